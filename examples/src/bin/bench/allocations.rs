//! What this program has allocated.

use peak_alloc::PeakAlloc;

/// Counts every allocation of the process.
#[global_allocator]
pub(crate) static ALLOCATOR: PeakAlloc = PeakAlloc;
