//! An operation of several of Candle's, of which the graph keeps the input alone: backward computes it anew.

use candle_core::{Result, Shape, Tensor, Var};

use super::super::weight::Weight;
use super::node::{self, Backward, Gradients};
use crate::kernels;
use crate::storage::scalar;

type Compute = dyn Fn(&Tensor, &[Tensor]) -> Result<Tensor> + Send + Sync;

/// `compute(x, weights)`, for up to two weights. It runs again in backward, once.
pub(in crate::nn) fn recomputed(
    function: &'static str,
    x: &Tensor,
    weights: Vec<Weight>,
    compute: impl Fn(&Tensor, &[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let values = weights.iter().map(|weight| Ok(weight.value()?.detach())).collect::<Result<Vec<_>>>()?;
    let y = compute(&x.detach(), &values)?;
    let mut inputs = vec![x.clone()];
    inputs.extend(weights.iter().map(|weight| weight.node().clone()));
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    node::node(&inputs, y, Recomputed { function, weights, compute: Box::new(compute) })
}

struct Recomputed {
    function: &'static str,
    weights: Vec<Weight>,
    compute: Box<Compute>,
}

/// A copy that collects a gradient, or the tensor without a graph.
fn start(tensor: &Tensor, is_wanted: bool) -> Result<Tensor> {
    let tensor = tensor.detach();
    if is_wanted { Ok(Var::from_tensor(&tensor)?.into_inner()) } else { Ok(tensor) }
}

impl Backward for Recomputed {
    fn name(&self) -> &'static str {
        self.function
    }

    fn backward(&self, x: &Tensor, gradient: &Tensor) -> Result<Gradients> {
        let own = start(x, x.track_op())?;
        let values = self.weights.iter().map(|weight| start(weight.value()?, weight.wants_grad()));
        let values = values.collect::<Result<Vec<_>>>()?;
        let y = (self.compute)(&own, &values)?;
        let given = Given { name: self.function, gradient: gradient.detach() };
        let root = kernels::node(&y, scalar(y.device())?, Shape::from(()), given)?;
        let mut gradients = root.backward()?;
        let dx = gradients.remove(&own).filter(|_| x.track_op());
        let mut of_weights = self.weights.iter().zip(&values).map(|(weight, value)| match gradients.remove(value) {
            Some(gradient) => weight.grad_of(&gradient),
            None => Ok(None),
        });
        let (a, b) = (of_weights.next().transpose()?.flatten(), of_weights.next().transpose()?.flatten());
        Ok([dx, a, b])
    }
}

/// From a tensor to a scalar without meaning, whose backward hands out a gradient that is there.
struct Given {
    name: &'static str,
    gradient: Tensor,
}

impl kernels::Backward for Given {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}
