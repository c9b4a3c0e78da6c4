//! Caches of keys and values: `candle_nn::kv_cache`.
//!
//! Candle's copy or detach what is appended, so that gradients stop there, and attention trains its queries alone.
//! These hand back what the call appended with its gradient. What earlier calls left in the cache is a constant, so
//! that a cache never keeps the graph of more than the last call; a model that is to be trained resets its caches
//! before each sequence, as it does before each prompt.

mod concat;
mod growing;
mod rotating;

pub use candle_nn::kv_cache::{
    IndicesAndMask, RawInterleavedKvCache, ScatteredCacheBuilder, ScatteredKvCache, rope_i_inplace,
};
pub use concat::{ConcatKvCache, InterleavedKvCache};
pub use growing::{Cache, KvCache};
pub use rotating::{RotatingCache, RotatingKvCache};
