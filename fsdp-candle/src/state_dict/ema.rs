//! The state of a moving average.

use candle_core::DType;
use fsdp_core::layout::Region;

use super::dict::{IncompatibleKeys, StateDict, StateTensor};
use super::model::compare;
use super::options::StateDictOptions;
use super::transfer::{Wanted, given, kept, taken};
use crate::error::Result;
use crate::fsdp::ShardedVarMap;
use crate::optim::Ema;
use crate::storage::copy_tensor;

/// How often it was updated: a name that PyTorch's `AveragedModel` has for it.
const UPDATES: &str = "n_averaged";

/// The mean of each parameter's values by its FQN, in F32, and how often it was updated as `n_averaged`. Collective
/// when a full state dict is asked for.
///
/// A checkpoint takes [`StateDict::shards`] of a sharded one beside the model's, under a prefix of your own, and
/// [`StateDict::load`] reads it back in place, at any number of ranks.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// use fsdp_candle::{get_ema_state_dict, model_tensors, Ema, StateDictOptions};
/// use fsdp_ckpt::{save, SaveState};
///
/// let mut ema = Ema::new(vars.params(), 0.999)?;
/// ema.update()?;
/// let options = StateDictOptions::default();
/// let mut tensors = model_tensors(&vars)?;
/// tensors.extend(get_ema_state_dict(&vars, &ema, &options)?.shards("ema."));
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("step-1");
/// let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
/// save(&dir, world.group(), &state)?;
///
/// let again = Ema::new(vars.params(), 0.999)?;
/// get_ema_state_dict(&vars, &again, &options)?.load("ema.", &*fsdp_ckpt::open(&dir)?, &Default::default())?;
/// assert_eq!(again.updates()?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of the collectives.
pub fn get_ema_state_dict(vars: &ShardedVarMap, ema: &Ema, options: &StateDictOptions) -> Result<StateDict> {
    let mut dict = StateDict::default();
    for (param, mean) in ema.means() {
        if let Some(name) = options.name(param.name()) {
            dict.tensors.insert(name.into(), taken(param, mean, options)?);
        }
    }
    dict.tensors.insert(UPDATES.into(), StateTensor::whole(ema.count().clone()));
    Ok(kept(dict, vars.mesh(), options))
}

/// Copies a state dict into the moving average, as [`crate::set_model_state_dict`] does into parameters.
///
/// # Errors
/// Its own.
pub fn set_ema_state_dict(
    vars: &ShardedVarMap,
    ema: &mut Ema,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let (mut wanted, mut targets) = (vec![], vec![]);
    for (param, mean) in ema.means() {
        let Some(name) = options.name(param.name()).map(str::to_string) else { continue };
        let (shape, region) = (param.shape().dims(), param.region().clone());
        wanted.push(Wanted { name, shape, region, dtype: DType::F32, required: true });
        targets.push(mean);
    }
    let (name, region) = (UPDATES.to_string(), Region::whole(&[]));
    wanted.push(Wanted { name, shape: &[], region, dtype: DType::F32, required: true });
    targets.push(ema.count());
    let given = given(dict, &wanted, vars.mesh(), options)?;
    let keys = compare(dict, &wanted, &given, vars, options)?;
    for (target, given) in targets.into_iter().zip(given) {
        given.map_or(Ok(()), |given| copy_tensor(&given, target))?;
    }
    Ok(keys)
}
