//! Forward and backward with prefetching, mixed precision, gradient clipping.

use candle_core::Module;

use super::*;
use fsdp_candle::{MixedPrecisionPolicy, NormType, OffloadPolicy, clip_grad_norm};

/// The result of a training loop, which is the same on every rank and for every world size: all ranks train on the same
/// tokens, and the mean of equal gradients over a power of two ranks is exact.
fn all_alike(worlds: Vec<Vec<Parameters>>) {
    let first = &worlds[0][0];
    for world in &worlds {
        assert!(world.iter().all(|parameters| parameters == first), "{} ranks came elsewhere", world.len());
    }
}

#[test]
fn implicit_prefetching() {
    all_alike(on_worlds(&[1, 2, 4], |world| {
        let args = ModelArgs::default();
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let mut optim = adam(&vars)?;
        let before = parameters(&vars)?;
        let (epochs, vocab_size, batch_size, seq_len, device) = (3, args.vocab_size, 4, 8, world.device());
        for _ in 0..epochs {
            let x = randint(vocab_size, (batch_size, seq_len), device)?;
            let loss = model.forward(&x)?.sum_all()?;
            let grads = model.backward(&loss)?;
            optim.step(&grads)?;
            drop(grads);
        }
        let after = parameters(&vars)?;
        assert!(before.iter().zip(&after).all(|(before, after)| before != after), "a parameter was not trained");
        Ok(after)
    }));
}

#[test]
fn explicit_prefetching() {
    let args = || ModelArgs { n_layers: 5, ..ModelArgs::default() };
    let run = |world: &World, explicit: bool| -> anyhow::Result<_> {
        let args = args();
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let mut optim = adam(&vars)?;
        let (epochs, vocab_size, batch_size, seq_len, device) = (3, args.vocab_size, 4, 8, world.device());
        if !explicit {
            for _ in 0..epochs {
                let x = randint(vocab_size, (batch_size, seq_len), device)?;
                optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
            }
            return parameters(&vars);
        }
        let num_to_forward_prefetch = 2;
        let layers = &model.inner().layers;
        for (i, layer) in layers.iter().enumerate() {
            if i >= layers.len() - num_to_forward_prefetch {
                break;
            }
            let layers_to_prefetch: Vec<_> = (1..=num_to_forward_prefetch).map(|j| layers[i + j].unit()).collect();
            layer.set_modules_to_forward_prefetch(&layers_to_prefetch)?;
        }
        let num_to_backward_prefetch = 2;
        for (i, layer) in layers.iter().enumerate() {
            if i < num_to_backward_prefetch {
                continue;
            }
            let layers_to_prefetch: Vec<_> = (1..=num_to_backward_prefetch).map(|j| layers[i - j].unit()).collect();
            layer.set_modules_to_backward_prefetch(&layers_to_prefetch)?;
        }
        for _ in 0..epochs {
            let _gathering = model.unshard_async()?;
            let x = randint(vocab_size, (batch_size, seq_len), device)?;
            let loss = model.forward(&x)?.sum_all()?;
            let grads = model.backward(&loss)?;
            optim.step(&grads)?;
            drop(grads);
        }
        parameters(&vars)
    };
    // Prefetching changes no number.
    let mut worlds = on_worlds(&[1, 2], |world| run(world, true));
    worlds.extend(on_worlds(&[2], |world| run(world, false)));
    all_alike(worlds);
}

#[test]
fn mixed_precision() {
    on_worlds(&[1, 2], |world| {
        let model_args = ModelArgs::default();
        let vars = vars(world)?;
        let vb = vars.builder(DType::F32);
        let fsdp_kwargs = FullyShard::new(&vars).mp_policy(MixedPrecisionPolicy {
            param_dtype: Some(DType::BF16),
            reduce_dtype: Some(DType::F32),
            ..MixedPrecisionPolicy::default()
        });
        let mut layers = vec![];
        for i in 0..model_args.n_layers {
            let layer = |vb| TransformerBlock::new(&model_args, vb);
            layers.push(fully_shard(&fsdp_kwargs, vb.pp(format!("layers.{i}")), layer)?);
        }
        let model = fully_shard(&fsdp_kwargs, vb, |vb| Transformer::new(&model_args, layers, vb))?;
        for param in vars.params() {
            assert_eq!(param.dtype(), DType::F32);
        }
        model.unshard()?;
        for param in model.params() {
            assert!(param.is_unsharded() && param.compute_dtype() == DType::BF16);
        }
        model.reshard()?;
        let mut optim = Adam::new(vars.trainable(), AdamConfig { lr: 1e-2, ..AdamConfig::default() })?;
        let x = randint(model_args.vocab_size, (4, 8), world.device())?;
        let logits = model.forward(&x)?;
        assert_eq!(logits.dtype(), DType::BF16);
        let grads = model.backward(&logits.to_dtype(DType::F32)?.sum_all()?)?;
        for param in vars.trainable() {
            let grad = param.grad(&grads)?.expect("every parameter is used");
            assert_eq!((grad.dtype(), grad.placements()), (DType::F32, &param.placements()[..]));
        }
        optim.step(&grads)?;
        for state in optim.states() {
            assert_eq!(state.tensor("exp_avg")?.dtype(), DType::F32);
        }
        Ok(())
    });
}

#[test]
fn clipping() {
    all_alike(on_worlds(&[1, 2, 4], |world| {
        let args = ModelArgs::default();
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let (epochs, vocab_size, batch_size, seq_len, device) = (2, args.vocab_size, 4, 8, world.device());
        let max_norm = 0.5;
        let mut optim = Adam::new(vars.trainable(), AdamConfig { lr: 1e-2, ..AdamConfig::default() })?;
        for _ in 0..epochs {
            let x = randint(vocab_size, (batch_size, seq_len), device)?;
            let loss = model.forward(&x)?.sum_all()?;
            let mut grads = model.backward(&loss)?;
            clip_grad_norm(&vars, &mut grads, max_norm)?;
            optim.step(&grads)?;
            drop(grads);
        }
        // The norm of the gradients as DTensors.
        let x = randint(vocab_size, (batch_size, seq_len), device)?;
        let mut grads = model.backward(&model.forward(&x)?.sum_all()?)?;
        let before = fsdp_candle::grad_norm(&vars, &grads)?;
        clip_grad_norm(&vars, &mut grads, max_norm)?;
        let mut squares = 0.;
        for param in vars.trainable() {
            let grad = param.grad(&grads)?.expect("every parameter is used");
            squares += grad.norm(NormType::Two)?.full_tensor()?.to_scalar::<f32>()?.powi(2);
        }
        assert!(before > max_norm && (f64::from(squares.sqrt()) - max_norm).abs() < 1e-5, "{before} {squares}");
        // Sums over different shards differ in the last bits.
        Ok(vec![])
    }));
}

#[test]
fn offload() {
    all_alike(on_worlds(&[1, 2], |world| {
        let args = ModelArgs::default();
        let vars = vars(world)?;
        let opts = FullyShard::new(&vars).offload_policy(OffloadPolicy::Cpu { pin_memory: true });
        let model = sharded(&opts, &vars, &args)?;
        for param in vars.params() {
            assert!(param.dtensor()?.device().is_cpu());
        }
        let mut optim = adam(&vars)?;
        let x = randint(args.vocab_size, (4, 8), world.device())?;
        for _ in 0..2 {
            let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
            for param in vars.trainable() {
                assert!(param.grad(&grads)?.expect("every parameter is used").device().is_cpu());
            }
            optim.step(&grads)?;
        }
        // A host DTensor can be redistributed over a mesh of devices.
        parameters(&vars)
    }));
}
