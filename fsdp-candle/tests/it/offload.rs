//! Shards, gradients and optimizer state in host memory give the same bits as on the device. On the host nothing moves.

use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use fsdp_candle::{
    AdamW, AdamWConfig, AllGatherExtension, Float8, FullyShard, GradScaler, MixedPrecisionPolicy, OffloadPolicy,
    ReshardAfterForward, ShardedVarMap, StateDictOptions, ValuesOf, World, check_finite, clip_grad_norm,
    get_model_state_dict, get_optimizer_state_dict, no_grad, set_model_state_dict,
};

use crate::common::{Block, Gradients, Model, Sharded, batch, dict_elements, full, loss_of, ranks, sharded, vars_on};

/// Wide enough for whole pages inside a shard, with biases smaller than a page.
const WIDTH: usize = 48;
const IN_HOST: OffloadPolicy = OffloadPolicy::Cpu { pin_memory: true };
const IN_PAGEABLE: OffloadPolicy = OffloadPolicy::Cpu { pin_memory: false };

/// One of a rank's batches.
fn numbered(world: &World, number: usize) -> Tensor {
    batch(world.rank() + 10 * number, WIDTH)
}

/// The parameters, the optimizer's moments, and the loss of each step.
type Outcome = (Vec<f32>, Gradients);

fn outcome(vars: &ShardedVarMap, optim: &AdamW, losses: Vec<f32>) -> Outcome {
    let options = StateDictOptions::default();
    let mut all = dict_elements(&get_model_state_dict(vars, &options).unwrap());
    all.extend(dict_elements(&get_optimizer_state_dict(vars, optim, &options).unwrap()));
    (losses, all)
}

/// Steps of two micro-batches, both reduced, with evaluations between steps.
fn train(world: &World, vars: &ShardedVarMap, model: &Sharded) -> Outcome {
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..AdamWConfig::default() }).unwrap();
    let mut losses = vec![];
    for step in 0..3 {
        model.set_is_last_backward(false);
        let loss = loss_of(model, &numbered(world, step));
        assert!(model.backward(&loss).unwrap().get(vars.trainable()[0].var()).is_none());
        model.set_is_last_backward(true);
        let grads = model.backward(&loss_of(model, &numbered(world, step + 1))).unwrap();
        losses.push(loss.to_scalar::<f32>().unwrap());
        optim.step(&grads).unwrap();
        losses.push(no_grad(|| loss_of(model, &numbered(world, 9))).to_scalar::<f32>().unwrap());
    }
    outcome(vars, &optim, losses)
}

/// Compares training with an offload policy to training without one. `options` sets other options of the units.
fn compare(
    size: usize,
    dims: &[(&str, usize)],
    policy: OffloadPolicy,
    options: impl Fn(FullyShard) -> FullyShard + Sync,
) {
    ranks(size, |world| {
        let run = |policy| {
            let vars = vars_on(&world, dims);
            let model = sharded(&options(FullyShard::new(&vars)).offload_policy(policy), &vars, WIDTH);
            let home = if policy == OffloadPolicy::None { world.device() } else { &Device::Cpu };
            for param in vars.params() {
                assert!(param.var().device().same_device(home), "{} {policy:?}", param.name());
            }
            train(&world, &vars, &model)
        };
        assert_eq!(run(policy), run(OffloadPolicy::None), "{:?}", world.device());
    });
}

const PAIR: &[(&str, usize)] = &[("dp_shard", 2)];

#[test]
fn training_gives_the_same_bits() {
    type Options = fn(FullyShard) -> FullyShard;
    type Case<'a> = (&'a [(&'a str, usize)], OffloadPolicy, Options);
    let plain: Options = |opts| opts;
    let half: Options =
        |opts| opts.mp_policy(MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() });
    let float8: Options = |opts| {
        opts.all_gather_extension(|name| {
            name.ends_with("down.weight").then(|| std::sync::Arc::new(Float8) as std::sync::Arc<dyn AllGatherExtension>)
        })
    };
    let cases: [Case; 10] = [
        (&[("dp_shard", 1)], IN_HOST, plain),
        (PAIR, IN_HOST, plain),
        (PAIR, IN_PAGEABLE, plain),
        (PAIR, IN_HOST, half),
        (&[("dp_shard", 1)], IN_PAGEABLE, half),
        (PAIR, IN_HOST, float8),
        (&[("dp_shard", 4)], IN_HOST, |opts| opts.reshard_after_forward(ReshardAfterForward::Never)),
        (&[("dp_shard", 4)], IN_HOST, |opts| opts.reshard_after_forward(ReshardAfterForward::To(2))),
        (&[("dp_shard", 4)], IN_HOST, |opts| opts.reshard_after_forward(ReshardAfterForward::Always)),
        (&[("dp_replicate", 2), ("dp_shard", 2)], IN_HOST, plain),
    ];
    for (dims, policy, options) in cases {
        compare(dims.iter().map(|(_, size)| size).product(), dims, policy, options);
    }
    // Empty shards and frozen parameters.
    ranks(5, |world| {
        let run = |policy| {
            let vars = vars_on(&world, &[("dp_shard", 5)]);
            vars.freeze(|name| name.contains("blocks.1")).unwrap();
            let model = sharded(&FullyShard::new(&vars).offload_policy(policy), &vars, WIDTH);
            train(&world, &vars, &model)
        };
        assert_eq!(run(IN_HOST), run(OffloadPolicy::None));
    });
}

#[test]
fn unused_prefetched_shards_are_freed() {
    ranks(2, |world| {
        let run = |policy| {
            let vars = vars_on(&world, PAIR);
            let model = sharded(&FullyShard::new(&vars).offload_policy(policy), &vars, WIDTH);
            let blocks = &model.inner().blocks;
            blocks[0].set_modules_to_forward_prefetch(&blocks[1].units()).unwrap();
            let _ = loss_of(&model, &numbered(&world, 0));
            // Gathered without a use, and again after the shards have changed.
            let before = model.unshard_async().unwrap();
            drop(before);
            model.reshard().unwrap();
            for param in vars.trainable() {
                let doubled = (param.var().as_tensor() * 2.).unwrap();
                param.var().set(&doubled).unwrap();
            }
            train(&world, &vars, &model)
        };
        assert_eq!(run(IN_HOST), run(OffloadPolicy::None));
    });
}

#[test]
fn units_with_and_without_offload_mix() {
    ranks(2, |world| {
        let run = |policy| {
            let vars = vars_on(&world, PAIR);
            let opts = FullyShard::new(&vars);
            let blocks = (0..2).map(|i| {
                let (opts, vb) = (opts.clone().offload_policy(policy), vars.builder(DType::F32));
                fsdp_candle::fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(WIDTH, vb)).unwrap()
            });
            let blocks = blocks.collect();
            let head = |vb: candle_nn::VarBuilder<'static>| {
                Ok(Model { blocks, head: fsdp_candle::nn::linear(WIDTH, 2, vb.pp("head"))? })
            };
            let model = fsdp_candle::fully_shard(&opts, vars.builder(DType::F32), head).unwrap();
            let mut scaler = GradScaler::new(8.);
            let loss = scaler.scale(&loss_of(&model, &numbered(&world, 0))).unwrap();
            let mut grads = model.backward(&loss).unwrap();
            assert!(!scaler.unscale(&vars, &mut grads).unwrap());
            let norm = clip_grad_norm(&vars, &mut grads, 1e-3).unwrap();
            check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Gradients(&grads)]).unwrap();
            let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
            scaler.step(&mut optim, &grads).unwrap();
            let mut plain = candle_nn::SGD::new(vars.trainable_vars(), 0.1).unwrap();
            Optimizer::step(&mut plain, &grads).unwrap();
            (norm, outcome(&vars, &optim, vec![]).1)
        };
        let ((norm, got), (want_norm, want)) = (run(IN_HOST), run(OffloadPolicy::None));
        assert!((norm - want_norm).abs() <= 1e-6 * want_norm, "{norm} instead of {want_norm}");
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() <= 1e-5 * (want.abs() + 1e-3), "{name}: {got} instead of {want}");
            }
        }
    });
}

#[test]
fn state_dicts_move_between_host_and_device() {
    for full_state_dict in [false, true] {
        ranks(2, |world| {
            let options = StateDictOptions { full_state_dict, ..StateDictOptions::default() };
            let make = |policy| {
                let vars = vars_on(&world, PAIR);
                let model = sharded(&FullyShard::new(&vars).offload_policy(policy), &vars, WIDTH);
                (vars, model)
            };
            let ((here, _on_device), (there, in_host)) = (make(OffloadPolicy::None), make(IN_HOST));
            let before = loss_of(&in_host, &numbered(&world, 0)).to_scalar::<f32>().unwrap();
            for param in here.trainable() {
                param.var().set(&(param.var().as_tensor() * 0.5).unwrap()).unwrap();
            }
            let dict = get_model_state_dict(&here, &options).unwrap();
            // Parameters gathered by a forward are gathered again.
            set_model_state_dict(&there, &dict, &options).unwrap();
            assert_ne!(loss_of(&in_host, &numbered(&world, 0)).to_scalar::<f32>().unwrap(), before);
            let options = full();
            let whole = |vars| dict_elements(&get_model_state_dict(vars, &options).unwrap());
            assert_eq!(whole(&there), whole(&here));
        });
    }
}

#[test]
fn a_failed_step_leaves_no_state() {
    ranks(2, |world| {
        let run = |policy| {
            let vars = vars_on(&world, PAIR);
            let model = sharded(&FullyShard::new(&vars).offload_policy(policy), &vars, WIDTH);
            model.set_is_last_backward(false);
            model.backward(&loss_of(&model, &numbered(&world, 0))).unwrap();
            model.set_is_last_backward(true);
            model.reset_iter_state();
            train(&world, &vars, &model)
        };
        assert_eq!(run(IN_HOST), run(OffloadPolicy::None));
    });
}
