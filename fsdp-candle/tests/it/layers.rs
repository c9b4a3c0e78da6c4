//! The layers of `candle_nn` that train under `fully_shard`, and those that this crate has to replace.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{ModuleT, RNN, VarBuilder, VarMap};
use fsdp_candle::{FullyShard, ShardedVarMap, fully_shard, nn};

use crate::common::{
    Gradients, Plain, assert_close, device, elements, full, gradients, input, mean, mean_square, ranks, refused, vars,
    weights,
};

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor>>;
type Build = fn(VarBuilder) -> Result<Layer>;
/// A layer's name, builder, input on a rank, and input shape.
type Case = (&'static str, Build, fn(usize, &[usize]) -> Tensor, &'static [usize]);

fn boxed(module: impl Module + 'static) -> Layer {
    Box::new(move |x| module.forward(x))
}

fn ids(rank: usize, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<u32> = (0..count).map(|i| ((i * 5 + rank * 3) % 7) as u32).collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// A loss without symmetries, under which gradients could vanish.
fn loss(y: &Tensor) -> Tensor {
    mean_square(&(y + input(7, y.dims())).unwrap())
}

fn plain_gradients(build: Build, initial: &Gradients, batches: &[Tensor]) -> Gradients {
    let plain = Plain::new(initial, build);
    let losses: Vec<Tensor> = batches.iter().map(|x| loss(&(plain.model)(x).unwrap())).collect();
    plain.gradients(&mean(&losses).backward().unwrap())
}

/// The layers that train, from both crates.
macro_rules! layers {
    ($cn:path) => {{
        use $cn as cn;
        let cases: [Case; 16] = [
            ("Linear", |vb| Ok(boxed(cn::linear(5, 3, vb)?)), input, &[4, 5]),
            ("Embedding", |vb| Ok(boxed(cn::embedding(7, 5, vb)?)), ids, &[2, 6]),
            ("Conv1d", |vb| Ok(boxed(cn::conv1d(3, 5, 3, Default::default(), vb)?)), input, &[2, 3, 8]),
            (
                "Conv2d",
                |vb| {
                    let config = cn::Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
                    Ok(boxed(cn::conv2d(3, 5, 3, config, vb)?))
                },
                input,
                &[2, 3, 7, 7],
            ),
            (
                "ConvTranspose2d",
                |vb| Ok(boxed(cn::conv_transpose2d(3, 5, 3, Default::default(), vb)?)),
                input,
                &[2, 3, 5, 5],
            ),
            ("LayerNorm without bias", |vb| Ok(boxed(cn::layer_norm_no_bias(5, 1e-5, vb)?)), input, &[4, 5]),
            (
                "RmsNorm::forward_diff",
                |vb| {
                    let norm = cn::rms_norm(5, 1e-5, vb)?;
                    Ok(Box::new(move |x| norm.forward_diff(x)))
                },
                input,
                &[4, 5],
            ),
            ("GroupNorm", |vb| Ok(boxed(cn::group_norm(2, 6, 1e-5, vb)?)), input, &[2, 6, 4]),
            (
                "BatchNorm in training",
                |vb| {
                    let norm = cn::batch_norm(5, 1e-5, vb)?;
                    Ok(Box::new(move |x| norm.forward_t(x, true)))
                },
                input,
                &[6, 5, 3],
            ),
            (
                "BatchNorm in evaluation",
                |vb| {
                    let norm = cn::batch_norm(5, 1e-5, vb)?;
                    Ok(Box::new(move |x| norm.forward_t(x, false)))
                },
                input,
                &[6, 5, 3],
            ),
            ("PReLU", |vb| Ok(boxed(cn::prelu(Some(5), vb)?)), input, &[6, 5, 3]),
            (
                "LSTM",
                |vb| {
                    let lstm = cn::lstm(5, 3, Default::default(), vb)?;
                    Ok(Box::new(move |x| lstm.states_to_tensor(&lstm.seq(x)?)))
                },
                input,
                &[2, 4, 5],
            ),
            (
                "GRU",
                |vb| {
                    let gru = cn::gru(5, 3, Default::default(), vb)?;
                    Ok(Box::new(move |x| gru.states_to_tensor(&gru.seq(x)?)))
                },
                input,
                &[2, 4, 5],
            ),
            (
                "softmax",
                |vb| {
                    let linear = cn::linear(5, 3, vb)?;
                    Ok(Box::new(move |x| cn::ops::softmax(&linear.forward(x)?, D::Minus1)))
                },
                input,
                &[4, 5],
            ),
            (
                "rope_slow",
                |vb| {
                    let linear = cn::linear(4, 4, vb)?;
                    Ok(Box::new(move |x| {
                        let angles = input(3, &[5, 2]);
                        cn::rotary_emb::rope_slow(&linear.forward(x)?, &angles.cos()?, &angles.sin()?)
                    }))
                },
                input,
                &[2, 3, 5, 4],
            ),
            (
                "Sequential with activations",
                |vb| {
                    let first = cn::linear(5, 6, vb.pp("0"))?;
                    let second = cn::linear(6, 3, vb.pp("2"))?;
                    Ok(boxed(
                        cn::seq().add(first).add(cn::Activation::Silu).add(second).add(cn::Activation::GeluPytorchTanh),
                    ))
                },
                input,
                &[4, 5],
            ),
        ];
        cases
    }};
}

/// Trains each on three ranks, and compares with plain Candle.
fn train(cases: &[Case]) {
    for &(what, build, input, shape) in cases {
        let batches: Vec<Tensor> = (0..3).map(|rank| input(rank, shape)).collect();
        let runs = ranks(3, |world| {
            let vars = vars(&world);
            let layer = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
            let initial = weights(&vars);
            let x = batches[world.rank()].to_device(&device()).unwrap();
            let y = layer.call_with(x, |layer, x| layer(&x)).unwrap();
            let grads = layer.backward(&loss(&y)).unwrap();
            assert_eq!(layer.parameters_without_gradient(), [""; 0], "{what}");
            assert_eq!(layer.graph_cuts(), [], "{what}");
            (initial, gradients(&vars, &grads))
        });
        let (initial, got) = &runs[0];
        assert!(got.iter().all(|(_, grad)| grad.iter().any(|g| g.abs() > 1e-6)), "{what}: {got:?}");
        assert_close(got, &plain_gradients(build, initial, &batches), 1e-4);
    }
}

#[test]
fn candles_layers_train() {
    train(&layers!(candle_nn));
}

#[test]
fn this_crates_layers_train() {
    train(&layers!(fsdp_candle::nn));
    train(&[
        ("LayerNorm", |vb| Ok(boxed(nn::layer_norm(5, 1e-5, vb)?)), input, &[4, 5]),
        ("RmsNorm", |vb| Ok(boxed(nn::rms_norm(5, 1e-5, vb)?)), input, &[4, 5]),
        ("ConvTranspose1d", |vb| Ok(boxed(nn::conv_transpose1d(3, 5, 3, Default::default(), vb)?)), input, &[2, 3, 8]),
        (
            "experts",
            |vb| {
                let weights = vb.get((3, 2, 5), "experts")?;
                Ok(Box::new(move |x| {
                    let order = Tensor::new(&[0u32, 3, 1, 2], x.device())?;
                    let experts = Tensor::new(&[0u32, 0, 1, 2], x.device())?;
                    nn::moe::moe_gemm(x, &weights, &None, &order, &experts, 1, true)
                }))
            },
            input,
            &[4, 5],
        ),
    ]);
}

#[test]
fn layers_without_backward_are_errors() {
    let world = fsdp_candle::World::single().unwrap();
    let vars = vars(&world);
    let layer = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
        candle_nn::conv_transpose1d(3, 5, 3, Default::default(), vb)
    })
    .unwrap();
    refused(
        layer.backward(&loss(&layer.forward(&input(0, &[2, 3, 8])).unwrap())),
        &["backward is not supported for conv-transpose1d"],
    );
}

#[test]
fn layers_that_cut_the_graph_are_reported() {
    use candle_nn as cn;
    let cut: [(&str, Build, &[usize]); 4] = [
        ("LayerNorm", |vb| Ok(boxed(cn::layer_norm(4, 1e-5, vb)?)), &[3, 4]),
        ("RmsNorm", |vb| Ok(boxed(cn::rms_norm(4, 1e-5, vb)?)), &[3, 4]),
        (
            "softmax_last_dim",
            |vb| {
                let linear = cn::linear(4, 4, vb)?;
                Ok(Box::new(move |x| cn::ops::softmax_last_dim(&linear.forward(x)?)))
            },
            &[3, 4],
        ),
        (
            "rope",
            |vb| {
                let linear = cn::linear(4, 4, vb)?;
                Ok(Box::new(move |x| {
                    let angles = input(3, &[3, 2]);
                    cn::rotary_emb::rope(&linear.forward(x)?, &angles.cos()?, &angles.sin()?)
                }))
            },
            &[2, 2, 3, 4],
        ),
    ];
    for (what, build, shape) in cut {
        let world = fsdp_candle::World::single().unwrap();
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let vb = vars.builder(DType::F32);
        let layer = fully_shard(&opts, vb.pp("layer"), build).unwrap();
        let model = fully_shard(&opts, vb, |vb| nn::linear(4, 2, vb.pp("head"))).unwrap();
        let x = input(0, shape);
        let y = model.call(|head| head.forward(&layer.call_with(x.clone(), |layer, x| layer(&x))?)).unwrap();
        model.backward(&loss(&y)).unwrap();
        let named = model.parameters_without_gradient();
        assert_eq!(named.len(), vars.params().len() - 2, "{what}: {named:?}");
        assert!(named.iter().all(|name| name.starts_with("layer.")), "{what}: {named:?}");
    }
}

#[test]
fn running_statistics_are_whole_and_not_trained() {
    use candle_nn::Optimizer;
    ranks(3, |world| {
        let vars = vars(&world);
        let layer = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            candle_nn::batch_norm(5, 1e-5, vb.pp("bn"))
        });
        let layer = layer.unwrap();
        let names: Vec<String> = vars.params().iter().map(|param| param.name().into()).collect();
        assert_eq!(names, ["bn.weight", "bn.bias"]);
        let buffers = vars.buffers();
        let names: Vec<&str> = buffers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["bn.running_mean", "bn.running_var"]);
        assert!(buffers.iter().all(|(_, buffer)| buffer.dims() == [5]));

        // Running statistics follow this rank's batches, as those of a plain layer do.
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &device());
        let plain = candle_nn::batch_norm(5, 1e-5, vb).unwrap();
        let mut optim = candle_nn::SGD::new(vars.trainable_vars(), 0.1).unwrap();
        for step in 0..3 {
            let x = input(world.rank() + 3 * step, &[6, 5]);
            plain.forward_t(&x, true).unwrap();
            let y = layer.call_with(x, |layer, x| layer.forward_t(&x, true)).unwrap();
            let grads = layer.backward(&loss(&y)).unwrap();
            assert!(buffers.iter().all(|(_, buffer)| grads.get(buffer).is_none()));
            optim.step(&grads).unwrap();
        }
        let values = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap();
        assert_eq!(values(&buffers[0].1), values(plain.running_mean()));
        assert_eq!(values(&buffers[1].1), values(plain.running_var()));

        // The same statistics on all ranks, saved and loaded through a state dict.
        vars.average_buffers().unwrap();
        let mean = values(&buffers[0].1);
        let others = world.all_reduce(&[f64::from(mean[0])], fsdp_candle::ReduceOp::Max).unwrap();
        assert_eq!(others[0] as f32, mean[0]);
        let options = full();
        let dict = fsdp_candle::get_model_state_dict(&vars, &options).unwrap();
        assert_eq!(values(&dict.tensors["bn.running_mean"].tensor), mean);
        buffers[0].1.set(&Tensor::zeros(5, DType::F32, &device()).unwrap()).unwrap();
        fsdp_candle::set_model_state_dict(&vars, &dict, &options).unwrap();
        assert_eq!(values(&buffers[0].1), mean);
    });
}

#[test]
fn running_statistics_are_saved() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    let build = |vars: &ShardedVarMap| {
        fully_shard(&FullyShard::new(vars), vars.builder(DType::F32), |vb| candle_nn::batch_norm(5, 1e-5, vb)).unwrap()
    };
    let means = ranks(2, |world| {
        let vars = vars(&world);
        let layer = build(&vars);
        layer.call_with(input(world.rank(), &[6, 5]), |layer, x| layer.forward_t(&x, true)).unwrap();
        vars.average_buffers().unwrap();
        let state = fsdp_ckpt::SaveState {
            mesh: vars.mesh().layout().clone(),
            tensors: fsdp_candle::model_tensors(&vars).unwrap(),
            values: Default::default(),
        };
        fsdp_ckpt::save(&dir, world.group(), &state).unwrap();
        vars.buffers()[0].1.to_vec1::<f32>().unwrap()
    });
    ranks(3, |world| {
        let vars = vars(&world);
        let _layer = build(&vars);
        let source = fsdp_ckpt::open(&dir).unwrap();
        fsdp_candle::load_model(&vars, &*source, &Default::default()).unwrap();
        assert_eq!(vars.buffers()[0].1.to_vec1::<f32>().unwrap(), means[0]);
    });
}

/// The same source with the layers of either crate: the names and signatures that both have.
macro_rules! written_once {
    ($name:ident, $nn:path) => {
        fn $name(vb: VarBuilder, x: &Tensor) -> Result<Vec<Tensor>> {
            use $nn as nn;
            let config = candle_nn::LayerNormConfig { eps: 1e-3, remove_mean: false, affine: true };
            let (weight, bias) = (vb.get(4, "lone.weight")?, vb.get(4, "lone.bias")?);
            let lone = nn::LayerNorm::new(weight.clone(), bias, 1e-5);
            assert_eq!((lone.eps(), lone.weight().dims1()?, lone.bias().is_some()), (1e-5, 4, true));
            let rms = nn::RmsNorm::new(weight.clone(), 1e-5);
            let old = nn::layer_norm(4, 1e-5, vb.pp("old"))?;
            let linear = nn::linear(4, 4, vb.pp("linear"))?;
            let again = nn::Linear::new(linear.weight().clone(), linear.bias().cloned());
            let table = nn::embedding(7, 4, vb.pp("table"))?;
            assert_eq!((table.embeddings().dims2()?, table.hidden_size()), ((7, 4), 4));
            Ok(vec![
                linear.forward(x)?,
                again.forward(x)?,
                nn::linear_no_bias(4, 3, vb.pp("bare"))?.forward(x)?,
                nn::linear_b(4, 3, true, vb.pp("either"))?.forward(x)?,
                nn::layer_norm(4, config, vb.pp("config"))?.forward(x)?,
                nn::layer_norm(4, 1e-5, vb.pp("norm"))?.forward(x)?,
                old.forward(x)?,
                nn::layer_norm_no_bias(4, 1e-5, vb.pp("no_bias"))?.forward(x)?,
                lone.forward(x)?,
                nn::LayerNorm::new_no_bias(weight.clone(), 1e-5).forward(x)?,
                nn::LayerNorm::rms_norm(weight, 1e-5).forward(x)?,
                nn::rms_norm(4, 1e-5, vb.pp("rms"))?.forward(x)?,
                rms.forward_diff(x)?,
                rms.into_inner().forward(x)?,
                table.forward(&ids(0, &[2, 3]))?,
            ])
        }
    };
}
written_once!(of_candle, candle_nn);
written_once!(of_this_crate, fsdp_candle::nn);

#[test]
fn layers_of_both_crates_build_from_one_source() {
    let mut tensors = std::collections::HashMap::new();
    for (i, (name, shape)) in [
        ("lone.weight", &[4][..]),
        ("lone.bias", &[4]),
        ("old.gamma", &[4]),
        ("old.beta", &[4]),
        ("linear.weight", &[4, 4]),
        ("linear.bias", &[4]),
        ("table.weight", &[7, 4]),
        ("bare.weight", &[3, 4]),
        ("either.weight", &[3, 4]),
        ("either.bias", &[3]),
        ("config.weight", &[4]),
        ("config.bias", &[4]),
        ("norm.weight", &[4]),
        ("norm.bias", &[4]),
        ("no_bias.weight", &[4]),
        ("rms.weight", &[4]),
    ]
    .into_iter()
    .enumerate()
    {
        tensors.insert(name.to_string(), input(i, shape));
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let x = input(3, &[2, 3, 4]);
    let pairs = of_candle(vb.clone(), &x).unwrap().into_iter().zip(of_this_crate(vb, &x).unwrap());
    for (i, (candle, ours)) in pairs.enumerate() {
        let apart = (&candle - &ours).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(candle.dims() == ours.dims() && apart < 1e-5, "layer {i}: {apart}");
    }
    let logits = input(1, &[3, 5]);
    let targets = Tensor::new(&[1u32, 0, 4], &Device::Cpu).unwrap();
    let value = |tensor: Result<Tensor>| elements::<f32>(&tensor.unwrap());
    for (candle, ours) in [
        (candle_nn::ops::silu(&logits), nn::silu(&logits)),
        (candle_nn::loss::cross_entropy(&logits, &targets), nn::cross_entropy(&logits, &targets)),
    ] {
        assert!(value(candle).iter().zip(value(ours)).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}
