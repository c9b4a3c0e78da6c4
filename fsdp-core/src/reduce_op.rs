//! How the ranks' elements are combined: what a reduction does, and what a partial placement still wants.

/// How a reduction combines the ranks' elements. Half precision inputs are combined in single precision and rounded
/// once, where the backend promises it ([`Promises::f32_sums`](crate::process_group::Guarantees::f32_sums)): all but NCCL
/// do, which combines them in their own dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks.
    Avg,
    /// The smallest.
    Min,
    /// The largest.
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
