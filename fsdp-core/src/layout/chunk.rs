//! Cutting a dimension into chunks as `torch.chunk` does.

use std::ops::Range;

/// The indices that chunk `index` of `chunks` holds of a dimension of `n` elements.
///
/// ```
/// use fsdp_core::layout::chunk_range;
/// assert_eq!(chunk_range(5, 4, 0), 0..2);
/// assert_eq!(chunk_range(5, 4, 2), 4..5);
/// assert!(chunk_range(5, 4, 3).is_empty());
/// ```
pub fn chunk_range(n: usize, chunks: usize, index: usize) -> Range<usize> {
    let chunk = n.div_ceil(chunks.max(1));
    let start = chunk.saturating_mul(index).min(n);
    start..start.saturating_add(chunk).min(n)
}
