//! A sharded model trains exactly like a plain one: losses, gradients and updates, at every world size.

use candle_core::{DType, Tensor, Var};
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, MixedPrecisionPolicy, ReshardAfterForward, clip_grad_norm};

use crate::common::{
    Gradients, Plain, assert_close, batch, gradients, loss_of, mean, plain, ranks, sharded, times, vars, weights,
};

const WIDTH: usize = 5; // odd, so that shards are uneven and, at 4 ranks, some are empty

#[derive(Default)]
struct Run {
    losses: Vec<f32>,
    norms: Vec<f64>,
    grads: Gradients,
    weights: Gradients,
}

fn train_sharded(size: usize, steps: usize, reshard: ReshardAfterForward) -> Vec<Run> {
    ranks(size, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars).reshard_after_forward(reshard);
        let model = sharded(&opts, &vars, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..Default::default() }).unwrap();
        let mut run = Run::default();
        for _ in 0..steps {
            let loss = loss_of(&model, &batch(world.rank(), WIDTH));
            run.losses.push(loss.to_scalar::<f32>().unwrap());
            let mut grads = model.backward(&loss).unwrap();
            run.norms.push(clip_grad_norm(&vars, &mut grads, 0.05).unwrap());
            run.grads = gradients(&vars, &grads);
            optim.step(&grads).unwrap();
        }
        run.weights = weights(&vars);
        assert!(model.parameters_without_gradient().is_empty());
        run
    })
}

/// The same model in one process, with the same initial values, on the mean of `replicas` batches.
fn train_plain(initial: &Gradients, steps: usize, replicas: usize) -> Run {
    let plain = Plain::new(initial, |vb| plain(vb, WIDTH));
    let zeros = |(_, var): &(String, Var)| (var.zeros_like().unwrap(), var.zeros_like().unwrap());
    let mut moments: Vec<(Tensor, Tensor)> = plain.vars.iter().map(zeros).collect();
    let mut run = Run::default();
    for step in 1..=steps {
        let losses: Vec<Tensor> = (0..replicas).map(|rank| loss_of(&plain.model, &batch(rank, WIDTH))).collect();
        run.losses.push(losses[0].to_scalar::<f32>().unwrap());
        let grads = mean(&losses).backward().unwrap();
        let values = plain.gradients(&grads);
        let norm = values.iter().flat_map(|(_, grad)| grad).map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        run.norms.push(norm);
        let factor = (0.05 / (norm + 1e-6)).min(1.);
        run.grads = times(&values, factor as f32);
        for ((_, var), (m, v)) in plain.vars.iter().zip(&mut moments) {
            let g = (grads.get(var).unwrap() * factor).unwrap();
            *m = ((&*m * 0.9).unwrap() + (&g * 0.1).unwrap()).unwrap();
            *v = ((&*v * 0.999).unwrap() + (g.sqr().unwrap() * 0.001).unwrap()).unwrap();
            let (c1, c2) = (1. - 0.9f64.powi(step as i32), 1. - 0.999f64.powi(step as i32));
            let denominator = ((&*v / c2).unwrap().sqrt().unwrap() + 1e-8).unwrap();
            let update = ((&*m / c1).unwrap() / denominator).unwrap();
            var.set(&((var.as_tensor() * (1. - 0.01 * 0.01)).unwrap() - (update * 0.01).unwrap()).unwrap()).unwrap();
        }
    }
    run.weights = plain.values();
    run
}

#[test]
fn matches_plain_candle_at_every_world_size() {
    for size in 1..=4 {
        for reshard in [ReshardAfterForward::Default, ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let initial = train_sharded(size, 0, reshard).swap_remove(0).weights;
            let sharded = train_sharded(size, 4, reshard);
            let plain = train_plain(&initial, 4, size);
            let losses = |run: &Run| vec![("losses of rank 0".to_string(), run.losses.clone())];
            assert_close(&losses(&sharded[0]), &losses(&plain), 1e-5);
            for run in &sharded {
                for (a, b) in run.norms.iter().zip(&plain.norms) {
                    assert!((a - b).abs() < 1e-5 * b, "norms {a} {b}");
                }
                assert_close(&run.grads, &plain.grads, 2e-4);
                assert_close(&run.weights, &plain.weights, 1e-3);
            }
        }
    }
}

#[test]
fn half_precision_is_close_to_single() {
    let single = train_sharded(2, 1, ReshardAfterForward::Default);
    for dtype in [DType::BF16, DType::F16] {
        let half = ranks(2, |world| {
            let vars = vars(&world);
            let policy =
                MixedPrecisionPolicy { param_dtype: Some(dtype), reduce_dtype: Some(DType::F32), ..Default::default() };
            let model = sharded(&FullyShard::new(&vars).mp_policy(policy), &vars, WIDTH);
            let loss = loss_of(&model, &batch(world.rank(), WIDTH));
            let grads = model.backward(&loss).unwrap();
            assert!(vars.params().iter().all(|p| grads.get(p.var()).unwrap().dtype() == DType::F32));
            [f64::from(loss.to_scalar::<f32>().unwrap()), fsdp_candle::grad_norm(&vars, &grads).unwrap()]
        });
        for (half, single) in half.iter().zip(&single) {
            for (half, single) in half.iter().zip([f64::from(single.losses[0]), single.norms[0]]) {
                assert!((half - single).abs() < 0.02 * single, "{dtype:?}: {half} {single}");
            }
        }
    }
}
