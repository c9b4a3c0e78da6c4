//! Untrusted bytes as PyTorch's files. The fuzz targets and the corpus tests call these functions.

use std::io::Write;
use std::path::Path;

use fsdp_ckpt::torch::{TorchDcp, TorchFile};
use fsdp_ckpt::{Result, TensorSource};
use fsdp_core::layout::Region;
use tempfile::TempDir;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// Largest tensor to read; hostile files may hold larger views.
const MOST: u64 = 1 << 20;

/// Creates a file of `torch.save` with this pickle and a storage "0" of 64 bytes.
pub(crate) fn archive(pickle: &[u8]) -> (TempDir, std::path::PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("hostile.pt");
    let mut zip = ZipWriter::new(std::fs::File::create(&path).unwrap());
    for (name, contents) in [("data.pkl", pickle), ("byteorder", b"little"), ("data/0", &[7; 64]), ("version", b"3\n")]
    {
        let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        zip.start_file(format!("archive/{name}"), options).unwrap();
        zip.write_all(contents).unwrap();
    }
    zip.finish().unwrap();
    (root, path)
}

/// Opens a file with this pickle and reads everything in it.
pub(crate) fn pickle(bytes: &[u8]) -> Result<()> {
    let (_root, path) = archive(bytes);
    read_all(&TorchFile::open(&path)?)
}

/// Creates a directory with this `.metadata` and the other files in `files`.
pub(crate) fn checkpoint(metadata: &[u8], files: &Path) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join(".metadata"), metadata).unwrap();
    for entry in std::fs::read_dir(files).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != ".metadata" {
            std::fs::copy(entry.path(), root.path().join(entry.file_name())).unwrap();
        }
    }
    root
}

/// Opens a checkpoint with this metadata and reads everything in it.
pub(crate) fn dcp_metadata(bytes: &[u8], files: &Path) -> Result<()> {
    let root = checkpoint(bytes, files);
    read_all(&TorchDcp::open(root.path())?)
}

fn read_all(source: &dyn TensorSource) -> Result<()> {
    let mut first = Ok(());
    for (fqn, tensor) in source.tensors() {
        if tensor.bytes() <= MOST {
            let mut bytes = vec![0; tensor.bytes() as usize];
            first = first.and(source.read(fqn, &Region::whole(&tensor.shape), &mut bytes));
        }
    }
    first.and(source.verify().map(drop))
}
