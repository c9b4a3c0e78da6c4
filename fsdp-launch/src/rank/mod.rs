//! One rank of this host: the cores and GPUs that it gets, its environment, its process, and what it leaves behind.

pub(crate) mod affinity;
pub(crate) mod environment;
pub(crate) mod exec;
pub(crate) mod gpus;
pub(crate) mod orphans;
pub(crate) mod worker;
