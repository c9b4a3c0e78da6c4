//! The devices of the ranks: the host, or CUDA devices if `FSDP_TEST_DEVICE=cuda`. Access to the memory of both.

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

/// The device of this thread's rank.
pub(crate) fn device() -> Device {
    DEVICE.with_borrow(Clone::clone)
}

/// Whether ranks compute on CUDA devices.
pub(crate) fn on_cuda() -> bool {
    static ON_CUDA: LazyLock<bool> = LazyLock::new(|| match std::env::var("FSDP_TEST_DEVICE").as_deref() {
        Ok("cuda") => {
            // By default NCCL ranks compare their calls only after a timeout.
            let check = std::env::var("FSDP_NCCL_CHECK");
            assert_eq!(check.as_deref(), Ok("always"), "set FSDP_NCCL_CHECK: tests of ranks that differ count on it");
            true
        }
        Ok("cpu") | Err(_) => false,
        Ok(other) => panic!("FSDP_TEST_DEVICE={other}: choose cpu or cuda"),
    });
    *ON_CUDA
}

/// Lets only one test use devices at a time. Ranks of two tests would share a compute stream on each device, where
/// collectives of both wait in an order that differs between devices: a deadlock.
pub(super) fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    on_cuda().then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The world of this thread's rank. [`device`] returns its device from now on.
pub(super) fn world(group: ProcessGroup) -> World {
    let choice = if on_cuda() { DeviceChoice::Cuda } else { DeviceChoice::Cpu };
    let world = World::on(group, choice).unwrap();
    let (before, now) = (device(), world.device());
    assert!(before.is_cpu() || before.same_device(now), "a thread on {before:?} would change to {now:?}");
    DEVICE.set(now.clone());
    world
}

/// The step through a test's cases: every case on the host, one of `n` on devices, where the device double takes ten
/// times as long.
pub(crate) fn one_of(n: usize) -> usize {
    if on_cuda() { n } else { 1 }
}

/// The relative difference allowed between sums of this dtype that are reduced together with other tensors: NCCL's
/// order of addition depends on what is reduced together. The host has one order.
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
    // Copied to the host first: Candle asks CUDA to convert the elements of an empty tensor, which is an error.
    let host = tensor.to_device(&Device::Cpu).unwrap().contiguous().unwrap();
    host.to_dtype(T::DTYPE).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Allocates and frees memory of this thread's device.
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

/// A buffer of F32 on the same device, with changed elements.
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

/// The address of a tensor of F32.
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
