//! What every optimizer over shards has.

use candle_core::backprop::GradStore;
use serde_json::{Map, Value};

use super::group::ParamGroup;
use super::state::ParamState;
use crate::error::Result;

/// An optimizer over the shards of parameters, with groups of parameters and named state: what state dicts,
/// checkpoints, [`crate::GradScaler`] and [`crate::check_finite`] work with.
///
/// [`crate::AdamW`], [`crate::Adam`], [`crate::SGD`] and [`crate::Muon`] are some. [`crate::Optimizers`] makes one of
/// several, and [`crate::CandleOptimizer`] one of any [`candle_nn::Optimizer`].
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{Adam, AdamConfig, SGD, SgdConfig, ShardedOptimizer};
///
/// let adam = Adam::new(vars.trainable(), AdamConfig::default())?;
/// let sgd = SGD::new(vars.trainable(), SgdConfig { momentum: 0.9, ..SgdConfig::default() })?;
/// let mut some: Vec<Box<dyn ShardedOptimizer>> = vec![Box::new(adam), Box::new(sgd)];
/// for optim in &mut some {
///     optim.set_learning_rate(0.1);
///     assert_eq!(optim.param_groups()[0].hyper["lr"], 0.1);
///     optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
///     assert!(optim.states().iter().all(|state| state.step == 1));
/// }
/// assert!(some[0].states()[0].names().eq(["exp_avg", "exp_avg_sq"]));
/// assert!(some[1].states()[0].names().eq(["momentum_buffer"]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait ShardedOptimizer: Send {
    /// Updates every parameter that has a gradient. All ranks call it; some optimizers communicate in it.
    ///
    /// # Errors
    /// When a gradient has another shape or dtype than its parameter's shard.
    fn step(&mut self, grads: &GradStore) -> Result<()>;

    /// The groups, in order: each parameter is in one of them.
    fn param_groups(&self) -> Vec<ParamGroup>;

    /// Changes hyper-parameters: for each group those that are named. Names of PyTorch's that mean nothing here are
    /// left alone.
    ///
    /// # Errors
    /// When there are more or fewer maps than groups; when a value is out of range, or stands for something that this
    /// optimizer does not compute. Nothing is changed then.
    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()>;

    /// What it keeps for each parameter, in its order.
    fn states(&self) -> Vec<&ParamState>;

    /// The same, to set the number of steps that parameters have taken.
    fn states_mut(&mut self) -> Vec<&mut ParamState>;

    /// Forgets all steps that were taken.
    ///
    /// # Errors
    /// When there is no memory for other state.
    fn reset(&mut self) -> Result<()>;

    /// Changes the learning rate of the steps to come, of one group. Of a group that is not there nothing is changed.
    fn set_group_learning_rate(&mut self, group: usize, lr: f64);

    /// The same of all groups.
    fn set_learning_rate(&mut self, lr: f64) {
        (0..self.param_groups().len()).for_each(|group| self.set_group_learning_rate(group, lr));
    }

    /// Why its state can't be saved, if there is some that nobody else sees.
    fn hidden_state(&self) -> Option<String> {
        None
    }
}
