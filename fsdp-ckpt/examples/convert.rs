//! Converts a checkpoint or model of any format: `convert SRC DST --to fsdp|torch-dcp [--world-size N]`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use fsdp_ckpt::torch::{DcpOptions, write_dcp};
use fsdp_ckpt::{SaveState, TensorShard, open, save};
use fsdp_core::layout::local_region;
use fsdp_core::process_group::local;
use fsdp_core::{Buffer, MeshLayout, Placement};

#[derive(Parser)]
struct Cli {
    source: PathBuf,
    target: PathBuf,
    #[arg(long, value_parser = ["fsdp", "torch-dcp"])]
    to: String,
    #[arg(long, default_value_t = 1)]
    world_size: usize,
}

fn main() -> anyhow::Result<()> {
    let Cli { source, target, to, world_size } = Cli::parse();
    let source = open(&source)?;
    if to == "torch-dcp" {
        write_dcp(&target, &*source, &DcpOptions::new(world_size), &mut |_| ())?;
        return Ok(());
    }
    let mesh = MeshLayout::new(&[("dp_shard", world_size)])?;
    let shards = |rank| -> anyhow::Result<Vec<TensorShard>> {
        let mut shards = Vec::new();
        for (fqn, tensor) in source.tensors() {
            let placement = if tensor.shape.is_empty() { Placement::Replicate } else { Placement::Shard(0) };
            let region = local_region(&tensor.shape, &mesh, &[rank], &[placement])?;
            let mut data = Buffer::zeros(tensor.dtype, region.elements());
            source.read(fqn, &region, data.bytes_mut())?;
            shards.push(TensorShard { fqn: fqn.clone(), shape: tensor.shape.clone(), region, data: Arc::new(data) });
        }
        Ok(shards)
    };
    let saved = local::run(world_size, |group| -> anyhow::Result<()> {
        let state = SaveState { mesh: mesh.clone(), tensors: shards(group.rank())?, values: source.values().clone() };
        save(&target, &*group, &state)?;
        Ok(())
    });
    saved.into_iter().collect()
}
