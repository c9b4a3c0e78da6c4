//! `--tensor-parallel`: whether it can be, and the parameters' mesh.

use anyhow::ensure;
use fsdp_candle::{ShardedVarMap, World};
use fsdp_examples::models::{ModelConfig, parallel};
use fsdp_examples::ranks::Ranks;

use crate::args::Args;

/// Fails where flags are in each other's way, whatever the model.
pub(crate) fn check_flags(args: &Args) -> anyhow::Result<()> {
    let (tensor, sequence) = (args.tensor_parallel, args.seq_len);
    ensure!(
        tensor > 1 || !args.sequence_parallel,
        "--sequence-parallel shares out what is between the layers of --tensor-parallel: pass that as well, or leave \
         it out"
    );
    ensure!(
        !args.sequence_parallel || sequence.is_multiple_of(tensor),
        "--seq-len {sequence} can't be shared out over the {tensor} processes of --tensor-parallel: pass a multiple \
         of {tensor}, or leave out --sequence-parallel"
    );
    let adapters = [("--lora-rank", args.lora_rank.is_some()), ("--lora-from", args.lora_from.is_some())];
    if let Some((flag, _)) = adapters.iter().find(|(_, given)| *given) {
        ensure!(
            tensor == 1,
            "{flag} is not there for --tensor-parallel {tensor}: adapters are of whole layers. Leave one of them out"
        );
    }
    Ok(())
}

/// Fails unless the model's numbers can be shared out.
pub(crate) fn check(args: &Args, config: &ModelConfig) -> anyhow::Result<()> {
    parallel::check(config, args.tensor_parallel)
}

/// The parameters of the model that is built next.
pub(crate) fn vars(args: &Args, config: &ModelConfig, world: &World) -> anyhow::Result<ShardedVarMap> {
    let Ranks { replicate, shard, .. } = args.ranks(world)?;
    let mesh = match replicate {
        1 => world.mesh(&[("dp_shard", shard)])?,
        _ => world.mesh(&[("dp_replicate", replicate), ("dp_shard", shard)])?,
    };
    let _ = config;
    Ok(ShardedVarMap::new(&mesh, world.device()))
}
