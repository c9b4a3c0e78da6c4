//! The Rust code of docs/tutorial.md, which shows PyTorch's FSDP2 tutorials beside it. The workspace's test `tutorial`
//! checks that these files contain every block of the document.

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

/// Runs a transcription on each rank of worlds of these sizes; what the ranks return, world by world.
fn on_worlds<T: Send>(sizes: &[usize], f: impl Fn(&World) -> anyhow::Result<T> + Sync) -> Vec<Vec<T>> {
    sizes.iter().map(|&size| ranks(size, |world| f(&world).unwrap_or_else(|error| panic!("{error:?}")))).collect()
}

fn vars(world: &World) -> anyhow::Result<ShardedVarMap> {
    Ok(ShardedVarMap::new(&world.mesh(&[("dp_shard", world.size())])?, world.device()))
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

/// Whole numbers below `high` that look random: the same on every rank, so that worlds of different sizes train alike.
fn randint(high: usize, shape: (usize, usize), device: &Device) -> candle_core::Result<Tensor> {
    let tokens: Vec<u32> = (0..shape.0 * shape.1).map(|at| (at * 7919 % 104_729 % high) as u32).collect();
    Tensor::from_vec(tokens, shape, device)
}

type Parameters = Vec<(String, Vec<f32>)>;

/// Every parameter's whole values, by name.
fn parameters(vars: &ShardedVarMap) -> anyhow::Result<Parameters> {
    let full = |param: &fsdp_candle::FsdpParam| -> anyhow::Result<_> {
        let full = param.dtensor()?.full_tensor()?.flatten_all()?;
        Ok((param.name().to_string(), full.to_vec1::<f32>()?))
    };
    vars.params().iter().map(|param| full(param)).collect()
}
