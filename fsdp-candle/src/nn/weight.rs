//! A layer's weight as a fused operation sees it, sharded or not.
//!
//! Candle's backward makes a zeroed tensor and a sum for every gradient that an operation returns. For a weight that is
//! three times its size; a fused operation therefore leaves a sharded weight's gradient where it belongs, and puts only
//! the parameter's anchor into the graph.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, WithDType, bail};

use crate::autograd::keeps_graph;
use crate::fsdp::FsdpParam;
#[cfg(feature = "cuda")]
use crate::storage;

/// Whether the kernels serve this tensor; otherwise its layer falls back to a chain of Candle's own operations.
pub(in crate::nn) fn served(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// Whether a layer that has an operation for CUDA devices uses it for this tensor.
pub(in crate::nn) fn on_cuda(tensor: &Tensor) -> bool {
    tensor.device().is_cuda() && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::F64)
}

/// Notes that a layer holds this tensor and uses it as a [`Weight`] alone, on the host and on CUDA devices: where it is
/// a sharded parameter, its unit need not be there before. A layer calls it for each of its tensors when it is made.
pub(crate) fn claim(tensor: &Tensor) {
    claim_where(tensor, served(tensor) || on_cuda(tensor));
}

/// [`claim`], for a layer that has an operation of its own on the host alone.
pub(crate) fn claim_on_host(tensor: &Tensor) {
    claim_where(tensor, served(tensor));
}

/// What the kernels do not serve goes into Candle's operations as it is.
fn claim_where(tensor: &Tensor, tells: bool) {
    if let Some(param) = FsdpParam::of(tensor) {
        param.register_layer(tells);
    }
}

/// A tensor as a graph has it, where there is one.
fn in_mode(tensor: &Tensor, graph: bool) -> Tensor {
    if graph { tensor.clone() } else { tensor.detach() }
}

/// A weight: values to read, a node for the graph, and a place for the gradient.
#[derive(Clone)]
pub(crate) struct Weight {
    value: Tensor,
    param: Option<(Arc<FsdpParam>, Tensor)>,
    /// Whether a gradient was wanted when it was looked at: by then a parameter may be frozen or not.
    wants_grad: bool,
}

impl Weight {
    /// Looks at the tensor that the layer holds.
    ///
    /// # Errors
    /// When it is a sharded parameter whose values are absent now.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        let Some(param) = FsdpParam::of(tensor) else {
            return Ok(Weight { value: in_mode(tensor, keeps_graph()), param: None, wants_grad: true });
        };
        param.pre_use()?;
        let graph = keeps_graph() && param.trainable();
        let (value, anchor) = (in_mode(&param.full, graph), in_mode(&param.anchor_of_pass()?, graph));
        Ok(Weight { value, wants_grad: graph, param: Some((param, anchor)) })
    }

    /// What Candle's own operations take in the weight's place: the values, and a node of the graph.
    ///
    /// # Errors
    /// When it is a sharded parameter whose values are absent now.
    pub(crate) fn in_graph(tensor: &Tensor) -> Result<Tensor> {
        Ok(Weight::of(tensor)?.value)
    }

    /// The tensor whose storage holds the values, of the full shape. It must not go into the graph. Every use of the
    /// values asks anew, in forward and in backward.
    ///
    /// # Errors
    /// When the values are absent now.
    pub(crate) fn value(&self) -> Result<&Tensor> {
        if let Some((param, _)) = &self.param {
            param.run_pre_use_hook()?;
            if !param.is_unsharded() {
                // In backward, of which the unit's module says more.
                bail!("parameter `{}`: its values are not gathered now (Candle calls their storage F4)", param.name())
            }
        }
        Ok(&self.value)
    }

    /// The dtype of the values.
    pub(crate) fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// What the operation takes as its graph argument in the weight's place. A sharded parameter's is a scalar without
    /// meaning.
    pub(crate) fn node(&self) -> &Tensor {
        self.param.as_ref().map_or(&self.value, |(_, anchor)| anchor)
    }

    /// Whether a gradient is wanted.
    pub(crate) fn wants_grad(&self) -> bool {
        self.wants_grad
    }

    /// [`Weight::grad`], in memory of the weight's device.
    #[cfg(feature = "cuda")]
    pub(in crate::nn) fn grad_in(
        &self,
        write: impl FnOnce(&mut fsdp_core::Buffer, bool) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        match &self.param {
            Some(_) if !self.wants_grad => Ok(None),
            Some((param, anchor)) => {
                param.run_pre_gradient_hook()?;
                param.gradient.write_in(write)?;
                Ok(Some(anchor.zeros_like()?))
            }
            None => {
                let grad = self.value.zeros_like()?;
                let Some(mut buffer) = storage::to_buffer(storage::take(&grad)?)? else {
                    bail!("a gradient of {:?} has no buffer", grad.dtype())
                };
                write(&mut buffer, false)?;
                Ok(Some(storage::to_tensor(buffer, grad.dims(), grad.device())?))
            }
        }
    }

    /// [`Weight::grad`], of a gradient that is there as a tensor.
    #[cfg(feature = "cuda")]
    pub(in crate::nn) fn grad_of(&self, gradient: &Tensor) -> Result<Option<Tensor>> {
        match &self.param {
            Some(_) if !self.wants_grad => Ok(None),
            Some((param, anchor)) => {
                param.run_pre_gradient_hook()?;
                param.gradient.add(gradient)?;
                Ok(Some(anchor.zeros_like()?))
            }
            None => Ok(Some(gradient.clone())),
        }
    }

    /// In backward: `write(buffer, accumulate)` leaves the gradient, dense and row-major, in `buffer`; it adds when
    /// `accumulate`, and else overwrites every element. Returns what the operation's backward returns for
    /// [`Weight::node`].
    pub(crate) fn grad<T: WithDType>(
        &self,
        write: impl FnOnce(&mut [T], bool) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        match &self.param {
            Some(_) if !self.wants_grad => Ok(None),
            Some((param, anchor)) => {
                param.run_pre_gradient_hook()?;
                param.gradient.write(write)?;
                Ok(Some(anchor.zeros_like()?))
            }
            None => {
                let mut grad = vec![T::zero(); self.value.elem_count()];
                write(&mut grad, false)?;
                Ok(Some(Tensor::from_vec(grad, self.value.shape(), self.value.device())?))
            }
        }
    }
}
