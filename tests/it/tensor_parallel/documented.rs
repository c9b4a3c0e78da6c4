//! The commands and the program of docs/tensor-parallel.md.

use std::fs;

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{FullyShard, World, fully_shard, nn};
use fsdp_core::process_group::local;
use fsdp_test_support::{code_blocks, program, run, without_layout};

use crate::sft;

const DOCUMENT: &str = "docs/tensor-parallel.md";

#[test]
fn documented_commands_run() {
    let dir = tempfile::tempdir().unwrap();
    sft::prepare(dir.path());
    fs::rename(dir.path().join("model"), dir.path().join("DIR")).unwrap();
    fs::rename(dir.path().join("chats.jsonl"), dir.path().join("FILE")).unwrap();
    let block = code_blocks(DOCUMENT, "sh").remove(0);
    assert_eq!(block.lines().count(), 3);
    for line in block.lines() {
        let mut words = line.split_whitespace();
        assert_eq!(words.next(), Some("fsdp-launch"));
        let mut command = std::process::Command::new(program("fsdp-launch"));
        let named = |word: &str| if word == "train" { program(word) } else { word.into() };
        command.args(words.map(named)).args(["--batch-size", "1"]).current_dir(dir.path());
        let stdout = run(command, std::time::Duration::from_secs(240)).ok().stdout;
        assert!(stdout.contains(" sample: \""), "{line}: {stdout}");
    }
}

/// The document's program, with a model and an input.
fn documented(world: &World) -> anyhow::Result<()> {
    use fsdp_candle::{
        ColwiseParallel, DataParallelMeshDims, ParallelPlan, RowwiseParallel, ShardedVarMap, parallelize,
    };

    let mesh = world.mesh(&[("dp", world.size() / 2), ("tp", 2)])?;
    let dims = DataParallelMeshDims { shard: &["dp"], replicate: &[] };
    let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device())?;
    let plan = ParallelPlan::new()
        .module("blocks.*.up", ColwiseParallel::default())
        .module("blocks.*.down", RowwiseParallel::default());
    parallelize(&vars, &mesh.slice(&["tp"])?, &plan)?;
    // The rest is the same as without tensor parallelism: fully_shard, the optimizer, clipping, checkpoints.
    let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
        let block = vb.pp("blocks.0");
        Ok((nn::linear(4, 6, block.pp("up"))?, nn::linear(6, 4, block.pp("down"))?))
    })?;
    let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    let (inner, y) = model.call(|(up, down)| {
        let inner = up.forward(&x)?;
        Ok::<_, candle_core::Error>((inner.clone(), down.forward(&inner)?))
    })?;
    assert_eq!((inner.dims(), y.dims()), (&[3, 3][..], &[3, 4][..]));
    Ok(())
}

#[test]
fn the_documented_program_runs() {
    let block = code_blocks(DOCUMENT, "rust").remove(0);
    assert!(without_layout(include_str!("documented.rs")).contains(&without_layout(&block)));
    for outcome in local::run(4, |group| documented(&World::of(group)).map_err(|error| format!("{error:#}"))) {
        outcome.unwrap();
    }
}
