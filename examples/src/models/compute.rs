//! The precision of the blocks' matrix products.

use clap::ValueEnum;
use fsdp_candle::{Float8Recipe, ShardedVarMap};
use serde::Serialize;

use super::is_block_matrix;

/// `--compute`: how the matrix products of the blocks are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Compute {
    /// In the dtype of the parameters
    Full,
    /// In 8-bit floats with one scale for each tensor: the fastest
    Float8,
    /// In 8-bit floats with a scale for each row
    Float8Rowwise,
    /// float8-rowwise, but gradients of weights are computed in full: the most accurate
    Float8RowwiseGwHp,
}

impl Compute {
    /// Sets how the next model of a map computes.
    pub fn apply(self, vars: &ShardedVarMap) -> fsdp_candle::Result<()> {
        let recipe = match self {
            Compute::Full => return Ok(()),
            Compute::Float8 => Float8Recipe::Tensorwise,
            Compute::Float8Rowwise => Float8Recipe::Rowwise,
            Compute::Float8RowwiseGwHp => Float8Recipe::RowwiseWithGwHp,
        };
        vars.convert_to_float8_training(recipe, |layer| is_block_matrix(&format!("{layer}.weight")))
    }
}
