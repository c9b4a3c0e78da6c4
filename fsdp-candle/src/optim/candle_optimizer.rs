//! An adapter from Candle's optimizers to [`ShardedOptimizer`].

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::Optimizer;
use fsdp_core::heartbeat;
use serde_json::{Map, Value};

use super::candle_loop::{self, params_of};
use super::elementwise::check_gradients;
use super::hyper_parameters as hyper;
use super::reach::{Reach, check_not_empty};
use super::sharded_optimizer::{ParamGroup, ShardedOptimizer};
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;

/// Any [`candle_nn::Optimizer`] over the shards of parameters: one group, whose only hyper-parameter is the learning
/// rate.
///
/// The optimizer must treat each element alone, as Adam and its variants do. One that computes with a whole parameter
/// or gradient, such as LAMB's norms or L-BFGS's products, would compute with this rank's shards, and ranks would train
/// different models.
///
/// The optimizer hides its state, so only an optimizer without state can be saved.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// use fsdp_candle::{optimizer_tensors, CandleOptimizer, ShardedOptimizer};
///
/// let params = candle_nn::ParamsAdamW { lr: 0.1, ..Default::default() };
/// let mut optim = CandleOptimizer::<candle_nn::AdamW>::new(vars.trainable(), params)?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert!(optimizer_tensors(&optim).unwrap_err().to_string().contains("AdamW hides"));
///
/// let sgd = CandleOptimizer::<candle_nn::SGD>::without_state(vars.trainable(), 0.1)?;
/// assert_eq!(optimizer_tensors(&sgd)?.len(), vars.trainable().len()); // step counts
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CandleOptimizer<O: Optimizer> {
    optim: O,
    states: Vec<ParamState>,
    /// Whether the optimizer has hidden state.
    has_state: bool,
    reach: Reach,
}

impl<O: Optimizer> CandleOptimizer<O> {
    /// Makes an optimizer of the parameters' shards ([`crate::ShardedVarMap::trainable`]) that has hidden state.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: O::Config) -> Result<Self> {
        Self::of(params, config, true)
    }

    /// Makes an optimizer without state, such as [`candle_nn::SGD`], which can be saved.
    pub fn without_state(params: Vec<Arc<FsdpParam>>, config: O::Config) -> Result<Self> {
        Self::of(params, config, false)
    }

    fn of(params: Vec<Arc<FsdpParam>>, config: O::Config, has_state: bool) -> Result<Self> {
        if let Some(param) = params.iter().find(|param| param.shard.on_disk().is_some()) {
            return Err(param.error(
                "its shard is on disk, and Candle's optimizers need it in memory: use AdamW or SGD of this crate",
            ));
        }
        check_not_empty("CandleOptimizer", params.is_empty())?;
        // Candle's optimizers fail for tensors without elements.
        let shards = params.iter().filter(|param| !param.region().is_empty()).map(|param| param.var().clone());
        let optim = O::new(shards.collect(), config)?;
        let states: Vec<_> = params.into_iter().map(|param| ParamState::new(param, vec![])).collect();
        Ok(CandleOptimizer { optim, reach: Reach::of(&states), states, has_state })
    }

    /// Returns Candle's optimizer.
    pub fn get(&self) -> &O {
        &self.optim
    }

    /// Updates every parameter that has a gradient. Fails if the shape or dtype of a gradient is not that of its
    /// parameter's shard, and if the optimizer fails.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        let _reported = heartbeat::span("optimizer", "");
        check_gradients(self.states.iter(), grads)?;
        self.reach.begin_step(&self.states, grads)?;
        self.optim.step(grads)?;
        for state in &mut self.states {
            if grads.get(state.param.var()).is_some() || state.param.is_empty_with_gradient(grads) {
                state.step += 1;
            }
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }

    /// Runs the model's backward, which reduces the gradients, and a step: see
    /// [`ShardedOptimizer::backward_step`]. Collective.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        let states: Vec<&ParamState> = self.states.iter().collect();
        let grads = candle_loop::backward(&states, loss)?;
        self.step(&grads)
    }

    /// Changes the learning rate.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.optim.set_learning_rate(lr);
    }
}

/// A loop over Candle's trait, for the variables of [`crate::ShardedVarMap::trainable_vars`]. The optimizer has hidden
/// state.
impl<O: Optimizer> Optimizer for CandleOptimizer<O> {
    type Config = O::Config;

    fn new(vars: Vec<Var>, config: O::Config) -> candle_core::Result<Self> {
        Ok(CandleOptimizer::new(params_of("CandleOptimizer", &vars)?, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(CandleOptimizer::step(self, grads)?)
    }

    fn learning_rate(&self) -> f64 {
        self.optim.learning_rate()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.optim.set_learning_rate(lr);
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        Ok(CandleOptimizer::backward_step(self, loss)?)
    }
}

impl<O: Optimizer + Send> ShardedOptimizer for CandleOptimizer<O> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        CandleOptimizer::step(self, grads)
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        let params = self.states.iter().map(|state| state.param.clone()).collect();
        vec![ParamGroup { hyper: hyper::map([("lr", self.optim.learning_rate().into())]), params }]
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        let [group] = groups else {
            return Err(Error::Argument(format!("{} groups of hyper-parameters, expected one", groups.len())));
        };
        let lr = hyper::number(group, "lr", self.optim.learning_rate());
        let lr = lr.map_err(|why| Error::Argument(format!("the hyper-parameters {why}")))?;
        self.optim.set_learning_rate(lr);
        Ok(())
    }

    fn states(&self) -> Vec<&ParamState> {
        self.states.iter().collect()
    }

    fn states_mut(&mut self) -> Vec<&mut ParamState> {
        self.states.iter_mut().collect()
    }

    /// Returns an error when the optimizer has hidden state, which cannot be reset.
    fn reset(&mut self) -> Result<()> {
        if let Some(why) = self.hidden_state() {
            return Err(Error::Argument(why));
        }
        self.states.iter_mut().for_each(|state| state.step = 0);
        Ok(())
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        if group == 0 {
            self.optim.set_learning_rate(lr);
        }
    }

    fn hidden_state(&self) -> Option<String> {
        self.has_state.then(|| {
            let name = std::any::type_name::<O>();
            format!(
                "{name} hides its state, which cannot be saved, loaded or reset: make a new one, use an optimizer of \
                 fsdp_candle, or `CandleOptimizer::without_state` for an optimizer without state"
            )
        })
    }
}
