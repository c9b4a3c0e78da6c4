//! One rank of this host: its cores and GPUs, its environment, its process, and its orphans.

pub(crate) mod affinity;
pub(crate) mod environment;
pub(crate) mod exec;
pub(crate) mod gpus;
pub(crate) mod orphans;
pub(crate) mod worker;
