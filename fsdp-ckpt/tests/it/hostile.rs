//! Reading untrusted bytes completely, for the fuzz targets and the tests of their corpora.

use std::path::Path;

use fsdp_ckpt::{Checkpoint, MANIFEST, Result, SafetensorsFile, TensorSource};
use fsdp_core::layout::Region;

/// Tensors larger than this are not read: their bytes are in no input.
const MOST: u64 = 1 << 20;

/// Reads bytes as a safetensors file. If its header is valid, every tensor must be readable.
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

/// Reads bytes as the manifest of the checkpoint in `dir`, without and with a valid checksum at the end.
pub(crate) fn manifest(bytes: &[u8], dir: &Path) -> Result<()> {
    with_manifest(bytes, dir).or_else(|error| match std::str::from_utf8(bytes) {
        Ok(text) if text.ends_with('}') => with_manifest(sealed(text).as_bytes(), dir),
        _ => Err(error),
    })
}

/// Appends the checksum to the text of a JSON object.
pub(crate) fn sealed(object: &str) -> String {
    let body = object.strip_suffix('}').unwrap().trim_end();
    format!("{body},\n  \"crc32c\": {}\n}}\n", crc32c(body.as_bytes()))
}

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Reads the checkpoint in `dir` with this manifest.
fn with_manifest(bytes: &[u8], dir: &Path) -> Result<()> {
    std::fs::write(dir.join(MANIFEST), bytes).unwrap();
    let checkpoint = Checkpoint::open(dir)?;
    for (fqn, tensor) in checkpoint.tensors().iter().filter(|(_, tensor)| tensor.bytes() <= MOST) {
        let mut into = vec![0; tensor.bytes() as usize];
        checkpoint.read(fqn, &Region::whole(&tensor.shape), &mut into)?;
    }
    checkpoint.verify()?;
    Ok(())
}

/// Changes a manifest and updates its checksum.
pub(crate) fn change_manifest(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = dir.join(MANIFEST);
    let mut manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("crc32c");
    change(&mut manifest);
    std::fs::write(path, sealed(&serde_json::to_string_pretty(&manifest).unwrap())).unwrap();
}

/// Writes the files of the corpus's manifests into `dir`: shards of two ranks.
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
