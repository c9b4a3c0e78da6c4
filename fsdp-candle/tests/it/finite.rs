//! Infinite values and NaN on any rank are found, and named on every rank.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, ClipOptions, Error, FsdpParam, FullyShard, NonFinite, NonFiniteTensor, NormType, ShardedVarMap,
    ValuesOf, World, check_finite, clip_grad_norm, clip_grad_norm_with, fully_shard, grad_norm, nn,
};

use crate::common::{WIDTH, batch, elements, loss_of, ranks, refused, sharded, vars, vars_on};

fn found(outcome: fsdp_candle::Result<()>) -> NonFinite {
    match outcome {
        Err(Error::NonFinite(found)) => found,
        other => panic!("{other:?}"),
    }
}

/// A tensor like this one that is `value` everywhere.
fn filled(like: &Tensor, value: f32) -> Tensor {
    Tensor::full(value, like.shape(), like.device()).unwrap()
}

fn of(param: &FsdpParam, what: &'static str, values: u64) -> NonFiniteTensor {
    NonFiniteTensor { parameter: param.name().into(), what, values, of: param.shape().elem_count() as u64 }
}

fn backward(world: &World, vars: &ShardedVarMap) -> GradStore {
    let model = sharded(&FullyShard::new(vars).ignored_params(|name| name == "head.bias"), vars, WIDTH);
    model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap()
}

#[test]
fn all_ranks_report_one_ranks_non_finite_values() {
    // Four ranks: four shards, or two replicas of two shards.
    for replicas in [1, 2] {
        ranks(4, |world| {
            let vars = match replicas {
                1 => vars(&world),
                _ => vars_on(&world, &[("dp_replicate", replicas), ("dp_shard", 4 / replicas)]),
            };
            let mut grads = backward(&world, &vars);
            let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
            optim.step(&grads).unwrap();
            let check = |grads: &GradStore| {
                check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Gradients(grads), ValuesOf::Moments(&optim)])
            };
            check(&grads).unwrap();

            // One element of one rank's gradient, the same on both replicas, as after a reduction.
            let param = vars.get("blocks.1.up.weight").unwrap();
            let shards = world.size() / replicas;
            let holders: Vec<usize> = (0..world.size()).filter(|rank| rank % shards == 1).collect();
            let good = grads.get(param.var()).unwrap().clone();
            if holders.contains(&world.rank()) {
                let mut values = elements::<f32>(&good);
                values[0] = f32::INFINITY;
                grads.insert(param.var(), Tensor::from_vec(values, good.shape(), good.device()).unwrap());
            }
            let one = NonFinite { norm: None, tensors: vec![of(&param, "gradient", 1)], ranks: holders.clone() };
            assert_eq!(found(check(&grads)), one);
            // With `error_if_nonfinite` the norm's error names the same parameters, and nothing is scaled.
            let strict = ClipOptions { max_norm: 1., norm_type: NormType::Two, error_if_nonfinite: true };
            let clipped = clip_grad_norm_with(&vars, &mut grads, &strict).map(drop);
            assert_eq!(found(clipped), NonFinite { norm: Some(f64::INFINITY), ..one });
            assert_eq!(found(check(&grads)).tensors[0].values, 1);
            grads.insert(param.var(), good);

            // A whole parameter, one moment of another, and a value that every rank holds in full.
            let moment = &optim.states()[0];
            let nan = |tensor: &Tensor| tensor.slice_set(&filled(tensor, f32::NAN), 0, 0);
            if param.region().elements() > 0 {
                nan(param.var()).unwrap();
            }
            if moment.param.region().elements() > 0 {
                nan(&moment.tensor("exp_avg_sq").unwrap()).unwrap();
            }
            let (name, bias) = vars.ignored().pop().unwrap();
            nan(&bias).unwrap();
            let all = found(check(&grads));
            let elements = |param: &FsdpParam| param.shape().elem_count() as u64;
            let whole = NonFiniteTensor { parameter: name, what: "", values: 2, of: 2 };
            let tensors =
                vec![of(&param, "", elements(&param)), whole, of(&moment.param, "exp_avg_sq", elements(&moment.param))];
            assert_eq!(all, NonFinite { norm: None, tensors, ranks: (0..4).collect() });
            assert_eq!(
                all.to_string(),
                "116 values are infinite or NaN (on rank 0, 1, 2, 3): 108 of 108 in `blocks.1.up.weight`, \
                 2 of 2 in `head.bias`, 6 of 6 in the exp_avg_sq of `blocks.0.norm.weight`"
            );
        });
    }
}

#[test]
fn clips_gradients_whose_squares_overflow() {
    ranks(2, |world| {
        let vars = vars(&world);
        let mut grads = backward(&world, &vars);
        // The squares overflow F32.
        let mut elements = 0;
        for param in vars.trainable() {
            elements += param.shape().elem_count();
            grads.insert(param.var(), filled(param.var(), 1e30));
        }
        let strict = ClipOptions { max_norm: 1., norm_type: NormType::P(99.), error_if_nonfinite: true };
        refused(clip_grad_norm_with(&vars, &mut grads, &strict), &["norm is inf: each value is finite"]);
        let want = 1e30 * (elements as f64).sqrt();
        for norm in [grad_norm(&vars, &grads).unwrap(), clip_grad_norm(&vars, &mut grads, 1.).unwrap()] {
            assert!((norm / want - 1.).abs() < 1e-6, "{norm} instead of {want}");
        }
        assert!((grad_norm(&vars, &grads).unwrap() - 1.).abs() < 1e-5);
    });
}

#[test]
fn pipeline_stages_report_their_own_values() {
    ranks(4, |world| {
        let grid = world.mesh(&[("stage", 2), ("shard", 2)]).unwrap();
        // A map over the ranks of one stage, with one parameter shared by the stages and one of its own.
        let vars = ShardedVarMap::new(&grid.slice(&["shard"]).unwrap(), world.device());
        let shared = FullyShard::new(&vars).mesh(&world.mesh(&[("all", 4)]).unwrap()).unwrap();
        let linear = |opts: &FullyShard, name: &str| {
            fully_shard(opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 4, vb.pp(name))).unwrap()
        };
        let (_shared, _own) = (linear(&shared, "shared"), linear(&FullyShard::new(&vars), "own"));
        let check = || check_finite(&vars, &[ValuesOf::Parameters]);
        check().unwrap();
        let stage = world.rank() / 2;
        let own = vars.get("own.weight").unwrap();
        if stage == 0 {
            let nan = filled(own.var(), f32::NAN);
            own.var().as_tensor().slice_set(&nan, 0, 0).unwrap();
            assert_eq!(found(check()).tensors, vec![of(&own, "", 16)]);
        } else {
            check().unwrap();
        }
        // Both stages report the shared parameter.
        let tied = vars.get("shared.weight").unwrap();
        if world.rank() % 2 == 0 {
            tied.var().as_tensor().slice_set(&filled(tied.var(), f32::INFINITY), 0, 0).unwrap();
        }
        let all = found(check());
        assert!(all.tensors.iter().any(|found| found.parameter == "shared.weight"), "{all:?}");
    });
}

#[test]
fn checks_buffers() {
    ranks(2, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let _layer =
            fully_shard(&opts, vars.builder(DType::F32), |vb| candle_nn::batch_norm(5, 1e-5, vb.pp("bn"))).unwrap();
        check_finite(&vars, &[ValuesOf::Parameters]).unwrap();
        let (name, variance) = vars.buffers().pop().unwrap();
        if world.rank() == 1 {
            variance.as_tensor().slice_set(&filled(&variance, f32::NAN), 0, 0).unwrap();
        }
        let of_variance = NonFiniteTensor { parameter: name, what: "", values: 5, of: 5 };
        assert_eq!(
            found(check_finite(&vars, &[ValuesOf::Parameters])),
            NonFinite { norm: None, tensors: vec![of_variance], ranks: vec![1] }
        );
    });
}
