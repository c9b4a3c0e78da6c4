//! A model of plain Candle in one process, with the parameters of a sharded one.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use super::{Gradients, device, elements};

pub(crate) struct Plain<M> {
    pub(crate) model: M,
    /// The parameters, in the sharded model's order.
    pub(crate) vars: Vec<(String, Var)>,
}

impl<M> Plain<M> {
    /// Builds a model with these parameters.
    pub(crate) fn new(initial: &Gradients, build: impl FnOnce(VarBuilder<'static>) -> Result<M>) -> Self {
        let map = VarMap::new();
        let model = build(VarBuilder::from_varmap(&map, DType::F32, &device())).unwrap();
        let data = map.data().lock().unwrap();
        let var = |(name, values): &(String, Vec<f32>)| {
            let var = data[name].clone();
            var.set(&Tensor::from_slice(values, var.shape(), &device()).unwrap()).unwrap();
            (name.clone(), var)
        };
        Plain { model, vars: initial.iter().map(var).collect() }
    }

    /// The variables whose name `is_it` accepts.
    pub(crate) fn vars_of(&self, is_it: impl Fn(&str) -> bool) -> Vec<Var> {
        self.vars.iter().filter(|(name, _)| is_it(name)).map(|(_, var)| var.clone()).collect()
    }

    pub(crate) fn values(&self) -> Gradients {
        self.vars.iter().map(|(name, var)| (name.clone(), elements(var))).collect()
    }

    /// The gradients of all parameters.
    pub(crate) fn gradients(&self, grads: &GradStore) -> Gradients {
        self.vars.iter().map(|(name, var)| (name.clone(), elements(grads.get(var).unwrap()))).collect()
    }
}

/// The mean of the losses of all ranks' batches.
pub(crate) fn mean(losses: &[Tensor]) -> Tensor {
    (Tensor::stack(losses, 0).unwrap().sum_all().unwrap() / losses.len() as f64).unwrap()
}
