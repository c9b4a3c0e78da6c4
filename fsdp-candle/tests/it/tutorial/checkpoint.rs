//! Distributed checkpoints: each rank writes and reads its own shards.

use candle_core::Module;
use fsdp_candle::{CheckpointManager, StateDictOptions, TrainState, get_state_dict, optimizer_values, set_state_dict};
use fsdp_ckpt::{LoadOptions, MODEL, SaveState};

use super::*;

#[test]
fn loads_at_other_world_sizes() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    let args = ModelArgs::default();
    let saved = on_worlds(&[2], |world| {
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let mut optim = adam(&vars)?;
        let x = randint(args.vocab_size, (4, 8), world.device())?;
        optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
        let (model_sd, optim_sd) = get_state_dict(&vars, &optim, &StateDictOptions::default())?;
        let mut tensors = model_sd.shards(MODEL);
        tensors.extend(optim_sd.shards("optim."));
        let values = optimizer_values(&optim);
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values };
        fsdp_ckpt::save(&dir, world.group(), &state)?;
        parameters(&vars)
    });
    for world in on_worlds(&[1, 2, 4], |world| {
        let vars = vars(world)?;
        vars.init_with(fsdp_candle::initializer::Philox::new(1)).unwrap();
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let mut optim = adam(&vars)?;
        assert_ne!(parameters(&vars)?, saved[0][0]);
        let (model_sd, optim_sd) = get_state_dict(&vars, &optim, &StateDictOptions::default())?;
        let source = fsdp_ckpt::open(&dir)?;
        model_sd.load(MODEL, &*source, &LoadOptions::default())?;
        optim_sd.load("optim.", &*source, &LoadOptions::default())?;
        set_state_dict(&vars, &mut optim, &model_sd, &optim_sd, &StateDictOptions::default())?;
        assert!(optim.states().iter().all(|state| state.step == 1));
        drop(model);
        parameters(&vars)
    }) {
        assert!(world.iter().all(|loaded| *loaded == saved[0][0]));
    }
}

#[test]
fn an_app_state_takes_one_call() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path();
    let args = ModelArgs::default();
    on_worlds(&[2], |world| {
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let mut optim = adam(&vars)?;
        let x = randint(args.vocab_size, (4, 8), world.device())?;
        optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
        let mut checkpoints = CheckpointManager::new(world, run);
        checkpoints.save(1, TrainState::new(&vars).optimizer(&mut optim))?;
        let saved = parameters(&vars)?;
        optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
        assert_ne!(parameters(&vars)?, saved);
        checkpoints.resume(TrainState::new(&vars).optimizer(&mut optim))?;
        assert_eq!((parameters(&vars)?, optim.states()[0].step), (saved, 1));
        Ok(())
    });
}
