//! Where ranks compute: on the host, or on CUDA devices where `FSDP_TEST_DEVICE=cuda`. What a test does with memory, it
//! does here with that of either.

use std::cell::RefCell;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};
use fsdp_candle::{DeviceChoice, World};
#[cfg(feature = "cuda")]
use fsdp_core::device::cuda::CudaMemory;
use fsdp_core::{Allocator, Buffer, Heap, ProcessGroup, Readable};

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// The device of the rank that this thread is.
pub(crate) fn device() -> Device {
    DEVICE.with_borrow(Clone::clone)
}

/// Whether ranks compute on CUDA devices.
pub(crate) fn on_cuda() -> bool {
    static ON_CUDA: LazyLock<bool> = LazyLock::new(|| match std::env::var("FSDP_TEST_DEVICE").as_deref() {
        Ok("cuda") => {
            // By default NCCL's ranks compare what they issue only when it does not end.
            let check = std::env::var("FSDP_NCCL_CHECK");
            assert_eq!(check.as_deref(), Ok("always"), "set FSDP_NCCL_CHECK: tests of ranks that differ count on it");
            true
        }
        Ok("cpu") | Err(_) => false,
        Ok(other) => panic!("FSDP_TEST_DEVICE={other}: choose cpu or cuda"),
    });
    *ON_CUDA
}

/// Held by the only ranks that are on devices. The ranks of two tests would share a compute stream on each device,
/// where collectives of both wait; and they would come there in another order on each device, so that each test's wait
/// for the other's.
pub(super) fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    on_cuda().then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The world of this thread's rank, with the device that is [`device`] from now on.
pub(super) fn world(group: ProcessGroup) -> World {
    let choice = if on_cuda() { DeviceChoice::Cuda } else { DeviceChoice::Cpu };
    let world = World::on(group, choice).unwrap();
    let (before, now) = (device(), world.device());
    assert!(before.is_cpu() || before.same_device(now), "a thread on {before:?} would change to {now:?}");
    DEVICE.set(now.clone());
    world
}

/// How far to step through a test's many cases: all of them run on the host, but one of `n` on devices, where the
/// double takes ten times as long.
pub(crate) fn one_of(n: usize) -> usize {
    if on_cuda() { n } else { 1 }
}

/// How far apart sums of this dtype may be when they are reduced together with other things, as a share of their size:
/// NCCL's order follows from what is reduced together. The host has one order.
pub(crate) fn rounding(dtype: DType) -> f32 {
    match dtype {
        _ if !on_cuda() => 0.,
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-6,
    }
}

/// A tensor's elements, row-major, on the host.
pub(crate) fn elements<T: WithDType>(tensor: &Tensor) -> Vec<T> {
    // There first: Candle asks CUDA to convert the elements of a tensor that has none, which CUDA refuses.
    let host = tensor.to_device(&Device::Cpu).unwrap().contiguous().unwrap();
    host.to_dtype(T::DTYPE).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// What allocates and frees memory of this thread's device.
pub(crate) fn memory() -> Arc<dyn Allocator> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device() {
        return Arc::new(OnDevice(device.cuda_stream()));
    }
    Heap::shared()
}

#[cfg(feature = "cuda")]
struct OnDevice(Arc<cudarc::driver::CudaStream>);

#[cfg(feature = "cuda")]
impl Allocator for OnDevice {
    fn take(&self, dtype: fsdp_core::DType, len: usize) -> fsdp_core::Result<Buffer> {
        CudaMemory::uninit(&self.0, dtype, len).map(Buffer::Cuda)
    }
    fn give(&self, buffer: Buffer) {
        drop(buffer);
    }
}

/// A buffer of F32 whose elements were changed, on the same device.
pub(crate) fn changed(buffer: Buffer, change: impl FnOnce(&mut Vec<f32>)) -> Buffer {
    assert_eq!(buffer.dtype(), fsdp_core::DType::F32);
    let mut values = vec![];
    buffer.read(&mut |bytes| values = bytemuck::pod_collect_to_vec(bytes)).unwrap();
    change(&mut values);
    #[cfg(feature = "cuda")]
    if let Buffer::Cuda(memory) = &buffer {
        return Buffer::Cuda(CudaMemory::from_slice(memory.stream().clone_htod(&values).unwrap()));
    }
    Buffer::F32(values)
}

/// Where the memory of a tensor of F32 is.
pub(crate) fn address(tensor: &Tensor) -> u64 {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr() as u64,
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            let slice = storage.as_cuda_slice::<f32>().unwrap();
            cudarc::driver::DevicePtr::device_ptr(slice, slice.stream()).0
        }
        _ => panic!("no memory"),
    }
}
