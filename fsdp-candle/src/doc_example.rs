//! The hidden beginning of the examples in this crate's documentation.

pub use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
pub use fsdp_core::Placement;

use crate::error::Result;
pub use crate::{
    AdamW, AdamWConfig, Error, FsdpModule, FullyShard, Recurse, ShardedVarMap, World, fully_shard, nn, shard,
};

/// Makes the map of a single rank, options of its units, and a builder.
pub fn one_rank() -> Result<(World, ShardedVarMap, FullyShard, VarBuilder<'static>)> {
    let world = World::single()?;
    let vars = ShardedVarMap::of_world(&world)?;
    let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    Ok((world, vars, opts, vb))
}

/// Makes a model of one layer from 4 features to 2, and its input: three rows of ones.
pub fn one_layer(
    layer: impl FnOnce(usize, usize, VarBuilder<'static>) -> candle_core::Result<nn::Linear>,
) -> Result<(World, ShardedVarMap, FsdpModule<nn::Linear>, Tensor)> {
    let (world, vars, opts, vb) = one_rank()?;
    let model = fully_shard(&opts, vb, |vb| layer(4, 2, vb))?;
    let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    Ok((world, vars, model, x))
}
