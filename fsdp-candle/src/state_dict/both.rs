//! The state of a model and of its optimizer, at once.

use super::dict::{IncompatibleKeys, StateDict};
use super::model::{get_model_state_dict, set_model_state_dict};
use super::optimizer::{get_optimizer_state_dict, set_optimizer_state_dict};
use super::options::StateDictOptions;
use crate::error::Result;
use crate::fsdp::ShardedVarMap;
use crate::optim::ShardedOptimizer;

/// The state of a model and of its optimizer: [`get_model_state_dict`] and [`get_optimizer_state_dict`].
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, AdamW, AdamWConfig, FullyShard, ShardedVarMap, World};
/// use fsdp_candle::{get_state_dict, set_state_dict, StateDictOptions};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// # let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
///
/// // Whole tensors, on every rank.
/// let full = StateDictOptions { full_state_dict: true, ..StateDictOptions::default() };
/// let (before, moments) = get_state_dict(&vars, &optim, &full)?;
/// assert_eq!(before.tensors["weight"].tensor.dims(), [2, 4]);
///
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert_eq!(optim.states()[0].step, 1);
///
/// // Back to where it was, from rank 0's copy.
/// let from_rank_0 = StateDictOptions { broadcast_from_rank0: true, ..full };
/// set_state_dict(&vars, &mut optim, &before, &moments, &from_rank_0)?;
/// assert_eq!(optim.states()[0].step, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Theirs.
pub fn get_state_dict(
    vars: &ShardedVarMap,
    optim: &dyn ShardedOptimizer,
    options: &StateDictOptions,
) -> Result<(StateDict, StateDict)> {
    Ok((get_model_state_dict(vars, options)?, get_optimizer_state_dict(vars, optim, options)?))
}

/// Sets the state of a model and of its optimizer: [`set_model_state_dict`] and [`set_optimizer_state_dict`].
///
/// # Errors
/// Theirs.
pub fn set_state_dict(
    vars: &ShardedVarMap,
    optim: &mut dyn ShardedOptimizer,
    model: &StateDict,
    optimizer: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let mut keys = set_model_state_dict(vars, model, options)?;
    let more = set_optimizer_state_dict(vars, optim, optimizer, options)?;
    keys.missing.extend(more.missing);
    keys.unexpected.extend(more.unexpected);
    Ok(keys)
}
