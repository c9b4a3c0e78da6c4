//! Putting a storage into a tensor and taking the old one out, as PyTorch's `untyped_storage().resize_()` does for
//! FSDP2.
//!
//! Views of a tensor share its storage, so the graph that forward recorded sees what is put in before backward.

use candle_core::{DType, Device, Result, Storage, Tensor, bail};

use super::convert::{to_core_dtype, to_storage};
use crate::error::Error;
use crate::kernels;

/// Puts `storage` under `tensor` and all of its views; returns what was there.
pub(crate) fn swap(tensor: &Tensor, storage: Storage) -> Result<Storage> {
    kernels::in_place(tensor, |at, _| at.replace(storage))
}

/// Takes the memory away from under `tensor` and all of its views, every use of which is an error from then on.
pub(crate) fn take(tensor: &Tensor) -> Result<Storage> {
    swap(tensor, kernels::of_device(tensor.device())?.freed_storage()?)
}

/// The memory of a copy of a tensor's elements, row-major.
pub(crate) fn copied_storage(tensor: &Tensor) -> Result<Storage> {
    take(&tensor.detach().force_contiguous()?)
}

/// A storage of no elements: a tensor born with it reports `dtype` for good, whatever is swapped in later.
pub(crate) fn empty(dtype: DType, device: &Device) -> Result<Storage> {
    match dtype {
        DType::BF16 | DType::F16 | DType::F32 | DType::F64 => zeros(to_core_dtype(dtype)?, 0, device),
        other => bail!("a parameter of {other:?} can't be sharded; use BF16, F16, F32 or F64"),
    }
}

/// The storage of a scalar of F32: 0.
pub(crate) fn scalar(device: &Device) -> Result<Storage> {
    zeros(fsdp_core::DType::F32, 1, device)
}

fn zeros(dtype: fsdp_core::DType, len: usize, device: &Device) -> Result<Storage> {
    to_storage(kernels::of_device(device)?.zeros(dtype, len).map_err(Error::from)?)
}

#[cfg(test)]
mod tests {
    use super::super::convert::to_buffer;
    use super::*;
    use fsdp_core::Buffer;

    #[test]
    fn views_see_the_new_storage() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let view = tensor.t().unwrap();
        let new = to_storage(vec![0f32, 1., 2., 3., 4., 5.].into()).unwrap();
        let old = swap(&tensor, new).unwrap();
        assert_eq!(to_buffer(old).unwrap(), Some(Buffer::from(vec![0f32; 6])));
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[0., 3.], [1., 4.], [2., 5.]]);
    }

    #[test]
    fn every_use_of_a_poisoned_tensor_is_an_error() {
        let bad = Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
        let good = bad.copy().unwrap();
        take(&bad).unwrap();
        let ids = Tensor::new(&[0u32], &Device::Cpu).unwrap();
        for result in [
            good.matmul(&bad),
            &good + &bad,
            bad.exp(),
            bad.sum_all(),
            bad.to_dtype(DType::F64),
            bad.contiguous().and_then(|t| t.affine(2., 0.)),
            bad.t().and_then(|t| t.contiguous()),
            bad.index_select(&ids, 0),
            Tensor::cat(&[&bad, &good], 0),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("F4") || error.contains("dtype"), "{error}");
        }
    }
}
