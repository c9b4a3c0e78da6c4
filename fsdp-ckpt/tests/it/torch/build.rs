//! Building pickles for tests.

/// A pickle of protocol 2 in progress.
#[derive(Clone, Default)]
pub(crate) struct Build(pub(crate) Vec<u8>);

impl Build {
    pub(crate) fn new() -> Self {
        Build(b"\x80\x02".to_vec())
    }

    pub(crate) fn ops(mut self, ops: &[u8]) -> Self {
        self.0.extend(ops);
        self
    }

    pub(crate) fn text(self, text: &str) -> Self {
        self.ops(b"X").ops(&(text.len() as u32).to_le_bytes()).ops(text.as_bytes())
    }

    pub(crate) fn global(self, module: &str, name: &str) -> Self {
        self.ops(format!("c{module}\n{name}\n").as_bytes())
    }

    pub(crate) fn int(self, number: u64) -> Self {
        self.ops(&[0x8a, 9]).ops(&number.to_le_bytes()).ops(&[0])
    }

    pub(crate) fn ints(self, numbers: &[u64]) -> Self {
        numbers.iter().fold(self.ops(b"("), |build, &number| build.signed(number)).ops(b"t")
    }

    fn signed(self, number: u64) -> Self {
        self.ops(&[0x8a, 8]).ops(&number.to_le_bytes())
    }

    pub(crate) fn end(self) -> Vec<u8> {
        self.ops(b".").0
    }

    /// Adds a tensor of f32 in storage `key`.
    pub(crate) fn tensor(self, key: &str, offset: u64, shape: &[u64], strides: &[u64]) -> Self {
        self.global("torch._utils", "_rebuild_tensor_v2")
            .ops(b"((")
            .text("storage")
            .global("torch", "FloatStorage")
            .text(key)
            .text("cpu")
            .ops(b"K\x10tQ")
            .signed(offset)
            .ints(shape)
            .ints(strides)
            .ops(b"\x89NtR")
    }
}

/// An item of `storage_data`.
#[derive(Clone)]
pub(crate) struct Item {
    pub(crate) fqn: &'static str,
    pub(crate) offsets: Option<Vec<u64>>,
    pub(crate) path: &'static str,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) transforms: Option<&'static str>,
}

/// Name, shape and chunks of a tensor.
pub(crate) type Tensor = (&'static str, Vec<u64>, Vec<(Vec<u64>, Vec<u64>)>);

/// Returns DCP metadata with these f32 tensors, values and items.
pub(crate) fn metadata(tensors: &[Tensor], values: &[&str], items: &[Item]) -> Vec<u8> {
    const MODULE: &str = "torch.distributed.checkpoint.metadata";
    let new = |build: Build, class: &str| build.global(MODULE, class).ops(b")\x81");
    let size = |build: Build, numbers: &[u64]| build.global("torch", "Size").ints(numbers).ops(b"\x85R");
    let mut build = new(Build::new(), "Metadata").ops(b"}(").text("state_dict_metadata").ops(b"}(");
    for (fqn, shape, chunks) in tensors {
        build = new(build.text(fqn), "TensorStorageMetadata").ops(b"}(").text("properties");
        build = new(build, "TensorProperties").ops(b"(").global("torch", "float32").ops(b"tb");
        build = size(build.text("size"), shape).text("chunks").ops(b"](");
        for (offsets, sizes) in chunks {
            build = size(new(build, "ChunkStorageMetadata").ops(b"}(").text("offsets"), offsets);
            build = size(build.text("sizes"), sizes).ops(b"ub");
        }
        build = build.ops(b"eub");
    }
    for fqn in values {
        build = new(build.text(fqn), "BytesStorageMetadata");
    }
    build = build.ops(b"u").text("storage_data").ops(b"}(");
    for item in items {
        build = new(build, "MetadataIndex").ops(b"}(").text("fqn").text(item.fqn).text("offset");
        build = match &item.offsets {
            Some(offsets) => size(build, offsets),
            None => build.ops(b"N"),
        };
        build = build.ops(b"ub").global("torch.distributed.checkpoint.filesystem", "_StorageInfo").ops(b")\x81}(");
        build = build.text("relative_path").text(item.path).text("offset").int(item.offset);
        build = build.text("length").int(item.length);
        if let Some(transform) = item.transforms {
            build = build.text("transform_descriptors").ops(b"](").text(transform).ops(b"e");
        }
        build = build.ops(b"ub");
    }
    build.ops(b"uub").end()
}
