//! What the fuzz targets and the tests of their corpus do with bytes that may be anything: read all of it, and get numbers or an error.

use std::path::Path;

use fsdp_ckpt::{Checkpoint, MANIFEST, Result, SafetensorsFile, TensorSource};
use fsdp_core::layout::Region;

/// Tensors larger than this are not read: their bytes are in no input.
const MOST: u64 = 1 << 20;

/// Bytes as a safetensors file. What its header describes lies in the file: nothing of it can fail to be read.
pub(crate) fn safetensors(bytes: &[u8], dir: &Path) -> Result<usize> {
    let path = dir.join("f.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let file = SafetensorsFile::open(&path)?;
    let mut read = 0;
    for name in file.names() {
        let Ok(info) = file.info(name) else { continue };
        let mut into = vec![0; info.shape.iter().product::<usize>() * info.dtype.size()];
        assert!(into.len() <= bytes.len());
        file.read(name, &Region::whole(&info.shape), &mut into).unwrap();
        read += into.len();
    }
    Ok(read)
}

/// Bytes as the manifest of the checkpoint in `dir`, all of which is then read.
pub(crate) fn manifest(bytes: &[u8], dir: &Path) -> Result<()> {
    std::fs::write(dir.join(MANIFEST), bytes).unwrap();
    let checkpoint = Checkpoint::open(dir)?;
    for (fqn, tensor) in checkpoint.tensors().iter().filter(|(_, tensor)| tensor.bytes() <= MOST) {
        let mut into = vec![0; tensor.bytes() as usize];
        checkpoint.read(fqn, &Region::whole(&tensor.shape), &mut into)?;
    }
    checkpoint.verify()?;
    Ok(())
}

/// The files that the manifests of the corpus are about: what two ranks save of a few small tensors.
#[allow(dead_code)]
pub(crate) fn files(dir: &Path) {
    use std::sync::Arc;

    use fsdp_ckpt::{SaveState, TensorShard, save};
    use fsdp_core::{Buffer, MeshLayout, process_group::local};

    local::run(2, |group| {
        let rank = group.rank();
        let half = |fqn: &str, columns: usize| TensorShard {
            fqn: fqn.into(),
            shape: vec![4, columns],
            region: Region { offsets: vec![2 * rank, 0], sizes: vec![2, columns] },
            data: Arc::new(Buffer::F32(vec![rank as f32 + 0.5; 2 * columns])),
        };
        let step = TensorShard::whole("step", &[], Arc::new(Buffer::I64(vec![10])));
        let mesh = MeshLayout::new(&[("dp_shard", 2)]).unwrap();
        let state = SaveState { mesh, tensors: vec![half("a", 3), half("b", 1), step], values: Default::default() };
        save(dir, &*group, &state).unwrap();
    });
}
