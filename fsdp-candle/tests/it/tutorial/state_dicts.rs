//! State dicts by the DTensor APIs and by the DCP APIs.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::Context;
use candle_core::{Module, safetensors};
use fsdp_candle::{
    StateDict, StateDictOptions, StateTensor, distribute_tensor, get_model_state_dict, get_optimizer_state_dict,
    get_state_dict, set_model_state_dict, set_optimizer_state_dict, set_state_dict,
};

use super::*;

/// A model and its optimizer after a step, or before any.
fn trained(world: &World, steps: usize) -> anyhow::Result<(ShardedVarMap, Sharded, Adam)> {
    let args = ModelArgs::default();
    let vars = vars(world)?;
    vars.init_with(fsdp_candle::initializer::Philox::new(steps as u64)).unwrap();
    let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
    let mut optim = adam(&vars)?;
    for _ in 0..steps {
        let x = randint(args.vocab_size, (4, 8), world.device())?;
        optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
    }
    Ok((vars, model, optim))
}

fn save_with_dtensor_apis(world: &World, vars: &ShardedVarMap, path: &Path) -> anyhow::Result<()> {
    let sharded_sd = get_model_state_dict(vars, &StateDictOptions::default())?;
    let mut cpu_state_dict = HashMap::new();
    for (param_name, sharded_param) in sharded_sd.tensors {
        let full_param = sharded_param.dtensor()?.context("a parameter is sharded")?.full_tensor()?;
        if world.rank() == 0 {
            cpu_state_dict.insert(param_name, full_param.to_device(&Device::Cpu)?);
        } else {
            drop(full_param);
        }
    }
    if world.rank() == 0 {
        safetensors::save(&cpu_state_dict, path)?;
    }
    // Other tests read it afterwards.
    world.group().barrier().wait()?;
    Ok(())
}

fn load_with_dtensor_apis(vars: &ShardedVarMap, path: &Path) -> anyhow::Result<()> {
    use fsdp_candle::distribute_tensor;
    let full_sd: BTreeMap<_, _> = safetensors::load(path, &Device::Cpu)?.into_iter().collect();
    let meta_sharded_sd = get_model_state_dict(vars, &StateDictOptions::default())?;
    let mut sharded_sd = StateDict::default();
    for (param_name, full_tensor) in full_sd {
        let sharded_meta_param = meta_sharded_sd.tensors[&param_name].dtensor()?.context("a parameter is sharded")?;
        let sharded_tensor =
            distribute_tensor(&full_tensor, sharded_meta_param.device_mesh(), sharded_meta_param.placements())?;
        sharded_sd.tensors.insert(param_name, StateTensor::of(&sharded_tensor)?);
    }
    set_model_state_dict(vars, &sharded_sd, &StateDictOptions::default())?;
    Ok(())
}

#[test]
fn with_dtensor_apis() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model_state_dict.safetensors");
    let saved = on_worlds(&[2], |world| {
        let (vars, _model, _) = trained(world, 1)?;
        save_with_dtensor_apis(world, &vars, &path)?;
        parameters(&vars)
    });
    let full = safetensors::load(&path, &Device::Cpu).unwrap();
    assert_eq!(full.len(), saved[0][0].len());
    for (name, values) in &saved[0][0] {
        assert_eq!(&full[name].flatten_all().unwrap().to_vec1::<f32>().unwrap(), values, "{name}");
    }
    for world in on_worlds(&[1, 2, 4], |world| {
        let (vars, _model, _) = trained(world, 0)?;
        assert_ne!(parameters(&vars)?, saved[0][0]);
        load_with_dtensor_apis(&vars, &path)?;
        parameters(&vars)
    }) {
        assert!(world.iter().all(|loaded| *loaded == saved[0][0]));
    }
}

/// "Optimizer state dict works similarly."
#[test]
fn optimizer_state_with_dtensor_apis() {
    let saved = on_worlds(&[2], |world| {
        let (vars, _model, optim) = trained(world, 2)?;
        let mut full = BTreeMap::new();
        let sharded_sd = get_optimizer_state_dict(&vars, &optim, &StateDictOptions::default())?;
        for (state_name, value) in &sharded_sd.tensors {
            if let Some(value) = value.dtensor()? {
                full.insert(state_name.clone(), value.full_tensor()?.flatten_all()?.to_vec1::<f32>()?);
            }
        }
        Ok((full, sharded_sd.values))
    });
    let (moments, values) = &saved[0][0];
    for world in on_worlds(&[1, 4], |world| {
        let (vars, _model, mut optim) = trained(world, 0)?;
        let options = StateDictOptions::default();
        let mut sharded_sd = get_optimizer_state_dict(&vars, &optim, &options)?;
        for (name, state) in &mut sharded_sd.tensors {
            if let Some(meta) = state.dtensor()? {
                let full = Tensor::from_slice(&moments[name], meta.shape(), &Device::Cpu)?;
                *state = StateTensor::of(&distribute_tensor(&full, meta.device_mesh(), meta.placements())?)?;
            } else {
                state.tensor = (state.tensor.zeros_like()? + 2.)?;
            }
        }
        sharded_sd.values = values.clone();
        set_optimizer_state_dict(&vars, &mut optim, &sharded_sd, &options)?;
        assert!(optim.states().iter().all(|state| state.step == 2));
        let again = get_optimizer_state_dict(&vars, &optim, &options)?;
        let mut full = BTreeMap::new();
        for (name, state) in &again.tensors {
            if let Some(state) = state.dtensor()? {
                full.insert(name.clone(), state.full_tensor()?.flatten_all()?.to_vec1::<f32>()?);
            }
        }
        Ok(full)
    }) {
        assert!(world.iter().all(|loaded| loaded == moments));
    }
}

#[test]
fn with_dcp_apis() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model_state_dict.safetensors");
    let saved = on_worlds(&[2], |world| {
        let (vars, model, _) = trained(world, 1)?;
        let _ = &model;
        use fsdp_candle::get_model_state_dict;
        let model_state_dict = get_model_state_dict(
            &vars,
            &StateDictOptions { full_state_dict: true, cpu_offload: true, ..StateDictOptions::default() },
        )?;
        if world.rank() == 0 {
            let tensors: HashMap<_, _> = model_state_dict.tensors.into_iter().map(|(k, v)| (k, v.tensor)).collect();
            safetensors::save(&tensors, &path)?;
        }
        parameters(&vars)
    });
    for world in on_worlds(&[1, 2, 4], |world| {
        let (vars, _model, _) = trained(world, 0)?;
        // Only rank 0 has it.
        let full_sd = match world.rank() {
            0 => safetensors::load(&path, &Device::Cpu)?,
            _ => HashMap::new(),
        };
        let tensors = full_sd.into_iter().map(|(name, tensor)| (name, StateTensor::whole(tensor))).collect();
        let full_sd = StateDict { tensors, ..StateDict::default() };
        use fsdp_candle::set_model_state_dict;
        set_model_state_dict(
            &vars,
            &full_sd,
            &StateDictOptions { full_state_dict: true, broadcast_from_rank0: true, ..StateDictOptions::default() },
        )?;
        parameters(&vars)
    }) {
        assert!(world.iter().all(|loaded| *loaded == saved[0][0]));
    }
}

/// Model and optimizer together: `get_state_dict` and `set_state_dict`.
#[test]
fn of_model_and_optimizer_at_once() {
    let full = StateDictOptions { full_state_dict: true, ..StateDictOptions::default() };
    on_worlds(&[1, 2], |world| {
        let (vars, model, mut optim) = trained(world, 1)?;
        let (model_sd, optim_sd) = get_state_dict(&vars, &optim, &full)?;
        let before = parameters(&vars)?;
        let x = randint(9, (4, 8), world.device())?;
        optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
        assert_ne!(parameters(&vars)?, before);
        set_state_dict(&vars, &mut optim, &model_sd, &optim_sd, &full)?;
        assert_eq!((parameters(&vars)?, optim.states()[0].step), (before, 1));
        Ok(())
    });
}
