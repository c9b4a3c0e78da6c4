//! How much memory a device has left.

use cudarc::driver::CudaContext;
use fsdp_core::{
    DType,
    device::cuda::{self, CudaMemory, DeviceMemory},
};

#[test]
fn freed_memory_that_the_pool_keeps_counts_as_free() {
    let context = CudaContext::new(0).unwrap();
    cuda::ready(&context).unwrap();
    let stream = context.new_stream().unwrap();
    let len = 64 << 20;
    let before = DeviceMemory::of(&stream).unwrap();
    let held = CudaMemory::uninit(&stream, DType::U8, len).unwrap();
    let during = DeviceMemory::of(&stream).unwrap();
    assert!(during.free + len as u64 <= before.free && during.total == before.total, "{before:?}, {during:?}");
    drop(held);
    stream.synchronize().unwrap();
    assert!(DeviceMemory::of(&stream).unwrap().free > during.free);
    let (free, _) = context.mem_get_info().unwrap();
    assert!((free as u64) < before.free, "the pool has given the memory back, so that this shows nothing");
}
