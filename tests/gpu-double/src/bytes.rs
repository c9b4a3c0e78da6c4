//! The bytes behind device addresses. Device memory is host memory, so an address is a pointer.

/// Reads as no number in f64, f32, f16, bf16 and both kinds of float8.
const POISON: u8 = 0xff;
/// Stands behind the end of each allocation, for who writes beyond.
const GUARD: u8 = 0xa5;
const GUARD_LEN: usize = 256;
/// As CUDA aligns.
const ALIGN: usize = 256;

fn layout(len: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(len.checked_add(GUARD_LEN)?, ALIGN).ok()
}

/// New memory with what the allocator left in it, and a guard behind it.
pub(crate) fn allocate(len: usize) -> Option<u64> {
    // SAFETY: the size is not 0, for the guard's.
    let base = unsafe { std::alloc::alloc(layout(len)?) };
    if base.is_null() {
        return None;
    }
    // SAFETY: the guard is the end of this memory.
    unsafe { base.add(len).write_bytes(GUARD, GUARD_LEN) };
    Some(base as u64)
}

/// Gives memory of [`allocate`] back.
///
/// # Safety
/// `base` and `len` are of one call of [`allocate`], and nobody uses the memory afterwards.
pub(crate) unsafe fn release(base: u64, len: usize) {
    let layout = layout(len).expect("it was allocated with this layout");
    // SAFETY: the caller's promise.
    unsafe { std::alloc::dealloc(base as *mut u8, layout) }
}

/// Whether nobody wrote behind the end.
///
/// # Safety
/// `base` and `len` are of one call of [`allocate`], and it is not released.
pub(crate) unsafe fn guard_is_whole(base: u64, len: usize) -> bool {
    // SAFETY: the guard stands behind `len` bytes.
    let guard = unsafe { std::slice::from_raw_parts((base as *const u8).add(len), GUARD_LEN) };
    guard.iter().all(|byte| *byte == GUARD)
}

/// # Safety
/// `len` bytes at `at` are memory that is the caller's to write.
pub(crate) unsafe fn poison(at: u64, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { fill(at, &[POISON], len) }
}

/// Writes `pattern` `count` times.
///
/// # Safety
/// As many bytes at `at` are memory that is the caller's to write.
pub(crate) unsafe fn fill(at: u64, pattern: &[u8], count: usize) {
    if let [byte] = pattern {
        // SAFETY: the caller's promise.
        unsafe { (at as *mut u8).write_bytes(*byte, count) };
        return;
    }
    for place in 0..count {
        // SAFETY: the caller's promise.
        unsafe {
            (at as *mut u8).add(place * pattern.len()).copy_from_nonoverlapping(pattern.as_ptr(), pattern.len());
        }
    }
}

/// # Safety
/// `len` bytes at both places are memory, and those at `to` the caller's to write.
pub(crate) unsafe fn copy(to: u64, from: u64, len: usize) {
    // SAFETY: the caller's promise. They may overlap.
    unsafe { (to as *mut u8).copy_from(from as *const u8, len) }
}

/// A copy of memory.
///
/// # Safety
/// `len` bytes at `at` are memory that is written.
pub(crate) unsafe fn read(at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the caller's promise, and as many bytes are new.
    unsafe { copy(bytes.as_mut_ptr() as u64, at, len) };
    bytes
}
