//! PyTorch's files.

pub(crate) mod build;
mod damage;
mod golden;
pub(crate) mod hostile;
mod state_dict;
mod write;

use std::path::{Path, PathBuf};

use fsdp_ckpt::TensorSource;
use fsdp_core::layout::Region;

/// Returns the path of a small file of PyTorch, made by `tests/interop/fixtures.py`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/torch/fixtures").join(name)
}

/// Returns the path of a recorded PyTorch run.
pub(crate) fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

/// Reads a whole tensor.
pub(crate) fn whole(source: &dyn TensorSource, fqn: &str) -> fsdp_ckpt::Result<Vec<u8>> {
    let tensor = source.tensor(fqn)?;
    let mut bytes = vec![0xEE; tensor.bytes() as usize];
    source.read(fqn, &Region::whole(&tensor.shape), &mut bytes)?;
    Ok(bytes)
}

/// Asserts that two sources have the same tensors and bits.
pub(crate) fn assert_same_tensors(a: &dyn TensorSource, b: &dyn TensorSource) {
    assert_eq!(a.tensors().keys().collect::<Vec<_>>(), b.tensors().keys().collect::<Vec<_>>());
    for (fqn, tensor) in a.tensors() {
        let other = &b.tensors()[fqn];
        assert_eq!((tensor.dtype, &tensor.shape), (other.dtype, &other.shape), "{fqn}");
        assert!(whole(a, fqn).unwrap() == whole(b, fqn).unwrap(), "{fqn}");
    }
}
