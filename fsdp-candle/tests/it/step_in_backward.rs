//! An optimizer that steps in backward, unit by unit, has the bits of one that steps after it.

use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, GradNorm, MixedPrecisionPolicy, Muon, MuonConfig, OffloadPolicy, Recurse,
    ReshardAfterForward, ShardedOptimizer, ShardedVarMap, World, grad_norm,
};

use crate::common::{
    Gradients, LAYERS, Sharded, WIDTH, batch, built, loss_of, mean_square, ranks, refused, sharded, vars_on, weights,
};

type Shared = Arc<Mutex<Box<dyn ShardedOptimizer>>>;

fn adamw(vars: &ShardedVarMap) -> Box<dyn ShardedOptimizer> {
    Box::new(AdamW::new(vars.trainable(), AdamWConfig { lr: 0.02, ..AdamWConfig::default() }).unwrap())
}

/// Steps in backward, and counts the calls.
fn hook(model: &Sharded, optim: &Shared) -> Arc<Mutex<Vec<usize>>> {
    let calls = Arc::new(Mutex::new(vec![]));
    let (optim, counted) = (optim.clone(), calls.clone());
    let step = move |grads: GradStore| {
        let mut optim = optim.lock().unwrap();
        let states = optim.states();
        counted.lock().unwrap().push(states.iter().filter(|state| grads.get(state.param.var()).is_some()).count());
        Ok(optim.step(&grads)?)
    };
    model.set_post_accumulate_grad_hook(Some(Arc::new(step)));
    calls
}

/// Trains for some steps of two micro-batches each. Returns losses and weights.
fn train(
    world: &World,
    (vars, model): (&ShardedVarMap, &Sharded),
    optim: Box<dyn ShardedOptimizer>,
    in_backward: bool,
    micro_batch: impl Fn(bool),
) -> (Vec<f32>, Gradients) {
    let optim: Shared = Arc::new(Mutex::new(optim));
    if in_backward {
        hook(model, &optim);
    }
    let mut losses = vec![];
    for step in 0..4 {
        for last in [false, true] {
            micro_batch(last);
            let loss = loss_of(model, &batch(world.rank() + 10 * step, WIDTH));
            let grads = model.backward(&loss).unwrap();
            losses.push(loss.to_scalar::<f32>().unwrap());
            let handed_out = vars.trainable().iter().any(|param| grads.get(param.var()).is_some());
            assert_eq!(handed_out, last && !in_backward && !vars.trainable().iter().all(|p| p.region().is_empty()));
            if last && !in_backward {
                optim.lock().unwrap().step(&grads).unwrap();
            }
        }
        assert!(model.parameters_without_gradient().is_empty(), "{:?}", model.parameters_without_gradient());
    }
    (losses, weights(vars))
}

fn compare(
    size: usize,
    mesh: &[(&str, usize)],
    options: impl Fn(FullyShard) -> FullyShard + Sync,
    optim: impl Fn(&ShardedVarMap) -> Box<dyn ShardedOptimizer> + Sync,
    every: bool,
) {
    ranks(size, |world| {
        let run = |in_backward| {
            let vars = vars_on(&world, mesh);
            let model = sharded(&options(FullyShard::new(&vars)), &vars, WIDTH);
            // Micro-batches add up before their reduction, or after it.
            let micro_batch = |last| match every {
                true => model.set_is_last_backward(last),
                false => model.set_requires_gradient_sync(last, Recurse::Yes),
            };
            train(&world, (&vars, &model), optim(&vars), in_backward, micro_batch)
        };
        let (after, within) = (run(false), run(true));
        assert!(after.0[7] < after.0[0]);
        assert_eq!(after.0, within.0, "{mesh:?}");
        assert!(after.1 == within.1, "{mesh:?}");
    });
}

#[test]
fn steps_have_the_bits_of_steps_after_backward() {
    for size in 1..5 {
        compare(size, &[("dp_shard", size)], |opts| opts, adamw, size % 2 == 0);
    }
    let hsdp = &[("dp_replicate", 2), ("dp_shard", 2)];
    compare(4, hsdp, |opts| opts.reshard_after_forward(ReshardAfterForward::Never), adamw, false);
    compare(4, hsdp, |opts| opts.shard_optimizer_over_replicas(true), adamw, true);
    compare(2, &[("dp_shard", 2)], |opts| opts.offload_policy(OffloadPolicy::Cpu { pin_memory: true }), adamw, false);
    let bf16 = |opts: FullyShard| {
        opts.mp_policy(MixedPrecisionPolicy { reduce_dtype: Some(DType::BF16), ..MixedPrecisionPolicy::default() })
    };
    compare(2, &[("dp_shard", 2)], bf16, adamw, true);
    let muon = |vars: &ShardedVarMap| -> Box<dyn ShardedOptimizer> {
        let (matrices, rest) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
        let muon = Muon::new(matrices, MuonConfig { lr: 0.02, ..MuonConfig::default() }).unwrap();
        let adam = AdamW::new(rest, AdamWConfig { lr: 0.02, ..AdamWConfig::default() }).unwrap();
        Box::new(fsdp_candle::Optimizers::new(vec![Box::new(muon), Box::new(adam)]).unwrap())
    };
    compare(3, &[("dp_shard", 3)], |opts| opts, muon, false);
}

#[test]
fn gradients_come_unit_by_unit() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let optim: Shared = Arc::new(Mutex::new(adamw(&vars)));
        let calls = hook(&model, &optim);
        model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let counts = calls.lock().unwrap().clone();
        assert_eq!(counts.len(), LAYERS + 1, "{counts:?}");
        assert_eq!(counts.iter().sum::<usize>(), vars.trainable().len());
        // A unit that ran twice is reduced twice, and steps once.
        calls.lock().unwrap().clear();
        let twice = (0..2).map(|i| mean_square(&model.forward(&batch(i, WIDTH)).unwrap()));
        let loss = twice.reduce(|a, b| (a + b).unwrap()).unwrap();
        model.backward(&loss).unwrap();
        assert_eq!(calls.lock().unwrap().len(), LAYERS + 1);
        assert!(optim.lock().unwrap().states().iter().all(|state| state.step == 2));
        // Without the hook, backward hands them out again.
        model.set_post_accumulate_grad_hook(None);
        let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert!(vars.trainable().iter().all(|param| grads.get(param.var()).is_some()));
    });
}

#[test]
fn norms_of_parts_are_the_norm_of_all() {
    ranks(3, |world| {
        let (vars, model) = built(&world, WIDTH);
        let x = batch(world.rank(), WIDTH);
        let want = grad_norm(&vars, &model.backward(&loss_of(&model, &x)).unwrap()).unwrap();
        let norm = Arc::new(Mutex::new(Some(GradNorm::new(&vars))));
        let parts = norm.clone();
        let add = move |grads: GradStore| Ok(parts.lock().unwrap().as_mut().unwrap().add(&grads)?);
        model.set_post_accumulate_grad_hook(Some(Arc::new(add)));
        model.backward(&loss_of(&model, &x)).unwrap();
        let norm = norm.lock().unwrap().take().unwrap().norm().unwrap();
        assert!((norm - want).abs() <= 1e-12 * want, "{norm} {want}");
    });
}

#[test]
fn an_error_of_the_hook_ends_the_backward() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let x: Tensor = batch(world.rank(), WIDTH);
        model.set_post_accumulate_grad_hook(Some(Arc::new(|_: GradStore| candle_core::bail!("no step"))));
        refused(model.backward(&loss_of(&model, &x)), &["no step"]);
        model.set_post_accumulate_grad_hook(None);
        let grads = model.backward(&loss_of(&model, &x)).unwrap();
        assert!(vars.trainable().iter().all(|param| grads.get(param.var()).is_some()));
    });
}
