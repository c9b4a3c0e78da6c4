//! Writing checkpoints of PyTorch DCP in the classic format.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_core::DType;
use fsdp_core::layout::{Region, chunk_range};
use serde_json::{Map, Value};

use crate::source::{WriteSummary, stream};
use crate::store::{Store, location};
use crate::torch::archive_layout::ArchiveLayout;
use crate::torch::dcp::METADATA;
use crate::torch::dcp_metadata::ByteRange;
use crate::torch::pickler::Pickler;
use crate::torch::tensor::{storage_class, torch_dtype};
use crate::{Error, Result, TensorEntry, TensorSource};

/// Writes the tensors and values of `source` as the directory `dst`, which PyTorch's `dcp.load` and `FileSystemReader`
/// read.
///
/// Names do not change; PyTorch unflattens `model.` and `optim.` into dicts. Nested values are flattened as PyTorch
/// does. The groups in `optim.param_groups` become options of each parameter. AdamW's options that are missing get
/// PyTorch's defaults, since PyTorch refuses optimizer state without them.
///
/// Needs little memory. The directory appears when it is complete.
///
/// # Errors
/// [`crate::Error::AlreadyExists`] if `dst` exists; [`crate::Error::Argument`] for an invalid world size, or a name of
/// both a tensor and a value; errors of reading `source`; [`crate::Error::Io`].
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
pub fn write_dcp(dst: impl AsRef<Path>, source: &dyn TensorSource, options: &DcpOptions) -> Result<WriteSummary> {
    let dst = dst.as_ref();
    let plan = Plan::new(source, options)?;
    let staging = location(dst)?.stage()?;
    let store = location(dst)?.open_staging(&staging.name())?;
    let mut written = WriteSummary { path: dst.to_path_buf(), tensors: source.tensors().len(), files: 0, bytes: 0 };
    for (rank, items) in plan.files.iter().enumerate().filter(|(_, items)| !items.is_empty()) {
        written.bytes += write_file(&*store, &file_name(rank), items, source)?;
        written.files += 1;
    }
    staging.commit(METADATA, &metadata(&plan, source.tensors()))?;
    Ok(written)
}

/// Writes a file and returns the bytes of its tensors.
fn write_file(store: &dyn Store, name: &str, items: &[PlannedItem], source: &dyn TensorSource) -> Result<u64> {
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

/// Options of [`write_dcp`].
#[derive(Clone, Debug)]
pub struct DcpOptions {
    /// Number of files, 1 to 65536. Tensors are cut on dimension 0 into as many chunks, as FSDP2 does.
    pub world_size: usize,
    /// Optimizer hyper-parameters ("lr", "betas", ...). Each is written as `optim.param_groups.<fqn>.<key>` for each
    /// parameter with optimizer state, unless the source has the value.
    pub hyper_parameters: Map<String, Value>,
}

impl DcpOptions {
    /// Creates options without hyper-parameters.
    pub fn new(world_size: usize) -> Self {
        DcpOptions { world_size, hyper_parameters: Map::new() }
    }
}

/// Returns PyTorch's name for a rank's file.
pub(super) fn file_name(rank: usize) -> String {
    format!("__{rank}_0.distcp")
}

/// Value with the optimizer's hyper-parameters.
const GROUPS: &str = "optim.param_groups";
/// Options of PyTorch's AdamW that older checkpoints lack, with their defaults.
const ADAMW: [(&str, Value); 7] = [
    ("amsgrad", Value::Bool(false)),
    ("capturable", Value::Bool(false)),
    ("decoupled_weight_decay", Value::Bool(true)),
    ("differentiable", Value::Bool(false)),
    ("foreach", Value::Null),
    ("fused", Value::Null),
    ("maximize", Value::Bool(false)),
];

/// Values by flattened name, each with its path of keys.
type Values = BTreeMap<String, (Vec<String>, Value)>;

/// An item of a file.
pub(super) struct PlannedItem {
    pub(super) fqn: String,
    /// Region of the tensor; `None` for a value.
    pub(super) region: Option<Region>,
    pub(super) place: ByteRange,
    pub(super) item: ArchiveLayout,
}

/// Items of each rank's file, and the values.
pub(super) struct Plan {
    pub(super) files: Vec<Vec<PlannedItem>>,
    pub(super) values: Values,
}

impl Plan {
    pub(super) fn new(source: &dyn TensorSource, options: &DcpOptions) -> Result<Self> {
        let world = options.world_size;
        if !(1..=1 << 16).contains(&world) {
            return Err(Error::Argument(format!(
                "can't write a checkpoint of {world} ranks, expected 1 to {}",
                1 << 16
            )));
        }
        let values = values(source, &options.hyper_parameters)?;
        let mut plan = Plan { files: Vec::new(), values: BTreeMap::new() };
        plan.files.resize_with(world, Vec::new);
        for (fqn, (_, value)) in &values {
            let mut pickler = Pickler::new();
            // Only hyper-parameters, such as betas, are likely to be tuples.
            pickler.json(value, fqn.starts_with(GROUPS));
            plan.add(0, fqn, None, ArchiveLayout::new(&pickler.finish(), None));
        }
        plan.values = values;
        let mut next = 0;
        for (fqn, tensor) in source.tensors() {
            match tensor.shape.first() {
                Some(&rows) if rows > 0 => {
                    for rank in 0..world {
                        let range = chunk_range(rows, world, rank);
                        if range.is_empty() {
                            break;
                        }
                        let mut region = Region::whole(&tensor.shape);
                        (region.offsets[0], region.sizes[0]) = (range.start, range.len());
                        plan.add_tensor(rank, fqn, tensor.dtype, region)?;
                    }
                }
                // Tensors that can't be split go to the ranks in turn.
                _ => {
                    plan.add_tensor(next % world, fqn, tensor.dtype, Region::whole(&tensor.shape))?;
                    next += 1;
                }
            }
        }
        Ok(plan)
    }

    fn add_tensor(&mut self, rank: usize, fqn: &str, dtype: DType, region: Region) -> Result<()> {
        let elements = region.elements();
        let item =
            ArchiveLayout::new(&tensor_pickle(fqn, dtype, &region.sizes)?, Some((elements * dtype.size()) as u64));
        self.add(rank, fqn, Some(region), item);
        Ok(())
    }

    fn add(&mut self, rank: usize, fqn: &str, region: Option<Region>, item: ArchiveLayout) {
        let file = &mut self.files[rank];
        let offset = file.last().map_or(0, |last| last.place.offset + last.place.bytes);
        let place = ByteRange { offset, bytes: item.bytes() };
        file.push(PlannedItem { fqn: fqn.to_string(), region, place, item });
    }
}

/// Returns the source's values, flattened, and the hyper-parameters of each parameter with optimizer state.
fn values(source: &dyn TensorSource, hyper_parameters: &Map<String, Value>) -> Result<Values> {
    let mut values = BTreeMap::new();
    for (key, value) in source.values() {
        match groups(key, value) {
            Some(groups) => {
                groups.into_iter().for_each(|(name, value)| drop(values.insert(name.clone(), (path(&name), value))))
            }
            None => flatten(&mut values, path(key), value),
        }
    }
    for fqn in source.tensors().keys() {
        let Some((fqn, _)) = fqn.strip_prefix("optim.state.").and_then(|rest| rest.rsplit_once('.')) else { continue };
        for (key, value) in hyper_parameters {
            let name = format!("{GROUPS}.{fqn}.{key}");
            if !values.contains_key(&name) {
                values.insert(name.clone(), (path(&name), value.clone()));
            }
        }
    }
    for fqn in values.keys() {
        if source.tensors().contains_key(fqn) {
            return Err(Error::Argument(format!(
                "\"{fqn}\" names both a tensor and a value in {}; rename one",
                source.path().display()
            )));
        }
    }
    Ok(values)
}

/// Expands a list of groups to the hyper-parameters of each parameter.
fn groups(key: &str, value: &Value) -> Option<Vec<(String, Value)>> {
    let groups = value.as_array().filter(|_| key == GROUPS)?;
    let mut flat = Vec::new();
    for group in groups {
        let group = group.as_object()?;
        let defaults = ADAMW.iter().filter(|_| group.contains_key("betas"));
        let defaults = defaults.map(|(key, value)| (key.to_string(), value.clone()));
        let mut all: Map<String, Value> = defaults.collect();
        all.extend(group.clone());
        for fqn in all.remove("params")?.as_array()? {
            let fqn = fqn.as_str()?;
            flat.extend(all.iter().map(|(key, value)| (format!("{GROUPS}.{fqn}.{key}"), value.clone())));
        }
    }
    Some(flat)
}

fn flatten(into: &mut Values, path: Vec<String>, value: &Value) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                let mut path = path.clone();
                path.push(key.clone());
                flatten(into, path, value);
            }
        }
        _ => drop(into.insert(path.join("."), (path, value.clone()))),
    }
}

/// Returns the keys of a tensor or value in PyTorch's state dict, in which `model` and `optim` are dicts.
pub(super) fn path(fqn: &str) -> Vec<String> {
    match fqn.split_once('.') {
        Some((part @ ("model" | "optim"), rest)) => vec![part.to_string(), rest.to_string()],
        _ => vec![fqn.to_string()],
    }
}

/// Returns the pickle that `torch.save` writes for a contiguous tensor.
fn tensor_pickle(fqn: &str, dtype: DType, sizes: &[usize]) -> Result<Vec<u8>> {
    let Some(name) = torch_dtype(dtype) else {
        return Err(Error::Argument(format!("tensor \"{fqn}\" has dtype {dtype}, which PyTorch does not have")));
    };
    let elements: usize = sizes.iter().product();
    let mut strides = vec![1; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim] * sizes[dim].max(1);
    }
    let mut pickler = Pickler::new();
    let class = storage_class(dtype);
    pickler.global("torch._utils", if class.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" });
    pickler.ops(b"((");
    pickler.text("storage");
    match class {
        Some(class) => pickler.global("torch", class),
        None => pickler.global("torch.storage", "UntypedStorage"),
    }
    pickler.text("0");
    pickler.text("cpu");
    pickler.int(if class.is_some() { elements } else { elements * dtype.size() } as u64);
    pickler.ops(b"tQ");
    pickler.int(0);
    pickler.ints(sizes);
    pickler.ints(&strides);
    pickler.ops(b"\x89");
    pickler.global("collections", "OrderedDict");
    pickler.ops(b")R");
    if class.is_none() {
        pickler.global("torch", name);
    }
    pickler.ops(b"tR");
    Ok(pickler.finish())
}

/// Returns the `.metadata` of a plan.
pub(super) fn metadata(plan: &Plan, tensors: &BTreeMap<String, TensorEntry>) -> Vec<u8> {
    const MODULE: &str = "torch.distributed.checkpoint.metadata";
    let mut chunks = BTreeMap::<&str, Vec<&Region>>::new();
    for planned in plan.files.iter().flatten() {
        if let Some(region) = &planned.region {
            chunks.entry(&planned.fqn).or_default().push(region);
        }
    }
    let mut pickler = Pickler::new();
    let new = |pickler: &mut Pickler, module: &str, class: &str| {
        pickler.global(module, class);
        pickler.ops(b")\x81}(");
    };
    new(&mut pickler, MODULE, "Metadata");

    pickler.key("state_dict_metadata");
    pickler.ops(b"}(");
    for (fqn, tensor) in tensors {
        pickler.key(fqn);
        new(&mut pickler, MODULE, "TensorStorageMetadata");
        pickler.key("properties");
        pickler.global(MODULE, "TensorProperties");
        pickler.ops(b")\x81(");
        pickler.global("torch", torch_dtype(tensor.dtype).unwrap_or_default());
        pickler.global("torch.serialization", "_get_layout");
        pickler.key("torch.strided");
        pickler.ops(b"\x85R\x89");
        pickler.global(MODULE, "_MEM_FORMAT_ENCODING");
        pickler.ops(b"K\0\x85R\x89tb");
        pickler.key("size");
        pickler.size(&tensor.shape);
        pickler.key("chunks");
        pickler.ops(b"](");
        for region in chunks.get(fqn.as_str()).into_iter().flatten() {
            new(&mut pickler, MODULE, "ChunkStorageMetadata");
            pickler.key("offsets");
            pickler.size(&region.offsets);
            pickler.key("sizes");
            pickler.size(&region.sizes);
            pickler.ops(b"ub");
        }
        pickler.ops(b"eub");
    }
    for fqn in plan.values.keys() {
        pickler.key(fqn);
        pickler.global(MODULE, "BytesStorageMetadata");
        pickler.ops(b")\x81");
    }
    pickler.ops(b"u");

    pickler.key("planner_data");
    pickler.ops(b"}(");
    let paths = tensors.keys().map(|fqn| (fqn, path(fqn)));
    for (fqn, path) in paths.chain(plan.values.iter().map(|(fqn, (path, _))| (fqn, path.clone()))) {
        pickler.key(fqn);
        pickler.ops(b"(");
        for key in &path {
            pickler.key(key);
        }
        pickler.ops(b"t");
    }
    pickler.ops(b"u");

    pickler.key("storage_data");
    pickler.ops(b"}(");
    let mut indices = BTreeMap::<&str, u64>::new();
    for (rank, file) in plan.files.iter().enumerate() {
        for planned in file {
            new(&mut pickler, MODULE, "MetadataIndex");
            pickler.key("fqn");
            pickler.key(&planned.fqn);
            pickler.key("offset");
            match &planned.region {
                Some(region) => {
                    pickler.size(&region.offsets);
                    pickler.key("index");
                    let index = indices.entry(&planned.fqn).or_default();
                    pickler.int(*index);
                    *index += 1;
                }
                None => {
                    pickler.ops(b"N");
                    pickler.key("index");
                    pickler.ops(b"N");
                }
            }
            pickler.ops(b"ub");
            new(&mut pickler, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
            pickler.key("relative_path");
            pickler.key(&file_name(rank));
            pickler.key("offset");
            pickler.int(planned.place.offset);
            pickler.key("length");
            pickler.int(planned.place.bytes);
            pickler.ops(b"ub");
        }
    }
    pickler.ops(b"uub");
    pickler.finish()
}
