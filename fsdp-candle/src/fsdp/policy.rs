//! The policies of `fully_shard`: how a unit computes and communicates.

use std::sync::Arc;

use candle_core::{DType, Device};

/// The dtypes of a unit: PyTorch's `MixedPrecisionPolicy`. Shards, sharded gradients and optimizer state keep the dtype
/// in which the model was built.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
/// use std::sync::Arc;
/// use fsdp_candle::MixedPrecisionPolicy;
///
/// // Compute in bf16, reduce in f32, and keep the norm in f32.
/// let policy = MixedPrecisionPolicy {
///     param_dtype: Some(DType::BF16),
///     reduce_dtype: Some(DType::F32),
///     param_dtype_override_fn: Some(Arc::new(|fqn, dtype| fqn.starts_with("norm").then_some(dtype))),
///     ..Default::default()
/// };
/// let model = fully_shard(&FullyShard::new(&vars).mp_policy(policy), vars.builder(DType::F32), |vb| {
///     Ok((nn::linear(4, 2, vb.pp("up"))?, nn::rms_norm(2, 1e-5, vb.pp("norm"))?))
/// })?;
/// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// let y = model.call_with(x, |(up, norm), x| norm.forward(&up.forward(&x)?.to_dtype(DType::F32)?))?;
/// let grads = model.backward(&y.sum_all()?)?;
/// for param in model.params() {
///     let computes_in = if param.name().starts_with("norm") { DType::F32 } else { DType::BF16 };
///     assert_eq!((param.dtype(), param.compute_dtype()), (DType::F32, computes_in));
///     assert_eq!(grads.get(param.var()).unwrap().dtype(), DType::F32);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct MixedPrecisionPolicy {
    /// Dtype of unsharded parameters, and so of the all-gather and of compute; `None` for the parameters' own.
    pub param_dtype: Option<DType>,
    /// Dtype of gradient reduction, and of gradients that wait for one; `None` for the parameters' own (as in PyTorch
    /// since 2.15). With F32 and a `param_dtype` of BF16, layers of [`crate::nn`] on CPUs do not round gradients to
    /// BF16 first.
    pub reduce_dtype: Option<DType>,
    /// Dtype that the unit's floating point outputs are cast to; `None` for no cast.
    pub output_dtype: Option<DType>,
    /// Whether floating point inputs are cast to `param_dtype`.
    pub cast_forward_inputs: bool,
    /// Function that lets a parameter compute in its own dtype.
    pub param_dtype_override_fn: Option<ParamDtypeFn>,
}

/// Returns, from the FQN and the own dtype of a parameter, the dtype that it computes in: its own dtype, or
/// `param_dtype`, which `None` also means. Building fails for another dtype, as in PyTorch.
pub type ParamDtypeFn = Arc<dyn Fn(&str, DType) -> Option<DType> + Send + Sync>;

/// Selects parameters by their FQN.
pub type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        MixedPrecisionPolicy {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
            param_dtype_override_fn: None,
        }
    }
}

impl MixedPrecisionPolicy {
    /// Returns the dtype that a parameter of the dtype `own` computes in. The error is a reason.
    pub(crate) fn compute_dtype(&self, name: &str, own: DType) -> Result<DType, String> {
        let default = self.param_dtype.unwrap_or(own);
        let chosen = self.param_dtype_override_fn.as_ref().and_then(|choose| choose(name, own)).unwrap_or(default);
        if chosen != own && chosen != default {
            return Err(format!(
                "param_dtype_override_fn returned {chosen:?}, expected {own:?} (its own dtype) or {default:?} (param_dtype)"
            ));
        }
        Ok(chosen)
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

/// Units that a setting applies to: PyTorch's `recurse`, whose default there is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recurse {
    /// This unit and the units inside it.
    Yes,
    /// Only this unit.
    No,
}

/// Treatment of a unit's unsharded parameters between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// Frees them, but keeps the root's, which backward needs at once. PyTorch's `None`.
    #[default]
    Default,
    /// Frees them; backward gathers again (ZeRO-3). PyTorch's `True`.
    Always,
    /// Keeps them until backward is done with them (ZeRO-2). PyTorch's `False`.
    Never,
    /// Keeps a part on each rank, so that backward gathers over this many neighbouring ranks only. PyTorch's integer: a
    /// divisor of the number of shard ranks, neither 1 nor that number.
    To(usize),
}

/// Where shards, gradients and optimizer state are stored between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OffloadPolicy {
    /// On the device that computes.
    #[default]
    None,
    /// On the CPU. Shards are copied to the device before the all-gather, and reduced gradients are copied back. A CPU
    /// device needs no copies.
    Cpu {
        /// Whether CPU memory is page-locked, so that copies overlap with compute.
        pin_memory: bool,
    },
}

impl OffloadPolicy {
    /// Returns the device that stores shards whose layers compute on `device`.
    pub(crate) fn home(self, device: &Device) -> &Device {
        match self {
            OffloadPolicy::None => device,
            OffloadPolicy::Cpu { .. } => &Device::Cpu,
        }
    }
}
