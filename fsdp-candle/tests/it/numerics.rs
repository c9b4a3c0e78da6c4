//! Gradient norms, gradient scaling and narrow dtypes.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, ClipOptions, FsdpModule, FsdpParam, FullyShard, GradScaler, MixedPrecisionPolicy, NormType,
    SGD, SgdConfig, ShardedVarMap, World, clip_grad_norm_with, fully_shard, nn,
};

use crate::common::{
    WIDTH, assert_close, batch, built, gradients, loss_of, ranks, reference, refused, vars, weights, whole,
};

#[test]
fn refuses_bad_norms() {
    ranks(3, |world| {
        let (vars, model) = built(&world, WIDTH);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let bad = ClipOptions { max_norm: 1., norm_type: NormType::P(-1.), error_if_nonfinite: false };
        refused(clip_grad_norm_with(&vars, &mut grads, &bad), &["order -1"]);
        let first = vars.trainable()[0].clone();
        if first.region().elements() > 0 {
            grads.insert(first.var(), (grads.get(first.var()).unwrap() / 0.).unwrap());
        }
        let strict = ClipOptions { max_norm: 1., norm_type: NormType::Infinity, error_if_nonfinite: true };
        refused(clip_grad_norm_with(&vars, &mut grads, &strict), &["norm is"]);
    });
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut scaler = GradScaler::new(1024.);
        scaler.set_growth_interval(2).unwrap();
        let want = reference(&world);
        let before = weights(&vars);
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
        let after = weights(&vars);
        assert!(before != after && after.iter().flat_map(|(_, values)| values).all(|v| v.is_finite()));
    });
}

/// A model in its own map, its optimizer, and the full weight.
struct Trained {
    vars: ShardedVarMap,
    model: FsdpModule<nn::Linear>,
    optim: SGD,
}

impl Trained {
    fn new(world: &World, name: &str) -> Self {
        let vars = vars(world);
        let build = |vb: candle_nn::VarBuilder<'static>| nn::linear_no_bias(WIDTH, 3, vb.pp(name));
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
        let optim = SGD::new(vars.trainable(), SgdConfig { lr: 0.1, ..SgdConfig::default() }).unwrap();
        Trained { vars, model, optim }
    }

    /// Sets gradients; the last rank's are infinite where `overflow`.
    fn backward(&self, world: &World, scaler: &GradScaler, overflow: bool) -> candle_core::backprop::GradStore {
        let loss = loss_of(&self.model, &batch(world.rank(), WIDTH));
        let mut grads = self.model.backward(&scaler.scale(&loss).unwrap()).unwrap();
        let shard = self.vars.params()[0].var().clone();
        if overflow && world.rank() + 1 == world.size() {
            grads.insert(&shard, Tensor::full(f32::INFINITY, shard.dims(), world.device()).unwrap());
        }
        grads
    }

    fn weight(&self) -> Vec<f32> {
        let param = self.vars.params()[0].clone();
        whole(&self.vars, &param, param.var())
    }
}

#[test]
fn steps_only_on_unscaled_gradients() {
    ranks(2, |world| {
        let (mut a, mut b) = (Trained::new(&world, "a"), Trained::new(&world, "b"));
        let mut scaler = GradScaler::new(1024.);
        let (mut of_a, mut of_b) = (a.backward(&world, &scaler, false), b.backward(&world, &scaler, false));
        let before = b.weight();
        assert!(!scaler.unscale(&a.vars, &mut of_a).unwrap());
        assert!(scaler.step(&mut a.optim, &of_a).unwrap());
        refused(scaler.step(&mut b.optim, &of_b), &["`b.weight`", "call unscale first"]);
        assert_eq!((b.weight(), b.optim.states()[0].step), (before.clone(), 0));
        // An optimizer of both maps needs the gradients of both to be unscaled.
        let all = a.vars.trainable().into_iter().chain(b.vars.trainable()).collect();
        let mut both = SGD::new(all, SgdConfig::default()).unwrap();
        refused(scaler.step(&mut both, &of_b), &["`b.weight`"]);

        assert!(!scaler.unscale(&b.vars, &mut of_b).unwrap());
        assert!(scaler.step(&mut b.optim, &of_b).unwrap());
        let gradient = |param: &fsdp_candle::FsdpParam| whole(&b.vars, param, of_b.get(param.var()).unwrap());
        let want = before.iter().zip(gradient(&b.vars.params()[0])).map(|(before, grad)| before - 0.1 * grad);
        assert!(b.weight().iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6));

        // Different gradients of the same parameters, as large as the scale.
        let again = b.backward(&world, &scaler, false);
        refused(scaler.step(&mut b.optim, &again), &["`b.weight`", "call update"]);
        scaler.update().unwrap();
        refused(scaler.step(&mut b.optim, &again), &["call unscale first"]);
    });
}

#[test]
fn an_overflow_skips_its_optimizers_and_lowers_the_scale() {
    for overflows in [[true, false], [false, true]] {
        ranks(2, |world| {
            let mut both = [Trained::new(&world, "a"), Trained::new(&world, "b")];
            let mut scaler = GradScaler::new(1024.);
            let mut unscaled = vec![];
            for (one, overflow) in both.iter().zip(overflows) {
                let mut grads = one.backward(&world, &scaler, overflow);
                assert_eq!(scaler.unscale(&one.vars, &mut grads).unwrap(), overflow);
                unscaled.push(grads);
            }
            for ((one, grads), overflow) in both.iter_mut().zip(&unscaled).zip(overflows) {
                let before = one.weight();
                assert_eq!(scaler.step(&mut one.optim, grads).unwrap(), !overflow, "{overflows:?}");
                assert_eq!((one.weight() == before, one.optim.states()[0].step == 0), (overflow, overflow));
            }
            // An optimizer without gradients skips the step if any gradient overflowed.
            assert!(!scaler.step(&mut Trained::new(&world, "c").optim, &unscaled[0]).unwrap());
            scaler.update().unwrap();
            assert_eq!(scaler.current_scale(), 512.);

            // An optimizer of both maps skips the step if the gradients of either overflowed.
            let [a, b] = &both;
            let all = a.vars.trainable().into_iter().chain(b.vars.trainable()).collect();
            let mut optim = SGD::new(all, SgdConfig::default()).unwrap();
            let mut grads = a.backward(&world, &scaler, overflows[0]);
            scaler.unscale(&a.vars, &mut grads).unwrap();
            let mut of_b = b.backward(&world, &scaler, overflows[1]);
            scaler.unscale(&b.vars, &mut of_b).unwrap();
            grads.extend(of_b).unwrap();
            assert!(!scaler.step(&mut optim, &grads).unwrap());
        });
    }
}

#[test]
fn parameters_can_keep_their_dtype() {
    ranks(2, |world| {
        let vars = vars(&world);
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(DType::BF16),
            param_dtype_override_fn: Some(Arc::new(|name, dtype| name.contains("norm").then_some(dtype))),
            ..Default::default()
        };
        let opts = FullyShard::new(&vars).mp_policy(policy);
        let norm = fully_shard(&opts, vars.builder(DType::F32).pp("norm"), |vb| nn::rms_norm(4, 1e-5, vb)).unwrap();
        let head = fully_shard(&opts, vars.builder(DType::F32).pp("head"), |vb| nn::linear(4, 4, vb)).unwrap();
        assert_eq!(norm.params()[0].compute_dtype(), DType::F32);
        assert_eq!(head.params()[0].compute_dtype(), DType::BF16);
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(DType::BF16),
            param_dtype_override_fn: Some(Arc::new(|_, _| Some(DType::F16))),
            ..Default::default()
        };
        let opts_f16 = FullyShard::new(&vars).mp_policy(policy);
        let built = fully_shard(&opts_f16, vars.builder(DType::F32).pp("half"), |vb| nn::linear(4, 4, vb));
        refused(built, &["half.weight", "returned F16", "expected F32", "BF16"]);
        // Inputs are cast to the unit's dtype, and so are outputs.
        assert_eq!(head.forward(&batch(0, 4)).unwrap().dtype(), DType::BF16);
        let policy = MixedPrecisionPolicy { output_dtype: Some(DType::F64), ..Default::default() };
        let opts = FullyShard::new(&vars).mp_policy(policy);
        let wide = fully_shard(&opts, vars.builder(DType::F32).pp("wide"), |vb| nn::linear(4, 4, vb)).unwrap();
        assert_eq!(wide.forward(&batch(0, 4)).unwrap().dtype(), DType::F64);
    });
}

#[test]
fn layers_do_not_round_gradients_that_are_reduced_in_f32() {
    ranks(2, |world| {
        let vars = vars(&world);
        let policy = MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() };
        let opts = FullyShard::new(&vars).mp_policy(policy);
        let vb = vars.builder(DType::F32);
        let ours = fully_shard(&opts, vb.pp("ours"), |vb| nn::linear_no_bias(1, 2, vb)).unwrap();
        let candles = fully_shard(&opts, vb.pp("candles"), |vb| candle_nn::linear_no_bias(1, 2, vb)).unwrap();
        let x = Tensor::new(&[[1f32], [1. / 256.]], world.device()).unwrap();
        let gradient = |grads: &GradStore, param: &FsdpParam| whole(&vars, param, grads.get(param.var()).unwrap());
        let of_ours = ours.backward(&ours.forward(&x).unwrap().sum_all().unwrap()).unwrap();
        let of_candles = candles.backward(&candles.forward(&x).unwrap().sum_all().unwrap()).unwrap();
        // 1 + 2^-8 is not a bf16. Candle's layers return gradients of bf16.
        let exact = 1. + 1. / 256.;
        assert_eq!(gradient(&of_ours, &ours.params()[0]), [exact; 2]);
        assert_eq!(gradient(&of_candles, &candles.params()[0]), [1.; 2]);

        let table = fully_shard(&opts, vb.pp("table"), |vb| nn::embedding(2, 1, vb)).unwrap();
        let norm = fully_shard(&opts, vb.pp("norm"), |vb| nn::rms_norm(2, 0., vb)).unwrap();
        let weights = x.to_dtype(DType::BF16).unwrap();
        let loss = |y: Tensor| y.broadcast_mul(&weights).unwrap().sum_all().unwrap();
        let rows = table.forward(&Tensor::zeros(2, DType::U32, world.device()).unwrap()).unwrap();
        assert_eq!(gradient(&table.backward(&loss(rows)).unwrap(), &table.params()[0]), [exact, 0.]);
        let normed = norm.forward(&Tensor::ones((2, 2), DType::BF16, world.device()).unwrap()).unwrap();
        assert_eq!(gradient(&norm.backward(&loss(normed)).unwrap(), &norm.params()[0]), [exact; 2]);
    });
}
