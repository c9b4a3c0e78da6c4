//! The bytes at device addresses. Device memory is host memory, so an address is a pointer.
//!
//! With `GPU_DOUBLE_COMPUTE=no`, nothing is computed: kernels, products and random numbers do not run, and of copies,
//! fills and collectives only small ones do. Memory that is not written takes no pages of the host. So models that are
//! larger than the host can be allocated, and their launches counted. Losses are zeros.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::OnceLock;

/// A byte pattern that reads as NaN in f64, f32, f16, bf16 and both kinds of float8.
const NAN_BYTE: u8 = 0xff;
/// Guard bytes after the end of each allocation, which reveal writes beyond the end.
const GUARD: u8 = 0xa5;
const GUARD_LEN: usize = 256;
/// CUDA's alignment of allocations.
const ALIGN: usize = 256;

/// Most bytes of copies that run although nothing is computed: token ids and bounds, which kernels do not read then.
const SMALL: usize = 64 << 10;

/// Returns whether kernels run.
pub(crate) fn computes() -> bool {
    static COMPUTES: OnceLock<bool> = OnceLock::new();
    *COMPUTES.get_or_init(|| std::env::var_os("GPU_DOUBLE_COMPUTE").is_none_or(|value| value != "no"))
}

/// Returns whether a copy, a fill or a collective of `len` bytes does not run.
pub(crate) fn is_skipped(len: usize) -> bool {
    len > SMALL && !computes()
}

fn layout(len: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(len.checked_add(GUARD_LEN)?, ALIGN).ok()
}

/// Allocates memory with undefined contents, followed by a guard. If nothing is computed, small memory holds zeros.
pub(crate) fn allocate(len: usize) -> Option<u64> {
    let layout = layout(len)?;
    // SAFETY: the size is not 0, because of the guard.
    let base =
        unsafe { if computes() || len > SMALL { std::alloc::alloc(layout) } else { std::alloc::alloc_zeroed(layout) } };
    if base.is_null() {
        return None;
    }
    // SAFETY: the guard is the end of this memory.
    unsafe { base.add(len).write_bytes(GUARD, GUARD_LEN) };
    Some(base as u64)
}

/// Releases memory of [`allocate`].
///
/// `base` and `len` belong to one call of [`allocate`], and the memory is not used afterwards.
pub(crate) unsafe fn release(base: u64, len: usize) {
    let layout = layout(len).expect("it was allocated with this layout");
    // SAFETY: ensured by the caller.
    unsafe { std::alloc::dealloc(base as *mut u8, layout) }
}

/// Returns whether the guard is unchanged.
///
/// `base` and `len` belong to one call of [`allocate`], and the memory is not released.
pub(crate) unsafe fn guard_is_whole(base: u64, len: usize) -> bool {
    // SAFETY: the guard follows the `len` bytes.
    let guard = unsafe { std::slice::from_raw_parts((base as *const u8).add(len), GUARD_LEN) };
    guard.iter().all(|byte| *byte == GUARD)
}

/// The caller may write `len` bytes at `at`.
pub(crate) unsafe fn fill_with_nan(at: u64, len: usize) {
    if computes() {
        // SAFETY: ensured by the caller.
        unsafe { fill(at, NAN_BYTE, len) }
    }
}

/// The caller may write `len` bytes at `at`.
pub(crate) unsafe fn fill(at: u64, byte: u8, len: usize) {
    if !is_skipped(len) {
        // SAFETY: ensured by the caller.
        unsafe { (at as *mut u8).write_bytes(byte, len) };
    }
}

/// `len` bytes at both addresses are memory, and the caller may write those at `to`.
pub(crate) unsafe fn copy(to: u64, from: u64, len: usize) {
    if !is_skipped(len) {
        // SAFETY: ensured by the caller. They may overlap.
        unsafe { (to as *mut u8).copy_from(from as *const u8, len) }
    }
}

/// Returns a checksum of memory.
///
/// `len` bytes at `at` are initialized memory.
pub(crate) unsafe fn checksum(at: u64, len: usize) -> u64 {
    if is_skipped(len) {
        return 0;
    }
    // SAFETY: ensured by the caller.
    let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, len) };
    BuildHasherDefault::<DefaultHasher>::default().hash_one(bytes)
}

/// Returns a copy of memory.
///
/// `len` bytes at `at` are initialized memory.
pub(crate) unsafe fn read(at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: ensured by the caller, and as many bytes are new.
    unsafe { copy(bytes.as_mut_ptr() as u64, at, len) };
    bytes
}
