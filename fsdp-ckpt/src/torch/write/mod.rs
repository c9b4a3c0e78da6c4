//! Writing DCP's classic format.

mod item;
mod options;
mod pickler;
mod plan;

use std::path::Path;

pub use self::options::DcpOptions;
use self::options::file_name;
use self::plan::{Plan, Planned, metadata};
use super::dcp::METADATA;
use crate::source::stream;
use crate::store::{Store, stage, staged};
use crate::written::Written;
use crate::{Result, TensorSource};

/// Writes tensors and values of any format as the directory `dst`, which PyTorch's `dcp.load` and `FileSystemReader`
/// read.
///
/// Names stay as they are; `model.` and `optim.` become dicts of their own where PyTorch unflattens names. Values that
/// are nested become several, as PyTorch flattens them. Of `optim.param_groups` as our checkpoints have it, each
/// parameter gets the hyper-parameters of its group, and PyTorch's defaults for those that only its AdamW has: it
/// refuses optimizer state that lacks one.
///
/// Memory stays small, however large the tensors are. The directory appears as a whole, or not at all.
///
/// # Errors
/// [`crate::Error::Exists`] when `dst` is there already; [`crate::Error::Argument`] for a world size that can't be, or
/// a name that is a tensor's and a value's; those of reading `source`; [`crate::Error::Io`].
///
/// ```
/// use fsdp_ckpt::torch::{DcpOptions, TorchDcp, write_dcp};
/// use fsdp_ckpt::{TensorSource, hf::HfModel};
/// # use fsdp_ckpt::TensorShard;
/// # use fsdp_core::{Buffer, process_group::local};
/// # let root = tempfile::tempdir()?;
/// # let model = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = std::sync::Arc::new(Buffer::F32(vec![0.5; 6]));
/// #     fsdp_ckpt::hf::export(&model, &group, &[TensorShard::whole("lm_head.weight", &[3, 2], data)], &[]).unwrap();
/// # });
/// let source = HfModel::open(&model)?;
/// let dst = root.path().join("dcp");
/// let written = write_dcp(&dst, &source, &DcpOptions::new(2))?;
/// assert_eq!((written.files, written.bytes), (2, 24));
/// assert_eq!(TorchDcp::open(&dst)?.tensor("lm_head.weight")?.chunks.len(), 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn write_dcp(dst: &Path, source: &dyn TensorSource, options: &DcpOptions) -> Result<Written> {
    let plan = Plan::new(source, options)?;
    let staging = stage(dst)?;
    let store = staged(dst, &staging.name())?;
    let mut written = Written { path: dst.to_path_buf(), tensors: source.tensors().len(), files: 0, bytes: 0 };
    for (rank, items) in plan.files.iter().enumerate().filter(|(_, items)| !items.is_empty()) {
        written.bytes += write_file(&*store, &file_name(rank), items, source)?;
        written.files += 1;
    }
    staging.commit(METADATA, &metadata(&plan, source.tensors()))?;
    Ok(written)
}

/// Writes a file and returns the bytes of tensors in it.
fn write_file(store: &dyn Store, name: &str, items: &[Planned], source: &dyn TensorSource) -> Result<u64> {
    let size = items.last().map_or(0, |last| last.place.offset + last.place.bytes);
    let mut file = store.create(name, size)?;
    let mut written = 0;
    for planned in items {
        file.append(&planned.item.head)?;
        let mut crc = crc32fast::Hasher::new();
        if let Some(region) = &planned.region {
            stream(source, &planned.fqn, region, &mut |bytes| {
                crc.update(bytes);
                written += bytes.len() as u64;
                file.append(bytes)
            })?;
        }
        file.append(&planned.item.tail(crc.finalize()))?;
    }
    file.finish()?;
    Ok(written)
}
