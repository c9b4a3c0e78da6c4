//! A layer's weight as a fused operation sees it, sharded or not.
//!
//! Candle's backward makes a zeroed tensor and a sum for every gradient that an operation returns. For a weight that is
//! three times its size; a fused operation therefore leaves a sharded weight's gradient where it belongs, and puts only
//! the parameter's anchor into the graph.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, WithDType, bail};

use crate::unit::FsdpParam;

/// A weight: values to read, a node for the graph, and a place for the gradient.
#[derive(Clone)]
pub(crate) struct Weight {
    value: Tensor,
    param: Option<(Arc<FsdpParam>, Tensor)>,
}

impl Weight {
    /// Looks at the tensor that the layer holds.
    ///
    /// # Errors
    /// When it is a sharded parameter whose values are absent now.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        let param = match FsdpParam::of(tensor) {
            Some(param) => {
                param.check_unsharded()?;
                let anchor = param.anchor().clone();
                Some((param, anchor))
            }
            None => None,
        };
        Ok(Weight { value: tensor.clone(), param })
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
        match &self.param {
            // In backward, of which the unit's module says more.
            Some((param, _)) if !param.is_unsharded() => {
                bail!("parameter `{}`: its values are not gathered now (Candle calls their storage F4)", param.name())
            }
            _ => Ok(&self.value),
        }
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
        self.param.as_ref().is_none_or(|(param, _)| param.trainable())
    }

    /// In backward: `write(buffer, accumulate)` leaves the gradient, dense and row-major, in `buffer`; it adds when
    /// `accumulate`, and else overwrites every element. Returns what the operation's backward returns for
    /// [`Weight::node`].
    pub(crate) fn grad<T: WithDType>(
        &self,
        write: impl FnOnce(&mut [T], bool) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        match &self.param {
            Some((param, _)) if !param.trainable() => Ok(None),
            Some((param, anchor)) => {
                param.gradient().write(write)?;
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
