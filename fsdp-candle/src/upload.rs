//! Copies of a step's data to devices.

use candle_core::{Device, Result, Tensor};

use crate::error::Error;
use crate::kernels;
use crate::storage::{to_core_dtype, to_tensor, with_slice};

/// Copies a CPU tensor to a device without waiting for the device. Use it for each step's batch.
///
/// Up to 4 MiB go through page-locked memory, as PyTorch's `tensor.pin_memory().to(device, non_blocking=True)`. Candle's
/// [`Tensor::to_device`] copies from pageable memory, for which CUDA may wait until the device has done all earlier work.
/// Larger tensors, and tensors of other devices, are copied as by `to_device`.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let device = Device::Cpu; // Or that of `World::device`.
/// let tokens = Tensor::new(&[[1u32, 2, 3], [4, 5, 6]], &Device::Cpu)?;
/// let tokens = fsdp_candle::upload(&tokens, &device)?;
/// assert_eq!(tokens.to_vec2::<u32>()?, [[1, 2, 3], [4, 5, 6]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn upload(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if !(tensor.device().is_cpu() && device.is_cuda()) {
        return tensor.to_device(device);
    }
    let Ok(dtype) = to_core_dtype(tensor.dtype()) else { return tensor.to_device(device) };
    let kernels = kernels::of_device(device)?;
    let mut uploaded = kernels.zeros(dtype, tensor.elem_count()).map_err(Error::from)?;
    let mut outcome = Ok(());
    with_slice(&tensor.contiguous()?, |host, elements| {
        host.read(elements, &mut |from| {
            outcome = kernels.write((&mut uploaded).into(), &mut |to| to.copy_from_slice(from));
        })
    })?;
    outcome?;
    to_tensor(uploaded, tensor.dims(), device)
}
