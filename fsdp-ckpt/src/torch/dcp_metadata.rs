//! `.metadata`: the tensors and values of a DCP checkpoint and their places. It is untrusted input.

use std::collections::BTreeMap;

use fsdp_core::DType;
use fsdp_core::layout::Region;

use crate::region::{Bounds, checked_bytes};
use crate::source::{ChunkEntry, TensorEntry, is_plain_file_name};
use crate::torch::flatten::{DEPTH, NAME};
use crate::torch::pickle::{Pickle, Value};
use crate::torch::tensor::{dtype_name, from_torch_dtype};

/// Longest file name.
const MAX_NAME: usize = 255;

/// Place of an item in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteRange {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// A value that is not a tensor.
#[derive(Debug)]
pub(super) struct ValueItem {
    pub(super) file: String,
    pub(super) place: ByteRange,
}

#[derive(Debug, Default)]
pub(super) struct Metadata {
    /// Each tensor with the places of its chunks.
    pub(super) tensors: BTreeMap<String, (TensorEntry, Vec<ByteRange>)>,
    /// Tensors of unsupported dtypes, with PyTorch's dtype names.
    pub(super) unreadable: BTreeMap<String, String>,
    pub(super) values: BTreeMap<String, ValueItem>,
    /// Smallest possible size of each file.
    pub(super) files: BTreeMap<String, u64>,
    /// The keys of dicts that lead to each tensor and value.
    pub(super) paths: BTreeMap<String, Vec<String>>,
}

/// A problem, and its tensor or value, if there is one.
pub(super) struct Bad {
    pub(super) item: Option<String>,
    pub(super) reason: String,
}

fn bad(item: &str, reason: impl Into<String>) -> Bad {
    Bad { item: Some(item.to_string()), reason: reason.into() }
}

/// An item of `storage_data`.
struct Item<'a> {
    /// Offsets of a chunk; `None` for a value.
    offsets: Option<Vec<usize>>,
    file: &'a str,
    place: ByteRange,
}

/// Parses the metadata and checks that chunks form whole tensors.
pub(super) fn parse(bytes: &[u8]) -> Result<Metadata, Bad> {
    let whole = |reason: &str| Bad { item: None, reason: reason.to_string() };
    let pickle = Pickle::parse(bytes).map_err(|flaw| Bad { item: None, reason: flaw.to_string() })?;
    let root = pickle.root();
    if !matches!(pickle.object(root), Some(("torch.distributed.checkpoint.metadata.Metadata", ..))) {
        return Err(whole("it is not the metadata of a DCP checkpoint"));
    }
    let field = |name| pickle.field(root, name).and_then(|value| pickle.dict(value));
    let items =
        field("storage_data").ok_or_else(|| whole("it has no storage_data; expected a file system checkpoint"))?;
    let mut items = storage(&pickle, items)?;
    let mut metadata = Metadata { files: files(&items)?, ..Metadata::default() };
    let mut left = bytes.len();
    for &(fqn, about) in field("state_dict_metadata").ok_or_else(|| whole("it has no state_dict_metadata"))? {
        let fqn = pickle.str(fqn).ok_or_else(|| whole("a name in state_dict_metadata is not a string"))?;
        let class = pickle.object(about).map_or("", |(class, ..)| class);
        let is_new = match class.rsplit('.').next() {
            Some("TensorStorageMetadata") => {
                let items = items.remove(fqn).unwrap_or_default();
                match tensor(&pickle, fqn, about, items, &mut left)? {
                    Ok(tensor) => metadata.tensors.insert(fqn.to_string(), tensor).is_none(),
                    Err(dtype) => metadata.unreadable.insert(fqn.to_string(), dtype.to_string()).is_none(),
                }
            }
            Some("BytesStorageMetadata") => {
                let items = items.remove(fqn).unwrap_or_default();
                let [Item { file, place, .. }] = &items[..] else {
                    return Err(bad(fqn, format!("it is in {} places, expected 1", items.len())));
                };
                let value = ValueItem { file: (*file).to_string(), place: *place };
                metadata.values.insert(fqn.to_string(), value).is_none()
            }
            _ => return Err(bad(fqn, format!("it is {}, expected a tensor or a value", pickle.describe(about)))),
        };
        if !is_new {
            return Err(bad(fqn, "it is there twice"));
        }
    }
    let planned = field("planner_data").unwrap_or_default();
    for fqn in metadata.tensors.keys().chain(metadata.unreadable.keys()).chain(metadata.values.keys()) {
        metadata.paths.insert(fqn.clone(), path_in_name(fqn));
    }
    // Names may share their keys, so that these are larger than the pickle.
    let mut left = bytes.len().saturating_mul(64).saturating_add(1 << 12);
    for &(fqn, path) in planned {
        let keys = pickle.items(path).unwrap_or_default();
        let text = keys.iter().map(|key| pickle.str(*key).map_or(8, str::len)).sum::<usize>();
        left = match left.checked_sub(text + 48 * keys.len()) {
            Some(left) if keys.len() <= DEPTH && text <= NAME => left,
            _ => {
                let reason =
                    format!("its path has {} keys of {text} bytes, expected at most {DEPTH} of {NAME}", keys.len());
                return Err(bad(pickle.str(fqn).unwrap_or_default(), reason));
            }
        };
        let keys = pickle.items(path).map(|keys| keys.iter().map(|key| key_of(&pickle, *key)).collect::<Option<_>>());
        if let (Some(fqn), Some(Some(keys))) = (pickle.str(fqn), keys)
            && let Some(known) = metadata.paths.get_mut(fqn)
        {
            *known = keys;
        }
    }
    Ok(metadata)
}

/// Returns a key of a dict or a position in a list.
fn key_of(pickle: &Pickle<'_>, key: Value) -> Option<String> {
    pickle.str(key).map(str::to_string).or_else(|| pickle.size(key).map(|at| at.to_string()))
}

/// Returns the keys that lead to a name, if the planner did not record them: usual keys of training states.
fn path_in_name(fqn: &str) -> Vec<String> {
    match fqn.split_once('.') {
        Some((first, rest)) if ["model", "optim", "optimizer"].contains(&first) => vec![first.into(), rest.into()],
        _ => vec![fqn.into()],
    }
}

/// Returns the items by name.
fn storage<'a>(pickle: &Pickle<'a>, pairs: &[(Value, Value)]) -> Result<BTreeMap<&'a str, Vec<Item<'a>>>, Bad> {
    let mut items = BTreeMap::<&str, Vec<Item<'_>>>::new();
    for &(index, info) in pairs {
        let fqn = pickle.field(index, "fqn").and_then(|fqn| pickle.str(fqn));
        let Some(fqn) = fqn else {
            return Err(Bad { item: None, reason: "an item of storage_data has no name".into() });
        };
        let offsets = match pickle.field(index, "offset") {
            None | Some(Value::None) => None,
            Some(offsets) => Some(
                pickle.sizes(offsets).ok_or_else(|| bad(fqn, format!("it starts at {}", pickle.describe(offsets))))?,
            ),
        };
        if let Some(transforms) = pickle.field(info, "transform_descriptors")
            && transforms != Value::None
            && pickle.items(transforms).is_none_or(|items| !items.is_empty())
        {
            return Err(bad(
                fqn,
                "it is stored with transforms (compressed?), which are not supported; save without extensions",
            ));
        }
        let number = |name| pickle.field(info, name).and_then(|number| pickle.size(number));
        let file = pickle.field(info, "relative_path").and_then(|path| pickle.str(path));
        let (Some(file), Some(offset), Some(bytes)) = (file, number("offset"), number("length")) else {
            return Err(bad(fqn, "it has no file, offset and length"));
        };
        if !is_plain_file_name(file) || file.len() > MAX_NAME {
            let shown: String = file.chars().take(MAX_NAME).collect();
            return Err(bad(fqn, format!("it is in {shown:?}, which is not a plain file name")));
        }
        let place = ByteRange { offset: offset as u64, bytes: bytes as u64 };
        items.entry(fqn).or_default().push(Item { offsets, file, place });
    }
    Ok(items)
}

/// Returns the files with the end of the last item in each. Items must not overlap.
fn files(items: &BTreeMap<&str, Vec<Item<'_>>>) -> Result<BTreeMap<String, u64>, Bad> {
    let mut sorted: Vec<(&str, ByteRange, &str)> =
        items.iter().flat_map(|(fqn, items)| items.iter().map(|item| (item.file, item.place, *fqn))).collect();
    sorted.sort_unstable_by_key(|(file, place, _)| (*file, place.offset, place.bytes));
    let mut files = BTreeMap::<String, u64>::new();
    let mut last = "";
    for (file, place, fqn) in sorted {
        let Some(end) = place.offset.checked_add(place.bytes) else {
            return Err(bad(fqn, format!("its {} bytes from {} on overflow", place.bytes, place.offset)));
        };
        match files.get_mut(file) {
            Some(known) if *known > place.offset => {
                return Err(bad(fqn, format!("it starts at {} of {file:?}, within \"{last}\"", place.offset)));
            }
            Some(known) => *known = end,
            None => drop(files.insert(file.to_string(), end)),
        }
        last = fqn;
    }
    Ok(files)
}

/// Returns a tensor with its chunks, or the name of an unsupported dtype. `left` limits the chunks of all tensors.
fn tensor(
    pickle: &Pickle<'_>,
    fqn: &str,
    about: Value,
    items: Vec<Item<'_>>,
    left: &mut usize,
) -> Result<Result<(TensorEntry, Vec<ByteRange>), &'static str>, Bad> {
    let properties = pickle.field(about, "properties");
    let state = properties.and_then(|properties| pickle.object(properties)).map(|(_, _, state)| state);
    let dtype = match state.and_then(|state| pickle.items(state)) {
        Some(state) => state.first().copied(),
        None => properties.and_then(|properties| pickle.field(properties, "dtype")),
    };
    let dtype = dtype.and_then(|dtype| pickle.global(dtype)).and_then(dtype_name);
    let dtype = dtype.ok_or_else(|| bad(fqn, "it has no dtype"))?;
    let Some(dtype) = from_torch_dtype(dtype) else { return Ok(Err(dtype)) };
    let shape = pickle.field(about, "size").and_then(|size| pickle.sizes(size));
    let chunks = pickle.field(about, "chunks").and_then(|chunks| pickle.items(chunks));
    let (Some(shape), Some(chunks)) = (shape, chunks) else { return Err(bad(fqn, "it has no shape and chunks")) };
    *left = left.checked_sub(chunks.len()).ok_or_else(|| bad(fqn, "it has more chunks than the file has bytes"))?;

    let mut by_offsets = BTreeMap::new();
    for item in items {
        let Some(offsets) = item.offsets else { return Err(bad(fqn, "a chunk of it is stored as a value")) };
        if by_offsets.insert(offsets, (item.file, item.place)).is_some() {
            return Err(bad(fqn, "two chunks of it have the same offsets"));
        }
    }
    let mut entry = TensorEntry { dtype, shape, chunks: Vec::new() };
    let mut places = Vec::new();
    for &chunk in chunks {
        let sizes = |name| pickle.field(chunk, name).and_then(|sizes| pickle.sizes(sizes));
        let (Some(offsets), Some(sizes)) = (sizes("offsets"), sizes("sizes")) else {
            return Err(bad(fqn, "a chunk of it has no offsets and sizes"));
        };
        // A rank without a shard may have written an empty chunk.
        if sizes.contains(&0) {
            continue;
        }
        let region = Region { offsets, sizes };
        let Some((file, place)) = by_offsets.remove(&region.offsets) else {
            return Err(bad(fqn, format!("its chunk {} is in no file, or is listed twice", Bounds(&region))));
        };
        let chunk = ChunkEntry::new(file, region);
        check_size(&chunk, dtype, place).map_err(|reason| bad(fqn, reason))?;
        entry.chunks.push(chunk);
        places.push(place);
    }
    entry.check_chunks().map_err(|reason| bad(fqn, reason))?;
    Ok(Ok((entry, places)))
}

/// Checks that a chunk is not larger than its item, which also holds an archive's headers.
fn check_size(chunk: &ChunkEntry, dtype: DType, place: ByteRange) -> Result<(), String> {
    match checked_bytes(&chunk.sizes, dtype.size()) {
        Some(bytes) if bytes as u64 <= place.bytes => Ok(()),
        _ => Err(format!(
            "its chunk {} as {dtype} does not fit into the {} bytes of its item in {:?}",
            Bounds(&chunk.region()),
            place.bytes,
            chunk.file
        )),
    }
}
