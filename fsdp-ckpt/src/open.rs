//! Opening a path of any format.

use std::path::Path;

use fsdp_core::ProcessGroup;

use crate::checkpoint::agree::agree;
use crate::checkpoint::open_for::open_for as open_for_ranks;
use crate::hf::{HfModel, INDEX, SINGLE};
use crate::store::location;
use crate::torch::{BIN, BIN_INDEX, METADATA, TorchDcp, TorchFile};
use crate::{Checkpoint, Error, MANIFEST, Result, TensorShard, TensorSource, latest};

/// Opens a checkpoint or model and detects its format: a directory with a `checkpoint.json`, with the `.metadata` of
/// PyTorch DCP, with safetensors files (see [`HfModel::open`]), or with a `pytorch_model.bin` or its index; a single
/// file of `torch.save` or a single safetensors file.
///
/// # Errors
/// [`Error::NotFound`] if no format is detected; errors of the format.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn TensorSource>> {
    let path = path.as_ref();
    if location(path)?.is_file()? {
        return Ok(if TorchFile::is_one(path)? {
            Box::new(TorchFile::open(path)?)
        } else {
            Box::new(HfModel::open_file(path)?)
        });
    }
    let store = location(path)?.store()?;
    if store.size(MANIFEST)?.is_some() {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    if store.size(METADATA)?.is_some() {
        return Ok(Box::new(TorchDcp::open(path)?));
    }
    let names = store.list()?;
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    if (has(BIN) || has(BIN_INDEX)) && !has(SINGLE) && !has(INDEX) {
        return Ok(Box::new(TorchFile::open_model(path)?));
    }
    if has(INDEX) || names.iter().any(|name| name.ends_with(".safetensors")) {
        return Ok(Box::new(HfModel::open(path)?));
    }
    Err(nothing(path))
}

/// Opens a checkpoint or model on all ranks of a group, which each read their parts of `tensors`. Detects the format as
/// [`open`] does. Collective: every rank passes the same path, on a file system that all ranks share.
///
/// Of a checkpoint of this crate, rank 0 reads the manifest and looks up the files. It sends each rank the chunks that
/// overlap with the rank's `tensors`, and the rank's share to verify. So what a rank reads does not grow with the number
/// of ranks. [`TensorSource::tensors`] has all tensors, but only these chunks, and [`TensorSource::files`] has the files
/// with these chunks. Reading another region, or verifying another share, first reads the manifest here.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_ckpt::{SaveState, TensorShard, TensorSource, open_for, save};
/// use fsdp_core::{Buffer, MeshLayout, layout::Region, process_group::local};
///
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("step-00000001");
/// local::try_run(2, |group| {
///     let region = Region { offsets: vec![2 * group.rank()], sizes: vec![2] };
///     let data = Arc::new(Buffer::F32(vec![group.rank() as f32; 2]));
///     let own = TensorShard { fqn: "weight".into(), shape: vec![4], region: region.clone(), data };
///     let state = SaveState { mesh: MeshLayout::new(&[("dp", 2)])?, tensors: vec![own], values: Default::default() };
///     save(&dir, &group, &state)?;
///     let source = open_for(&dir, &group, &state.tensors)?;
///     source.verify_share(group.rank(), group.size())?;
///     let mut bytes = [0; 8];
///     source.read("weight", &region, &mut bytes)?;
///     assert_eq!(source.tensor("weight")?.chunks.len(), 1);
///     Ok::<_, fsdp_ckpt::Error>(())
/// })?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The errors of [`open`]. An error of rank 0 is [`Error::Rank`] on the other ranks. [`Error::Open`] if a collective
/// fails, as when a rank does not open it.
pub fn open_for(
    path: impl AsRef<Path>,
    group: &ProcessGroup,
    tensors: &[TensorShard],
) -> Result<Box<dyn TensorSource>> {
    let path = path.as_ref();
    open_together(path, group, tensors).map_err(|error| match error {
        Error::Group(source) => Error::Open { path: path.to_path_buf(), source: Box::new(source) },
        other => other,
    })
}

fn open_together(path: &Path, group: &ProcessGroup, tensors: &[TensorShard]) -> Result<Box<dyn TensorSource>> {
    let opened = if group.rank() == 0 { open_checkpoint(path) } else { Ok(None) };
    let opened = agree(group, "open the checkpoint", opened).map_err(|error| match error {
        Error::Rank { error: Some(own), .. } => *own,
        other => other,
    })?;
    let is_checkpoint = group.broadcast_bytes(0, vec![u8::from(opened.is_some())])? == [1];
    if is_checkpoint { Ok(Box::new(open_for_ranks(path, group, opened, tensors)?)) } else { open(path) }
}

/// Opens a checkpoint of this crate; `None` for another format.
fn open_checkpoint(path: &Path) -> Result<Option<Checkpoint>> {
    let is_one = !location(path)?.is_file()? && location(path)?.store()?.size(MANIFEST)?.is_some();
    is_one.then(|| Checkpoint::open(path)).transpose()
}

/// Returns the error for a directory of no known format. It may be the directory of a run.
fn nothing(path: &Path) -> Error {
    let hint = match latest(path) {
        Ok(Some(step)) => format!("; its newest checkpoint is {}: pass this path", step.display()),
        _ => String::new(),
    };
    let looked_for = format!(
        "checkpoint and no model: no {MANIFEST} (did the save finish?), no {METADATA}, no file of safetensors, no \
            {BIN}{hint}"
    );
    Error::NotFound { path: path.to_path_buf(), looked_for }
}
