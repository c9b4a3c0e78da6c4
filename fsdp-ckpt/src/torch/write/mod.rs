//! Writing DCP's classic format.

mod blocks;
mod item;
mod pickler;
mod plan;

use std::path::Path;

use serde_json::{Map, Value};

use self::blocks::blocks;
use self::plan::{Plan, metadata};
use super::dcp::METADATA;
use crate::store::{Store, stage, staged};
use crate::{Result, TensorSource};

/// How many bytes of a tensor are in memory at once.
const BLOCK: usize = 4 << 20;

/// How [`write_dcp`] writes.
#[derive(Clone, Debug)]
pub struct DcpOptions {
    /// The number of files, as from so many ranks: each tensor is cut along its first dimension into so many parts, as FSDP2 does. 1 to 65536.
    pub world_size: usize,
    /// Hyper-parameters of the optimizer ("lr", "betas", ...). Each is written as `optim.param_groups.<fqn>.<key>` for each parameter that has optimizer
    /// state, unless the source has that value. PyTorch refuses optimizer state whose groups lack one that its optimizer has.
    pub hyper_parameters: Map<String, Value>,
}

impl DcpOptions {
    /// For so many ranks, without hyper-parameters.
    pub fn new(world_size: usize) -> Self {
        DcpOptions { world_size, hyper_parameters: Map::new() }
    }
}

/// Writes tensors and values of any format as the directory `dst`, which PyTorch's `dcp.load` and `FileSystemReader` read. Returns the bytes of all tensors.
///
/// Names stay as they are; `model.` and `optim.` become dicts of their own where PyTorch unflattens names. Values that are nested become several, as PyTorch
/// flattens them. A block of 4 MiB is in memory at a time; `progress` gets the bytes of each. The directory appears as a whole, or not at all.
///
/// # Errors
/// [`crate::Error::Exists`] when `dst` is there already; [`crate::Error::Argument`] for a world size that can't be, or a name that is a tensor's and a value's;
/// those of reading `source`; [`crate::Error::Io`].
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
/// #     fsdp_ckpt::hf::export(&model, &*group, &[TensorShard::whole("lm_head.weight", &[3, 2], data)], &[]).unwrap();
/// # });
/// let source = HfModel::open(&model)?;
/// let dst = root.path().join("dcp");
/// let bytes = write_dcp(&dst, &source, &DcpOptions::new(2), &mut |_| ())?;
/// assert_eq!(bytes, 24);
/// assert_eq!(TorchDcp::open(&dst)?.tensor("lm_head.weight")?.chunks.len(), 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn write_dcp(
    dst: &Path,
    source: &dyn TensorSource,
    options: &DcpOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<u64> {
    let plan = Plan::new(source, options)?;
    let staging = stage(dst)?;
    let store = staged(dst, &staging.name())?;
    let mut bytes = 0;
    let mut count = |read| {
        bytes += read;
        progress(read);
    };
    for rank in 0..plan.files.len() {
        write_file(&*store, rank, &plan, source, &mut count)?;
    }
    staging.commit(METADATA, &metadata(&plan, source.tensors()))?;
    Ok(bytes)
}

/// PyTorch's name for the file of a rank.
fn file_name(rank: usize) -> String {
    format!("__{rank}_0.distcp")
}

fn write_file(
    store: &dyn Store,
    rank: usize,
    plan: &Plan,
    source: &dyn TensorSource,
    count: &mut dyn FnMut(u64),
) -> Result<()> {
    let items = &plan.files[rank];
    let Some(last) = items.last() else { return Ok(()) };
    let mut file = store.create(&file_name(rank), last.place.offset + last.place.bytes)?;
    let mut block = Vec::new();
    for planned in items {
        file.append(&planned.item.head)?;
        let mut crc = crc32fast::Hasher::new();
        if let Some(region) = &planned.region {
            let size = source.tensor(&planned.fqn)?.dtype.size();
            for part in blocks(region, size, BLOCK) {
                block.resize(part.elements() * size, 0);
                source.read(&planned.fqn, &part, &mut block)?;
                crc.update(&block);
                file.append(&block)?;
                count(block.len() as u64);
            }
        }
        file.append(&planned.item.tail(crc.finalize()))?;
    }
    file.finish()
}
