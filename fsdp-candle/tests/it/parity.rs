//! A sharded model trains exactly like a plain one: losses, gradients and updates, at every world size.

use crate::common::{batch, plain, ranks, shard_of_gradient, sharded, vars, whole};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, MixedPrecisionPolicy, ReshardAfterForward, clip_grad_norm};

const WIDTH: usize = 5; // odd, so that shards are uneven and, at 4 ranks, some are empty

struct Run {
    losses: Vec<f32>,
    norms: Vec<f64>,
    grads: Vec<(String, Vec<f32>)>,
    weights: Vec<(String, Vec<f32>)>,
}

fn train_sharded(
    world_size: usize,
    steps: usize,
    reshard: ReshardAfterForward,
    seed_rank: fn(usize) -> usize,
) -> Vec<Run> {
    ranks(world_size, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars).reshard_after_forward(reshard);
        let model = sharded(&opts, &vars, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..Default::default() }).unwrap();
        let mut run = Run { losses: vec![], norms: vec![], grads: vec![], weights: vec![] };
        for _ in 0..steps {
            let loss =
                model.forward(&batch(seed_rank(world.rank()), WIDTH)).unwrap().sqr().unwrap().mean_all().unwrap();
            run.losses.push(loss.to_scalar::<f32>().unwrap());
            let mut grads = model.backward(&loss).unwrap();
            run.norms.push(clip_grad_norm(&vars, &mut grads, 0.05).unwrap());
            run.grads = vars
                .params()
                .iter()
                .map(|p| (p.name().to_string(), whole(&vars, p, shard_of_gradient(p, &grads))))
                .collect();
            optim.step(&grads).unwrap();
        }
        run.weights = vars.params().iter().map(|p| (p.name().to_string(), whole(&vars, p, p.var()))).collect();
        assert!(model.parameters_without_gradient().is_empty());
        run
    })
}

/// The same model in one process, with the same initial values, on the mean of `replicas` batches.
fn train_plain(initial: &[(String, Vec<f32>)], steps: usize, replicas: usize) -> Run {
    let map = VarMap::new();
    let model = plain(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), WIDTH);
    let data = map.data().lock().unwrap();
    for (name, values) in initial {
        let var = &data[name];
        var.set(&Tensor::from_slice(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
    }
    let mut moments: Vec<(Tensor, Tensor)> =
        initial.iter().map(|(name, _)| (data[name].zeros_like().unwrap(), data[name].zeros_like().unwrap())).collect();
    let mut run = Run { losses: vec![], norms: vec![], grads: vec![], weights: vec![] };
    for step in 1..=steps {
        let losses: Vec<Tensor> = (0..replicas)
            .map(|rank| model.forward(&batch(rank, WIDTH)).unwrap().sqr().unwrap().mean_all().unwrap())
            .collect();
        run.losses.push(losses[0].to_scalar::<f32>().unwrap());
        let loss = (losses.iter().skip(1).fold(losses[0].clone(), |sum, loss| (sum + loss).unwrap()) / replicas as f64)
            .unwrap();
        let grads = loss.backward().unwrap();
        let square: f64 = initial
            .iter()
            .map(|(name, _)| {
                f64::from(grads.get(&data[name]).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap())
            })
            .sum();
        let norm = square.sqrt();
        run.norms.push(norm);
        let factor = (0.05 / (norm + 1e-6)).min(1.);
        run.grads.clear();
        for ((name, _), (m, v)) in initial.iter().zip(&mut moments) {
            let var = &data[name];
            let g = (grads.get(var).unwrap() * factor).unwrap();
            run.grads.push((name.clone(), g.flatten_all().unwrap().to_vec1().unwrap()));
            *m = ((&*m * 0.9).unwrap() + (&g * 0.1).unwrap()).unwrap();
            *v = ((&*v * 0.999).unwrap() + (g.sqr().unwrap() * 0.001).unwrap()).unwrap();
            let (c1, c2) = (1. - 0.9f64.powi(step as i32), 1. - 0.999f64.powi(step as i32));
            let denominator = ((&*v / c2).unwrap().sqrt().unwrap() + 1e-8).unwrap();
            let update = ((&*m / c1).unwrap() / denominator).unwrap();
            var.set(&((var.as_tensor() * (1. - 0.01 * 0.01)).unwrap() - (update * 0.01).unwrap()).unwrap()).unwrap();
        }
    }
    run.weights =
        initial.iter().map(|(name, _)| (name.clone(), data[name].flatten_all().unwrap().to_vec1().unwrap())).collect();
    run
}

fn close(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = b.iter().fold(1e-3f32, |max, v| max.max(v.abs()));
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= tolerance * scale, "{what}: {a} and {b}");
    }
}

#[test]
fn matches_plain_candle_at_every_world_size() {
    for world_size in 1..=4 {
        for reshard in [ReshardAfterForward::Default, ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let initial = train_sharded(world_size, 0, reshard, |rank| rank).swap_remove(0).weights;
            let sharded = train_sharded(world_size, 4, reshard, |rank| rank);
            let plain = train_plain(&initial, 4, world_size);
            close(&sharded[0].losses, &plain.losses, 1e-5, "losses of rank 0");
            for run in &sharded {
                for (a, b) in run.norms.iter().zip(&plain.norms) {
                    assert!((a - b).abs() < 1e-5 * b, "norms {a} {b}");
                }
                for ((name, a), (_, b)) in run.grads.iter().zip(&plain.grads) {
                    close(a, b, 2e-4, &format!("gradient of {name} at {world_size} ranks"));
                }
                for ((name, a), (_, b)) in run.weights.iter().zip(&plain.weights) {
                    close(a, b, 1e-3, &format!("{name} at {world_size} ranks"));
                }
            }
        }
    }
}

#[test]
fn runs_are_deterministic() {
    let (a, b) = (
        train_sharded(3, 3, ReshardAfterForward::Default, |rank| rank),
        train_sharded(3, 3, ReshardAfterForward::Default, |rank| rank),
    );
    for (a, b) in a.iter().zip(&b) {
        assert_eq!((&a.losses, &a.norms, &a.weights), (&b.losses, &b.norms, &b.weights));
    }
}

#[test]
fn half_precision_is_close_to_single() {
    let single = train_sharded(2, 1, ReshardAfterForward::Default, |rank| rank);
    for dtype in [DType::BF16, DType::F16] {
        let half = ranks(2, |world| {
            let vars = vars(&world);
            let policy =
                MixedPrecisionPolicy { param_dtype: Some(dtype), reduce_dtype: Some(DType::F32), ..Default::default() };
            let model = sharded(&FullyShard::new(&vars).mp_policy(policy), &vars, WIDTH);
            let loss = model
                .forward(&batch(world.rank(), WIDTH))
                .unwrap()
                .to_dtype(DType::F32)
                .unwrap()
                .sqr()
                .unwrap()
                .mean_all()
                .unwrap();
            let grads = model.backward(&loss).unwrap();
            assert!(vars.params().iter().all(|p| grads.get(p.var()).unwrap().dtype() == DType::F32));
            (loss.to_scalar::<f32>().unwrap(), fsdp_candle::grad_norm(&vars, &grads).unwrap())
        });
        for (half, single) in half.iter().zip(&single) {
            assert!(
                (half.0 - single.losses[0]).abs() < 0.02 * single.losses[0],
                "{dtype:?}: {} {}",
                half.0,
                single.losses[0]
            );
            assert!(
                (half.1 - single.norms[0]).abs() < 0.02 * single.norms[0],
                "{dtype:?}: {} {}",
                half.1,
                single.norms[0]
            );
        }
    }
}
