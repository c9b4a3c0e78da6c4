//! A layer's weight as a fused operation sees it, sharded or not.
//!
//! Candle's backward allocates a zeroed tensor and a sum for every gradient that an operation returns. For a weight,
//! that is three times its size. A fused operation therefore writes a sharded weight's gradient directly into the
//! parameter's gradient buffer, and puts only the parameter's anchor (a scalar) into the graph.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, WithDType, bail};

use crate::autograd::keeps_graph;
use crate::fsdp::FsdpParam;
use crate::graph::Joined;

/// Returns whether the CPU kernels compute on this tensor. Otherwise its layer uses Candle's own operations.
pub(in crate::nn) fn has_cpu_kernels(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// Returns whether a layer with its own CUDA operation uses it for this tensor.
pub(in crate::nn) fn on_cuda(tensor: &Tensor) -> bool {
    tensor.device().is_cuda() && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::F64)
}

/// Registers a tensor that a layer reads only through [`Weight`], on the CPU and on CUDA devices. If the tensor is a
/// sharded parameter, its unit can gather it on first use. A layer calls this for each of its tensors when it is built.
pub(crate) fn register_layer(tensor: &Tensor) {
    register(tensor, has_cpu_kernels(tensor) || on_cuda(tensor));
}

/// [`register_layer`], for a layer that has its own operation on the CPU only.
pub(crate) fn register_cpu_layer(tensor: &Tensor) {
    register(tensor, has_cpu_kernels(tensor));
}

/// Candle's own operations read the tensor directly, so a layer that falls back to them does not announce its use.
fn register(tensor: &Tensor, announces_use: bool) {
    if let Some(param) = FsdpParam::of(tensor) {
        param.register_layer(announces_use);
    }
}

/// Returns whether the values of all tensors can be there at once. Reading a parameter of one unit may free those of
/// another.
#[cfg(feature = "cuda")]
pub(in crate::nn) fn are_of_one_unit<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
    let params: Vec<Arc<FsdpParam>> = tensors.into_iter().filter_map(FsdpParam::of).collect();
    params.windows(2).all(|two| {
        let units = two[0].unit().and_then(|a| Ok((a.0.index, two[1].unit()?.0.index)));
        units.is_ok_and(|(a, b)| a == b) && two[0].is_of_same_map(&two[1])
    })
}

fn with_graph(tensor: &Tensor, graph: bool) -> Tensor {
    if graph { tensor.clone() } else { tensor.detach() }
}

/// A weight: its values, its node of the graph, and the destination of its gradient.
#[derive(Clone)]
pub(crate) struct Weight {
    value: Tensor,
    /// The sharded parameter, and its anchor in the graph.
    param: Option<(Arc<FsdpParam>, Tensor)>,
    /// Whether a gradient was wanted in forward. The parameter may be frozen or unfrozen before backward.
    wants_grad: bool,
}

impl Weight {
    /// Reads the tensor that a layer holds. Fails if the tensor is a sharded parameter that is not gathered.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        let Some(param) = FsdpParam::of(tensor) else {
            return Ok(Weight { value: with_graph(tensor, keeps_graph()), param: None, wants_grad: true });
        };
        param.pre_use()?;
        let graph = keeps_graph() && param.trainable();
        let (value, anchor) = (with_graph(&param.full.tensor, graph), with_graph(&param.anchor_of_pass()?, graph));
        Ok(Weight { value, wants_grad: graph, param: Some((param, anchor)) })
    }

    /// Returns the weight as an argument of Candle's own operations: the full values, as a node of the graph. Fails if
    /// the tensor is a sharded parameter that is not gathered.
    pub(crate) fn in_graph(tensor: &Tensor) -> Result<Tensor> {
        Ok(Weight::of(tensor)?.value)
    }

    /// Returns the full values, which must not go into the graph. An operation calls this again at each use, in forward
    /// and in backward. Fails if the parameter is not gathered.
    pub(crate) fn value(&self) -> Result<&Tensor> {
        if let Some((param, _)) = &self.param {
            param.run_pre_use_hook()?;
            if !param.is_unsharded() {
                bail!("parameter `{}`: its values are not gathered now (Candle calls their storage F4)", param.name())
            }
        }
        Ok(&self.value)
    }

    /// Returns the dtype of the values.
    pub(crate) fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Returns the dtype that [`Weight::write_grad`] writes.
    pub(crate) fn grad_dtype(&self) -> DType {
        self.param.as_ref().map_or(self.value.dtype(), |(param, _)| param.gradient.dtype())
    }

    /// Returns the operation's graph argument. For a sharded parameter it is the anchor, whose value has no meaning.
    pub(crate) fn node(&self) -> &Tensor {
        self.param.as_ref().map_or(&self.value, |(_, anchor)| anchor)
    }

    /// Returns whether a gradient is wanted.
    pub(crate) fn wants_grad(&self) -> bool {
        self.wants_grad
    }

    /// Accumulates a gradient in backward. `write(buffer, accumulate)` writes it to `buffer`, dense and row-major: it
    /// adds if `accumulate`, else it overwrites every element. `T` is the type of [`Weight::grad_dtype`]. Returns what
    /// `bwd` returns for [`Weight::node`].
    pub(crate) fn write_grad<T: WithDType>(
        &self,
        write: impl FnOnce(&mut [T], bool) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        match self.grad_destination()? {
            GradDestination::Plain(value) => {
                let mut grad = vec![T::zero(); value.elem_count()];
                write(&mut grad, false)?;
                Ok(Some(Tensor::from_vec(grad, value.shape(), value.device())?))
            }
            GradDestination::Param { param, anchor } => {
                param.gradient.write(write)?;
                Ok(Some(anchor.detach()))
            }
            GradDestination::Nothing => Ok(None),
        }
    }

    /// Returns the destination of a gradient in backward.
    pub(in crate::nn) fn grad_destination(&self) -> Result<GradDestination<'_>> {
        let Some((param, anchor)) = &self.param else { return Ok(GradDestination::Plain(&self.value)) };
        if !self.wants_grad {
            return Ok(GradDestination::Nothing);
        }
        param.run_pre_gradient_hook()?;
        Ok(GradDestination::Param { param, anchor })
    }

    /// Returns the graph arguments of an operation: its input, and the nodes of its weight and its bias.
    pub(in crate::nn) fn arguments(&self, x: &Tensor, bias: Option<&Weight>) -> Vec<Tensor> {
        [x, self.node()].into_iter().chain(bias.map(Weight::node)).cloned().collect()
    }

    /// Returns one graph argument for any number of weights, at least one.
    pub(in crate::nn) fn joined<'a>(weights: impl IntoIterator<Item = &'a Weight>) -> Result<Joined> {
        let nodes: Vec<Tensor> = weights.into_iter().map(|weight| weight.node().clone()).collect();
        Joined::new(&nodes)
    }
}

/// The destination of a weight's gradient.
pub(in crate::nn) enum GradDestination<'a> {
    /// A new tensor, like these values.
    Plain(&'a Tensor),
    /// The buffer of a sharded parameter. `bwd` returns the anchor itself, detached: its value is zero.
    Param { param: &'a FsdpParam, anchor: &'a Tensor },
    /// The gradient is not wanted.
    Nothing,
}

#[cfg(test)]
mod tests {
    use candle_core::Module;
    use fsdp_core::process_group::local;

    use super::*;
    use crate::{FullyShard, ShardedVarMap, World, fully_shard, nn};

    /// Backward returns the anchors themselves as gradients.
    #[test]
    fn backward_leaves_anchors_zero_and_out_of_the_store() {
        local::run(1, |group| {
            let world = World::of(group);
            let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)]).unwrap(), world.device());
            let opts = FullyShard::new(&vars);
            let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb)).unwrap();
            let x = Tensor::ones((3, 4), DType::F32, world.device()).unwrap();
            for passes in 1..4 {
                let outputs = (0..passes).map(|_| model.forward(&x).unwrap().sum_all().unwrap());
                let loss = outputs.reduce(|sum, more| (sum + more).unwrap()).unwrap();
                let grads = model.backward(&loss).unwrap();
                assert_eq!(grads.get_ids().count(), vars.params().len());
                for param in vars.params() {
                    let gradient = grads.get(param.var()).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert!(
                        gradient.iter().all(|value| *value == 3. * passes as f32),
                        "{}: {gradient:?}",
                        param.name()
                    );
                    assert_eq!(param.anchor.to_scalar::<f32>().unwrap(), 0., "{}", param.name());
                }
            }
        });
    }
}
