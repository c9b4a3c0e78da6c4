//! How a DTensor lies on one dimension of a mesh.

use crate::ReduceOp;

/// One mesh dimension's share in the layout of a tensor, as in PyTorch's `torch.distributed.tensor.placement_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The tensor dimension is cut into chunks, one for each rank of the mesh dimension ([`crate::layout::chunk_range`]).
    Shard(usize),
    /// Every rank of the mesh dimension holds the same.
    Replicate,
    /// Every rank holds a term; the tensor is their reduction.
    Partial(ReduceOp),
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Placement::Shard(dim) => write!(f, "S({dim})"),
            Placement::Replicate => f.write_str("R"),
            Placement::Partial(op) => write!(f, "P({op})"),
        }
    }
}
