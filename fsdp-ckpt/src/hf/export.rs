//! Writing one consolidated weights file from shards: all ranks at once, none with more than its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fsdp_core::ProcessGroup;
use fsdp_core::layout::Region;

use super::{INDEX, SINGLE};
use crate::error::io_error;
use crate::exchange::{agree, from_first};
use crate::plan::{Plan, negotiate};
use crate::region::runs;
use crate::safetensors::{Entry, Layout, read_bytes};
use crate::store::{local_path, sync_dir, unique};
use crate::{Error, Result, TensorShard};

/// Writes `model.safetensors` to the directory `dir` (created where it is missing) from every rank's shards, and copies `config_files` (`config.json`,
/// the tokenizer, ...) beside it. Collective: every rank of `group` calls it with the same `dir`, on a file system that all of them share; rank 0's
/// `config_files` count. Names are written as given. Returns the size of the file in bytes.
///
/// Nothing is gathered: each rank writes its own parts to their places in a temporary file, and rank 0 gives that its name by an atomic rename. Equal
/// shards of several ranks are written by one of them.
///
/// # Errors
/// On every rank when any of them fails, naming that rank and its cause ([`Error::Rank`]). [`Error::Shards`] when the ranks' shards don't make whole
/// tensors, [`Error::Exists`] (within [`Error::Rank`]) when `dir` holds weights already, [`Error::Group`] when a collective fails.
pub fn export(dir: &Path, group: &dyn ProcessGroup, tensors: &[TensorShard], config_files: &[PathBuf]) -> Result<u64> {
    let dir = agree(group, "start the export", local_path(dir, "an export from shards"))?;
    let plan = negotiate(group, "a model for export", tensors)?;
    let entries: Vec<Entry> = plan
        .iter()
        .map(|(name, tensor)| Entry { name: name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() })
        .collect();
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let layout = agree(group, "lay out the file", Layout::new(&entries, &metadata))?;

    let mut temporary = None;
    let name = from_first(group, "create the file", || {
        let (made, name) = Temporary::create(dir, &layout)?;
        temporary = Some(made);
        Ok(name)
    })?;
    let written = write_own(&dir.join(name), group.rank(), &plan, &layout, tensors);
    agree(group, "write its shards", written)?;
    let committed = match temporary {
        Some(temporary) => copy_all(config_files, dir).and_then(|()| temporary.commit(dir)),
        None => Ok(()),
    };
    agree(group, "finish the export", committed)?;
    Ok(layout.bytes)
}

/// The file while it is written. Dropped before [`Temporary::commit`], it is removed.
struct Temporary {
    path: PathBuf,
    committed: bool,
}

impl Temporary {
    /// Creates the file in its full size, with its header.
    fn create(dir: &Path, layout: &Layout) -> Result<(Self, String)> {
        for name in [SINGLE, INDEX] {
            let path = dir.join(name);
            if path.symlink_metadata().is_ok() {
                return Err(Error::Exists { path });
            }
        }
        std::fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let name = format!(".{SINGLE}.tmp-{}", unique());
        let path = dir.join(&name);
        let file = File::create_new(&path).map_err(io_error("create", &path))?;
        let temporary = Temporary { path, committed: false };
        file.set_len(layout.bytes).map_err(io_error("make room for", &temporary.path))?;
        write_all_at(&file, &temporary.path, &layout.header, 0)?;
        file.sync_all().map_err(io_error("sync", &temporary.path))?;
        Ok((temporary, name))
    }

    fn commit(mut self, dir: &Path) -> Result<()> {
        std::fs::rename(&self.path, dir.join(SINGLE)).map_err(io_error("rename", &self.path))?;
        self.committed = true;
        sync_dir(dir)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.committed
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("can't remove {}: {error}", self.path.display());
        }
    }
}

fn write_own(path: &Path, rank: usize, plan: &Plan, layout: &Layout, shards: &[TensorShard]) -> Result<()> {
    let by_name: BTreeMap<&str, &TensorShard> = shards.iter().map(|shard| (shard.fqn.as_str(), shard)).collect();
    let file = File::options().write(true).open(path).map_err(io_error("open", path))?;
    for ((fqn, tensor), range) in plan.iter().zip(&layout.ranges) {
        for chunk in tensor.chunks.iter().filter(|chunk| chunk.writer == rank) {
            let (size, part, whole) = (tensor.dtype.size(), &chunk.region, Region::whole(&tensor.shape));
            let data = &by_name[fqn.as_str()].data;
            read_bytes(fqn, &**data, part.elements() * size, &mut |bytes| {
                for run in runs(part, &whole, part, size) {
                    write_all_at(&file, path, &bytes[run.src..run.src + run.len], range.start + run.dst as u64)?;
                }
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
        let Some(name) = from.file_name() else {
            return Err(Error::Argument(format!("{} is not a file to copy", from.display())));
        };
        // Copied under another name first: what has its final name is whole.
        let temporary = dir.join(format!(".{}.tmp-{}", name.to_string_lossy(), unique()));
        let copied = std::fs::copy(from, &temporary)
            .and_then(|_| File::open(&temporary)?.sync_all())
            .and_then(|()| std::fs::rename(&temporary, dir.join(name)));
        if let Err(error) = copied {
            // It may not be there at all; the copy's own error is the one to tell.
            let _ = std::fs::remove_file(&temporary);
            return Err(io_error("copy", from)(error));
        }
    }
    Ok(())
}
