//! How a unit computes and communicates: the options of `fully_shard`.

use candle_core::DType;

/// The dtypes of a unit, as in PyTorch's `MixedPrecisionPolicy`. Shards, sharded gradients and optimizer state keep the dtype that the model was built in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixedPrecisionPolicy {
    /// The dtype of unsharded parameters, and so of the all-gather and of compute. Unset: the parameters' own.
    pub param_dtype: Option<DType>,
    /// The dtype of gradient reduction. Unset: the parameters' own.
    pub reduce_dtype: Option<DType>,
    /// The dtype that the unit's floating point outputs are cast to. Unset: as they are.
    pub output_dtype: Option<DType>,
    /// Whether floating point inputs are cast to `param_dtype`.
    pub cast_forward_inputs: bool,
}

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        MixedPrecisionPolicy { param_dtype: None, reduce_dtype: None, output_dtype: None, cast_forward_inputs: true }
    }
}

/// What a unit does with its unsharded parameters between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// Frees them, but keeps the root's, which backward needs at once. PyTorch's `None`.
    #[default]
    Default,
    /// Frees them; backward gathers again (ZeRO-3).
    Always,
    /// Keeps them until backward is done with them (ZeRO-2).
    Never,
}
