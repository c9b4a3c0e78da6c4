//! 8-bit moments, moving averages, clipping of parameter groups, and gradient accumulation in F32.

use candle_core::{DType, Device, Module, Tensor};
use fsdp_candle::{
    AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, ClipOptions, Ema, FullyShard, GradAccumulator, NamePattern,
    NormType, SGD, SgdConfig, ShardedOptimizer, StateDictOptions, check_finite, clip_grad_norm_of, fully_shard,
    get_ema_state_dict, get_optimizer_state_dict, group_by_name, load_optimizer, nn, optimizer_tensors,
    set_ema_state_dict, set_optimizer_state_dict,
};
use fsdp_ckpt::{LoadOptions, SaveState, save};

use crate::common::{
    Gradients, WIDTH, assert_close, batch, built, elements, full, gradients, loss_of, ranks, refused, vars, weights,
    whole,
};
use crate::sharded_optimizers::{backward, layers};

/// AdamW, and AdamW with 8-bit moments for parameters of at least the given number of elements.
fn configs(min_8bit_size: usize) -> (AdamWConfig, AdamW8bitConfig) {
    let config = AdamWConfig { lr: 0.01, betas: (0.9, 0.95), weight_decay: 0.1, ..AdamWConfig::default() };
    let AdamWConfig { lr, betas, eps, weight_decay } = config;
    (config, AdamW8bitConfig { lr, betas, eps, weight_decay, min_8bit_size })
}

/// The losses of some steps and the final weights of a model whose parameters have several quantization blocks.
fn losses(
    size: usize,
    steps: usize,
    make: &(dyn Fn(&fsdp_candle::ShardedVarMap) -> Box<dyn ShardedOptimizer> + Sync),
) -> Vec<f32> {
    ranks(size, |world| {
        let vars = vars(&world);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            Ok((nn::linear(40, 60, vb.pp("up"))?, nn::linear(60, 7, vb.pp("down"))?))
        })
        .unwrap();
        let mut optim = make(&vars);
        (0..steps)
            .map(|_| {
                let x = batch(0, 40);
                let y = model.call(|(up, down)| down.forward(&nn::gelu(&up.forward(&x)?)?)).unwrap();
                let loss = (y - 1.).unwrap().sqr().unwrap().mean_all().unwrap();
                optim.step(&model.backward(&loss).unwrap()).unwrap();
                loss.to_scalar::<f32>().unwrap()
            })
            .collect()
    })
    .swap_remove(0)
}

#[test]
fn moments_of_8_bits_train_like_f32() {
    let (config, of_8_bits) = configs(0);
    let plain = losses(1, 40, &|vars| Box::new(AdamW::new(vars.trainable(), config).unwrap()));
    assert!(plain[39] < plain[0] / 20., "{plain:?}");
    for size in [1, 2, 3] {
        let rounded = losses(size, 40, &|vars| Box::new(AdamW8bit::new(vars.trainable(), of_8_bits).unwrap()));
        let apart = plain.iter().zip(&rounded).map(|(a, b)| (a - b).abs() / plain[0]).fold(0., f32::max);
        // Some values were rounded, with little effect on the loss.
        assert!(apart > 1e-7 && apart < 1e-2, "{size} ranks: {apart:e}");
    }
    // Small parameters have AdamW's own moments, bit for bit.
    let (_, small) = configs(60 * 40 + 1);
    let same = losses(2, 5, &|vars| Box::new(AdamW8bit::new(vars.trainable(), small).unwrap()));
    assert_eq!(same, losses(2, 5, &|vars| Box::new(AdamW::new(vars.trainable(), config).unwrap())));
}

/// Updates with 8-bit moments are computed in F32, which is too narrow for an F64 parameter.
#[test]
fn refuses_8_bit_moments_of_f64() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = layers(&vars, DType::F64);
        let before = weights(&vars);
        let (config, of_8_bits) = configs(0);
        refused(AdamW8bit::new(vars.trainable(), of_8_bits), &["`up.weight`", "F64", "AdamW"]);
        // Small F64 parameters, whose moments are F64, are allowed.
        let (biases, weights_of) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 1);
        let (_, small) = configs(6);
        AdamW8bit::new(biases, small).unwrap();
        refused(AdamW8bit::new(weights_of, small), &["`up.weight`"]);
        assert_eq!(weights(&vars), before);

        let mut optim = AdamW8bit::new(vars.trainable(), configs(100).1).unwrap();
        optim.step(&backward(&model, &vars, DType::F64, 1)).unwrap();
        let plain = crate::common::vars(&world);
        let other = layers(&plain, DType::F64);
        AdamW::new(plain.trainable(), config).unwrap().step(&backward(&other, &plain, DType::F64, 1)).unwrap();
        assert_eq!(weights(&vars), weights(&plain));
        assert!(weights(&vars) != before);
    });
}

#[test]
fn moments_of_8_bits_save_as_adamws() {
    let dir = tempfile::tempdir().unwrap();
    let (config, of_8_bits) = configs(0);
    let path = dir.path().join("saved");
    let options = StateDictOptions::default();
    for size in [2, 3] {
        ranks(size, |world| {
            let vars = vars(&world);
            let model = layers(&vars, DType::F32);
            let mut optim = AdamW8bit::new(vars.trainable(), of_8_bits).unwrap();
            let other = AdamW::new(vars.trainable(), config).unwrap();
            check_finite(&vars, &[fsdp_candle::ValuesOf::Moments(&optim), fsdp_candle::ValuesOf::Moments(&other)])
                .unwrap();
            let optim_of = |optim: &mut AdamW8bit, steps: std::ops::RangeInclusive<u64>| {
                steps.for_each(|step| optim.step(&backward(&model, &vars, DType::F32, step)).unwrap());
            };
            if size == 2 {
                optim_of(&mut optim, 1..=3);
                let (mesh, tensors) = (vars.mesh().layout().clone(), optimizer_tensors(&optim).unwrap());
                save(&path, world.group(), &SaveState { mesh, tensors, values: Default::default() }).unwrap();
                // At the same world size, files and state dicts round nothing again.
                let source = fsdp_ckpt::open(&path).unwrap();
                let mut loaded = AdamW8bit::new(vars.trainable(), of_8_bits).unwrap();
                load_optimizer(&mut loaded, &*source, &LoadOptions::default()).unwrap();
                let mut set = AdamW8bit::new(vars.trainable(), of_8_bits).unwrap();
                let dict = get_optimizer_state_dict(&vars, &optim, &options).unwrap();
                set_optimizer_state_dict(&vars, &mut set, &dict, &options).unwrap();
                for again in [loaded, set] {
                    for (state, was) in again.states().iter().zip(optim.states()) {
                        assert_eq!(state.step, 3);
                        for name in ["exp_avg", "exp_avg_sq"] {
                            let values =
                                |state: &fsdp_candle::ParamState| elements::<f32>(&state.tensor(name).unwrap());
                            assert_eq!(values(state), values(was), "{name} of {}", state.param.name());
                        }
                    }
                }
            } else {
                // At another world size they are close, and AdamW loads them too.
                let source = fsdp_ckpt::open(&path).unwrap();
                let mut plain = AdamW::new(vars.trainable(), config).unwrap();
                load_optimizer(&mut plain, &*source, &LoadOptions::default()).unwrap();
                load_optimizer(&mut optim, &*source, &LoadOptions::default()).unwrap();
                for (state, plain) in optim.states().iter().zip(plain.states()) {
                    let all = |state: &fsdp_candle::ParamState, name: &str| {
                        let shard = state.tensor(name).unwrap();
                        vec![(name.to_string(), whole(&vars, &state.param, &shard))]
                    };
                    assert_close(&all(state, "exp_avg"), &all(plain, "exp_avg"), 0.008);
                    assert_close(&all(state, "exp_avg_sq"), &all(plain, "exp_avg_sq"), 0.008);
                }
            }
        });
    }
}

#[test]
fn moving_averages_match_at_any_world_size() {
    let run = |size: usize, saved: Option<&fsdp_candle::StateDict>| {
        ranks(size, |world| {
            let vars = vars(&world);
            let model = layers(&vars, DType::F32);
            let mut optim = SGD::new(vars.trainable(), SgdConfig { lr: 0.5, ..SgdConfig::default() }).unwrap();
            let mut ema = Ema::new(vars.params(), 0.75).unwrap();
            let mut history: Vec<Gradients> = vec![];
            for step in 1..=4 {
                optim.step(&backward(&model, &vars, DType::F32, step)).unwrap();
                ema.update().unwrap();
                history.push(weights(&vars));
            }
            // The direct computation.
            let mut want = history[0].clone();
            for after in &history[1..] {
                for ((_, mean), (_, now)) in want.iter_mut().zip(after) {
                    mean.iter_mut().zip(now).for_each(|(mean, now)| *mean = 0.75 * *mean + 0.25 * now);
                }
            }
            let gathered = model.forward(&Tensor::ones((2, 3), DType::F32, world.device()).unwrap()).unwrap();
            let seen = ema.swapped(&vars, |_| Ok(weights(&vars))).unwrap();
            assert_close(&seen, &want, 1e-6);
            assert_eq!(weights(&vars), history[3]);
            let failed = ema.swapped(&vars, |_| Err::<(), _>(fsdp_candle::Error::Argument("no".into())));
            assert!(failed.is_err());
            assert_eq!(weights(&vars), history[3]);
            drop(gathered);
            if let Some(saved) = saved {
                let mut again = Ema::new(vars.params(), 0.75).unwrap();
                set_ema_state_dict(&vars, &mut again, saved, &full()).unwrap();
                assert_eq!(again.updates().unwrap(), 4);
                again.copy_to(&vars).unwrap();
                assert_close(&weights(&vars), &want, 1e-6);
            }
            get_ema_state_dict(&vars, &ema, &full()).unwrap()
        })
        .swap_remove(0)
    };
    let saved = run(2, None);
    assert!(saved.tensors.contains_key("n_averaged"));
    for size in [1, 3, 4] {
        run(size, Some(&saved));
    }
    assert!(Ema::new(vec![], 1.).unwrap_err().to_string().contains("`decay` is 1"));
}

/// Averages are loaded after a model has diverged, so no NaN may remain.
#[test]
fn moving_averages_replace_non_finite_parameters() {
    for (size, dtype) in [(1, DType::F32), (3, DType::F32), (2, DType::BF16)] {
        ranks(size, |world| {
            let vars = vars(&world);
            let _model = layers(&vars, dtype);
            let good = weights(&vars);
            let set_all = |value: f64| {
                for param in vars.params().iter().filter(|param| !param.region().is_empty()) {
                    let spoilt = Tensor::full(value as f32, param.var().shape(), world.device()).unwrap();
                    param.var().set(&spoilt.to_dtype(dtype).unwrap()).unwrap();
                }
            };
            let ema = Ema::new(vars.params(), 0.75).unwrap();
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                set_all(value);
                assert_eq!(ema.swapped(&vars, |_| Ok(weights(&vars))).unwrap(), good);
                // The original values are restored.
                assert!(weights(&vars).iter().flat_map(|(_, values)| values).all(|v| !v.is_finite()));
                ema.copy_to(&vars).unwrap();
                assert_eq!(weights(&vars), good);
            }
            // The first update copies the parameters, whatever the average's initial values.
            set_all(f64::NAN);
            let mut ema = Ema::new(vars.params(), 0.75).unwrap();
            set_all(0.5);
            ema.update().unwrap();
            set_all(0.);
            ema.copy_to(&vars).unwrap();
            assert!(weights(&vars).iter().flat_map(|(_, values)| values).all(|&v| v == 0.5));
        });
    }
}

#[test]
fn clips_a_group_by_its_norm() {
    for size in [1, 2, 4] {
        ranks(size, |world| {
            let (vars, model) = built(&world, WIDTH);
            let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            let before = gradients(&vars, &grads);
            let patterns = [NamePattern::new("bias").unwrap()];
            let groups = group_by_name(vars.trainable(), [&patterns[..]]).unwrap();
            let norm_of = |all: &Gradients, biases: bool| {
                let of_group = all.iter().filter(|(name, _)| name.ends_with("bias") == biases);
                of_group.flat_map(|(_, values)| values).map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
            };
            let want = norm_of(&before, true);
            let options = ClipOptions { max_norm: want / 4., norm_type: NormType::Two, error_if_nonfinite: true };
            let norm = clip_grad_norm_of(&vars, &groups[1], &mut grads, &options).unwrap();
            assert!((norm - want).abs() < 1e-5 * want, "{norm} {want}");
            let after = gradients(&vars, &grads);
            assert!((norm_of(&after, true) - want / 4.).abs() < 1e-3 * want);
            for ((name, before), (_, after)) in before.iter().zip(&after) {
                assert_eq!(before == after, !name.ends_with("bias"), "{name}");
            }
            // A group without parameters has norm 0 on every rank.
            assert_eq!(clip_grad_norm_of(&vars, &[], &mut grads, &options).unwrap(), 0.);
        });
    }
}

#[test]
fn accumulates_half_gradients_in_f32() {
    for (size, dtype) in [(1, DType::BF16), (3, DType::BF16), (4, DType::F16), (2, DType::F32)] {
        ranks(size, |world| {
            let vars = vars(&world);
            let model = layers(&vars, dtype);
            let mut sum = GradAccumulator::new(vars.trainable());
            assert!(sum.finish().unwrap().is_none());
            // Known gradients, whose sum in F64 is rounded once.
            let mut want: Vec<Vec<f64>> = vec![];
            for step in 1..=9 {
                let grads = backward(&model, &vars, dtype, step);
                for (at, param) in vars.trainable().iter().enumerate().filter(|(_, p)| !p.region().is_empty()) {
                    let values = elements::<f64>(grads.get(param.var()).unwrap());
                    want.resize(want.len().max(at + 1), vec![]);
                    want[at].resize(values.len(), 0.);
                    want[at].iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
                }
                sum.add(grads).unwrap();
            }
            let grads = sum.finish().unwrap().unwrap();
            for (at, param) in vars.trainable().iter().enumerate().filter(|(_, p)| !p.region().is_empty()) {
                let grad = grads.get(param.var()).unwrap();
                assert_eq!(grad.dtype(), dtype);
                let once = Tensor::from_slice(&want[at], grad.shape(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(elements::<f32>(grad), elements::<f32>(&once), "{}", param.name());
            }
            // Ranks with an empty shard still count steps.
            let mut optim = SGD::new(vars.trainable(), SgdConfig::default()).unwrap();
            optim.step(&grads).unwrap();
            assert!(optim.states().iter().all(|state| state.step == 1));
        });
    }
}
