//! Any of Candle's optimizers as one of ours.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_nn::Optimizer;
use fsdp_core::heartbeat;
use serde_json::{Map, Value};

use super::group::ParamGroup;
use super::hyper;
use super::per_shard::check_gradients;
use super::sharded::ShardedOptimizer;
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;

/// Any [`candle_nn::Optimizer`] over the shards of parameters: one group, whose hyper-parameter is the learning rate.
///
/// Nobody but the optimizer itself sees what it keeps, so only one that keeps nothing can be saved.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{optimizer_tensors, CandleOptimizer, ShardedOptimizer};
///
/// let params = candle_nn::ParamsAdamW { lr: 0.1, ..Default::default() };
/// let mut optim = CandleOptimizer::<candle_nn::AdamW>::new(vars.trainable(), params)?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert!(optimizer_tensors(&optim).unwrap_err().to_string().contains("AdamW keeps"));
///
/// let sgd = CandleOptimizer::<candle_nn::SGD>::without_state(vars.trainable(), 0.1)?;
/// assert_eq!(optimizer_tensors(&sgd)?.len(), vars.trainable().len()); // how many steps each has taken
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CandleOptimizer<O: Optimizer> {
    optim: O,
    states: Vec<ParamState>,
    /// Whether it keeps something between steps.
    keeps: bool,
}

impl<O: Optimizer> CandleOptimizer<O> {
    /// An optimizer of the parameters' shards ([`crate::ShardedVarMap::trainable`]) that keeps state of its own.
    ///
    /// # Errors
    /// Its own.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: O::Config) -> Result<Self> {
        Self::of(params, config, true)
    }

    /// One that keeps nothing between steps, as [`candle_nn::SGD`], and so can be saved.
    ///
    /// # Errors
    /// Its own.
    pub fn without_state(params: Vec<Arc<FsdpParam>>, config: O::Config) -> Result<Self> {
        Self::of(params, config, false)
    }

    fn of(params: Vec<Arc<FsdpParam>>, config: O::Config, keeps: bool) -> Result<Self> {
        // Candle's optimizers fail on tensors without elements.
        let shards = params.iter().filter(|param| !param.region().is_empty()).map(|param| param.var().clone());
        let optim = O::new(shards.collect(), config)?;
        let states = params.into_iter().map(|param| ParamState::new(param, vec![])).collect();
        Ok(CandleOptimizer { optim, states, keeps })
    }

    /// Candle's optimizer.
    pub fn get(&self) -> &O {
        &self.optim
    }
}

impl<O: Optimizer + Send> ShardedOptimizer for CandleOptimizer<O> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        let _told = heartbeat::span("optimizer", "");
        check_gradients(self.states.iter(), grads)?;
        self.optim.step(grads)?;
        for state in &mut self.states {
            if grads.get(state.param.var()).is_some() || state.param.is_empty_with_gradient(grads) {
                state.step += 1;
            }
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        let params = self.states.iter().map(|state| state.param.clone()).collect();
        vec![ParamGroup { hyper: hyper::map([("lr", self.optim.learning_rate().into())]), params }]
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        let [group] = groups else {
            return Err(Error::Argument(format!("{} groups of hyper-parameters are not one", groups.len())));
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

    /// Refused for one that keeps something, which nobody else can forget.
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
        self.keeps.then(|| {
            let name = std::any::type_name::<O>();
            format!(
                "{name} keeps its state to itself: it can be neither saved, loaded nor forgotten. Make it anew, use an \
                 optimizer of fsdp_candle's, or `CandleOptimizer::without_state` for one that keeps nothing"
            )
        })
    }
}
