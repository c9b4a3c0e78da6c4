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

/// Puts the files that the manifests of the corpus are about into `dir`: what two ranks once saved of a few small tensors.
pub(crate) fn files(dir: &Path) {
    std::fs::create_dir(dir).unwrap();
    for (name, bytes) in [
        (
            "shard-00001-model-00001-of-00001.safetensors",
            &include_bytes!("fixtures/shard-00001-model-00001-of-00001.safetensors")[..],
        ),
        (
            "shard-00002-model-00001-of-00001.safetensors",
            &include_bytes!("fixtures/shard-00002-model-00001-of-00001.safetensors")[..],
        ),
    ] {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
}
