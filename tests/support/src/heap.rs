//! Heap memory of a thread, counted by the global allocator.
//!
//! ```
//! use fsdp_test_support::heap;
//!
//! #[global_allocator]
//! static ALLOCATOR: heap::Counting = heap::Counting;
//!
//! let (buffer, most) = heap::peak(|| vec![0_u8; 1 << 20]);
//! assert!(most >= buffer.len());
//! ```

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// Bytes that a thread has allocated and not freed, and the most so far.
#[derive(Clone, Copy)]
struct Heap {
    live: isize,
    peak: isize,
}

thread_local! {
    static HEAP: Cell<Heap> = const { Cell::new(Heap { live: 0, peak: 0 }) };
}

/// The system's allocator, which counts the memory of each thread.
pub struct Counting;

impl Counting {
    fn add(bytes: isize) {
        // A thread that ends has no counter any more.
        let _ = HEAP.try_with(|heap| {
            let live = heap.get().live + bytes;
            heap.set(Heap { live, peak: heap.get().peak.max(live) });
        });
    }
}

// SAFETY: passes every call to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Self::add(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `f` and returns the most bytes that this thread has allocated meanwhile and not freed. [`Counting`] must be the
/// program's allocator. Memory that another thread frees counts until `f` ends.
pub fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HEAP.get().live;
    HEAP.set(Heap { live: before, peak: before });
    let result = f();
    (result, (HEAP.get().peak - before).max(0) as usize)
}
