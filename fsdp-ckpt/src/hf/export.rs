//! Exporting one weights file from the shards of all ranks, without gathering them.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fsdp_core::ProcessGroup;
use fsdp_core::layout::Region;

use crate::checkpoint::agree::{agree, for_purpose, on_rank_0, read_message, to_message};
use crate::checkpoint::hosts::Hosts;
use crate::checkpoint::plan::{OwnChunk, Plan, PlannedTensor, plan_on_rank_0};
use crate::error::io_error;
use crate::hf::{INDEX, SINGLE};
use crate::region::{CopyRun, runs};
use crate::safetensors::{Entry, Layout, read_bytes};
use crate::store::{LocalStaging, Staging, remove_stale, require_local, split};
use crate::{Error, Result, TensorShard, check_writable};

/// Options of [`export_with`].
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Name of the weights file.
    pub file: String,
    /// Files to copy beside it, such as `config.json` and the tokenizer.
    pub config_files: Vec<PathBuf>,
    /// Entries for the file's `__metadata__`, the same on every rank.
    pub metadata: BTreeMap<String, String>,
    /// Whether to replace an existing file of this name, such as the export of an earlier run. Default: false, which makes
    /// existing weights an error. An index of several files is never replaced.
    pub replace: bool,
}

impl Default for ExportOptions {
    /// Exports only `model.safetensors`, and replaces nothing.
    fn default() -> Self {
        ExportOptions { file: SINGLE.into(), config_files: Vec::new(), metadata: BTreeMap::new(), replace: false }
    }
}

/// Writes `model.safetensors` to the directory `dir` from the shards of all ranks, and copies rank 0's `config_files`
/// beside it. Creates `dir` if it is missing. Names are not changed. Returns the size of the file. Collective: every
/// rank of `group` passes the same `dir`, on a file system that all ranks share.
///
/// Each rank writes its shards to their places in a temporary file, which rank 0 then renames. Replicated shards are
/// written once. Also removes what killed exports left in `dir`.
///
/// # Errors
/// [`Error::Rank`] on every rank if any rank fails; within it, [`Error::AlreadyExists`] if `dir` holds weights, unless
/// [`ExportOptions::replace`] is set. [`check_export`] tells before training.
/// [`Error::InvalidShards`] if the shards do not form whole tensors; [`Error::Group`] if a collective fails.
pub fn export(
    dir: impl AsRef<Path>,
    group: &ProcessGroup,
    tensors: &[TensorShard],
    config_files: &[PathBuf],
) -> Result<u64> {
    let dir = dir.as_ref();
    export_with(dir, group, tensors, &ExportOptions { config_files: config_files.to_vec(), ..ExportOptions::default() })
}

/// [`export`] with options. Has the same errors.
pub fn export_with(
    dir: impl AsRef<Path>,
    group: &ProcessGroup,
    tensors: &[TensorShard],
    options: &ExportOptions,
) -> Result<u64> {
    let dir = dir.as_ref();
    export_to(dir, group, tensors, options, check_free)
}

/// Writes one safetensors file from the shards of all ranks, as [`export`] does, beside whatever its directory holds.
/// Replaces an existing file. Returns the size of the file. Collective. Has the errors of [`export`], except for
/// [`Error::AlreadyExists`].
///
/// ```
/// use fsdp_ckpt::{TensorShard, hf, open};
/// use fsdp_core::{Buffer, process_group::local};
///
/// let root = tempfile::tempdir()?;
/// let file = root.path().join("weights.safetensors");
/// local::run(2, |group| {
///     let weight = TensorShard::whole("weight", &[2], std::sync::Arc::new(Buffer::F32(vec![0.5; 2])));
///     hf::export_file(&file, &group, &[weight]).unwrap();
/// });
/// assert_eq!(open(&file)?.tensor("weight")?.shape, [2]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn export_file(path: impl AsRef<Path>, group: &ProcessGroup, tensors: &[TensorShard]) -> Result<u64> {
    let path = path.as_ref();
    let named = for_purpose(group, &format!("export of `{}`", path.file_name().unwrap_or_default().to_string_lossy()));
    let (dir, file) = agree(&named, "start the export", split(path))?;
    let options = ExportOptions { file, replace: true, ..ExportOptions::default() };
    export_to(&dir, group, tensors, &options, |dir, options| {
        let path = dir.join(&options.file);
        // A rename can't replace a directory, and would fail after the whole model was written.
        if path.is_dir() { Err(Error::AlreadyExists { path }) } else { Ok(()) }
    })
}

fn export_to(
    dir: &Path,
    group: &ProcessGroup,
    tensors: &[TensorShard],
    options: &ExportOptions,
    check_free: fn(&Path, &ExportOptions) -> Result<()>,
) -> Result<u64> {
    let group = &about(group, dir, options);
    let dir = agree(group, "start the export", require_local(dir, "an export from shards"))?;
    let plan = plan_on_rank_0(group, &Hosts::shared(group.size()), "a model for export", tensors)?;
    let lay_out = "lay out the file";
    let listed = on_rank_0(group, lay_out, || list(plan.whole.as_ref()))?;
    let entries: Vec<Entry> = agree(group, lay_out, read_message(0, listed.as_bytes()))?;
    let mut metadata = options.metadata.clone();
    metadata.insert("format".into(), "pt".into());
    let layout = agree(group, lay_out, Layout::new(&entries, &metadata))?;

    let mut staging = None;
    let name = on_rank_0(group, "create the file", || {
        remove_stale(dir);
        check_free(dir, options)?;
        let staging = staging.insert(create(dir, options, layout.bytes)?);
        write_all_at(staging.file(), staging.path(), &layout.header, 0)?;
        Ok(staging.name())
    })?;
    let written = write_own(&dir.join(name), &plan.own_chunks(tensors), &entries, &layout, tensors);
    agree(group, "write its shards", written)?;
    let finished = match staging {
        Some(staging) => copy_all(&options.config_files, dir).and_then(|()| staging.rename(options.replace)),
        None => Ok(()),
    };
    agree(group, "finish the export", finished)?;
    Ok(layout.bytes)
}

/// Returns the planned tensors as JSON.
fn list(plan: Option<&Plan>) -> Result<String> {
    let entry = |(name, tensor): (&String, &PlannedTensor)| Entry {
        name: name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
    };
    let entries: Vec<Entry> = plan.into_iter().flatten().map(entry).collect();
    Ok(String::from_utf8_lossy(&to_message(&entries)?).into_owned())
}

/// Checks that [`export_with`] with these options can write to `dir`: that the directory holds no weights, unless
/// `options` replace them, that every rank can write there, and that rank 0 can read the files to copy. Call it before
/// training, since an export that can't be written shows only after it otherwise. Collective.
///
/// # Errors
/// The errors of [`export_with`].
///
/// ```
/// use fsdp_ckpt::{TensorShard, hf};
/// use fsdp_core::{Buffer, process_group::local};
///
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("model");
/// local::run(2, |group| {
///     let mut options = hf::ExportOptions::default();
///     hf::check_export(&dir, &group, &options).unwrap();
///     let weight = TensorShard::whole("weight", &[2], std::sync::Arc::new(Buffer::F32(vec![0.5; 2])));
///     hf::export_with(&dir, &group, &[weight], &options).unwrap();
///     assert!(hf::check_export(&dir, &group, &options).is_err()); // it holds weights
///     options.replace = true;
///     hf::check_export(&dir, &group, &options).unwrap();
/// });
/// # Ok::<_, std::io::Error>(())
/// ```
pub fn check_export(dir: impl AsRef<Path>, group: &ProcessGroup, options: &ExportOptions) -> Result<()> {
    let dir = dir.as_ref();
    let named = about(group, dir, options);
    let local = agree(&named, "start the export", require_local(dir, "an export from shards"))?;
    on_rank_0(&named, "check the export", || {
        check_free(local, options)?;
        let readable = |path: &PathBuf| File::open(path).map(drop).map_err(io_error("open", path));
        options.config_files.iter().try_for_each(readable).map(|()| String::new())
    })?;
    check_writable(dir, group)
}

/// Returns a handle of the group whose collectives name the export.
fn about(group: &ProcessGroup, dir: &Path, options: &ExportOptions) -> ProcessGroup {
    // Ranks may spell the path in different ways.
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    for_purpose(group, &format!("export of `{name}/{}`", options.file))
}

/// Fails if the directory holds weights that the export does not replace.
fn check_free(dir: &Path, options: &ExportOptions) -> Result<()> {
    let in_the_way = |name: &&str| *name == INDEX || !options.replace || *name != options.file;
    for name in [SINGLE, INDEX, &options.file].iter().filter(|name| in_the_way(name)) {
        let path = dir.join(name);
        if path.symlink_metadata().is_ok() {
            return Err(Error::AlreadyExists { path });
        }
    }
    Ok(())
}

/// Creates the weights file with its full size.
fn create(dir: &Path, options: &ExportOptions, bytes: u64) -> Result<LocalStaging> {
    let staging = LocalStaging::create_file(&dir.join(&options.file))?;
    staging.file().set_len(bytes).map_err(io_error("make room for", staging.path()))?;
    Ok(staging)
}

fn write_own(
    path: &Path,
    own: &[OwnChunk<'_>],
    entries: &[Entry],
    layout: &Layout,
    shards: &[TensorShard],
) -> Result<()> {
    let by_name: BTreeMap<&str, &TensorShard> = shards.iter().map(|shard| (shard.fqn.as_str(), shard)).collect();
    let ranges: BTreeMap<&str, &Range<u64>> =
        entries.iter().map(|entry| entry.name.as_str()).zip(&layout.ranges).collect();
    let file = File::options().write(true).open(path).map_err(io_error("open", path))?;
    for OwnChunk { fqn, dtype, region: part } in own {
        // Rank 0 lists every planned tensor.
        if let Some(range) = ranges.get(fqn) {
            let TensorShard { shape, data, .. } = by_name[fqn];
            let (size, whole) = (dtype.size(), Region::whole(shape));
            // A piece of the data may end within a run.
            let (mut runs, mut done) = (runs(part, &whole, part, size).peekable(), 0);
            read_bytes(fqn, &**data, part.elements() * size, &mut |bytes| {
                let end = done + bytes.len();
                while let Some(&CopyRun { src, dst, len }) = runs.peek()
                    && src < end
                {
                    let (from, to) = (src.max(done), end.min(src + len));
                    write_all_at(&file, path, &bytes[from - done..to - done], range.start + (dst + from - src) as u64)?;
                    if src + len > end {
                        break;
                    }
                    runs.next();
                }
                done = end;
                Ok(())
            })?;
        }
    }
    file.sync_all().map_err(io_error("sync", path))
}

fn write_all_at(file: &File, path: &Path, bytes: &[u8], at: u64) -> Result<()> {
    file.write_all_at(bytes, at).map_err(io_error("write", path))
}

fn copy_all(files: &[PathBuf], dir: &Path) -> Result<()> {
    for from in files {
        // Copy under a temporary name first, so that a file under its final name is complete.
        let staging = LocalStaging::create_file(&dir.join(split(from)?.1))?;
        let mut to = staging.file();
        File::open(from).and_then(|mut from| std::io::copy(&mut from, &mut to)).map_err(io_error("copy", from))?;
        staging.rename(true)?;
    }
    Ok(())
}
