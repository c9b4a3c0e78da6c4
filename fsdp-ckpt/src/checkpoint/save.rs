//! Saving from all ranks at once, in the phases that `checkpoint/mod.rs` lists.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_core::{MeshLayout, ProcessGroup};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::checkpoint::agree::{agree, for_purpose, gather_on_rank_0, read_messages};
use crate::checkpoint::hosts::Hosts;
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::plan::{OwnChunk, Plan, plan_on_rank_0, write_chunks};
use crate::error::chain;
use crate::escape::escape;
use crate::file_names::{MANIFEST, file_name};
use crate::region::Bounds;
use crate::safetensors::read_bytes;
use crate::source::{ChunkEntry, FileEntry, TensorEntry};
use crate::store::{Store, location, require_local, split};
use crate::{Error, Result, TensorShard};

/// The state of one rank to save.
#[derive(Clone, Debug)]
pub struct SaveState {
    /// Mesh that the tensors are sharded over, with as many ranks as the group. The same on every rank.
    pub mesh: MeshLayout,
    /// This rank's shards, in any order.
    pub tensors: Vec<TensorShard>,
    /// Non-tensor state: step, data position, hyper-parameters. Only rank 0's values are saved.
    pub values: Map<String, Value>,
}

/// Options of a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveOptions {
    /// Declares that the caller checked every floating point number of this rank's tensors and found it finite. If all
    /// ranks declare it, the checkpoint records it ([`crate::Checkpoint::is_finite`]). The save does not check it.
    pub finite: bool,
    /// Name of this rank's host, if each host saves to its own directory: see [`crate::HostDirs`]. `None` on every rank
    /// if all ranks share the directory.
    pub host: Option<String>,
}

/// Summary of a save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveSummary {
    /// Path of the checkpoint.
    pub path: PathBuf,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of tensor files.
    pub files: usize,
    /// Bytes of all tensors; replicas count once.
    pub bytes: u64,
    /// Bytes of tensors that this rank wrote.
    pub bytes_by_this_rank: u64,
}

/// Saves a checkpoint as the directory `dir` and creates its parents. Collective: every rank of `group` passes the same
/// `dir`, on a file system that all ranks share.
///
/// The ranks write to a temporary directory beside `dir`. When all files are on disk, rank 0 writes the manifest and
/// renames the directory. Replicated shards are written once. Ranks wait for the slowest writer, at most for the
/// group's timeout.
///
/// With [`SaveOptions::host`], each host has its own `dir`. The first rank of each host writes the manifest and renames
/// the directory. Replicated shards are written once on each host.
///
/// In an object store (`s3://bucket/run/step-1`, with the feature `object-store`), each save gives its files unique
/// names, and the manifest is written last.
///
/// # Errors
/// [`Error::Rank`] on every rank if any rank fails; the save then leaves no files. Within it, [`Error::AlreadyExists`]
/// if `dir` exists. [`Error::InvalidShards`] if the shards do not form whole tensors; [`Error::Save`] if a collective
/// fails, as when a rank does not save.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_ckpt::{Checkpoint, SaveState, TensorShard, TensorSource, save};
/// use fsdp_core::{Buffer, MeshLayout, layout::Region, process_group::local};
///
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("step-00000001");
/// local::run(2, |group| {
///     // Each of two ranks holds two of four rows.
///     let data = Arc::new(Buffer::F32(vec![group.rank() as f32; 6]));
///     let region = Region { offsets: vec![2 * group.rank(), 0], sizes: vec![2, 3] };
///     let shard = TensorShard { fqn: "model.weight".into(), shape: vec![4, 3], region, data };
///     let mesh = MeshLayout::new(&[("dp_shard", 2)])?;
///     save(&dir, &group, &SaveState { mesh, tensors: vec![shard], values: Default::default() })?;
///     Ok::<_, fsdp_ckpt::Error>(())
/// });
/// let mut column = vec![0; 16];
/// let region = Region { offsets: vec![0, 1], sizes: vec![4, 1] };
/// Checkpoint::open(&dir)?.read("model.weight", &region, &mut column)?;
/// assert_eq!(column[12..], 1f32.to_ne_bytes());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn save(dir: impl AsRef<Path>, group: &ProcessGroup, state: &SaveState) -> Result<SaveSummary> {
    let dir = dir.as_ref();
    save_with(dir, group, state, &SaveOptions::default())
}

/// [`save`] with options. Has the same errors.
pub fn save_with(
    dir: impl AsRef<Path>,
    group: &ProcessGroup,
    state: &SaveState,
    options: &SaveOptions,
) -> Result<SaveSummary> {
    let dir = dir.as_ref();
    save_together(dir, group, state, options).map_err(|error| match error {
        Error::Group(source) => Error::Save { path: dir.to_path_buf(), source: Box::new(source) },
        other => other,
    })
}

fn save_together(dir: &Path, group: &ProcessGroup, state: &SaveState, options: &SaveOptions) -> Result<SaveSummary> {
    let started = std::time::Instant::now();
    let _span = fsdp_core::heartbeat::span("checkpoint save", "");
    let group = &for_purpose(group, "save of a checkpoint");
    let name = agree(group, "start the save", check_arguments(dir, group, &state.mesh, options))?;
    let hosts = Hosts::exchange(group, options.host.as_deref())?;
    let subject = format!("checkpoint \"{name}\" of mesh {}", state.mesh);
    let plan = plan_on_rank_0(group, &hosts, &subject, &state.tensors)?;

    let mut staging = None;
    let begun = "create the checkpoint's directory";
    let here = hosts.on_first_ranks(group, begun, || Ok(staging.insert(location(dir)?.stage()?).name()))?;
    let here = location(dir)?.open_staging(&here[&hosts.first(group.rank())])?;
    let own = plan.own_chunks(&state.tensors);
    let written = write_own(&*here, group.rank(), &own, &state.tensors, options.finite);
    let reports = gather_on_rank_0(group, "write its shards", written)?;
    let finish = "finish the checkpoint";
    let made = match (&plan.whole, reports) {
        (Some(plan), Some(reports)) => manifest(&*here, group, &hosts, state, plan, &reports),
        _ => Ok((String::new(), 0)),
    };
    let (manifest, files) = agree(group, finish, made)?;
    let files = group.broadcast_bytes(0, files.to_le_bytes().to_vec())?;
    let manifest = on_hosts(group, &hosts, manifest.into_bytes())?;
    let committed = staging.map(|staging| staging.commit(MANIFEST, &manifest)).transpose();
    let is_here = matches!(committed, Ok(Some(())));
    if let Err(error) = agree(group, finish, committed) {
        // Another host failed to publish its part.
        if is_here
            && matches!(error, Error::Rank { .. })
            && let Err(left) = location(dir).and_then(|dir| dir.remove_dir())
        {
            tracing::warn!("leaving this host's part of {}: {}", escape(dir.display()), chain(&left));
        }
        return Err(error);
    }
    let summary = SaveSummary {
        path: dir.to_path_buf(),
        tensors: plan.tensors,
        files: files.first_chunk().map_or(0, |files| usize::from_le_bytes(*files)),
        bytes: plan.bytes,
        bytes_by_this_rank: own.iter().map(|own| own.bytes() as u64).sum(),
    };
    if group.rank() == 0 {
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!(tensors = summary.tensors, bytes = summary.bytes, seconds, "saved {}", dir.display());
    }
    Ok(summary)
}

fn check_arguments(dir: &Path, group: &ProcessGroup, mesh: &MeshLayout, options: &SaveOptions) -> Result<String> {
    if options.host.is_some() {
        require_local(dir, "a save to a directory of each host")?;
    }
    if mesh.size() != group.size() {
        return Err(Error::Argument(format!(
            "the mesh {mesh} has {} ranks, but the group \"{}\" has {}",
            mesh.size(),
            group.name(),
            group.size()
        )));
    }
    Ok(split(dir)?.1)
}

/// A rank's report of the file that it wrote.
#[derive(Serialize, Deserialize)]
struct Report {
    /// Value of [`SaveOptions::finite`].
    finite: bool,
    /// File that the rank wrote; `None` if it had no chunk to write.
    file: Option<FileEntry>,
    /// Checksums of its chunks, in the plan's order.
    checksums: Vec<u32>,
}

/// Writes this rank's file, if it has a chunk to write.
fn write_own(
    store: &dyn Store,
    rank: usize,
    own: &[OwnChunk<'_>],
    shards: &[TensorShard],
    finite: bool,
) -> Result<Report> {
    if own.is_empty() {
        return Ok(Report { finite, file: None, checksums: Vec::new() });
    }
    // A plan assigns a rank only chunks that it holds.
    let by_name: BTreeMap<&str, &TensorShard> = shards.iter().map(|shard| (shard.fqn.as_str(), shard)).collect();
    let name = store.unique_name(&file_name(rank));
    let written =
        write_chunks(store, &name, own, |own, sink| read_bytes(own.fqn, &*by_name[own.fqn].data, own.bytes(), sink))?;
    let file = FileEntry { bytes: written.bytes, header_crc32c: Some(written.header_crc32c), host: None };
    Ok(Report { finite, file: Some(file), checksums: written.checksums })
}

/// Returns rank 0's manifest on the first rank of each host, and nothing on the others. All parts of a checkpoint have
/// the same manifest, with the values of rank 0.
fn on_hosts(group: &ProcessGroup, hosts: &Hosts, manifest: Vec<u8>) -> Result<Vec<u8>> {
    if !hosts.are_named() {
        return Ok(manifest);
    }
    let is_first = hosts.is_first(group.rank());
    let alike = group.split(usize::from(!is_first), group.rank())?;
    Ok(if is_first { alike.broadcast_bytes(0, manifest)? } else { Vec::new() })
}

/// Returns the text of the manifest, and the number of its files.
fn manifest(
    store: &dyn Store,
    group: &ProcessGroup,
    hosts: &Hosts,
    state: &SaveState,
    plan: &Plan,
    reports: &[Vec<u8>],
) -> Result<(String, usize)> {
    let reports: Vec<Report> = read_messages(reports)?;
    let mut files = BTreeMap::new();
    for (rank, report) in reports.iter().enumerate() {
        if let Some(file) = &report.file {
            let host = hosts.name(rank).map(str::to_string);
            files.insert(store.unique_name(&file_name(rank)), FileEntry { host, ..file.clone() });
        }
    }
    let mut checksums: Vec<_> = reports.iter().map(|report| report.checksums.iter()).collect();
    let mut next = |rank: usize| {
        let too_few = || format!("rank {rank} reported too few checksums; do all ranks run the same program?");
        checksums[rank].next().copied().ok_or_else(|| Error::Argument(too_few()))
    };
    let name = |rank: usize| store.unique_name(&file_name(rank));
    let mut tensors = BTreeMap::new();
    for (fqn, tensor) in plan {
        let mut chunks = Vec::with_capacity(tensor.chunks.len());
        for chunk in &tensor.chunks {
            let crc = next(chunk.writer)?;
            for &copier in &chunk.copiers {
                if next(copier)? != crc {
                    let (span, rank) = (Bounds(&chunk.region), chunk.writer);
                    let reason = format!("ranks {rank} and {copier} hold different bytes of {span}");
                    return Err(Error::InvalidShards { tensor: fqn.clone(), reason });
                }
            }
            chunks.push(ChunkEntry {
                copies: chunk.copiers.iter().map(|&rank| name(rank)).collect(),
                crc32c: Some(crc),
                ..ChunkEntry::new(name(chunk.writer), chunk.region.clone())
            });
        }
        tensors.insert(fqn.clone(), TensorEntry { dtype: tensor.dtype, shape: tensor.shape.clone(), chunks });
    }
    let finite = reports.iter().all(|report| report.finite);
    let count = files.len();
    let manifest = Manifest::new(&state.mesh, group.size(), finite, state.values.clone(), files, tensors);
    Ok((manifest.to_text()?, count))
}
