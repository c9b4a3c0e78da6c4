//! The names that a pickle may use.

/// Every class and function that a state dict or DCP's metadata needs. None is ever called: a name is all there is of
/// it.
const NAMES: &[&str] = &[
    "collections.OrderedDict",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "torch.BFloat16Storage",
    "torch.BoolStorage",
    "torch.ByteStorage",
    "torch.CharStorage",
    "torch.ComplexDoubleStorage",
    "torch.ComplexFloatStorage",
    "torch.DoubleStorage",
    "torch.FloatStorage",
    "torch.HalfStorage",
    "torch.IntStorage",
    "torch.LongStorage",
    "torch.ShortStorage",
    "torch.Size",
    "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch.bfloat16",
    "torch.bool",
    "torch.complex128",
    "torch.complex64",
    "torch.device",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.float16",
    "torch.float32",
    "torch.float64",
    "torch.float8_e4m3fn",
    "torch.float8_e4m3fnuz",
    "torch.float8_e5m2",
    "torch.float8_e5m2fnuz",
    "torch.float8_e8m0fnu",
    "torch.int16",
    "torch.int32",
    "torch.int64",
    "torch.int8",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
    "torch.uint16",
    "torch.uint32",
    "torch.uint64",
    "torch.uint8",
];

/// The name of an allowed global, with its module.
pub(super) fn allowed(module: &str, name: &str) -> Option<&'static str> {
    NAMES.iter().copied().find(|allowed| {
        allowed.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| rest == name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_names_are_allowed() {
        assert_eq!(allowed("torch", "Size"), Some("torch.Size"));
        assert_eq!(allowed("torch._utils", "_rebuild_tensor_v2"), Some("torch._utils._rebuild_tensor_v2"));
        for (module, name) in [("os", "system"), ("torch", "load"), ("torch.Size", ""), ("", "torch.Size")] {
            assert_eq!(allowed(module, name), None, "{module}.{name}");
        }
        assert!(NAMES.is_sorted());
    }
}
