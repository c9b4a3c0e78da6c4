//! Reports of ranks and of the launch, from `/proc`, status pages, error files and logs.

pub(crate) mod outcome;
pub(crate) mod process;
pub(crate) mod rank;
pub(crate) mod rank_snapshot;
