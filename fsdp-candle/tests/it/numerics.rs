//! Norms, scales and narrow numbers.

use std::sync::Arc;

use candle_core::{DType, Module};
use fsdp_candle::{
    AdamW, AdamWConfig, AllGatherExtension, ClipOptions, FullyShard, GradScaler, Int8Blocks, MixedPrecisionPolicy,
    NormType, clip_grad_norm_with, fully_shard, nn,
};

use crate::common::{WIDTH, assert_close, batch, gradients, loss_of, ranks, reference, sharded, vars, whole};

#[test]
fn eight_bit_gathers_of_frozen_weights_stay_near() {
    ranks(2, |world| {
        let output = |quantised: bool| {
            let vars = vars(&world);
            vars.freeze(|name| name.ends_with("weight") && !name.contains("norm"));
            let int8: Arc<dyn AllGatherExtension> = Arc::new(Int8Blocks::new(64));
            let opts = FullyShard::new(&vars).all_gather_extension(move |name| {
                (quantised && name.ends_with("weight") && !name.contains("norm")).then(|| int8.clone())
            });
            let model = sharded(&opts, &vars, WIDTH);
            let y = model.forward(&batch(world.rank(), WIDTH)).unwrap();
            let grads = model.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
            assert!(gradients(&vars, &grads).iter().all(|(_, grad)| grad.iter().all(|v| v.is_finite())));
            y.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let (exact, near) = (output(false), output(true));
        let size = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v * v)).sum::<f64>().sqrt();
        let difference = size(&mut exact.iter().zip(&near).map(|(a, b)| a - b)) / size(&mut exact.iter().copied());
        assert!(difference > 0. && difference < 0.05, "{difference}");
    });
}

#[test]
fn norms_of_every_order() {
    ranks(3, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let all: Vec<f64> =
            gradients(&vars, &grads).iter().flat_map(|(_, v)| v.iter().map(|&v| f64::from(v).abs())).collect();
        for (norm_type, want) in [
            (NormType::Two, all.iter().map(|v| v * v).sum::<f64>().sqrt()),
            (NormType::P(1.), all.iter().sum()),
            (NormType::P(3.), all.iter().map(|v| v.powi(3)).sum::<f64>().cbrt()),
            (NormType::Infinity, all.iter().copied().fold(0., f64::max)),
        ] {
            let options = ClipOptions { max_norm: 1e9, norm_type, error_if_nonfinite: true };
            let got = clip_grad_norm_with(&vars, &mut grads, &options).unwrap();
            assert!((got - want).abs() < 1e-5 * want, "{norm_type:?}: {got} instead of {want}");
        }
        let bad = ClipOptions { max_norm: 1., norm_type: NormType::P(-1.), error_if_nonfinite: false };
        assert!(clip_grad_norm_with(&vars, &mut grads, &bad).unwrap_err().to_string().contains("order -1"));
        let first = vars.trainable()[0].clone();
        if first.region().elements() > 0 {
            grads.insert(first.var(), (grads.get(first.var()).unwrap() / 0.).unwrap());
        }
        let strict = ClipOptions { max_norm: 1., norm_type: NormType::Infinity, error_if_nonfinite: true };
        assert!(clip_grad_norm_with(&vars, &mut grads, &strict).unwrap_err().to_string().contains("norm is"));
    });
}

#[test]
fn one_ranks_overflow_skips_everybodys_step() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut scaler = GradScaler::new(1024.);
        scaler.set_growth_interval(2).unwrap();
        let want = reference(&world);
        let before: Vec<_> = vars.params().iter().map(|param| whole(&vars, param, param.var())).collect();
        for (step, (overflow, scale)) in
            [(false, 1024.), (true, 512.), (false, 512.), (false, 1024.)].into_iter().enumerate()
        {
            let loss = loss_of(&model, &batch(world.rank(), WIDTH));
            let mut grads = model.backward(&scaler.scale(&loss).unwrap()).unwrap();
            let first = vars.trainable()[0].clone();
            if overflow && world.rank() == 1 {
                grads.insert(first.var(), (grads.get(first.var()).unwrap() * f64::INFINITY).unwrap());
            }
            assert_eq!(scaler.unscale(&vars, &mut grads).unwrap(), overflow);
            if step == 0 {
                assert_close(&gradients(&vars, &grads), &want, 1e-6);
            }
            assert_eq!(scaler.step(&mut optim, &grads).unwrap(), !overflow);
            scaler.update().unwrap();
            assert_eq!(scaler.current_scale(), scale);
        }
        assert_eq!(optim.states()[0].step, 3);
        let after: Vec<_> = vars.params().iter().map(|param| whole(&vars, param, param.var())).collect();
        assert!(before != after && after.iter().flatten().all(|v| v.is_finite()));
    });
}

#[test]
fn a_parameter_may_keep_its_own_dtype() {
    ranks(2, |world| {
        let vars = vars(&world);
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(DType::BF16),
            keep_dtype_fn: Some(Arc::new(|name| name.contains("norm"))),
            ..Default::default()
        };
        let opts = FullyShard::new(&vars).mp_policy(policy);
        let norm = fully_shard(&opts, vars.builder(DType::F32).pp("norm"), |vb| nn::rms_norm(4, 1e-5, vb)).unwrap();
        let head = fully_shard(&opts, vars.builder(DType::F32).pp("head"), |vb| nn::linear(4, 4, vb)).unwrap();
        assert_eq!(norm.params()[0].compute_dtype(), DType::F32);
        assert_eq!(head.params()[0].compute_dtype(), DType::BF16);
        // Inputs are cast to the unit's dtype, outputs come in it.
        assert_eq!(head.forward(&batch(0, 4)).unwrap().dtype(), DType::BF16);
    });
}
