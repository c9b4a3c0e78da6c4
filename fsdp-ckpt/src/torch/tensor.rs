//! What a pickle says of a tensor, and where that leads in a file.

use std::path::Path;

use fsdp_core::DType;

use super::archive::{Archive, Storage};
use super::error::not_torch;
use super::pickle::{Node, Pickle, Value};
use crate::Result;
use crate::region::checked_bytes;

/// A view of an expanded tensor, in which elements are repeated, has no more bytes than this, or than its file.
const MAX_EXPANDED: u64 = 16 << 20;

/// A tensor as a pickle describes it: a strided view of a storage.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// The name of its storage in the archive.
    pub(super) key: String,
    /// `float32` and so on, as PyTorch names it.
    pub(super) dtype: &'static str,
    /// In elements.
    offset: usize,
    pub(super) shape: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// In elements.
    pub(super) strides: Vec<usize>,
    /// Where its first element is in the file.
    pub(super) start: u64,
    pub(super) storage: Storage,
}

/// Whether a value is a tensor.
pub(super) fn is_tensor(pickle: &Pickle<'_>, value: Value) -> bool {
    pickle.object(value).is_some_and(|(class, ..)| {
        class.starts_with("torch._utils._rebuild_") || class == "torch._tensor._rebuild_from_type_v2"
    })
}

/// The tensor that a value is; what is wrong with it otherwise.
pub(super) fn view(pickle: &Pickle<'_>, value: Value) -> Result<View, String> {
    let mut value = value;
    // A parameter is made of a tensor, and a tensor with attributes of either.
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
    let (storage, rest, typed) = match (function, args) {
        ("torch._utils._rebuild_tensor_v3", [storage, offset, shape, strides, _, _, dtype, ..]) => {
            let dtype = pickle.global(*dtype).and_then(dtype_name).ok_or("its dtype is none of PyTorch's")?;
            (*storage, [*offset, *shape, *strides], Some(dtype))
        }
        ("torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2", [storage, offset, shape, strides, ..]) => {
            (*storage, [*offset, *shape, *strides], None)
        }
        _ => return Err(format!("it is made by {function:?} of {} arguments, which is not read", args.len())),
    };
    let Some(Node::Persistent(id)) = pickle.node(storage) else { return Err("it has no storage".into()) };
    let Some([kind, class, key, ..]) = pickle.items(*id) else { return Err("its storage has no name".into()) };
    let (Some("storage"), Some(class), Some(key)) = (pickle.str(*kind), pickle.global(*class), pickle.str(*key)) else {
        return Err("its storage is none of torch.save's".into());
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
        _ => Err("its offset, shape and strides are not those of a tensor".into()),
    }
}

impl View {
    /// The tensor in its storage, in a file of `file_bytes` bytes.
    pub(super) fn within(self, storage: Storage, dtype: DType, file_bytes: u64) -> Result<Stored, String> {
        let View { offset, shape, strides, .. } = self;
        let impossible = || format!("its shape {shape:?} with strides {strides:?} is too large to count its bytes");
        let bytes = checked_bytes(&shape, dtype.size()).ok_or_else(impossible)? as u64;
        if bytes > storage.bytes && bytes > file_bytes.max(MAX_EXPANDED) {
            return Err(format!("its {bytes} bytes are {} bytes, repeated; save it with .contiguous()", storage.bytes));
        }
        let mut last = offset as u64;
        for (&size, &stride) in shape.iter().zip(&strides) {
            let reach = (size.saturating_sub(1) as u64).checked_mul(stride as u64);
            last = reach.and_then(|reach| last.checked_add(reach)).ok_or_else(impossible)?;
        }
        let size = dtype.size() as u64;
        let end = last.checked_add(1).and_then(|count| count.checked_mul(size)).ok_or_else(impossible)?;
        if bytes > 0 && end > storage.bytes {
            return Err(format!("its elements reach to byte {end} of its storage, which has {} bytes", storage.bytes));
        }
        let start = if bytes > 0 { storage.start + offset as u64 * size } else { storage.start };
        Ok(Stored { dtype, shape, strides, start, storage })
    }
}

impl Stored {
    /// Whether the elements lie one after another, in row-major order.
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

/// A tensor's archive, in which there is nothing else: where the tensor is. `item` is its name.
pub(super) fn sole(
    path: &Path,
    item: &str,
    archive: &mut Archive<'_>,
    dtype: DType,
    file_bytes: u64,
) -> Result<Stored> {
    let bad = |reason| not_torch(path, Some(item), reason);
    let bytes = archive.pickle()?;
    let pickle = Pickle::parse(&bytes).map_err(|flaw| bad(flaw.to_string()))?;
    let view = view(&pickle, pickle.root()).map_err(bad)?;
    if our_dtype(view.dtype) != Some(dtype) {
        return Err(bad(format!("it is {}, the checkpoint's metadata says {dtype}", view.dtype)));
    }
    let storage = archive.storage(&view.key)?;
    view.within(storage, dtype, file_bytes).map_err(bad)
}

/// PyTorch's name of a dtype without its module.
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

/// The dtype that PyTorch calls so, if this crate has it.
pub(super) fn our_dtype(name: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| torch_dtype(*dtype) == Some(name))
}

/// PyTorch's name for a dtype.
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

/// The class of a storage of this dtype, `None` where only storages without a dtype hold it.
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
