//! What callers say about tensors.

use std::path::PathBuf;
use std::sync::Arc;

use fsdp_core::layout::Region;
use fsdp_core::{DType, Readable};

/// One rank's part of a global tensor.
#[derive(Clone)]
pub struct TensorShard {
    /// The fully qualified name, the same on every rank, as in `model.layers.0.weight`.
    pub fqn: String,
    /// The shape of the global tensor.
    pub shape: Vec<usize>,
    /// The box of the global tensor that this rank holds; may be empty.
    pub region: Region,
    /// The elements of the box, row-major. The tensor's dtype is this memory's.
    pub data: Arc<dyn Readable>,
}

impl TensorShard {
    /// A tensor that this rank holds as a whole.
    pub fn whole(fqn: impl Into<String>, shape: &[usize], data: Arc<dyn Readable>) -> Self {
        TensorShard { fqn: fqn.into(), shape: shape.to_vec(), region: Region::whole(shape), data }
    }
}

impl std::fmt::Debug for TensorShard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensorShard")
            .field("fqn", &self.fqn)
            .field("dtype", &self.data.dtype())
            .field("shape", &self.shape)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: PathBuf,
}
