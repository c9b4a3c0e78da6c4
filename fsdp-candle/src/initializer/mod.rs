//! Initial values of parameters: drawn, or read from files, for one rank's shard alone.

mod fallback;
mod philox;
mod pretrained;

use candle_nn::Init;
use fsdp_core::layout::Region;

pub use fallback::Fallback;
pub use philox::Philox;
pub use pretrained::Pretrained;

use crate::Result;

/// What an initializer is asked for: one rank's part of one parameter.
#[derive(Debug)]
pub struct ShardRequest<'a> {
    /// The parameter's FQN.
    pub name: &'a str,
    /// Its global shape.
    pub shape: &'a [usize],
    /// Its dtype (F32, F64, BF16 or F16).
    pub dtype: candle_core::DType,
    /// The box that this rank holds.
    pub region: &'a Region,
    /// How the layer asks for it to be drawn.
    pub init: Init,
}

/// Where initial values come from. The values of an element must not depend on how the parameter is sharded.
pub trait Initializer: Send + Sync {
    /// Writes the region's elements, row-major and in native byte order, into `shard`.
    ///
    /// # Errors
    /// When there are no such values; the message names the parameter and the file.
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()>;

    /// Whether there will be values, asked before memory is taken for them.
    ///
    /// # Errors
    /// As [`Initializer::fill`].
    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        let _ = request;
        Ok(())
    }

    /// Whether there are values of this name in particular, so that a model can ask ([`candle_nn::VarBuilder::contains_tensor`]) what it was saved with.
    fn contains(&self, name: &str) -> bool {
        let _ = name;
        false
    }
}
