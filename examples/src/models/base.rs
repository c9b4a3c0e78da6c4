//! Storage of the weights that adapters are trained on.

use clap::ValueEnum;
use fsdp_candle::WeightFormat;
use fsdp_core::{BLOCK, BlockFormat};
use serde::Serialize;

use super::is_block_matrix;

/// Storage of frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Base {
    /// F32.
    F32,
    /// All matrices in BF16.
    Bf16,
    /// The blocks' matrices in 8 bits, others in BF16.
    Int8,
    /// The blocks' matrices in 4 bits, others in BF16.
    Nf4,
}

impl Base {
    /// Returns the storage of a frozen parameter. Rows of an incomplete block are stored in BF16, and vectors in F32.
    ///
    /// ```
    /// use fsdp_candle::WeightFormat;
    /// use fsdp_train::models::Base;
    ///
    /// let of = |name, shape: &[usize]| Base::Nf4.format(name, shape);
    /// assert_eq!(of("model.layers.0.mlp.up_proj.weight", &[256, 64]), Some(WeightFormat::Nf4));
    /// assert_eq!(of("model.layers.0.mlp.up_proj.weight", &[256, 65]), Some(WeightFormat::Bf16));
    /// assert_eq!(of("lm_head.weight", &[256, 64]), Some(WeightFormat::Bf16));
    /// assert_eq!(of("model.norm.weight", &[64]), None);
    /// ```
    pub fn format(self, name: &str, shape: &[usize]) -> Option<WeightFormat> {
        let has_blocks = is_block_matrix(name) && shape.last().is_some_and(|last| last.is_multiple_of(BLOCK));
        match self {
            Base::F32 => None,
            _ if shape.len() < 2 => None,
            Base::Int8 if has_blocks => Some(WeightFormat::Int8),
            Base::Nf4 if has_blocks => Some(WeightFormat::Nf4),
            Base::Bf16 | Base::Int8 | Base::Nf4 => Some(WeightFormat::Bf16),
        }
    }

    /// Returns the fewest bytes of a weight.
    pub fn bytes(self) -> f64 {
        let of_block = |format: BlockFormat| format.block_bytes() as f64 / BLOCK as f64;
        match self {
            Base::F32 => 4.,
            Base::Bf16 => 2.,
            Base::Int8 => of_block(BlockFormat::Int8),
            Base::Nf4 => of_block(BlockFormat::Nf4),
        }
    }
}
