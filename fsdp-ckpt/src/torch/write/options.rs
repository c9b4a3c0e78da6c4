//! How a checkpoint of DCP is written, and the names of its files.

use serde_json::{Map, Value};

/// How [`write_dcp`](super::write_dcp) writes.
#[derive(Clone, Debug)]
pub struct DcpOptions {
    /// The number of files, as from so many ranks: each tensor is cut along its first dimension into so many parts, as
    /// FSDP2 does. 1 to 65536.
    pub world_size: usize,
    /// Hyper-parameters of the optimizer ("lr", "betas", ...). Each is written as `optim.param_groups.<fqn>.<key>` for
    /// each parameter that has optimizer state, unless the source says otherwise.
    pub hyper_parameters: Map<String, Value>,
}

impl DcpOptions {
    /// For so many ranks, without hyper-parameters.
    pub fn new(world_size: usize) -> Self {
        DcpOptions { world_size, hyper_parameters: Map::new() }
    }
}

/// PyTorch's name for the file of a rank.
pub(super) fn file_name(rank: usize) -> String {
    format!("__{rank}_0.distcp")
}
