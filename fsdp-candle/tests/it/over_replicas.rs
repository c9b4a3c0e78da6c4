//! HSDP whose replicas shard the optimizer state, compared with HSDP whose replicas hold the same state.

use std::sync::Arc;

use candle_core::{DType, Module};
use fsdp_candle::{
    AdamW, AdamWConfig, Error, Float8, FsdpModule, FullyShard, GradcheckOptions, MixedPrecisionPolicy, Placement,
    Recurse, ReshardAfterForward, ShardPlacement, ShardedVarMap, StateDictOptions, ValuesOf, World, check_finite,
    clip_grad_norm, fully_shard, get_state_dict, gradcheck, load_model, load_optimizer, model_tensors, nn, no_grad,
    optimizer_tensors, optimizer_values, set_state_dict, shard,
};
use fsdp_ckpt::{LoadOptions, SaveState, save};

use crate::common::{
    Gradients, Model, Sharded, WIDTH, batch, counted, dict_elements, elements, full, loss_of, mean_square, one_of,
    ranks, refused, rounding, sharded, vars_on,
};

const CONFIG: AdamWConfig = AdamWConfig { lr: 0.02, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };

fn map(world: &World, replicas: usize) -> ShardedVarMap {
    let dims = [("dp_replicate", replicas), ("dp_shard", world.size() / replicas)];
    vars_on(world, &dims)
}

/// All full parameters and moments.
fn state(vars: &ShardedVarMap, optim: &AdamW) -> Gradients {
    let (model, optim) = get_state_dict(vars, optim, &full()).unwrap();
    [dict_elements(&model), dict_elements(&optim)].concat()
}

/// The options of a run.
#[derive(Clone, Default)]
struct Way {
    options: Option<fn(FullyShard) -> FullyShard>,
    /// Micro-batches before the last one: how many are not reduced, and how many are reduced over shards only.
    apart: [usize; 2],
    clip: Option<f64>,
    evaluates: bool,
}

type Run = (Vec<f32>, Vec<f64>, Gradients);

fn train(world: &World, replicas: usize, divided: bool, way: &Way) -> Run {
    let vars = map(world, replicas);
    let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(divided);
    let opts = way.options.map_or(opts.clone(), |options| options(opts));
    let model = sharded(&opts, &vars, WIDTH);
    let mut optim = AdamW::new(vars.trainable(), CONFIG).unwrap();
    let (mut losses, mut norms) = (vec![], vec![]);
    for step in 0..4 {
        let [unsynced, unreplicated] = way.apart;
        let micros = unsynced + unreplicated + 1;
        let mut grads = None;
        for micro in 0..micros {
            model.set_requires_gradient_sync(micro >= unsynced, Recurse::Yes);
            model.set_requires_all_reduce(micro + 1 == micros, Recurse::Yes);
            let loss = loss_of(&model, &batch(world.rank() + 10 * step + 3 * micro, WIDTH));
            if way.evaluates {
                no_grad(|| loss_of(&model, &batch(0, WIDTH)));
            }
            losses.push(loss.to_scalar().unwrap());
            grads = Some(model.backward(&loss).unwrap());
        }
        let mut grads = grads.unwrap();
        norms.push(clip_grad_norm(&vars, &mut grads, way.clip.unwrap_or(f64::INFINITY)).unwrap());
        optim.step(&grads).unwrap();
    }
    (losses, norms, state(&vars, &optim))
}

/// Asserts that numbers are equal: bit for bit on the host, whose sums have one order.
fn assert_same(got: &[f32], want: &[f32], dtype: DType, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        // These include squares of gradients, after four steps.
        let allowed = 4. * rounding(dtype) * want.abs().max(1.);
        assert!(got.to_bits() == want.to_bits() || (got - want).abs() <= allowed, "{what}: {got} and {want}");
    }
}

fn assert_same_states(got: &Gradients, want: &Gradients, dtype: DType, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, got), (want_name, want)) in got.iter().zip(want) {
        assert_eq!(name, want_name, "{what}");
        assert_same(got, want, dtype, &format!("{what} {name}"));
    }
}

#[test]
fn matches_plain_replicas() {
    // Heads of two rows on three and six ranks: uneven and empty shards.
    let meshes = [(2, 2), (4, 2), (6, 2), (6, 3), (4, 4), (3, 1)];
    let ways: [(&str, Way); 6] = [
        ("plain", Way::default()),
        ("two micro-batches without communication", Way { apart: [2, 0], ..Way::default() }),
        ("two micro-batches within replicas", Way { apart: [0, 2], ..Way::default() }),
        ("both, and evaluations", Way { apart: [1, 1], evaluates: true, ..Way::default() }),
        ("kept", Way { options: Some(|o| o.reshard_after_forward(ReshardAfterForward::Never)), ..Way::default() }),
        ("half", Way { options: Some(|o| o.mp_policy(half())), apart: [0, 1], ..Way::default() }),
    ];
    let cases = meshes.into_iter().flat_map(|mesh| ways.iter().map(move |way| (mesh, way)));
    for ((size, replicas), (name, way)) in cases.step_by(one_of(5)) {
        ranks(size, |world| {
            let (losses, norms, state) = train(&world, replicas, true, way);
            let (want_losses, want_norms, want) = train(&world, replicas, false, way);
            let what = format!("{size} {replicas} {name}");
            let dtype = if *name == "half" { DType::BF16 } else { DType::F32 };
            assert_same(&losses, &want_losses, dtype, &what);
            for (norm, want) in norms.iter().zip(want_norms) {
                let allowed = f64::from(rounding(dtype).max(1e-6)) * want;
                assert!((norm - want).abs() < allowed, "{what}: {norm} and {want}");
            }
            assert_same_states(&state, &want, dtype, &what);
        });
    }
}

fn half() -> MixedPrecisionPolicy {
    MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() }
}

#[test]
fn clipped_steps_differ_by_rounding() {
    let way = Way { clip: Some(0.1), ..Way::default() };
    for (size, replicas) in [(4, 2), (6, 3)] {
        ranks(size, |world| {
            let (losses, _, state) = train(&world, replicas, true, &way);
            let (want_losses, want_norms, want) = train(&world, replicas, false, &way);
            assert!(want_norms.iter().all(|norm| *norm > 0.1));
            let all =
                losses.iter().zip(&want_losses).chain(state.iter().zip(&want).flat_map(|(a, b)| a.1.iter().zip(&b.1)));
            for (got, want) in all {
                assert!((got - want).abs() <= 2e-6 * want.abs().max(0.1), "{got} and {want}");
            }
        });
    }
}

#[test]
fn matches_with_other_placements_and_gathers() {
    let columns: fn(FullyShard) -> FullyShard =
        |opts| opts.shard_placement_fn(|_, shape| (shape == [WIDTH, 3 * WIDTH]).then(|| ShardPlacement::from(1)));
    let eight_bits: fn(FullyShard) -> FullyShard =
        |opts| opts.all_gather_extension(|name| name.ends_with("weight").then(|| Arc::new(Float8) as Arc<_>));
    let neighbours: fn(FullyShard) -> FullyShard = |opts| opts.reshard_after_forward(ReshardAfterForward::To(2));
    for (size, replicas, options) in
        [(6, 3, columns), (6, 2, columns), (6, 3, eight_bits), (4, 2, eight_bits), (8, 2, neighbours)]
    {
        ranks(size, |world| {
            let way = Way { options: Some(options), ..Way::default() };
            let (_, _, state) = train(&world, replicas, true, &way);
            let (_, _, want) = train(&world, replicas, false, &way);
            assert_same_states(&state, &want, DType::F32, &format!("{size} {replicas}"));
        });
    }
    ranks(4, |world| {
        let vars = map(&world, 2);
        let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(true).shard_placement_fn(|_, _| Some(1.into()));
        let built = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(6, 4, vb));
        refused(built, &["does not divide evenly over 2 shard ranks and 2 replicas"]);
    });
}

#[test]
fn matches_with_named_units_and_unused_parameters() {
    ranks(4, |world| {
        let run = |divided: bool| {
            let vars = map(&world, 2);
            vars.freeze(|name| name == "blocks.0.weight").unwrap();
            let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(divided);
            let vb = vars.builder(DType::F32);
            let model = shard(&opts, &["blocks.*"], vb, |vb| {
                let blocks = (0..3)
                    .map(|i| nn::linear(WIDTH, WIDTH, vb.pp(format!("blocks.{i}"))))
                    .collect::<candle_core::Result<Vec<_>>>()?;
                Ok::<_, candle_core::Error>(Model { blocks, head: nn::linear(WIDTH, 2, vb.pp("head"))? })
            })
            .unwrap();
            model.set_reduce_scatter_unused_params(true, Recurse::Yes);
            let mut optim = AdamW::new(vars.trainable(), CONFIG).unwrap();
            for step in 0..3 {
                let x = batch(world.rank() + step, WIDTH);
                // Each rank does not use one block, a different one on each.
                let y = model.call(|model| {
                    let used = model.blocks.iter().enumerate().filter(|(i, _)| i % 4 != world.rank());
                    model.head.forward(&used.map(|(_, block)| block).try_fold(x, |x, block| block.forward(&x))?)
                });
                let grads = model.backward(&mean_square(&y.unwrap())).unwrap();
                optim.step(&grads).unwrap();
            }
            vars.set_requires_grad(false, |name| name.starts_with("blocks.1")).unwrap();
            let y = model.call(|model| model.forward(&batch(world.rank(), WIDTH))).unwrap();
            optim.step(&model.backward(&y.sum_all().unwrap()).unwrap()).unwrap();
            state(&vars, &optim)
        };
        assert!(run(true) == run(false));
    });
}

#[test]
fn matches_after_failed_steps_and_set_values() {
    ranks(4, |world| {
        let run = |divided: bool| {
            let vars = map(&world, 2);
            let model = sharded(&FullyShard::new(&vars).shard_optimizer_over_replicas(divided), &vars, WIDTH);
            let x = batch(world.rank(), WIDTH);
            let two = (loss_of(&model, &x) + loss_of(&model, &batch(7, WIDTH))).unwrap();
            let grads = model.backward(&two).unwrap();
            let mut seen: Vec<Vec<f32>> = vec![];
            let mut optim = AdamW::new(vars.trainable(), CONFIG).unwrap();
            optim.step(&grads).unwrap();
            let failed: candle_core::Result<()> = model.call(|_| candle_core::bail!("on purpose"));
            refused(failed, &["on purpose"]);
            seen.push(elements::<f32>(&no_grad(|| loss_of(&model, &x))));
            // A state dict replaces the values that the next forward would gather.
            let options = StateDictOptions::default();
            let (dict, moments) = get_state_dict(&vars, &optim, &options).unwrap();
            let halved = dict.tensors.iter().map(|(name, state)| {
                let tensor = (&state.tensor * 0.5).unwrap();
                (name.clone(), fsdp_candle::StateTensor { tensor, ..state.clone() })
            });
            let dict = fsdp_candle::StateDict { tensors: halved.collect(), values: dict.values.clone() };
            set_state_dict(&vars, &mut optim, &dict, &moments, &options).unwrap();
            seen.push(elements::<f32>(&no_grad(|| loss_of(&model, &x))));
            model.unshard().unwrap();
            model.reshard().unwrap();
            let grads = model.backward(&loss_of(&model, &x)).unwrap();
            check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Gradients(&grads)]).unwrap();
            (seen, state(&vars, &optim))
        };
        assert!(run(true) == run(false));
    });
}

#[test]
fn manual_unshard_has_the_last_step() {
    ranks(4, |world| {
        let vars = map(&world, 2);
        let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(true);
        let layer = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(WIDTH, 8, vb)).unwrap();
        let mut optim = AdamW::new(vars.trainable(), CONFIG).unwrap();
        let x = batch(0, WIDTH);
        let weight = vars.get("weight").unwrap();
        let check = |what: &str| {
            let want = x.matmul(&weight.dtensor().unwrap().full_tensor().unwrap().t().unwrap()).unwrap();
            layer.unshard().unwrap();
            let found = layer.inner().forward(&x).unwrap().detach();
            layer.reshard().unwrap();
            let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
            assert!(elements::<f32>(&found).iter().zip(&elements(&want)).all(near), "{what}");
        };
        let grads = layer.backward(&layer.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
        check("before a step");
        optim.step(&grads).unwrap();
        check("after it");
        layer.unshard().unwrap();
        let zeros = (weight.dtensor().unwrap().full_tensor().unwrap() * 0.).unwrap();
        weight.set_full(&(zeros + 1.).unwrap()).unwrap();
        check("after it was set");
    });
}

#[test]
fn gradcheck_and_check_finite_work() {
    ranks(6, |world| {
        let vars = map(&world, 3);
        let model = sharded(&FullyShard::new(&vars).shard_optimizer_over_replicas(true), &vars, WIDTH);
        gradcheck(&model, &GradcheckOptions::default(), |model| {
            model.forward(&batch(world.rank(), WIDTH))?.sqr()?.mean_all()
        })
        .unwrap();
        // One element on one rank.
        let weight = vars.get("blocks.1.down.weight").unwrap();
        if world.rank() == 4 {
            let bad = (weight.var().zeros_like().unwrap() / 0.).unwrap();
            weight.var().set(&bad).unwrap();
        }
        let own = weight.region().elements();
        let Err(Error::NonFinite(found)) = check_finite(&vars, &[ValuesOf::Parameters]) else { panic!("not found") };
        assert_eq!((found.tensors.len(), found.ranks), (1, vec![4]));
        let on_4 = ranks_elements(&world, own);
        assert_eq!(found.tensors[0].values, on_4[4] as u64);
    });
}

fn ranks_elements(world: &World, own: usize) -> Vec<usize> {
    let all = world.group().gather_values(vec![own as i64]).unwrap();
    all.into_iter().map(|count| count as usize).collect()
}

#[test]
fn checkpoints_reshard() {
    let dir = tempfile::tempdir().unwrap();
    // World size, replicas, whether replicas shard the state.
    let ways = [(4, 2, true), (6, 3, true), (4, 2, false), (3, 1, false), (1, 1, false), (6, 2, true)];
    let step = |vars: &ShardedVarMap, model: &Sharded, optim: &mut AdamW| {
        let grads = model.backward(&loss_of(model, &batch(0, WIDTH))).unwrap();
        optim.step(&grads).unwrap();
        state(vars, optim)
    };
    for (from, (size, replicas, divided)) in ways.into_iter().enumerate() {
        let path = dir.path().join(format!("{from}"));
        let states = ranks(size, |world| {
            let vars = map(&world, replicas);
            let model = sharded(&FullyShard::new(&vars).shard_optimizer_over_replicas(divided), &vars, WIDTH);
            let mut optim = AdamW::new(vars.trainable(), CONFIG).unwrap();
            let saved = step(&vars, &model, &mut optim);
            let mut tensors = model_tensors(&vars).unwrap();
            tensors.extend(optimizer_tensors(&optim).unwrap());
            let values = optimizer_values(&optim);
            save(&path, world.group(), &SaveState { mesh: vars.mesh().layout().clone(), tensors, values }).unwrap();
            (saved, step(&vars, &model, &mut optim))
        });
        for (size, replicas, divided) in ways {
            ranks(size, |world| {
                let vars = map(&world, replicas);
                let model = sharded(&FullyShard::new(&vars).shard_optimizer_over_replicas(divided), &vars, WIDTH);
                let mut optim = AdamW::new(vars.trainable(), CONFIG).unwrap();
                no_grad(|| loss_of(&model, &batch(0, WIDTH)));
                let source = fsdp_ckpt::open(&path).unwrap();
                load_model(&vars, &*source, &LoadOptions::default()).unwrap();
                load_optimizer(&mut optim, &*source, &LoadOptions::default()).unwrap();
                assert!(state(&vars, &optim) == states[0].0, "{from} to {size} {replicas} {divided}");
                let next = step(&vars, &model, &mut optim);
                for ((name, next), (_, want)) in next.iter().zip(&states[0].1) {
                    let near = next.iter().zip(want).all(|(a, b)| (a - b).abs() < 2e-5 * b.abs().max(0.1));
                    assert!(near, "{from} to {size} {replicas} {divided}: {name}");
                }
            });
        }
    }
}

#[test]
fn placements_are_strided_over_replicas() {
    ranks(6, |world| {
        let vars = map(&world, 3);
        let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(true);
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| vb.get((8, 2), "weight")).unwrap();
        let weight = &model.params()[0];
        assert_eq!(weight.placements(), [Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard(0)]);
        // Four rows a shard, of which the replicas have two, two and none.
        let (replica, shard) = (world.rank() / 2, world.rank() % 2);
        let rows = [2, 2, 0][replica];
        assert_eq!(weight.var().dims(), [rows, 2]);
        assert!(rows == 0 || weight.region().offsets == [4 * shard + 2 * replica, 0]);
        assert_eq!(ranks_elements(&world, weight.region().elements()).iter().sum::<usize>(), 16);
    });
}

/// The collectives of a step and their bytes against the formula: with `P` parameters a unit, `R` replicas and `S`
/// shard ranks, a rank's inputs are `P / (R S)` for the all-gather over replicas, once a step; `P / S` for each
/// all-gather of forward and backward; `P` for the reduce-scatter over shard ranks, and `P / S` for the one over
/// replicas.
#[test]
fn communicates_the_expected_bytes() {
    const ROWS: usize = 24;
    for (replicas, shards) in [(2, 2), (2, 3), (3, 2)] {
        counted(replicas * shards, |world, counts| {
            let build = |divided: bool| {
                let vars = map(&world, replicas);
                let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(divided);
                let vb = vars.builder(DType::F32);
                let blocks = (0..2)
                    .map(|i| fully_shard(&opts, vb.pp(i), |vb| nn::linear_no_bias(ROWS, ROWS, vb)).unwrap())
                    .collect::<Vec<_>>();
                let model = fully_shard(&opts, vb, |_| Ok(blocks)).unwrap();
                model.set_implicit_prefetch(false);
                (vars, model)
            };
            let loss = |model: &FsdpModule<Vec<FsdpModule<nn::Linear>>>| {
                let x = batch(world.rank(), ROWS);
                let y = model.call(|blocks| blocks.iter().try_fold(x, |x, block| block.forward(&x)));
                y.unwrap().sqr().unwrap().mean_all().unwrap()
            };
            let bytes = ROWS * ROWS * 4;
            let (p_rs, p_s) = (bytes / (replicas * shards), bytes / shards);
            let sorted = |mut counts: Vec<(&'static str, usize)>| {
                counts.sort();
                counts
            };
            let times = |count: usize, what: (&'static str, usize)| vec![what; count];

            let (_vars, model) = build(true);
            counts.take();
            model.backward(&loss(&model)).unwrap();
            let mut want = times(2, ("all_gather", p_rs));
            want.extend(times(4, ("all_gather", p_s)));
            want.extend([times(2, ("reduce_scatter", bytes)), times(2, ("reduce_scatter", p_s))].concat());
            assert_eq!(sorted(counts.take()), sorted(want.clone()));
            // Two micro-batches with one reduction: the shards are gathered once.
            model.set_requires_all_reduce(false, Recurse::Yes);
            model.backward(&loss(&model)).unwrap();
            model.set_requires_all_reduce(true, Recurse::Yes);
            model.backward(&loss(&model)).unwrap();
            want.extend([times(4, ("all_gather", p_s)), times(2, ("reduce_scatter", bytes))].concat());
            assert_eq!(sorted(counts.take()), sorted(want));

            // An evaluation gathers once more, and does not affect the next step.
            no_grad(|| loss(&model));
            assert_eq!(counts.names(), ["all_gather"; 4]);

            // With equal replicas, an all-reduce replaces the all-gather and the reduce-scatter.
            let (_vars, model) = build(false);
            counts.take();
            model.backward(&loss(&model)).unwrap();
            let mut want = times(4, ("all_gather", p_s));
            want.extend([times(2, ("reduce_scatter", bytes)), times(2, ("all_reduce", p_s))].concat());
            assert_eq!(sorted(counts.take()), sorted(want));
        });
    }
}
