//! Checkpoints that `--resume auto` can't use because they are damaged. They are set aside, never deleted, and the run
//! goes on from an older one.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use fsdp_ckpt::Survey;

use crate::hosts::Hosts;
use crate::steps::step_of;

/// Whether an error says that what is on disk is not what was written.
pub(crate) fn is_damage(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(fsdp_ckpt::Error::is_damage)
}

/// Whether there is something whole that `train` has not saved, as a model of Hugging Face's. Without its manifest a
/// checkpoint of ours reads like one of PyTorch's, so the names of its files decide too.
pub(crate) fn is_of_another_program(path: &Path) -> bool {
    let is_shard = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("shard-");
    let has_shards = std::fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(is_shard));
    !has_shards && fsdp_ckpt::open(path).is_ok()
}

/// Renames a damaged checkpoint. `why` says what is wrong with it. One rank calls it, while the others wait for what
/// comes of it; all of them, where each host has its own directory.
pub(crate) fn set_aside(hosts: &Hosts, path: &Path, why: &str) -> anyhow::Result<()> {
    let moved =
        hosts.set_aside(path).with_context(|| format!("can't set {} aside, which is damaged", path.display()))?;
    if let Some(moved) = moved {
        tracing::warn!("{} can't be gone on from and was set aside as {}: {why}", path.display(), moved.display());
    }
    Ok(())
}

/// Fails when there have been checkpoints under `dir` and none of them can be gone on from: a run that begins anew then
/// is not what was asked for.
pub(crate) fn check_something_is_left(dir: &Path, found: &Survey) -> anyhow::Result<()> {
    let was_step = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        step_of(fsdp_ckpt::name_before_quarantine(name).unwrap_or(name)).is_some()
    };
    let unusable =
        found.skipped.iter().map(|(path, error)| (path, format!("{}: {}", path.display(), error.with_causes())));
    let aside = found.quarantined.iter().map(|path| (path, format!("{}: set aside", path.display())));
    let links = found.links.iter().map(|(path, target)| {
        let why = if target.exists() { "which has a name of its own" } else { "which is not there" };
        (path, format!("{}: a link to {}, {why}", path.display(), target.display()))
    });
    let all = unusable.chain(aside).chain(links);
    let lost: Vec<String> = all.filter(|(path, _): &(&PathBuf, _)| was_step(path)).map(|(_, about)| about).collect();
    if found.newest.is_some() || lost.is_empty() {
        return Ok(());
    }
    bail!(
        "--resume auto: no checkpoint in {} can be used ({}); put a good one there, or move these away, or pass \
            another --checkpoint-dir, to begin anew",
        dir.display(),
        lost.join("; ")
    );
}

/// Fails when a checkpoint newer than the one to go on from can't be read for another reason than damage: it may be
/// whole, and what was trained since would be lost.
pub(crate) fn check_no_newer_is_whole(found: &Survey) -> anyhow::Result<()> {
    let Some((path, error)) = found.skipped.iter().find(|(_, error)| !error.is_damage()) else { return Ok(()) };
    bail!(
        "--resume auto: {} can't be read, which does not mean that it is damaged: {}; mend that, move it away, or \
            pass the path of the one to go on from to --resume",
        path.display(),
        error.with_causes()
    );
}
