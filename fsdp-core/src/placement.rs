//! How a DTensor lies on one dimension of a mesh.

use crate::ReduceOp;

/// One mesh dimension's share in the layout of a tensor, as in PyTorch's `torch.distributed.tensor.placement_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The tensor dimension is cut into chunks, one for each rank of the mesh dimension
    /// ([`crate::layout::chunk_range`]).
    Shard(usize),
    /// As [`Placement::Shard`], but of what mesh dimensions further right leave: PyTorch's `_StridedShard`.
    ///
    /// It is what FSDP over tensor parallelism makes: on a mesh (dp, tp), a parameter that tp has sharded is sharded
    /// once more by dp, which stands further left: `[StridedShard { dim: 0, split_factor: <size of tp> }, Shard(0)]`.
    /// The mesh dimensions to the right that shard the same tensor dimension come first, as many of them as it takes
    /// for their sizes to multiply to `split_factor`.
    ///
    /// Where nothing to the right shards the tensor dimension (a mesh without tp), the dimension is cut into
    /// `split_factor` pieces, each piece into chunks, and every rank holds its chunk of every piece: several boxes of
    /// the tensor.
    StridedShard {
        /// The tensor dimension.
        dim: usize,
        /// Into how many pieces the dimension is cut before; 1 is the same as [`Placement::Shard`].
        split_factor: usize,
    },
    /// Every rank of the mesh dimension holds the same.
    Replicate,
    /// Every rank holds a term; the tensor is their reduction.
    Partial(ReduceOp),
}

impl Placement {
    /// The tensor dimension that it shards, if any.
    ///
    /// ```
    /// use fsdp_core::Placement;
    /// assert_eq!(Placement::StridedShard { dim: 1, split_factor: 2 }.shard_dim(), Some(1));
    /// assert_eq!(Placement::Replicate.shard_dim(), None);
    /// ```
    pub fn shard_dim(self) -> Option<usize> {
        match self {
            Placement::Shard(dim) | Placement::StridedShard { dim, .. } => Some(dim),
            Placement::Replicate | Placement::Partial(_) => None,
        }
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Placement::Shard(dim) => write!(f, "S({dim})"),
            Placement::StridedShard { dim, split_factor } => write!(f, "_S({dim}, {split_factor})"),
            Placement::Replicate => f.write_str("R"),
            Placement::Partial(op) => write!(f, "P({op})"),
        }
    }
}
