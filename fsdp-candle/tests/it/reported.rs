//! Faults that users of PyTorch's FSDP2 reported, and that must not happen here. `docs/reports.md` has the reports.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::initializer::{Fallback, Philox, Pretrained};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, FsdpModule, FullyShard, MixedPrecisionPolicy,
    Muon, MuonConfig, ReshardAfterForward, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap, StateDictOptions,
    StateOnDisk, ValuesOf, WeightFormat, World, check_finite, clip_grad_norm, fully_shard, get_model_state_dict,
    load_model, load_optimizer, model_tensors, nn, no_grad, optimizer_tensors,
};
use fsdp_ckpt::{LoadOptions, SaveState, hf};

use crate::common::{
    Block, Gradients, LAYERS, Model, Own, Parts, Plain, WIDTH, alone, assert_close, assert_contains, assert_part,
    batch, built, counted, device, elements, gradients_of, input, loss_of, mean, mean_square, on_cuda, plain, ranks,
    reference, rounding, sharded, times, vars, vars_on, weights,
};

/// Parameters of BF16 that are frozen in the first step, and not in the second.
#[test]
fn reduce_dtype_holds_after_unfreezing() {
    ranks(2, |world| {
        let run = |frozen: Option<fn(&str) -> bool>| {
            let vars = vars(&world);
            let policy = MixedPrecisionPolicy {
                param_dtype: Some(DType::BF16),
                reduce_dtype: Some(DType::F32),
                ..Default::default()
            };
            let model = sharded(&FullyShard::new(&vars).mp_policy(policy), &vars, WIDTH);
            let dtypes: Arc<Mutex<Vec<fsdp_core::DType>>> = Arc::default();
            let seen = dtypes.clone();
            let record = Own::new(move |parts: Parts<'_>| {
                if let Parts::Scatter(parts) = parts {
                    seen.lock().unwrap().extend(parts.iter().map(|part| part.input.dtype()));
                }
                None
            });
            model.set_custom_reduce_scatter(Some(record.clone()));
            model.inner().blocks.iter().for_each(|block| block.set_custom_reduce_scatter(Some(record.clone())));
            let x = batch(world.rank(), WIDTH);
            if let Some(frozen) = frozen {
                vars.set_requires_grad(false, frozen).unwrap();
                let loss = loss_of(&model, &x);
                if !vars.trainable().is_empty() {
                    model.backward(&loss).unwrap();
                }
                vars.set_requires_grad(true, |_| true).unwrap();
                dtypes.lock().unwrap().clear();
            }
            let grads = gradients_of(&vars, &model, &x);
            let dtypes = dtypes.lock().unwrap();
            assert_eq!(dtypes.len(), vars.params().len());
            assert!(dtypes.iter().all(|&dtype| dtype == fsdp_core::DType::F32), "{dtypes:?}");
            grads
        };
        let want = run(None);
        for frozen in [|_: &str| true, |name: &str| name.starts_with("blocks"), |name: &str| name.ends_with("bias")] {
            assert_close(&run(Some(frozen)), &want, rounding(DType::F32));
        }
    });
}

/// Evaluation has no backward, which would free the shares that forward keeps.
#[test]
fn evaluation_steps_need_the_same_memory() {
    const WIDTH: usize = 32;
    // A norm and two layers, and the head in the root.
    let block = 4 * (WIDTH + 3 * WIDTH * (WIDTH + 1) + WIDTH * (3 * WIDTH + 1));
    let root = 4 * 2 * (WIDTH + 1);
    ranks(4, |world| {
        let policies = [(ReshardAfterForward::Always, 0), (ReshardAfterForward::To(2), LAYERS * block / 2)];
        for ((policy, kept), has_graph) in policies.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(policy), &vars, WIDTH);
            let x = batch(world.rank(), WIDTH);
            let step = |_| {
                match has_graph {
                    true => drop(model.forward(&x).unwrap()),
                    false => drop(no_grad(|| model.forward(&x)).unwrap()),
                }
                vars.buffer_memory()
            };
            let seen: Vec<_> = (0..8).map(step).collect();
            // Two units, where the next one is gathered while this one computes.
            let bound = 2 * block + root + kept;
            assert!(seen.iter().all(|memory| memory.now == seen[0].now), "{policy:?}: {seen:?}");
            assert!(seen[0].now <= kept + root && seen[7].most <= bound, "{policy:?}: {seen:?}, not {bound}");
        }
    });
}

/// Blocks are on a mesh of replicas, the head on all ranks.
#[test]
fn norms_over_two_meshes_are_those_of_one_process() {
    let plain = Plain::new(&weights(&built(&alone(), WIDTH).0), |vb| plain(vb, WIDTH));
    let losses: Vec<Tensor> = (0..4).map(|rank| loss_of(&plain.model, &batch(rank, WIDTH))).collect();
    let want = plain.gradients(&mean(&losses).backward().unwrap());
    let square = |(_, values): &(String, Vec<f32>)| values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
    let norm = want.iter().map(square).sum::<f64>().sqrt();
    let clipped = times(&want, 0.25);
    let norms = ranks(4, |world| {
        let vars = vars(&world);
        let pairs = world.mesh(&[("replicate", 2), ("shard", 2)]).unwrap();
        let root = FullyShard::new(&vars);
        let of_blocks = root.clone().mesh(&pairs).unwrap();
        let vb = vars.builder(DType::F32);
        let block = |i| fully_shard(&of_blocks, vb.pp(format!("blocks.{i}")), |vb| Block::new(WIDTH, vb)).unwrap();
        let blocks = (0..LAYERS).map(block).collect();
        let build = |vb: VarBuilder<'static>| Ok(Model { blocks, head: nn::linear(WIDTH, 2, vb.pp("head"))? });
        let model = fully_shard(&root, vb.clone(), build).unwrap();
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let found = clip_grad_norm(&vars, &mut grads, norm / 4.).unwrap();
        vars.trainable().iter().for_each(|param| assert_part(param, &grads, &clipped));
        found
    });
    assert!(norms.iter().all(|found| found.to_bits() == norms[0].to_bits()), "{norms:?}");
    assert!((norms[0] - norm).abs() < 1e-5 * norm, "{norms:?} instead of {norm}");
}

type Make = fn(&ShardedVarMap, &Path) -> Vec<Box<dyn ShardedOptimizer>>;

fn muon(vars: &ShardedVarMap, _: &Path) -> Vec<Box<dyn ShardedOptimizer>> {
    let (matrices, rest): (Vec<_>, Vec<_>) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
    let mut both: Vec<Box<dyn ShardedOptimizer>> = vec![Box::new(Muon::new(matrices, MuonConfig::default()).unwrap())];
    if !rest.is_empty() {
        both.push(Box::new(AdamW::new(rest, AdamWConfig::default()).unwrap()));
    }
    both
}

const OPTIMIZERS: [Make; 6] = [
    |vars, _| vec![Box::new(AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap())],
    |vars, _| vec![Box::new(Adam::new(vars.trainable(), AdamConfig::default()).unwrap())],
    |vars, _| vec![Box::new(SGD::new(vars.trainable(), SgdConfig::default()).unwrap())],
    |vars, _| vec![Box::new(AdamW8bit::new(vars.trainable(), AdamW8bitConfig::default()).unwrap())],
    |vars, dir| {
        let groups = vec![(vars.trainable(), AdamWConfig::default())];
        vec![Box::new(AdamW::on_disk(groups, &StateOnDisk::new(dir).memory_bytes(1 << 20)).unwrap())]
    },
    muon,
];

/// Position of the optimizer with its state on disk.
const ON_DISK: usize = 4;

/// Groups that an optimizer or a norm made in the first step would need memory when it is full.
#[test]
fn groups_are_made_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    for mesh in [&[("dp_shard", 4)][..], &[("dp_replicate", 2), ("dp_shard", 2)]] {
        for make in OPTIMIZERS {
            counted(4, |world, counts| {
                let vars = vars_on(&world, mesh);
                let policy = if mesh.len() == 1 { ReshardAfterForward::To(2) } else { ReshardAfterForward::Always };
                let model = sharded(&FullyShard::new(&vars).reshard_after_forward(policy), &vars, WIDTH);
                let mut optimizers = make(&vars, dir.path());
                let before = counts.groups();
                assert!(before > 0);
                for _ in 0..2 {
                    let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
                    clip_grad_norm(&vars, &mut grads, 0.1).unwrap();
                    check_finite(&vars, &[ValuesOf::Gradients(&grads)]).unwrap();
                    optimizers.iter_mut().for_each(|optim| optim.step(&grads).unwrap());
                }
                assert_eq!(counts.groups(), before);
            });
        }
    }
}

fn steps(
    world: &World,
    model: &impl Module,
    backward: impl Fn(&Tensor) -> candle_core::backprop::GradStore,
    optim: &mut AdamW,
    steps: std::ops::Range<usize>,
) -> Vec<u32> {
    let step = |step: usize| {
        let loss = loss_of(model, &input(10 * step + world.rank(), &[4, 5]));
        optim.step(&backward(&loss)).unwrap();
        loss.to_scalar::<f32>().unwrap().to_bits()
    };
    steps.map(step).collect()
}

/// Five ranks share the two rows of the head, and five rows or fifteen of the blocks.
#[test]
fn uneven_and_empty_shards_resume_with_the_same_bits() {
    for size in [3, 4, 5] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step-3");
        ranks(size, |world| {
            let run = |resumes: bool| {
                let (vars, model) = built(&world, 5);
                assert!(size < 3 || vars.params().iter().any(|param| param.region().is_empty()) == (world.rank() >= 2));
                let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..Default::default() }).unwrap();
                let backward = |loss: &Tensor| model.backward(loss).unwrap();
                if resumes {
                    let source = fsdp_ckpt::open(&dir).unwrap();
                    load_model(&vars, &*source, &LoadOptions::default()).unwrap();
                    load_optimizer(&mut optim, &*source, &LoadOptions::default()).unwrap();
                } else {
                    steps(&world, &model, backward, &mut optim, 0..3);
                    let mut tensors = model_tensors(&vars).unwrap();
                    tensors.extend(optimizer_tensors(&optim).unwrap());
                    let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
                    fsdp_ckpt::save(&dir, world.group(), &state).unwrap();
                }
                (steps(&world, &model, backward, &mut optim, 3..6), weights(&vars))
            };
            assert_eq!(run(false), run(true));
        });
    }
}

/// A model's file, read by ranks that have no rows of some parameters.
#[test]
fn files_load_where_shards_are_empty() {
    let root = tempfile::tempdir().unwrap();
    let map = candle_nn::VarMap::new();
    plain(VarBuilder::from_varmap(&map, DType::F32, &device()), 3).unwrap();
    for (name, var) in map.data().lock().unwrap().iter() {
        var.set(&input(name.len(), var.dims())).unwrap();
    }
    map.save(root.path().join("model.safetensors")).unwrap();
    let want: Vec<(String, Vec<f32>)> =
        map.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), elements(var))).collect();
    for named in [false, true] {
        ranks(5, |world| {
            let vars = vars(&world);
            if !named {
                vars.init_with(Pretrained::open(root.path()).unwrap()).unwrap();
            }
            let model = sharded(&FullyShard::new(&vars), &vars, 3);
            assert!(world.rank() < 3 || vars.params().iter().any(|param| param.region().is_empty()));
            if named {
                let source = fsdp_ckpt::open(root.path()).unwrap();
                load_model(&vars, &*source, &LoadOptions::default()).unwrap();
            }
            for (name, values) in weights(&vars) {
                assert_eq!(want.iter().find(|(of, _)| *of == name).unwrap().1, values, "{name}");
            }
            gradients_of(&vars, &model, &batch(world.rank(), 3));
        });
    }
}

/// The first forward is an evaluation, in which units are inspected.
#[test]
fn training_after_an_evaluation_has_the_same_bits() {
    ranks(2, |world| {
        let want = reference(&world);
        for policy in [ReshardAfterForward::Default, ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(policy), &vars, WIDTH);
            let x = batch(world.rank(), WIDTH);
            let evaluated = no_grad(|| model.forward(&x)).unwrap();
            assert_close(&gradients_of(&vars, &model, &x), &want, rounding(DType::F32));
            let again = no_grad(|| model.forward(&x)).unwrap();
            assert_eq!(elements::<f32>(&evaluated), elements::<f32>(&again));
            assert_close(&gradients_of(&vars, &model, &x), &want, rounding(DType::F32));
        }
    });
}

const LORA: nn::LoraConfig = nn::LoraConfig { rank: 2, alpha: 4. };

/// Adapters keep F32 masters in a unit whose base is stored and computed in BF16.
#[test]
fn adapters_of_f32_train_in_a_unit_of_bf16() {
    for size in [1, 2, 3] {
        ranks(size, |world| {
            let run = |base: DType| {
                let vars = vars(&world);
                vars.freeze(|name| !nn::is_adapter(name)).unwrap();
                let policy = MixedPrecisionPolicy {
                    param_dtype: Some(DType::BF16),
                    reduce_dtype: Some(DType::F32),
                    ..Default::default()
                };
                let model = fully_shard(&FullyShard::new(&vars).mp_policy(policy), vars.builder(base), |vb| {
                    let linear = nn::linear(WIDTH, WIDTH, vb.clone())?;
                    nn::lora(linear, WIDTH, WIDTH, LORA, vb.to_dtype(DType::F32))
                })
                .unwrap();
                let dtypes: Vec<DType> = vars.params().iter().map(|param| param.dtype()).collect();
                assert_eq!(dtypes, [base, base, DType::F32, DType::F32]);
                let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 1e-4, ..Default::default() }).unwrap();
                let before = weights(&vars);
                for step in 0..3 {
                    let grads = model.backward(&loss_of(&model, &batch(step * size + world.rank(), WIDTH))).unwrap();
                    optim.step(&grads).unwrap();
                }
                let after = weights(&vars);
                for ((name, before), (_, after)) in before.iter().zip(&after) {
                    assert_eq!(before != after, nn::is_adapter(name), "{name}");
                }
                after.into_iter().filter(|(name, _)| nn::is_adapter(name)).collect::<Gradients>()
            };
            // A base of BF16 computes as a base of F32 that is rounded for each all-gather.
            assert_close(&run(DType::BF16), &run(DType::F32), rounding(DType::F32));
        });
    }
}

/// Two layers with adapters, over a base in blocks of NF4.
fn quantized(world: &World, base: &Path, adapters: Option<&Path>) -> (ShardedVarMap, FsdpModule<[nn::Linear; 2]>) {
    let vars = vars(world);
    match adapters {
        Some(adapters) => {
            let adapters = Pretrained::open(adapters).unwrap();
            vars.init_with(Fallback::new(Pretrained::open(base).unwrap(), adapters, nn::is_adapter)).unwrap();
        }
        None => vars.init_with(Fallback::new(Pretrained::open(base).unwrap(), Philox::new(0), nn::is_adapter)).unwrap(),
    }
    vars.freeze(|name| !nn::is_adapter(name)).unwrap();
    vars.adapt(LORA, |_| true).unwrap();
    let opts = FullyShard::new(&vars)
        .store(|name, shape| (shape.len() == 2 && !nn::is_adapter(name)).then_some(WeightFormat::Nf4));
    let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
        Ok([nn::linear(64, 128, vb.pp("up"))?, nn::linear(128, 64, vb.pp("down"))?])
    });
    (vars, model.unwrap())
}

#[test]
fn saved_adapters_of_a_quantized_base_have_the_same_outputs() {
    let root = tempfile::tempdir().unwrap();
    let map = candle_nn::VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &device());
    nn::linear(64, 128, vb.pp("up")).unwrap();
    nn::linear(128, 64, vb.pp("down")).unwrap();
    map.save(root.path().join("model.safetensors")).unwrap();
    let saved = root.path().join("adapters");
    let outputs = |model: &FsdpModule<[nn::Linear; 2]>| {
        let x = input(1, &[3, 64]);
        no_grad(|| model.call(|[up, down]| down.forward(&nn::gelu(&up.forward(&x)?)?))).unwrap()
    };
    let want = ranks(2, |world| {
        let (vars, model) = quantized(&world, root.path(), None);
        let untrained = elements::<f32>(&outputs(&model));
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..Default::default() }).unwrap();
        for step in 0..3 {
            let x = input(step * 2 + world.rank(), &[3, 64]);
            let y = model.call(|[up, down]| down.forward(&nn::gelu(&up.forward(&x)?)?)).unwrap();
            optim.step(&model.backward(&mean_square(&y)).unwrap()).unwrap();
        }
        let mut tensors = get_model_state_dict(&vars, &StateDictOptions::default()).unwrap().shards("");
        tensors.retain(|tensor| nn::is_adapter(&tensor.fqn));
        hf::export(&saved, world.group(), &tensors, &[]).unwrap();
        let trained = elements::<f32>(&outputs(&model));
        assert_ne!(untrained, trained);
        vec![("outputs".to_string(), trained)]
    })
    .swap_remove(0);
    for size in [1, 2, 4] {
        ranks(size, |world| {
            let (_vars, model) = quantized(&world, root.path(), Some(&saved));
            assert_close(&vec![("outputs".to_string(), elements(&outputs(&model)))], &want, 1e-6);
        });
    }
}

/// An update of BF16 weights is rounded away where it is small. Rank 0 warns once for each optimizer.
#[test]
fn optimizers_warn_of_half_precision_masters() {
    let dir = tempfile::tempdir().unwrap();
    // State on disk needs shards on the host.
    let optimizers = || OPTIMIZERS.into_iter().enumerate().filter(|(at, _)| *at != ON_DISK || !on_cuda());
    for (dtype, (_, make)) in
        [DType::F32, DType::BF16, DType::F16].into_iter().flat_map(|dtype| optimizers().map(move |make| (dtype, make)))
    {
        let said = ranks(2, |world| {
            let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
            let said = warnings.clone();
            let on_event = move |event: &tracing::Metadata<'_>, text: String| {
                if *event.level() == tracing::Level::WARN && text.contains("master") {
                    said.lock().unwrap().push(text);
                }
            };
            fsdp_test_support::observed(on_event, || {
                let vars = vars(&world);
                let build = |vb: VarBuilder<'static>| nn::linear_no_bias(WIDTH, WIDTH, vb.pp("layer"));
                let model = fully_shard(&FullyShard::new(&vars), vars.builder(dtype), build).unwrap();
                assert_contains(&model.to_string(), &[&format!("layer.weight [6, 6] {dtype:?} ")]);
                drop(make(&vars, dir.path()));
            });
            std::mem::take(&mut *warnings.lock().unwrap())
        });
        let is_half = dtype != DType::F32;
        assert_eq!(said.iter().map(Vec::len).collect::<Vec<_>>(), [usize::from(is_half), 0], "{dtype:?}: {said:?}");
        if is_half {
            assert_contains(&said[0][0], &["`layer.weight`", &format!("{dtype:?}"), "F32", "param_dtype"]);
        }
    }
}
