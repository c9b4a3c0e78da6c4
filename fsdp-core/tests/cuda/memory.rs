//! How much memory a device has left.

use std::sync::Arc;

use crate::ranks::start;
use cudarc::driver::{CudaContext, CudaStream};
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

pub(crate) fn run(role: &str, compute: &Arc<CudaStream>) -> Option<String> {
    (role == "fills the pool").then(|| fills_the_pool(compute))
}

/// Frees two blocks of two fifths of the memory each, and allocates three fifths.
fn fills_the_pool(compute: &Arc<CudaStream>) -> String {
    let fifth = (DeviceMemory::of(compute).unwrap().free / 5) as usize;
    let take = |len| CudaMemory::uninit(compute, DType::U8, len);
    drop([take(2 * fifth).unwrap(), take(2 * fifth).unwrap()]);
    let large = take(3 * fifth).map(|memory| memory.len() == 3 * fifth);
    let too_large = take(6 * fifth).unwrap_err();
    format!("{large:?}, {too_large}")
}

/// The pool holds free pieces that are too small.
#[test]
fn unused_memory_of_the_pool_is_returned_before_an_allocation_fails() {
    let outcomes = start("fills the pool", &[0], &[("GPU_DOUBLE_MEMORY", "104857600")]).outcomes();
    let found = outcomes[0].strip_prefix("Ok(true), ").unwrap_or_else(|| panic!("{outcomes:?}"));
    assert!(found.contains("elements of U8 on CUDA device 0"), "{found}");
}
