//! Several optimizers as one.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use serde_json::{Map, Value};

use super::group::ParamGroup;
use super::sharded::ShardedOptimizer;
use super::state::ParamState;
use crate::error::{Error, Result};

/// Several optimizers of different parameters as one, whose groups are theirs one after another: what PyTorch's
/// `get_optimizer_state_dict` makes of a list.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{AdamW, AdamWConfig, Muon, MuonConfig, Optimizers, ShardedOptimizer};
///
/// let (matrices, rest) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
/// let muon = Muon::new(matrices, MuonConfig { lr: 0.02, ..MuonConfig::default() })?;
/// let mut optim = Optimizers::new(vec![Box::new(muon), Box::new(AdamW::new(rest, AdamWConfig::default())?)])?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert_eq!(optim.param_groups()[0].params[0].name(), "weight");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Optimizers(Vec<Box<dyn ShardedOptimizer>>);

impl Optimizers {
    /// These optimizers, stepped in this order.
    ///
    /// # Errors
    /// When two of them have the same parameter.
    pub fn new(optimizers: Vec<Box<dyn ShardedOptimizer>>) -> Result<Self> {
        let mut names = HashSet::new();
        for group in optimizers.iter().flat_map(|optim| optim.param_groups()) {
            for param in group.params {
                if !names.insert(param.name().to_string()) {
                    let message = "two optimizers have it: leave it out of one".into();
                    return Err(Error::Parameter { name: param.name().into(), message });
                }
            }
        }
        Ok(Optimizers(optimizers))
    }
}

impl ShardedOptimizer for Optimizers {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.0.iter_mut().try_for_each(|optim| optim.step(grads))
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        self.0.iter().flat_map(|optim| optim.param_groups()).collect()
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        let before: Vec<Vec<_>> =
            self.0.iter().map(|optim| optim.param_groups().into_iter().map(|group| group.hyper).collect()).collect();
        let there: usize = before.iter().map(Vec::len).sum();
        if groups.len() != there {
            return Err(Error::Argument(format!(
                "{} groups of hyper-parameters are not {there}, as many as these optimizers have",
                groups.len()
            )));
        }
        let mut rest = groups;
        for at in 0..self.0.len() {
            let (own, others) = rest.split_at(before[at].len());
            rest = others;
            if let Err(error) = self.0[at].set_hyper(own) {
                // All or nothing: what they had before is right.
                self.0[..at].iter_mut().zip(&before).try_for_each(|(optim, before)| optim.set_hyper(before))?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn states(&self) -> Vec<&ParamState> {
        self.0.iter().flat_map(|optim| optim.states()).collect()
    }

    fn states_mut(&mut self) -> Vec<&mut ParamState> {
        self.0.iter_mut().flat_map(|optim| optim.states_mut()).collect()
    }

    fn reset(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|optim| optim.reset())
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        let mut group = group;
        for optim in &mut self.0 {
            let own = optim.param_groups().len();
            if group < own {
                return optim.set_group_learning_rate(group, lr);
            }
            group -= own;
        }
    }

    fn hidden_state(&self) -> Option<String> {
        self.0.iter().find_map(|optim| optim.hidden_state())
    }
}
