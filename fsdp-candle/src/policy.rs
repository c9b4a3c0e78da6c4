//! How a unit computes and communicates: the policies of `fully_shard`.

use std::sync::Arc;

use candle_core::DType;

/// The dtypes of a unit, as in PyTorch's `MixedPrecisionPolicy`. Shards, sharded gradients and optimizer state keep the dtype that the model was built in.
#[derive(Clone)]
pub struct MixedPrecisionPolicy {
    /// The dtype of unsharded parameters, and so of the all-gather and of compute. Unset: the parameters' own.
    pub param_dtype: Option<DType>,
    /// The dtype of gradient reduction, and of gradients that wait for one. Unset: the parameters' own (as in PyTorch since 2.15).
    pub reduce_dtype: Option<DType>,
    /// The dtype that the unit's floating point outputs are cast to. Unset: as they are.
    pub output_dtype: Option<DType>,
    /// Whether floating point inputs are cast to `param_dtype`.
    pub cast_forward_inputs: bool,
    /// Decides by FQN which parameters keep their own dtype (`true`) instead of `param_dtype`. Unset: none.
    pub keep_dtype_fn: Option<NamePredicate>,
}

/// A choice of parameters by their FQN.
pub type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        MixedPrecisionPolicy {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
            keep_dtype_fn: None,
        }
    }
}

impl MixedPrecisionPolicy {
    /// The dtype that the parameter called `name` computes in, if not its own.
    pub(crate) fn param_dtype_of(&self, name: &str) -> Option<DType> {
        self.param_dtype.filter(|_| !self.keep_dtype_fn.as_ref().is_some_and(|keep| keep(name)))
    }
}

impl std::fmt::Debug for MixedPrecisionPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MixedPrecisionPolicy")
            .field("param_dtype", &self.param_dtype)
            .field("reduce_dtype", &self.reduce_dtype)
            .field("output_dtype", &self.output_dtype)
            .field("cast_forward_inputs", &self.cast_forward_inputs)
            .finish_non_exhaustive()
    }
}

/// What a unit does with its unsharded parameters between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// Frees them, but keeps the root's, which backward needs at once. PyTorch's `None`.
    #[default]
    Default,
    /// Frees them; backward gathers again (ZeRO-3). PyTorch's `True`.
    Always,
    /// Keeps them until backward is done with them (ZeRO-2). PyTorch's `False`.
    Never,
    /// Keeps the part that each of so many neighbouring ranks needs to hold for backward to gather over them alone. PyTorch's integer: a divisor of the number of
    /// shard ranks, neither 1 nor that number.
    To(usize),
}

/// Where shards, gradients and optimizer state live between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OffloadPolicy {
    /// On the device that computes.
    #[default]
    None,
    /// On the CPU; shards go to the device before the all-gather, reduced gradients come back. On a CPU device nothing has to move.
    Cpu {
        /// Whether the CPU memory is page-locked, so that copies overlap with compute.
        pin_memory: bool,
    },
}
