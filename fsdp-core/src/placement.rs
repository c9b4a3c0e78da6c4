//! The placement of a DTensor on one dimension of a mesh.

use crate::ReduceOp;

/// The placement of a tensor on one mesh dimension, as in PyTorch's `torch.distributed.tensor.placement_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Splits the tensor dimension into chunks, one for each rank of the mesh dimension
    /// ([`crate::layout::chunk_range`]).
    Shard(usize),
    /// Shards the parts that mesh dimensions further right leave: PyTorch's `_StridedShard`.
    ///
    /// FSDP over tensor parallelism uses it. On a mesh (dp, tp), dp shards once more a parameter that tp has sharded:
    /// `[StridedShard { dim: 0, split_factor: <size of tp> }, Shard(0)]`. The mesh dimensions to the right that shard
    /// the same tensor dimension split first; their sizes multiply to `split_factor`.
    ///
    /// If nothing to the right shards the tensor dimension (a mesh without tp), the dimension is split into
    /// `split_factor` pieces and each piece into chunks. Every rank holds its chunk of every piece: several boxes of
    /// the tensor.
    StridedShard {
        /// The tensor dimension.
        dim: usize,
        /// Number of pieces that the dimension is split into first; 1 is [`Placement::Shard`].
        split_factor: usize,
    },
    /// Only one rank of the mesh dimension holds elements: all that mesh dimensions which shard later divide. The others
    /// hold an empty chunk. Expert parallelism uses it. veScale's `RaggedShard`, with everything on one rank.
    OwnedBy {
        /// The tensor dimension, which is empty on the other ranks.
        dim: usize,
        /// The rank, a coordinate of the mesh dimension.
        rank: usize,
    },
    /// Every rank of the mesh dimension holds the same elements.
    Replicate,
    /// Every rank holds a term of this reduction, whose result is the tensor.
    Partial(ReduceOp),
}

impl Placement {
    /// Returns the sharded tensor dimension, if any.
    ///
    /// ```
    /// use fsdp_core::Placement;
    /// assert_eq!(Placement::StridedShard { dim: 1, split_factor: 2 }.shard_dim(), Some(1));
    /// assert_eq!(Placement::Replicate.shard_dim(), None);
    /// ```
    pub fn shard_dim(self) -> Option<usize> {
        match self {
            Placement::Shard(dim) | Placement::StridedShard { dim, .. } | Placement::OwnedBy { dim, .. } => Some(dim),
            Placement::Replicate | Placement::Partial(_) => None,
        }
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Placement::Shard(dim) => write!(f, "S({dim})"),
            Placement::StridedShard { dim, split_factor } => write!(f, "_S({dim}, {split_factor})"),
            Placement::OwnedBy { dim, rank } => write!(f, "O({dim}, {rank})"),
            Placement::Replicate => f.write_str("R"),
            Placement::Partial(op) => write!(f, "P({op})"),
        }
    }
}
