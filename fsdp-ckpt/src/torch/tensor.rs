//! Tensors of PyTorch's files: strided views of storages.

use std::path::Path;

use fsdp_core::DType;
use fsdp_core::layout::Region;

use crate::Result;
use crate::region::{CopyRun, checked_bytes, runs};
use crate::store::{ReadAt, read_runs};
use crate::torch::archive::{Archive, Storage};
use crate::torch::not_torch;
use crate::torch::pickle::{Node, Pickle, Value};

/// Largest size of an expanded view, which repeats elements, unless its file is larger.
const MAX_EXPANDED: u64 = 16 << 20;

/// A tensor in a pickle: a strided view of a storage.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// Name of the storage in the archive.
    pub(super) key: String,
    /// PyTorch's name of the dtype, such as `float32`.
    pub(super) dtype: &'static str,
    /// Offset in elements.
    offset: usize,
    pub(super) shape: Vec<usize>,
    /// Strides in elements.
    strides: Vec<usize>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Strides in elements.
    pub(super) strides: Vec<usize>,
    /// Offset of the first element in the file.
    pub(super) start: u64,
    pub(super) storage: Storage,
}

/// Returns whether a value is a tensor.
pub(super) fn is_tensor(pickle: &Pickle<'_>, value: Value) -> bool {
    pickle.object(value).is_some_and(|(class, ..)| {
        class.starts_with("torch._utils._rebuild_") || class == "torch._tensor._rebuild_from_type_v2"
    })
}

/// Returns the tensor that a value describes, or why it is not a tensor.
pub(super) fn view(pickle: &Pickle<'_>, value: Value) -> Result<View, String> {
    let mut value = value;
    // A parameter wraps a tensor, and a tensor with attributes wraps either.
    for _ in 0..4 {
        let Some((class, args, _)) = pickle.object(value) else { break };
        let inner = match (class, args) {
            ("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", [inner, ..]) => *inner,
            // A function, a type and the function's arguments.
            ("torch._tensor._rebuild_from_type_v2", [function, _, args, ..]) => {
                let args = pickle.items(*args).unwrap_or_default();
                return rebuilt(pickle, pickle.global(*function).unwrap_or_default(), args);
            }
            _ => return rebuilt(pickle, class, args),
        };
        value = inner;
    }
    Err(format!("it is {}, not a tensor", pickle.describe(value)))
}

fn rebuilt(pickle: &Pickle<'_>, function: &str, args: &[Value]) -> Result<View, String> {
    let (storage, rest, typed, more) = match (function, args) {
        ("torch._utils._rebuild_tensor_v3", [storage, offset, shape, strides, _, _, dtype, more @ ..]) => {
            let dtype = pickle.global(*dtype).and_then(dtype_name).ok_or("its dtype is unknown")?;
            (*storage, [*offset, *shape, *strides], Some(dtype), more)
        }
        ("torch._utils._rebuild_tensor_v2", [storage, offset, shape, strides, _, _, more @ ..]) => {
            (*storage, [*offset, *shape, *strides], None, more)
        }
        ("torch._utils._rebuild_tensor", &[storage, offset, shape, strides]) => {
            (storage, [offset, shape, strides], None, &[][..])
        }
        _ => return Err(format!("it is made by {function:?} with {} arguments, which is not supported", args.len())),
    };
    more.iter().try_for_each(|metadata| refuse_metadata(pickle, *metadata))?;
    let Some(Node::Persistent(id)) = pickle.node(storage) else { return Err("it has no storage".into()) };
    let Some([kind, class, key, ..]) = pickle.items(*id) else { return Err("its storage has no name".into()) };
    let (Some("storage"), Some(class), Some(key)) = (pickle.str(*kind), pickle.global(*class), pickle.str(*key)) else {
        return Err("its storage is not one of torch.save".into());
    };
    let dtype = match typed.or_else(|| storage_dtype(class)) {
        Some(dtype) => dtype,
        None => return Err(format!("its storage is a {class}")),
    };
    let [offset, shape, strides] = rest;
    match (pickle.size(offset), pickle.sizes(shape), pickle.sizes(strides)) {
        (Some(offset), Some(shape), Some(strides)) if shape.len() == strides.len() && key.len() <= 64 => {
            Ok(View { key: key.to_string(), dtype, offset, shape, strides })
        }
        _ => Err("its offset, shape and strides do not describe a tensor".into()),
    }
}

/// Fails for a view whose elements are not those of its storage, such as one of `torch.Tensor.conj`.
fn refuse_metadata(pickle: &Pickle<'_>, metadata: Value) -> Result<(), String> {
    let known = |name: &str| match name {
        "neg" => "torch._neg_view, whose elements are stored with the other sign".to_owned(),
        "conj" => "a conjugate view, whose elements are not stored conjugated".to_owned(),
        other => format!("a view with the metadata {other:?}"),
    };
    match (metadata, pickle.dict(metadata)) {
        (Value::None, _) => Ok(()),
        (_, Some(pairs)) => match pairs.iter().find(|(_, value)| *value != Value::Bool(false)) {
            Some((name, _)) => Err(format!(
                "it is {}: save it with .resolve_neg().resolve_conj()",
                known(pickle.str(*name).unwrap_or("?"))
            )),
            None => Ok(()),
        },
        _ => Err(format!("its metadata is {}, not a dict", pickle.describe(metadata))),
    }
}

impl View {
    /// Locates the tensor in its storage, in a file of `file_bytes` bytes.
    pub(super) fn within(self, storage: Storage, dtype: DType, file_bytes: u64) -> Result<StoredTensor, String> {
        let View { offset, shape, strides, .. } = self;
        let impossible = || format!("the bytes of its shape {shape:?} with strides {strides:?} overflow");
        let bytes = checked_bytes(&shape, dtype.size()).ok_or_else(impossible)? as u64;
        if bytes > storage.bytes && bytes > file_bytes.max(MAX_EXPANDED) {
            return Err(format!("it expands {} bytes to {bytes}; save it with .contiguous()", storage.bytes));
        }
        let mut last = offset as u64;
        for (&size, &stride) in shape.iter().zip(&strides) {
            let reach = (size.saturating_sub(1) as u64).checked_mul(stride as u64);
            last = reach.and_then(|reach| last.checked_add(reach)).ok_or_else(impossible)?;
        }
        let size = dtype.size() as u64;
        let end = last.checked_add(1).and_then(|count| count.checked_mul(size)).ok_or_else(impossible)?;
        if bytes > 0 && end > storage.bytes {
            return Err(format!("its elements end at byte {end} of its storage, which has {} bytes", storage.bytes));
        }
        let start = if bytes > 0 { storage.start + offset as u64 * size } else { storage.start };
        Ok(StoredTensor { dtype, shape, strides, start, storage })
    }
}

impl StoredTensor {
    /// Returns whether the elements are contiguous in row-major order.
    pub(super) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size.max(1);
            fits
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// Locates the tensor of an archive that holds only this tensor. `item` is its name.
pub(super) fn read_single_tensor(
    path: &Path,
    item: &str,
    archive: &mut Archive<'_>,
    dtype: DType,
    file_bytes: u64,
) -> Result<StoredTensor> {
    let bad = |reason| not_torch(path, Some(item), reason);
    let bytes = archive.pickle()?;
    let pickle = Pickle::parse(&bytes).map_err(|flaw| bad(flaw.to_string()))?;
    let view = view(&pickle, pickle.root()).map_err(bad)?;
    if from_torch_dtype(view.dtype) != Some(dtype) {
        return Err(bad(format!("it is {}, but the checkpoint's metadata has {dtype}", view.dtype)));
    }
    let storage = archive.storage(&view.key)?;
    view.within(storage, dtype, file_bytes).map_err(bad)
}

/// Returns PyTorch's name of a dtype without its module.
pub(super) fn dtype_name(global: &'static str) -> Option<&'static str> {
    let name = global.strip_prefix("torch.")?;
    let is_one = ["float", "bfloat", "int", "uint", "bool", "complex"].iter().any(|kind| name.starts_with(kind));
    is_one.then_some(name)
}

fn storage_dtype(class: &str) -> Option<&'static str> {
    Some(match class {
        "torch.FloatStorage" => "float32",
        "torch.DoubleStorage" => "float64",
        "torch.HalfStorage" => "float16",
        "torch.BFloat16Storage" => "bfloat16",
        "torch.LongStorage" => "int64",
        "torch.IntStorage" => "int32",
        "torch.ShortStorage" => "int16",
        "torch.CharStorage" => "int8",
        "torch.ByteStorage" => "uint8",
        "torch.BoolStorage" => "bool",
        "torch.ComplexFloatStorage" => "complex64",
        "torch.ComplexDoubleStorage" => "complex128",
        _ => return None,
    })
}

/// Returns the dtype with a name of PyTorch, if this crate has it.
pub(super) fn from_torch_dtype(name: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| torch_dtype(*dtype) == Some(name))
}

/// Returns PyTorch's name of a dtype.
pub(super) fn torch_dtype(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::U8 => "uint8",
        DType::U32 => "uint32",
        DType::I64 => "int64",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::F32 => "float32",
        DType::F64 => "float64",
        _ => return None,
    })
}

/// Returns the class of storages of this dtype; `None` if only untyped storages hold it.
pub(super) fn storage_class(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::U8 => "ByteStorage",
        DType::I64 => "LongStorage",
        DType::BF16 => "BFloat16Storage",
        DType::F16 => "HalfStorage",
        DType::F32 => "FloatStorage",
        DType::F64 => "DoubleStorage",
        _ => return None,
    })
}

/// Reads `part` of the region `chunk`, which is `stored`, into `into`, which is the region `region` of the same tensor.
/// The caller has checked all three. Calls `seen` with the bytes, in file order if the elements are.
pub(super) fn read_part(
    file: &dyn ReadAt,
    stored: &StoredTensor,
    [chunk, region, part]: [&Region; 3],
    into: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    if part.is_empty() {
        return Ok(());
    }
    let size = stored.dtype.size();
    if stored.is_contiguous() {
        return read_runs(file, stored.start, runs(chunk, region, part, size), into, seen);
    }
    read_runs(file, stored.start, strided_runs(stored, [chunk, region, part]), into, seen)
}

/// A dimension to copy: its size, and the distances in bytes between indices on both sides.
struct Dim {
    size: usize,
    src: usize,
    dst: usize,
}

/// Returns the runs in file order, unless the view overlaps itself.
fn strided_runs(stored: &StoredTensor, [chunk, region, part]: [&Region; 3]) -> impl Iterator<Item = CopyRun> + use<> {
    let size = stored.dtype.size();
    let mut dims = Vec::with_capacity(part.sizes.len());
    let (mut src_start, mut dst_start, mut dst) = (0, 0, size);
    for at in (0..part.sizes.len()).rev() {
        // The stride of a dimension of size 1 is unused and may be any number.
        let src = if stored.shape[at] > 1 { stored.strides[at] * size } else { 0 };
        src_start += (part.offsets[at] - chunk.offsets[at]) * src;
        dst_start += (part.offsets[at] - region.offsets[at]) * dst;
        if part.sizes[at] > 1 {
            dims.push(Dim { size: part.sizes[at], src, dst });
        }
        dst *= region.sizes[at];
    }
    dims.reverse();
    dims.sort_by_key(|dim| std::cmp::Reverse(dim.src));
    let mut len = size;
    while let Some(last) = dims.last()
        && (last.src, last.dst) == (len, len)
    {
        len *= last.size;
        dims.pop();
    }
    let count: usize = dims.iter().map(|dim| dim.size).product();
    (0..count).map(move |index| {
        let (mut rest, mut run) = (index, CopyRun { src: src_start, dst: dst_start, len });
        for dim in dims.iter().rev() {
            let at = rest % dim.size;
            rest /= dim.size;
            run.src += at * dim.src;
            run.dst += at * dim.dst;
        }
        run
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    use crate::store::LocalFile;

    proptest! {
        #[test]
        fn reads_any_region_of_any_view(
            sizes in prop::collection::vec(1usize..5, 3),
            mut strides in prop::collection::vec(0usize..12, 3),
            cut in prop::collection::vec((0usize..4, 1usize..5), 3),
        ) {
            // Strides of dimensions of size 1 are unused.
            strides.iter_mut().zip(&sizes).filter(|(_, size)| **size == 1).for_each(|(stride, _)| *stride = usize::MAX);
            let reach: usize = sizes.iter().zip(&strides).map(|(size, stride)| (size - 1) * stride).sum();
            let memory: Vec<u8> = (0..4 + 2 * (reach + 1)).map(|i| (i * 7 + 3) as u8).collect();
            let root = tempfile::tempdir().unwrap();
            std::fs::write(root.path().join("f"), &memory).unwrap();
            let file = LocalFile::open(&root.path().join("f")).unwrap();
            let storage = Storage { start: 0, bytes: memory.len() as u64, crc32: 0 };
            let (shape, dtype) = (sizes.clone(), DType::BF16);
            let stored = StoredTensor { dtype, shape, strides: strides.clone(), start: 4, storage };
            let offsets: Vec<usize> = cut.iter().zip(&sizes).map(|(cut, &size)| cut.0.min(size - 1)).collect();
            let counts: Vec<usize> =
                cut.iter().zip(&sizes).zip(&offsets).map(|((cut, size), at)| cut.1.min(size - at)).collect();
            let part = Region { offsets: offsets.clone(), sizes: counts.clone() };
            let mut into = vec![0; part.elements() * 2];
            read_part(&file, &stored, [&Region::whole(&sizes), &part, &part], &mut into, &mut |_| ()).unwrap();
            let mut at = 0;
            for x in 0..counts[0] {
                for y in 0..counts[1] {
                    for z in 0..counts[2] {
                        let steps = [x, y, z].into_iter().zip(&offsets).zip(&strides);
                        let index: usize = steps.map(|((step, offset), stride)| (offset + step) * stride).sum();
                        prop_assert_eq!(&into[at..at + 2], &memory[4 + 2 * index..6 + 2 * index]);
                        at += 2;
                    }
                }
            }
        }
    }
}
