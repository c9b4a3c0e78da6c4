//! Optimizer state on disk gives the bits of optimizer state in memory, and its checkpoints.

use std::path::Path;

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Error, FsdpModule, FsdpParam, FullyShard,
    OffloadPolicy, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap, StateOnDisk, ValuesOf, World, check_finite,
    fully_shard, get_optimizer_state_dict, load_model, load_optimizer, model_tensors, nn, optimizer_tensors,
    optimizer_values, set_optimizer_state_dict,
};
use fsdp_ckpt::{LoadOptions, SaveState, save};
use fsdp_test_support::files;
use std::sync::Arc;

use crate::common::{assert_contains, device, elements, full, input, loss_of, ranks, refused, vars};

const WIDTH: usize = 96;

/// Two layers. On one rank, their moments take several of the smallest blocks. On four ranks, the last layer's shards
/// are empty on two ranks.
struct Layers(nn::Linear, nn::Linear);

impl Module for Layers {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&nn::gelu(&self.0.forward(x)?)?)
    }
}

fn layers(vars: &ShardedVarMap, dtype: DType) -> FsdpModule<Layers> {
    let opts = FullyShard::new(vars).offload_policy(OffloadPolicy::Cpu { pin_memory: false });
    let build = |vb: candle_nn::VarBuilder<'static>| {
        Ok(Layers(nn::linear(WIDTH, 131, vb.pp("up"))?, nn::linear(131, 2, vb.pp("down"))?))
    };
    fully_shard(&opts, vars.builder(dtype), build).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AdamW,
    AdamW8bit,
    Adam,
    Sgd,
    PlainSgd,
}

const KINDS: [Kind; 5] = [Kind::AdamW, Kind::AdamW8bit, Kind::Adam, Kind::Sgd, Kind::PlainSgd];

/// Makes an optimizer with two groups, with its state on disk if there is a directory.
fn optimizer(kind: Kind, vars: &ShardedVarMap, dir: Option<&Path>) -> Box<dyn ShardedOptimizer> {
    let is_bias = |param: &Arc<FsdpParam>| param.name().ends_with("bias");
    let (biases, weights): (Vec<_>, Vec<_>) = vars.trainable().into_iter().partition(is_bias);
    let disk = dir.map(|dir| StateOnDisk::new(dir).memory_bytes(0));
    macro_rules! make {
        ($optim:ident, $config:expr) => {{
            let groups = vec![(weights, $config(0.1)), (biases, $config(0.))];
            match &disk {
                Some(disk) => Box::new($optim::on_disk(groups, disk).unwrap()),
                None => Box::new($optim::with_groups(groups).unwrap()),
            }
        }};
    }
    match kind {
        Kind::AdamW => make!(AdamW, |weight_decay| AdamWConfig { lr: 0.02, weight_decay, ..AdamWConfig::default() }),
        Kind::AdamW8bit => make!(AdamW8bit, |weight_decay| AdamW8bitConfig {
            weight_decay,
            min_8bit_size: 1000,
            ..AdamW8bitConfig::default()
        }),
        Kind::Adam => make!(Adam, |weight_decay| AdamConfig { weight_decay, ..AdamConfig::default() }),
        Kind::Sgd => {
            make!(SGD, |weight_decay| SgdConfig { lr: 0.1, momentum: 0.9, dampening: 0., weight_decay, nesterov: true })
        }
        Kind::PlainSgd => make!(SGD, |weight_decay| SgdConfig { weight_decay, ..SgdConfig::default() }),
    }
}

fn train(optim: &mut dyn ShardedOptimizer, model: &FsdpModule<Layers>, dtype: DType, steps: std::ops::Range<usize>) {
    for step in steps {
        let x = input(step, &[4, WIDTH]).to_dtype(dtype).unwrap();
        optim.step(&model.backward(&loss_of(model, &x)).unwrap()).unwrap();
    }
}

/// This rank's weights, step counts and moments, without rounding.
fn values(vars: &ShardedVarMap, optim: &dyn ShardedOptimizer) -> Vec<(String, Vec<f64>)> {
    let mut all = vec![];
    for param in vars.params() {
        all.push((param.name().to_string(), elements(param.var())));
    }
    for state in optim.states() {
        all.push((format!("{}.step", state.param.name()), vec![state.step as f64]));
        for name in state.names() {
            all.push((format!("{}.{name}", state.param.name()), elements(&state.tensor(name).unwrap())));
        }
    }
    all
}

#[test]
fn bits_equal_state_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    for kind in KINDS {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for world_size in 1..=4 {
                let [in_memory, on_disk] = [None, Some(dir.path())].map(|dir| {
                    ranks(world_size, |world| {
                        let vars = vars(&world);
                        let model = layers(&vars, dtype);
                        let mut optim = optimizer(kind, &vars, dir);
                        train(&mut *optim, &model, dtype, 0..3);
                        let bytes: usize = optim.states().iter().map(|state| state.bytes()).sum();
                        let on_disk: u64 = optim.states().iter().map(|state| state.bytes_on_disk()).sum();
                        let (kept, none) =
                            if dir.is_some() { (on_disk as usize, bytes) } else { (bytes, on_disk as usize) };
                        (values(&vars, &*optim), kept, none)
                    })
                });
                assert!(in_memory == on_disk, "{kind:?}, {dtype:?}, {world_size} ranks");
                for (values, _, none) in on_disk {
                    assert!(none == 0 && values.iter().flat_map(|(_, values)| values).all(|value| value.is_finite()));
                }
            }
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Saves a checkpoint. Collective.
fn checkpoint(path: &Path, world: &World, vars: &ShardedVarMap, optim: &dyn ShardedOptimizer) {
    let mut tensors = model_tensors(vars).unwrap();
    tensors.extend(optimizer_tensors(optim).unwrap());
    let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: optimizer_values(optim) };
    save(path, world.group(), &state).unwrap();
}

#[test]
fn checkpoints_resume_on_disk_and_in_memory_at_any_world_size() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    for kind in [Kind::AdamW, Kind::AdamW8bit, Kind::Sgd] {
        let saved = ["memory", "disk"].map(|name| {
            let path = dir.path().join(format!("{kind:?}-{name}"));
            ranks(2, |world| {
                let vars = vars(&world);
                let model = layers(&vars, DType::F32);
                let mut optim = optimizer(kind, &vars, (name == "disk").then_some(&*disk));
                train(&mut *optim, &model, DType::F32, 0..2);
                checkpoint(&path, &world, &vars, &*optim);
            });
            path
        });
        let [in_memory, on_disk] = saved.each_ref().map(|path| files(path));
        assert!(in_memory == on_disk, "{kind:?}");
        for world_size in [1, 2, 3] {
            let [in_memory, on_disk] = [None, Some(&*disk)].map(|disk| {
                ranks(world_size, |world| {
                    let vars = vars(&world);
                    let model = layers(&vars, DType::F32);
                    let mut optim = optimizer(kind, &vars, disk);
                    // A load replaces the state of another run.
                    train(&mut *optim, &model, DType::F32, 7..8);
                    let source = fsdp_ckpt::open(&saved[1]).unwrap();
                    let options = LoadOptions { include: vec!["model.*".into()], ..LoadOptions::default() };
                    load_model(&vars, &*source, &options).unwrap();
                    load_optimizer(&mut *optim, &*source, &LoadOptions::default()).unwrap();
                    let loaded = values(&vars, &*optim);
                    train(&mut *optim, &model, DType::F32, 2..4);
                    (loaded, values(&vars, &*optim))
                })
            });
            assert!(in_memory == on_disk, "{kind:?} on {world_size} ranks");
        }
    }
}

#[test]
fn state_dicts_and_resets_are_those_of_state_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    for kind in KINDS {
        let [in_memory, on_disk] = [None, Some(dir.path())].map(|dir| {
            ranks(2, |world| {
                let vars = vars(&world);
                let model = layers(&vars, DType::F32);
                let mut optim = optimizer(kind, &vars, dir);
                train(&mut *optim, &model, DType::F32, 0..2);
                let dict = get_optimizer_state_dict(&vars, &*optim, &full()).unwrap();
                let trained = values(&vars, &*optim);
                optim.reset().unwrap();
                let reset = values(&vars, &*optim);
                set_optimizer_state_dict(&vars, &mut *optim, &dict, &full()).unwrap();
                if kind != Kind::PlainSgd {
                    assert_eq!(values(&vars, &*optim), trained);
                }
                let copies = dict.tensors.iter().map(|(name, state)| (name.clone(), elements::<f32>(&state.tensor)));
                (copies.collect::<Vec<_>>(), dict.values, trained, reset)
            })
        });
        assert!(in_memory == on_disk, "{kind:?}");
    }
}

#[test]
fn values_that_are_not_finite_are_found_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    for kind in [Kind::AdamW, Kind::AdamW8bit] {
        let [in_memory, on_disk] = [None, Some(dir.path())].map(|dir| {
            ranks(3, |world| {
                let vars = vars(&world);
                let model = layers(&vars, DType::F32);
                let mut optim = optimizer(kind, &vars, dir);
                let x = input(0, &[4, WIDTH]);
                let mut grads = model.backward(&loss_of(&model, &x)).unwrap();
                optim.step(&grads).unwrap();
                check_finite(&vars, &[ValuesOf::Moments(&*optim)]).unwrap();
                if world.rank() == 1 {
                    let param = vars.get("up.weight").unwrap();
                    let mut values = elements::<f32>(param.var());
                    values[7] = f32::NAN;
                    values[2000] = f32::INFINITY;
                    let bad = Tensor::from_vec(values, param.var().dims(), param.var().device()).unwrap();
                    grads.insert(param.var(), bad);
                }
                optim.step(&grads).unwrap();
                check_finite(&vars, &[ValuesOf::Moments(&*optim)]).unwrap_err().to_string()
            })
        });
        assert_eq!(in_memory, on_disk);
        assert_contains(&on_disk[0], &["(on rank 1)", "in the exp_avg of `up.weight`"]);
    }
}

#[test]
fn errors_name_the_directory_and_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    ranks(2, |world| {
        let vars = vars(&world);
        let _model = layers(&vars, DType::F32);
        let on_disk =
            |dir: &Path, config: SgdConfig| SGD::on_disk(vec![(vars.trainable(), config)], &StateOnDisk::new(dir));
        let config = SgdConfig { momentum: 0.9, ..SgdConfig::default() };
        let error = on_disk(&missing, config).unwrap_err();
        let Error::StateOnDisk { rank, dir: at, kind, .. } = &error else { panic!("{error}") };
        assert_eq!((*rank, &**at, *kind), (world.rank(), &*missing, std::io::ErrorKind::NotFound));
        let start = format!("rank {rank}, state on disk in {}: can't create a file: No such file", missing.display());
        assert_contains(&error.to_string(), &[&start, "Pass a directory"]);

        let params = vars.trainable();
        let twice = SGD::on_disk(vec![(params.clone(), config), (params, config)], &StateOnDisk::new(dir.path()));
        refused(twice, &["in the groups of SGD twice"]);

        // New hyper-parameters may need a moment.
        let mut optim = on_disk(dir.path(), SgdConfig::default()).unwrap();
        let hyper = [serde_json::json!({ "momentum": 0.5 }).as_object().unwrap().clone()];
        refused(optim.set_hyper(&hyper), &["no place for `momentum_buffer`", "make the optimizer with"]);
        assert_eq!(optim.param_groups()[0].hyper["momentum"], 0.);
    });
}

/// A shard on a device has no state on disk: each step would copy it to the host and back.
#[test]
fn shards_on_a_device_are_refused() {
    if device().is_cpu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    ranks(1, |world| {
        let vars = vars(&world);
        let build = |vb: candle_nn::VarBuilder<'static>| nn::linear(4, 4, vb);
        let _model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
        let groups = vec![(vars.trainable(), AdamWConfig::default())];
        refused(AdamW::on_disk(groups, &StateOnDisk::new(dir.path())), &["expected host memory", "OffloadPolicy::Cpu"]);
    });
}
