//! What travels in an all-gather instead of the parameter itself: PyTorch's `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

mod float8;
mod int8;

use candle_core::{Result, Tensor};
use fsdp_core::Buffer;

pub use float8::Float8;
pub use int8::Int8Blocks;

/// Changes what travels in the all-gather of a parameter: quantised weights, other encodings.
///
/// Each rank encodes its shard into one or more buffers; each buffer is gathered; every rank decodes the gathered buffers into the concatenation of all shards. The
/// number of buffers, their dtypes and lengths must follow from the shard's length alone, because every rank works out those of the others.
pub trait AllGatherExtension: Send + Sync {
    /// The lengths of the buffers that encode a shard of `elements` elements.
    fn lengths(&self, elements: usize) -> Vec<usize>;

    /// Encodes a contiguous shard (in the compute dtype), one buffer for each of [`AllGatherExtension::lengths`].
    ///
    /// # Errors
    /// When the shard can't be encoded.
    fn pre_all_gather(&self, shard: &Tensor) -> Result<Vec<Buffer>>;

    /// Decodes into `full`, the concatenation of shards of `counts` elements; `gathered` holds each buffer's concatenation over the ranks.
    ///
    /// # Errors
    /// When the buffers can't be decoded.
    fn post_all_gather(&self, gathered: &[Buffer], counts: &[usize], full: &mut Buffer) -> Result<()>;
}

/// A float of any width from an f32, rounded once.
fn float_from<T: candle_core::WithDType>(value: f32) -> T {
    T::from_f64(f64::from(value))
}
