//! Model and optimizer as named tensors, and back: what checkpoints hold. Names are those of PyTorch's flattened state dicts.

use std::sync::Arc;

use candle_core::Tensor;
use fsdp_ckpt::{TensorShard, TensorSource};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, Readable};

use crate::optim::AdamW;
use crate::param::FsdpParam;
use crate::storage::{TensorMemory, to_core_dtype, with_bytes_mut};
use crate::var_map::ShardedVarMap;
use crate::{Error, Result};

/// Every parameter's shard as `model.<fqn>`.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let weight = vars.params()[0].var().clone();
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{load_model, load_optimizer, model_tensors, optimizer_tensors, AdamW, AdamWConfig};
/// use fsdp_ckpt::{save, Checkpoint, SaveState};
///
/// let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// let mut tensors = model_tensors(&vars);
/// tensors.extend(optimizer_tensors(&optim));
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("step-1");
/// save(&dir, &**world.group(), &SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() })?;
///
/// // In another run, at another number of ranks: build the model and its optimizer, then
/// let checkpoint = Checkpoint::open(&dir)?;
/// load_model(&vars, &checkpoint)?;
/// load_optimizer(&mut optim, &checkpoint)?;
/// assert_eq!(optim.states()[0].step, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn model_tensors(vars: &ShardedVarMap) -> Vec<TensorShard> {
    vars.params().iter().map(|param| shard(format!("model.{}", param.name()), param, param.var().as_tensor())).collect()
}

/// The optimizer's state as `optim.state.<fqn>.exp_avg`, `.exp_avg_sq` and `.step`.
pub fn optimizer_tensors(optim: &AdamW) -> Vec<TensorShard> {
    optim
        .states()
        .iter()
        .flat_map(|state| {
            let name = |what: &str| format!("optim.state.{}.{what}", state.param.name());
            let step: Arc<dyn Readable> = Arc::new(Buffer::F32(vec![state.step as f32]));
            [
                shard(name("exp_avg"), &state.param, &state.exp_avg),
                shard(name("exp_avg_sq"), &state.param, &state.exp_avg_sq),
                TensorShard::whole(name("step"), &[], step),
            ]
        })
        .collect()
}

/// Reads every parameter's shard from a checkpoint, whatever mesh wrote it.
///
/// # Errors
/// When the checkpoint lacks a parameter or holds it with another shape or dtype.
pub fn load_model(vars: &ShardedVarMap, checkpoint: &dyn TensorSource) -> Result<()> {
    vars.reshard()?;
    vars.params()
        .iter()
        .try_for_each(|param| load(checkpoint, &format!("model.{}", param.name()), param, param.var().as_tensor()))
}

/// Reads the optimizer's state from a checkpoint, whatever mesh wrote it.
///
/// # Errors
/// When the checkpoint lacks a parameter's state or holds it with another shape or dtype.
pub fn load_optimizer(optim: &mut AdamW, checkpoint: &dyn TensorSource) -> Result<()> {
    for state in optim.states_mut() {
        let name = |what: &str| format!("optim.state.{}.{what}", state.param.name());
        load(checkpoint, &name("exp_avg"), &state.param, &state.exp_avg)?;
        load(checkpoint, &name("exp_avg_sq"), &state.param, &state.exp_avg_sq)?;
        let mut step = [0; 4];
        check(checkpoint, &name("step"), &state.param, &[], fsdp_core::DType::F32)?;
        checkpoint.read(&name("step"), &Region::whole(&[]), &mut step)?;
        state.step = f32::from_ne_bytes(step) as u64;
    }
    Ok(())
}

fn shard(fqn: String, param: &FsdpParam, tensor: &Tensor) -> TensorShard {
    TensorShard {
        fqn,
        shape: param.shape().dims().to_vec(),
        region: param.region().clone(),
        data: Arc::new(TensorMemory(tensor.clone())),
    }
}

fn load(checkpoint: &dyn TensorSource, fqn: &str, param: &FsdpParam, into: &Tensor) -> Result<()> {
    check(checkpoint, fqn, param, param.shape().dims(), to_core_dtype(into.dtype())?)?;
    Ok(with_bytes_mut(into, |bytes| Ok(checkpoint.read(fqn, param.region(), bytes).map_err(Error::from)?))?)
}

fn check(
    checkpoint: &dyn TensorSource,
    fqn: &str,
    param: &FsdpParam,
    shape: &[usize],
    dtype: fsdp_core::DType,
) -> Result<()> {
    let saved = checkpoint.tensor(fqn)?;
    if saved.shape == shape && saved.dtype == dtype {
        return Ok(());
    }
    Err(Error::Parameter {
        name: param.name().into(),
        message: format!(
            "checkpoint {} holds `{fqn}` as {} {:?}, the model has {dtype} {shape:?}: resume with the model that was saved",
            checkpoint.path().display(),
            saved.dtype,
            saved.shape
        ),
    })
}
