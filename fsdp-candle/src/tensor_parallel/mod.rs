//! Tensor parallelism, as far as parameters know of it: which modules are cut, and how. What their layers do about it
//! is in `nn`.

mod parallel;
mod plan;
mod style;

pub(crate) use parallel::Parallel;
pub use plan::ParallelPlan;
pub(crate) use plan::Planned;
pub use style::{
    ActivationLayout, ColwiseParallel, HiddenParallel, ParallelStyle, RowwiseParallel, SequenceParallel, VocabParallel,
};
