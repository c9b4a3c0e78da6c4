//! Whether what a run is going to write can be written, found out before its first step by writing.

use std::path::Path;

use anyhow::{Context, anyhow};
use fsdp_candle::World;
use fsdp_examples::writable::{try_directory, try_file, try_file_and_directory};

use crate::agree::{Finding, worst};
use crate::args::Args;
use crate::hosts::Hosts;
use crate::places::ROOT;
use crate::trace;
use crate::values::is_url;

/// Each rank tries what it is going to write; where one can't, all of them fail with its words. Collective.
pub(crate) fn check(args: &Args, hosts: &Hosts, world: &World) -> anyhow::Result<()> {
    // The ranks have compared their arguments: these are the same everywhere.
    let cannot = |flag: &str, dir: &Path, error: fsdp_ckpt::Error, way_out: &str| {
        anyhow!("can't write to {flag} {} ({}); {way_out}", dir.display(), error.with_causes())
    };
    let shared = "pass a directory that every rank can write to, on a file system that all hosts share";
    let dir = args.checkpoint_dir.as_deref().unwrap_or(Path::new(ROOT));
    hosts.check_writable(dir, world).map_err(|error| {
        let local = format!("{shared}, or --checkpoint-local where each host has one of its own");
        let way_out = match (args.checkpoint_local, is_url(dir)) {
            (true, _) => {
                "pass a directory of which each host has its own; leave --checkpoint-local out where they share it"
            }
            (false, true) if cfg!(feature = "object-store") => "pass a place that every rank can write to",
            (false, true) => "train saves to object stores where it was built with `--features object-store`",
            (false, false) => &local,
        };
        cannot("--checkpoint-dir", dir, error, way_out)
    })?;
    if let Some(dir) = &args.export_hf {
        let written = fsdp_ckpt::check_writable(dir, world.group());
        written.map_err(|error| cannot("--export-hf", dir, error, shared))?;
    }
    let own = match own_files(args, world.rank()) {
        Ok(()) => Finding::Good,
        Err(error) => Finding::Failed(format!("rank {}: {error:#}", world.rank())),
    };
    match worst(world, own)? {
        Finding::Good => Ok(()),
        Finding::Failed(why) | Finding::Damaged(why) => Err(anyhow!("{why}; pass another path, or make room there")),
    }
}

/// What a rank writes by itself.
fn own_files(args: &Args, rank: usize) -> anyhow::Result<()> {
    let cannot = |flag: &str, path: &Path| format!("can't write {flag} {}", path.display());
    if let Some(file) = &args.trace {
        // The ranks' own files are made beside it: nothing belongs beside a device.
        if std::fs::metadata(file).is_ok_and(|there| !there.is_file()) {
            return Err(anyhow!("it is there and no file")).with_context(|| cannot("--trace", file));
        }
        let part = trace::of_rank(file, rank);
        for file in [file, &part].iter().skip(usize::from(rank > 0)) {
            try_file(file).with_context(|| cannot("--trace", file))?;
        }
    }
    if rank > 0 {
        return Ok(());
    }
    if let Some(file) = &args.metrics {
        try_file_and_directory(file).with_context(|| cannot("--metrics", file))?;
    }
    if let Some(dir) = &args.tensorboard {
        try_directory(dir).with_context(|| cannot("--tensorboard", dir))?;
    }
    Ok(())
}
