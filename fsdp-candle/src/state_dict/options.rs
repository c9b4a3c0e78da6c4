//! How a state dict is taken and set.

/// How a state dict is taken and set, as PyTorch's `StateDictOptions`.
///
/// Of PyTorch's fields there is no `flatten_optimizer_state_dict`: names are always flat (`state.<fqn>.exp_avg`), which
/// is what checkpoints hold.
#[derive(Clone, Debug)]
pub struct StateDictOptions {
    /// Whole tensors instead of shards. Taking them is collective, a tensor at a time.
    pub full_state_dict: bool,
    /// Copies in host memory; of a full state dict rank 0 alone gets them, and the others an empty one.
    pub cpu_offload: bool,
    /// Setting takes rank 0's full state dict, whatever the others pass. Collective; needs `full_state_dict`.
    pub broadcast_from_rank0: bool,
    /// Leaves frozen parameters out.
    pub ignore_frozen_params: bool,
    /// Only what is below this module, as in `layers.0`.
    pub submodule: Option<String>,
    /// Whether the names of a submodule's tensors begin with the submodule's own.
    pub keep_submodule_prefixes: bool,
    /// Whether setting insists that both sides have the same names.
    pub strict: bool,
}

impl Default for StateDictOptions {
    /// Shards of everything, strictly.
    fn default() -> Self {
        StateDictOptions {
            full_state_dict: false,
            cpu_offload: false,
            broadcast_from_rank0: false,
            ignore_frozen_params: false,
            submodule: None,
            keep_submodule_prefixes: true,
            strict: true,
        }
    }
}

impl StateDictOptions {
    /// What the state dict calls the parameter `fqn`; `None` if it is to be left out.
    pub(super) fn name<'a>(&self, fqn: &'a str) -> Option<&'a str> {
        let Some(module) = &self.submodule else { return Some(fqn) };
        let inside = fqn.strip_prefix(module.as_str())?.strip_prefix('.')?;
        Some(if self.keep_submodule_prefixes { fqn } else { inside })
    }
}
