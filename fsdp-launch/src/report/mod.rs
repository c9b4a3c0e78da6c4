pub(crate) mod outcome;
pub(crate) mod process;
pub(crate) mod rank;
pub(crate) mod rank_snapshot;
