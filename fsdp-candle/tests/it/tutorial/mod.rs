//! The Rust code of docs/tutorial.md, which shows it beside that of PyTorch's FSDP2 tutorials. The test `tutorial` of
//! the workspace checks that these files contain every code block of the document.

mod checkpoint;
mod contract;
mod init;
mod migration;
mod model;
mod state_dicts;
mod training;

use candle_core::{DType, Device, Tensor};
use fsdp_candle::{Adam, AdamConfig, FsdpModule, FullyShard, ShardedVarMap, World, fully_shard};

use crate::common::ranks;
use model::{ModelArgs, Transformer, TransformerBlock};

type Sharded = FsdpModule<Transformer<FsdpModule<TransformerBlock>>>;

/// Runs a transcription on each rank of worlds of these sizes, and returns the ranks' results by world.
fn on_worlds<T: Send>(sizes: &[usize], f: impl Fn(&World) -> anyhow::Result<T> + Sync) -> Vec<Vec<T>> {
    sizes.iter().map(|&size| ranks(size, |world| f(&world).unwrap_or_else(|error| panic!("{error:?}")))).collect()
}

fn vars(world: &World) -> anyhow::Result<ShardedVarMap> {
    Ok(ShardedVarMap::of_world(world)?)
}

fn sharded(opts: &FullyShard, vars: &ShardedVarMap, args: &ModelArgs) -> anyhow::Result<Sharded> {
    let vb = vars.builder(DType::F32);
    let layers = (0..args.n_layers)
        .map(|i| fully_shard(opts, vb.pp(format!("layers.{i}")), |vb| TransformerBlock::new(args, vb)))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(fully_shard(opts, vb, |vb| Transformer::new(args, layers, vb))?)
}

fn adam(vars: &ShardedVarMap) -> anyhow::Result<Adam> {
    Ok(Adam::new(vars.trainable(), AdamConfig { lr: 1e-2, ..AdamConfig::default() })?)
}

/// Pseudo-random integers below `high`, the same on every rank, so that worlds of all sizes train alike.
fn randint(high: usize, shape: (usize, usize), device: &Device) -> candle_core::Result<Tensor> {
    let tokens: Vec<u32> = (0..shape.0 * shape.1).map(|at| (at * 7919 % 104_729 % high) as u32).collect();
    Tensor::from_vec(tokens, shape, device)
}

type Parameters = Vec<(String, Vec<f32>)>;

/// Every full parameter, by name.
fn parameters(vars: &ShardedVarMap) -> anyhow::Result<Parameters> {
    let full = |param: &fsdp_candle::FsdpParam| -> anyhow::Result<_> {
        let full = param.dtensor()?.full_tensor()?.flatten_all()?;
        Ok((param.name().to_string(), full.to_vec1::<f32>()?))
    };
    vars.params().iter().map(|param| full(param)).collect()
}
