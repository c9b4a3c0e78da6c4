//! `CheckpointManager` saves and resumes whole training runs.

use std::path::{Path, PathBuf};

use candle_core::{DType, Module, Tensor};
use fsdp_candle::random::RngState;
use fsdp_candle::{
    AdamW, AdamWConfig, CheckpointManager, Ema, Error, FullyShard, GradScaler, GradScalerState, Resumed, SGD,
    SgdConfig, ShardedOptimizer, ShardedVarMap, TrainState, World, model_tensors, nn, optimizer_tensors,
    optimizer_values, shard,
};
use fsdp_ckpt::{SaveState, TensorSource};
use tempfile::TempDir;

use crate::common::{
    Gradients, Sharded, WIDTH, all_refused, assert_close, built, input, loss_of, ranks, refused, sharded, vars_on,
    weights,
};

/// Rows of all ranks in a step: 1 to 4 ranks share them evenly.
const ROWS: usize = 12;

/// A run with two optimizers and some values.
struct Run {
    world: World,
    vars: ShardedVarMap,
    model: Sharded,
    adamw: AdamW,
    /// Optimizer of the biases.
    sgd: SGD,
    seen: Vec<usize>,
    rng: RngState,
}

impl Run {
    /// Makes a run at its beginning. `lr` tells whether a resume loads hyper-parameters.
    fn new(world: World, mesh: &[(&str, usize)], lr: f64) -> Self {
        let vars = vars_on(&world, mesh);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let (biases, rest) = vars.trainable().into_iter().partition(|param| param.name().ends_with("bias"));
        let adamw = AdamW::new(rest, AdamWConfig { lr, ..AdamWConfig::default() }).unwrap();
        let sgd = SGD::new(biases, SgdConfig { lr, momentum: 0.9, ..SgdConfig::default() }).unwrap();
        Run { world, vars, model, adamw, sgd, seen: vec![], rng: RngState::new(7) }
    }

    fn on_all(world: World) -> Self {
        let size = world.size();
        Self::new(world, &[("dp_shard", size)], 0.01)
    }

    fn state(&mut self) -> TrainState<'_> {
        TrainState::new(&self.vars)
            .optimizer(&mut self.adamw)
            .optimizer(&mut self.sgd)
            .value("seen", &mut self.seen)
            .value("rng", &mut self.rng)
    }

    fn step(&mut self, step: usize) {
        let rows = ROWS / self.world.size();
        let x = input(step, &[ROWS, WIDTH]).narrow(0, self.world.rank() * rows, rows).unwrap();
        let grads = self.model.backward(&loss_of(&self.model, &x)).unwrap();
        self.adamw.step(&grads).unwrap();
        self.sgd.step(&grads).unwrap();
        self.seen.push(step);
        self.rng.calls += 1;
    }

    fn checkpoints(&self, dir: &Path) -> CheckpointManager {
        CheckpointManager::new(&self.world, dir)
    }

    /// Takes the steps and saves after each.
    fn train(&mut self, checkpoints: &mut CheckpointManager, steps: std::ops::RangeInclusive<usize>) {
        for step in steps {
            self.step(step);
            checkpoints.save(step, self.state()).unwrap();
        }
    }
}

/// Saves the steps 1 to `steps` on two ranks.
fn saved(dir: &Path, steps: usize) {
    ranks(2, |world| {
        let mut run = Run::on_all(world);
        let mut checkpoints = run.checkpoints(dir);
        run.train(&mut checkpoints, 1..=steps);
    });
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn step_path(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

/// Flips the last bit of a rank's file.
fn damage(checkpoint: &Path, rank: usize) {
    let names = names(checkpoint);
    let name = names.iter().find(|name| name.starts_with(&format!("shard-{:05}", rank + 1))).unwrap();
    let mut bytes = std::fs::read(checkpoint.join(name)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(checkpoint.join(name), bytes).unwrap();
}

#[test]
fn resumed_runs_equal_uninterrupted_ones() {
    let line = |size| vec![("dp_shard", size)];
    let hybrid = vec![("dp_replicate", 2), ("dp_shard", 2)];
    let cases = [
        (line(1), line(1), false),
        (line(2), line(2), true),
        (line(3), line(3), false),
        (hybrid.clone(), hybrid.clone(), true),
        (line(2), line(1), false),
        (line(3), line(4), true),
        (line(4), line(3), false),
        (hybrid, line(2), true),
        (line(1), line(4), false),
    ];
    for (before, after, asynchronous) in cases {
        let root = tempfile::tempdir().unwrap();
        let size = |mesh: &[(&str, usize)]| mesh.iter().map(|(_, size)| size).product::<usize>();
        let set = |checkpoints: CheckpointManager| if asynchronous { checkpoints.asynchronous() } else { checkpoints };
        let want: Vec<Gradients> = ranks(size(&before), |world| {
            let mut run = Run::new(world, &before, 0.01);
            let mut checkpoints = set(run.checkpoints(root.path()));
            assert_eq!(checkpoints.resume(run.state()).unwrap(), None);
            for step in 1..=6 {
                run.step(step);
                if step == 3 {
                    let path = checkpoints.save(step, run.state()).unwrap();
                    assert_eq!(path, step_path(root.path(), 3));
                }
            }
            checkpoints.finish().unwrap();
            weights(&run.vars)
        });
        let got = ranks(size(&after), |world| {
            let mut run = Run::new(world, &after, 0.5);
            let mut checkpoints = set(run.checkpoints(root.path()));
            let resumed = checkpoints.resume(run.state()).unwrap();
            assert_eq!(resumed, Some(Resumed { step: 3, path: step_path(root.path(), 3) }));
            assert_eq!((&run.seen[..], run.rng.calls), (&[1, 2, 3][..], 3));
            assert_eq!((run.adamw.param_groups()[0].hyper["lr"].as_f64(), run.sgd.states()[0].step), (Some(0.01), 3));
            (4..=6).for_each(|step| run.step(step));
            weights(&run.vars)
        });
        match before == after {
            true => assert_eq!(got, want, "{before:?}"),
            false => assert_close(&got[0], &want[0], 1e-5),
        }
    }
}

#[test]
fn keeps_the_newest() {
    for asynchronous in [false, true] {
        let root = tempfile::tempdir().unwrap();
        ranks(2, |world| {
            let mut run = Run::on_all(world);
            let mut checkpoints = run.checkpoints(root.path()).keep_newest(2);
            if asynchronous {
                checkpoints = checkpoints.asynchronous();
            }
            run.train(&mut checkpoints, 1..=5);
            // The end of a loop saves the last step again.
            checkpoints.save(5, run.state()).unwrap();
            checkpoints.finish().unwrap();
        });
        assert_eq!(names(root.path()), ["step-00000004", "step-00000005"]);
    }
}

#[test]
fn skips_torn_and_damaged_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path(), 3);
    damage(&step_path(root.path(), 2), 1);
    // A kill before the rename leaves a hidden directory. A copy that was interrupted leaves one without a manifest.
    std::fs::create_dir(root.path().join(".step-00000004.tmp-host-1-1f")).unwrap();
    std::fs::remove_file(step_path(root.path(), 3).join("checkpoint.json")).unwrap();
    ranks(3, |world| {
        let mut run = Run::on_all(world);
        let mut checkpoints = run.checkpoints(root.path());
        assert_eq!(checkpoints.resume(run.state()).unwrap().unwrap().step, 1);
        assert_eq!(run.seen, [1]);
        run.train(&mut checkpoints, 2..=3);
    });
    let left = ["step-00000001", "step-00000002", "step-00000002.damaged", "step-00000003", "step-00000003.damaged"];
    assert_eq!(names(root.path()).into_iter().filter(|name| !name.starts_with('.')).collect::<Vec<_>>(), left);
    (1..=3).for_each(|step| damage(&step_path(root.path(), step), 0));
    let errors = ranks(2, |world| {
        let mut run = Run::on_all(world);
        run.checkpoints(root.path()).resume(run.state()).unwrap_err().to_string()
    });
    all_refused(errors, &["rank 0", "no checkpoint in", "step-00000003.damaged-2 is damaged", "another directory"]);
}

#[test]
fn other_names_are_errors_that_name_the_way_out() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path(), 1);
    let path = step_path(root.path(), 1).display().to_string();
    let resume = |add: &(dyn Fn(&mut Run) -> Result<Option<Resumed>, Error> + Sync), parts: &[&str]| {
        let errors = ranks(2, |world| {
            let mut run = Run::new(world, &[("dp_shard", 2)], 0.5);
            let before = weights(&run.vars);
            let error = add(&mut run).unwrap_err().to_string();
            assert_eq!(weights(&run.vars), before);
            assert_eq!((run.seen.len(), run.adamw.param_groups()[0].hyper["lr"].as_f64()), (0, Some(0.5)));
            error
        });
        all_refused(errors, &[&["rank 0", &path[..]], parts].concat());
    };
    resume(
        &|run| run.checkpoints(root.path()).resume(run.state().value("extra", &mut 1)),
        &["lacks `extra`", "allow_missing(\"extra\")"],
    );
    resume(
        &|run| {
            let Run { world, vars, adamw, sgd, seen, .. } = run;
            let state = TrainState::new(vars).optimizer(adamw).optimizer(sgd).value("seen", seen);
            CheckpointManager::new(world, root.path()).resume(state)
        },
        &["holds `rng`", "`value(\"rng\", ..)`", "allow_unexpected(\"rng\")"],
    );
    resume(
        &|run| {
            let state = TrainState::new(&run.vars).optimizer(&mut run.adamw).allow_unexpected("[rs]*");
            CheckpointManager::new(&run.world, root.path()).resume(state)
        },
        &["holds `optim.state.blocks.0.down.bias.momentum_buffer`", "and 6 more", "add its optimizer by `optimizer`"],
    );
    resume(
        &|run| {
            let mut optim = AdamW::new(run.vars.trainable(), AdamWConfig::default())?;
            let state = TrainState::new(&run.vars).optimizer(&mut optim).allow_unexpected("[rs]*");
            CheckpointManager::new(&run.world, root.path()).resume(state)
        },
        &["hyper-parameters"],
    );
    resume(
        &|run| {
            let mut seen = String::new();
            let Run { world, vars, adamw, sgd, rng, .. } = run;
            let state =
                TrainState::new(vars).optimizer(adamw).optimizer(sgd).value("seen", &mut seen).value("rng", rng);
            CheckpointManager::new(world, root.path()).resume(state)
        },
        &["`seen` is [1]", "expected a string"],
    );
    // The ways out.
    ranks(2, |world| {
        let mut run = Run::on_all(world);
        let (mut extra, mut ema) = (5, Ema::new(run.vars.params(), 0.9).unwrap());
        let Run { world, vars, adamw, .. } = &mut run;
        let state = TrainState::new(vars)
            .optimizer(adamw)
            .ema(&mut ema)
            .value("extra", &mut extra)
            .allow_missing("extra")
            .allow_missing("ema.*")
            .allow_unexpected("optim.state.*.bias.*")
            .allow_unexpected("seen")
            .allow_unexpected("rng");
        let resumed = CheckpointManager::new(world, root.path()).resume(state).unwrap();
        assert_eq!((resumed.unwrap().step, extra, ema.updates().unwrap(), run.adamw.states()[0].step), (1, 5, 0, 1));
    });
}

#[test]
fn values_that_a_resume_could_not_read_are_not_saved() {
    let root = tempfile::tempdir().unwrap();
    let save = |add: &(dyn for<'a> Fn(TrainState<'a>, &'a mut f64, usize) -> TrainState<'a> + Sync), parts: &[&str]| {
        let errors = ranks(2, |world| {
            let (rank, mut run) = (world.rank(), Run::on_all(world));
            let mut number = if rank == 1 { 1. } else { 0. };
            let mut checkpoints = run.checkpoints(root.path());
            checkpoints.save(1, add(run.state(), &mut number, rank)).unwrap_err().to_string()
        });
        all_refused(errors, parts);
    };
    save(
        &|state, number, _| state.value("place", number),
        &["`place` is 1.0 on rank 1 and 0.0 on rank 0", "`rank_value`"],
    );
    save(
        &|state, number, _| {
            *number = f64::NAN;
            state.value("place", number)
        },
        &["rank 0", "`place` cannot be saved", "null"],
    );
    save(&|state, number, _| state.value("step", number), &["take it from the result of `resume`"]);
    save(&|state, number, _| state.value("optim.x", number), &["`optim.x`", "reserved"]);
    save(&|state, number, _| state.value("", number), &["is empty"]);
    save(&|state, number, _| state.value("seen", number), &["two parts", "`seen`"]);
    assert!(names(root.path()).is_empty());
}

#[test]
fn each_rank_has_its_own_value() {
    let root = tempfile::tempdir().unwrap();
    ranks(3, |world| {
        let (vars, _model) = built(&world, WIDTH);
        let mut place = 10 * world.rank() as u64;
        let mut checkpoints = CheckpointManager::new(&world, root.path());
        checkpoints.save(1, TrainState::new(&vars).rank_value("place", &mut place)).unwrap();
        place = 7;
        checkpoints.resume(TrainState::new(&vars).rank_value("place", &mut place)).unwrap();
        assert_eq!(place, 10 * world.rank() as u64);
    });
    let errors = ranks(2, |world| {
        let (vars, _model) = built(&world, WIDTH);
        let mut checkpoints = CheckpointManager::new(&world, root.path());
        let mut all: Vec<u64> = vec![];
        checkpoints.resume(TrainState::new(&vars).value("place", &mut all)).unwrap();
        assert_eq!(all, [0, 10, 20]);
        checkpoints.resume(TrainState::new(&vars).rank_value("place", &mut 0u64)).unwrap_err().to_string()
    });
    all_refused(errors, &["step-00000001", "values of 3 ranks", "this run has 2", "into a Vec"]);
}

#[test]
fn saves_beside_an_earlier_run_are_errors() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path(), 3);
    let errors = ranks(2, |world| {
        let mut run = Run::on_all(world);
        [2, 3].map(|step| run.checkpoints(root.path()).save(step, run.state()).unwrap_err().to_string())
    });
    for [earlier, same] in errors {
        refused(Err::<(), _>(earlier), &["rank 0", "step 2 cannot be saved", "step-00000003", "resume"]);
        refused(Err::<(), _>(same), &["rank 0", "step 3 cannot be saved", "step-00000003", "resume"]);
    }
}

#[test]
fn values_that_are_not_finite_are_not_saved() {
    let root = tempfile::tempdir().unwrap();
    ranks(2, |world| {
        let mut run = Run::on_all(world);
        let param = &run.vars.params()[0];
        let nan = Tensor::full(f32::NAN, param.var().dims(), param.var().device()).unwrap();
        param.set_local(&nan).unwrap();
        let mut checkpoints = run.checkpoints(root.path());
        let error = checkpoints.save(1, run.state()).unwrap_err();
        assert!(matches!(error, Error::NonFinite(_)), "{error}");
        checkpoints.allow_non_finite().save(1, run.state()).unwrap();
    });
    assert_eq!(names(root.path()), ["step-00000001"]);
}

#[test]
fn hosts_have_directories_of_their_own() {
    let disks: [TempDir; 2] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let on_host = |run: &Run| {
        let host = run.world.rank() / 2;
        let checkpoints = run.checkpoints(disks[host].path()).keep_newest(2);
        checkpoints.asynchronous().host(&format!("node{host}")).unwrap()
    };
    ranks(4, |world| {
        let mut run = Run::on_all(world);
        let mut checkpoints = on_host(&run);
        assert_eq!(checkpoints.resume(run.state()).unwrap(), None);
        run.train(&mut checkpoints, 1..=3);
        checkpoints.finish().unwrap();
    });
    let both = || disks.each_ref().map(|disk| names(disk.path()));
    assert_eq!(both(), [["step-00000002", "step-00000003"]; 2]);
    // The second host died in the save of step 3.
    std::fs::remove_dir_all(step_path(disks[1].path(), 3)).unwrap();
    damage(&step_path(disks[0].path(), 3), 0);
    std::fs::remove_file(step_path(disks[0].path(), 3).join("checkpoint.json")).unwrap();
    ranks(4, |world| {
        let mut run = Run::on_all(world);
        let mut checkpoints = on_host(&run);
        let resumed = checkpoints.resume(run.state()).unwrap().unwrap();
        assert_eq!(resumed, Resumed { step: 2, path: step_path(disks[run.world.rank() / 2].path(), 2) });
        run.train(&mut checkpoints, 3..=3);
        checkpoints.finish().unwrap();
    });
    let [first, second] = both();
    assert_eq!(first, ["step-00000002", "step-00000003", "step-00000003.damaged"]);
    assert_eq!(second, ["step-00000002", "step-00000003"]);
}

#[test]
fn loads_checkpoints_of_the_parts() {
    let root = tempfile::tempdir().unwrap();
    let want = ranks(2, |world| {
        let mut run = Run::on_all(world);
        (1..=2).for_each(|step| run.step(step));
        let mut tensors = model_tensors(&run.vars).unwrap();
        let optim: [&dyn ShardedOptimizer; 2] = [&run.adamw, &run.sgd];
        optim.iter().for_each(|optim| tensors.extend(optimizer_tensors(*optim).unwrap()));
        let groups = optim.iter().flat_map(|optim| optimizer_values(*optim)["optim.param_groups"].as_array().cloned());
        let mut values = serde_json::Map::new();
        values.insert("optim.param_groups".into(), groups.flatten().collect());
        values.insert("seen".into(), serde_json::json!([1, 2]));
        values.insert("rng".into(), serde_json::to_value(run.rng).unwrap());
        // Values of `train`.
        values.insert("sequences".into(), 24.into());
        values.insert("train.run".into(), serde_json::json!({ "--seed": "1" }));
        let state = SaveState { mesh: run.vars.mesh().layout().clone(), tensors, values };
        // The step is in the name alone.
        fsdp_ckpt::save(root.path().join("step-2"), run.world.group(), &state).unwrap();
        weights(&run.vars)
    });
    let got = ranks(2, |world| {
        let mut run = Run::new(world, &[("dp_shard", 2)], 0.5);
        let mut checkpoints = run.checkpoints(root.path()).keep_newest(1);
        refused(checkpoints.resume(run.state()), &["holds `sequences`, `train.run`", "`value(\"sequences\", ..)`"]);
        let state = run.state().allow_unexpected("sequences").allow_unexpected("train.*");
        assert_eq!(checkpoints.resume(state).unwrap().unwrap().step, 2);
        assert_eq!((&run.seen[..], run.adamw.param_groups()[0].hyper["lr"].as_f64()), (&[1, 2][..], Some(0.01)));
        let loaded = weights(&run.vars);
        run.train(&mut checkpoints, 3..=3);
        loaded
    });
    assert_eq!(got, want);
    assert_eq!(names(root.path()), ["step-00000003"]);
}

#[test]
fn a_run_has_several_models() {
    let root = tempfile::tempdir().unwrap();
    let build = |world: &World| {
        let vars = vars_on(world, &[("dp_shard", world.size())]);
        let model =
            shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), |vb| nn::linear(WIDTH, 3, vb)).unwrap();
        (vars, model)
    };
    let x = |world: &World| input(world.rank(), &[2, WIDTH]);
    let want = ranks(2, |world| {
        let ((vars, model), (critic, critic_model)) = (build(&world), build(&world));
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut sgd = SGD::new(critic.trainable(), SgdConfig { lr: 0.1, ..SgdConfig::default() }).unwrap();
        let mut ema = Ema::new(vars.params(), 0.5).unwrap();
        let mut scaler = GradScaler::new(8.);
        scaler.load_state(GradScalerState { growth_tracker: 3, ..scaler.state() }).unwrap();
        let x = x(&world);
        optim.step(&model.backward(&model.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap()).unwrap()).unwrap();
        let loss = critic_model.forward(&x).unwrap().sum_all().unwrap();
        sgd.step(&critic_model.backward(&loss).unwrap()).unwrap();
        ema.update().unwrap();
        let mut rate = 0.1;
        let part = TrainState::new(&critic).optimizer(&mut sgd).value("rate", &mut rate);
        let state = TrainState::new(&vars).optimizer(&mut optim).ema(&mut ema).scaler(&mut scaler).part("critic", part);
        CheckpointManager::new(&world, root.path()).save(1, state).unwrap();
        (weights(&vars), weights(&critic))
    });
    let source = fsdp_ckpt::open(step_path(root.path(), 1)).unwrap();
    assert!(source.tensors().contains_key("critic.optim.state.weight.step"));
    assert_eq!(source.values()["critic.rate"], 0.1);
    let got = ranks(4, |world| {
        let ((vars, _model), (critic, _critic_model)) = (build(&world), build(&world));
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut sgd = SGD::new(critic.trainable(), SgdConfig::default()).unwrap();
        let mut ema = Ema::new(vars.params(), 0.5).unwrap();
        let (mut scaler, mut rate) = (GradScaler::default(), 0.);
        let part = TrainState::new(&critic).optimizer(&mut sgd).value("rate", &mut rate);
        let state = TrainState::new(&vars).optimizer(&mut optim).ema(&mut ema).scaler(&mut scaler).part("critic", part);
        CheckpointManager::new(&world, root.path()).resume(state).unwrap().unwrap();
        assert_eq!((ema.updates().unwrap(), rate), (1, 0.1));
        assert_eq!((scaler.state().scale, scaler.state().growth_tracker), (8., 3));
        assert_eq!((optim.states()[0].step, sgd.states()[0].step), (1, 1));
        assert_eq!(sgd.param_groups()[0].hyper["lr"].as_f64(), Some(0.1));
        (weights(&vars), weights(&critic))
    });
    assert_eq!(got[0], want[0]);
}

#[test]
fn loads_a_chosen_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    saved(root.path(), 2);
    let forked = root.path().join("forked");
    let errors = ranks(2, |world| {
        let mut run = Run::on_all(world);
        let mut checkpoints = run.checkpoints(&forked);
        assert_eq!(checkpoints.load(step_path(root.path(), 1), run.state()).unwrap().step, 1);
        // The other run's checkpoint is not a save of this one.
        checkpoints.save(1, run.state()).unwrap();
        run.train(&mut checkpoints, 2..=2);
        checkpoints.load(root.path().join("none"), run.state()).unwrap_err().to_string()
    });
    all_refused(errors, &["can't load", "none has no", "load another checkpoint"]);
    assert_eq!(names(&forked), ["step-00000001", "step-00000002"]);
}

#[test]
fn failed_saves_in_the_background_are_reported_by_the_next_call() {
    let root = tempfile::tempdir().unwrap();
    ranks(2, |world| {
        let mut run = Run::on_all(world);
        let mut checkpoints = run.checkpoints(root.path()).asynchronous();
        run.train(&mut checkpoints, 1..=1);
        run.world.group().barrier().wait().unwrap();
        checkpoints.save(2, run.state()).unwrap();
        checkpoints.finish().unwrap();
        // A file where the directory of the checkpoint has to be.
        let blocked = root.path().join("blocked");
        if run.world.rank() == 0 {
            std::fs::create_dir(&blocked).unwrap();
            std::fs::write(step_path(&blocked, 3), "").unwrap();
        }
        run.world.group().barrier().wait().unwrap();
        let mut checkpoints = run.checkpoints(&blocked).asynchronous();
        checkpoints.save(3, run.state()).unwrap();
        let error = checkpoints.save(3, run.state()).unwrap_err().to_string();
        assert!(error.contains("step-00000003"), "{error}");
        checkpoints.save(4, run.state()).unwrap();
        checkpoints.finish().unwrap();
        run.world.group().barrier().wait().unwrap();
        assert_eq!(names(&blocked), ["step-00000003", "step-00000004"]);
    });
}
