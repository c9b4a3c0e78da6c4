//! The operations of reductions and of partial placements.

/// The operation that combines the elements of ranks.
///
/// Half-precision inputs are combined in single precision and rounded once, where the backend guarantees
/// [`f32_accumulation`](crate::process_group::Guarantees::f32_accumulation). All backends do except NCCL, which
/// combines in the inputs' dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks.
    Avg,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// The product.
    Product,
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        })
    }
}
