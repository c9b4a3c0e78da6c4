//! One rank of this host: the cores and GPUs that it gets, its environment, its process, and what it leaves behind.

pub(crate) mod cores;
pub(crate) mod environment;
mod exec;
pub(crate) mod gpus;
pub(crate) mod numa;
pub(crate) mod orphans;
pub(crate) mod session;
pub(crate) mod worker;
