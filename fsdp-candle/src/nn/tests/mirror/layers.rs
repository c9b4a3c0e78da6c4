use std::collections::HashMap;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::VarBuilder;

use super::super::super::{self as nn, RNN};
use super::{check, check_on, random, run, tensors};

/// Returns the norm of the difference, relative to the norm of `b`.
fn relative_error(a: &Tensor, b: &Tensor) -> f64 {
    let norm = |t: Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
    norm((a - b).unwrap()) / norm(b.clone())
}

#[test]
fn linear_and_conv1d() {
    for (x, inputs, outputs) in
        [(&[4usize, 5][..], 5, 3), (&[2, 3, 17], 17, 33), (&[1, 64], 64, 1), (&[2, 2, 1, 9], 9, 4)]
    {
        check(
            "Linear",
            &[x, &[outputs, inputs], &[outputs]],
            &|a| nn::Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0]),
            Some(&|a| candle_nn::Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0])),
        );
        check(
            "Linear without bias",
            &[x, &[outputs, inputs]],
            &|a| nn::Linear::new(a[1].clone(), None).forward(&a[0]),
            Some(&|a| candle_nn::Linear::new(a[1].clone(), None).forward(&a[0])),
        );
        check(
            "Gpt2Linear",
            &[x, &[inputs, outputs], &[outputs]],
            &|a| nn::Gpt2Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0]),
            Some(&|a| candle_nn::Linear::new(a[1].t()?.contiguous()?, Some(a[2].clone())).forward(&a[0])),
        );
    }
}

/// Candle treats rows of a batch that are not adjacent as adjacent, and gets another result.
#[test]
fn linear_is_right_for_views_unlike_candles() {
    let (x, w) = (random(1, &[2, 5, 3], DType::F64), random(2, &[4, 5], DType::F64));
    let view = |x: &Tensor| x.transpose(1, 2);
    let plain = |a: &[Tensor]| view(&a[0])?.contiguous()?.reshape((6, 5))?.matmul(&a[1].t()?)?.reshape((2, 3, 4));
    let vars = [x, w];
    let args = tensors(&vars);
    let (expected_y, expected) = run(&plain, &args, &vars);
    let (y, grads) = run(&|a| nn::Linear::new(a[1].clone(), None).forward(&view(&a[0])?), &args, &vars);
    let (wrong_y, wrong) = run(&|a| candle_nn::Linear::new(a[1].clone(), None).forward(&view(&a[0])?), &args, &vars);
    assert!(
        relative_error(&y, &expected_y) < 1e-12
            && grads.iter().zip(&expected).all(|(a, b)| relative_error(a, b) < 1e-12)
    );
    let worst = relative_error(&wrong_y, &expected_y)
        .max(relative_error(&wrong[0], &expected[0]))
        .max(relative_error(&wrong[1], &expected[1]));
    assert!(worst > 0.1, "candle_nn's Linear is right now (error {worst}): update nn's documentation");
}

#[test]
fn embedding_takes_ids_of_each_dtype() {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let ids = super::super::random_ids(2, &[3, 1, 2], 7).to_dtype(dtype).unwrap();
        check(
            "Embedding",
            &[&[7, 4]],
            &|a| nn::Embedding::new(a[0].contiguous()?, 4).forward(&ids),
            Some(&|a| candle_nn::Embedding::new(a[0].contiguous()?, 4).forward(&ids)),
        );
    }
    let none = Tensor::new(&[u32::MAX, 1], &Device::Cpu).unwrap();
    check(
        "Embedding with no id",
        &[&[3, 2]],
        &|a| nn::Embedding::new(a[0].contiguous()?, 2).forward(&none),
        Some(&|a| candle_nn::Embedding::new(a[0].contiguous()?, 2).forward(&none)),
    );
}

#[test]
fn norms_of_the_last_dimension() {
    let shapes: [&[usize]; 3] = [&[2, 3, 8], &[8], &[8]];
    check(
        "LayerNorm",
        &shapes,
        &|a| nn::LayerNorm::new(a[1].clone(), a[2].clone(), 1e-5).forward(&a[0]),
        // Candle's layer does not support f64.
        Some(&|a| match a[0].dtype() {
            DType::F64 => candle_nn::ops::layer_norm_slow(&a[0], &a[1], &a[2], 1e-5),
            _ => candle_nn::LayerNorm::new(a[1].clone(), a[2].clone(), 1e-5).forward(&a[0]),
        }),
    );
    check(
        "LayerNorm without bias",
        &shapes[..2],
        &|a| nn::LayerNorm::new_no_bias(a[1].clone(), 1e-5).forward(&a[0]),
        Some(&|a| candle_nn::LayerNorm::new_no_bias(a[1].clone(), 1e-5).forward(&a[0])),
    );
    check(
        "RmsNorm",
        &shapes[..2],
        &|a| nn::RmsNorm::new(a[1].clone(), 1e-5).forward(&a[0]),
        Some(&|a| candle_nn::RmsNorm::new(a[1].clone(), 1e-5).forward_diff(&a[0])),
    );
}

#[test]
fn norms_of_channels() {
    for (x, groups) in [(&[2usize, 6, 3][..], 2), (&[1, 6, 2, 2], 3), (&[3, 6, 1], 1)] {
        check(
            "GroupNorm",
            &[x, &[6], &[6]],
            &|a| nn::GroupNorm::new(a[1].clone(), a[2].clone(), 6, groups, 1e-5)?.forward(&a[0]),
            Some(&|a| candle_nn::GroupNorm::new(a[1].clone(), a[2].clone(), 6, groups, 1e-5)?.forward(&a[0])),
        );
    }
    for train in [true, false] {
        // Short and long runs, and enough elements for several threads.
        for x in [&[6usize, 3][..], &[4, 3, 2], &[3, 3, 5, 20], &[12, 3, 1000]] {
            let running = |a: &[Tensor]| -> Result<[Tensor; 2]> {
                let of = |value: f64| Tensor::full(value, 3, &Device::Cpu)?.to_dtype(a[0].dtype());
                Ok([of(0.25)?, of(1.5)?])
            };
            check(
                "BatchNorm",
                &[x, &[3], &[3]],
                &|a| {
                    let [mean, var] = running(a)?;
                    nn::BatchNorm::new(3, mean, var, a[1].clone(), a[2].clone(), 1e-5)?.forward_t(&a[0], train)
                },
                Some(&|a| {
                    let [mean, var] = running(a)?;
                    candle_nn::BatchNorm::new(3, mean, var, a[1].clone(), a[2].clone(), 1e-5)?.forward_t(&a[0], train)
                }),
            );
        }
    }
}

#[test]
fn running_statistics_match_candle() {
    let of = |value: f32| Tensor::full(value, 3, &Device::Cpu).unwrap();
    let x = random(1, &[5, 3, 40], DType::F32);
    let ours = nn::BatchNorm::new_no_bias_with_momentum(3, of(0.5), of(2.), 1e-5, 0.3).unwrap();
    let theirs = candle_nn::BatchNorm::new_no_bias_with_momentum(3, of(0.5), of(2.), 1e-5, 0.3).unwrap();
    for _ in 0..2 {
        ours.forward_t(&x, true).unwrap();
        theirs.forward_t(&x, true).unwrap();
    }
    super::assert_close("mean", ours.running_mean(), theirs.running_mean(), 1e-6);
    super::assert_close("variance", ours.running_var(), theirs.running_var(), 1e-6);
    assert!(nn::BatchNorm::new_no_bias(2, of(0.), of(1.), 1e-5).is_err());
    assert!(nn::BatchNorm::new_no_bias(3, of(0.), of(1.), -1.).is_err());
}

#[test]
fn prelu() {
    for (x, weight, is_scalar) in [
        (&[2usize, 3, 4][..], &[3usize][..], false),
        (&[2, 3], &[1], true),
        (&[2, 3], &[2, 3], false),
        (&[5], &[5], false),
    ] {
        check(
            "PReLU",
            &[x, weight],
            &|a| nn::PReLU::new(a[1].clone(), is_scalar).forward(&a[0]),
            Some(&|a| candle_nn::PReLU::new(a[1].clone(), is_scalar).forward(&a[0])),
        );
    }
}

#[test]
fn recurrent_networks() {
    let builder = |a: &[Tensor]| {
        let names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"];
        let tensors: HashMap<String, Tensor> =
            names.map(String::from).into_iter().zip(a[1..].iter().cloned()).collect();
        VarBuilder::from_tensors(tensors, a[0].dtype(), &Device::Cpu)
    };
    check_small(
        "LSTM",
        &[&[2, 3, 4], &[12, 4], &[12, 3], &[12], &[12]],
        &|a| {
            let lstm = nn::lstm(4, 3, Default::default(), builder(a))?;
            lstm.states_to_tensor(&lstm.seq(&a[0])?)
        },
        &|a| {
            let lstm = candle_nn::lstm(4, 3, Default::default(), builder(a))?;
            lstm.states_to_tensor(&lstm.seq(&a[0])?)
        },
    );
    check_small(
        "GRU",
        &[&[2, 3, 4], &[9, 4], &[9, 3], &[9], &[9]],
        &|a| {
            let gru = nn::gru(4, 3, Default::default(), builder(a))?;
            gru.states_to_tensor(&gru.seq(&a[0])?)
        },
        &|a| {
            let gru = candle_nn::gru(4, 3, Default::default(), builder(a))?;
            gru.states_to_tensor(&gru.seq(&a[0])?)
        },
    );
}

/// The arguments are small, so that rounding errors do not grow from step to step.
fn check_small(what: &str, shapes: &[&[usize]], ours: super::F, candle: super::F) {
    let fresh = |dtype| -> Vec<Var> {
        let small = |(shape, seed): (&&[usize], u64)| (random(seed, shape, dtype).as_detached_tensor() * 0.5).unwrap();
        shapes.iter().zip(1..).map(|of| Var::from_tensor(&small(of)).unwrap()).collect()
    };
    check_on(what, &fresh, ours, Some(candle));
}

#[test]
fn conv1d() {
    // Length, kernel, groups, padding, stride, dilation. Some strides do not divide the input.
    for (length, kernel, groups, padding, stride, dilation) in
        [(7, 3, 1, 0, 1, 1), (8, 3, 2, 1, 2, 1), (9, 2, 1, 2, 3, 2), (5, 1, 4, 0, 1, 1)]
    {
        let config = nn::Conv1dConfig { padding, stride, dilation, groups, cudnn_fwd_algo: None };
        check(
            "Conv1d",
            &[&[2, 4, length], &[8, 4 / groups, kernel], &[8]],
            &|a| nn::Conv1d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]),
            Some(&|a| candle_nn::Conv1d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0].contiguous()?)),
        );
    }
}

#[test]
fn conv2d() {
    for ((height, width), kernel, groups, padding, stride, dilation) in
        [((4, 5), 3, 1, 0, 1, 1), ((5, 4), 2, 2, 1, 2, 1), ((6, 7), 2, 1, 1, 2, 2)]
    {
        let config = nn::Conv2dConfig { padding, stride, dilation, groups, cudnn_fwd_algo: None };
        check(
            "Conv2d",
            &[&[2, 4, height, width], &[2, 4 / groups, kernel, kernel], &[2]],
            &|a| nn::Conv2d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]),
            Some(&|a| candle_nn::Conv2d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0].contiguous()?)),
        );
    }
}

#[test]
fn transposed_convolutions() {
    for (groups, padding, output_padding, stride, dilation) in [(1, 0, 0, 1, 1), (2, 1, 1, 2, 1), (1, 1, 0, 3, 2)] {
        let config = nn::ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups };
        check(
            "ConvTranspose1d",
            &[&[2, 4, 5], &[4, 3, 3], &[3 * groups]],
            &|a| nn::ConvTranspose1d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]),
            // Candle's is right only for one element of a batch at a time.
            Some(&|a| {
                let layer = candle_nn::ConvTranspose1d::new(a[1].clone(), Some(a[2].clone()), config);
                let one = |i| layer.forward(&a[0].narrow(0, i, 1)?.contiguous()?);
                Tensor::cat(&[one(0)?, one(1)?], 0)
            }),
        );
    }
    for (padding, output_padding, stride, dilation) in [(0, 0, 1, 1), (1, 1, 2, 1), (1, 0, 2, 2)] {
        let config = nn::ConvTranspose2dConfig { padding, output_padding, stride, dilation };
        check(
            "ConvTranspose2d",
            &[&[2, 2, 3, 4], &[2, 3, 2, 2], &[3]],
            &|a| nn::ConvTranspose2d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]),
            Some(&|a| {
                let x = a[0].contiguous()?;
                candle_nn::ConvTranspose2d::new(a[1].clone(), Some(a[2].clone()), config).forward(&x)
            }),
        );
    }
}

/// Candle's `conv1d` copies a kernel that is not contiguous, and then uses the original. Its own gradient is affected.
#[test]
fn the_kernel_gradient_of_conv1d_is_right_unlike_candles() {
    let vars = [random(1, &[2, 3, 8], DType::F64), random(2, &[4, 3, 3], DType::F64)];
    let args = tensors(&vars);
    // The convolution as a sum over the taps.
    let plain = |a: &[Tensor]| {
        let tap = |i: usize| a[1].narrow(2, i, 1)?.squeeze(2)?.unsqueeze(0)?.broadcast_as((2, 4, 3))?.contiguous();
        let at = |i: usize| tap(i)?.matmul(&a[0].narrow(2, i, 6)?.contiguous()?);
        (at(0)? + at(1)?)? + at(2)?
    };
    let (_, expected) = run(&plain, &args, &vars);
    let config = Default::default();
    let (_, ours) = run(&|a| nn::Conv1d::new(a[1].clone(), None, config).forward(&a[0]), &args, &vars);
    let (_, theirs) = run(&|a| candle_nn::Conv1d::new(a[1].clone(), None, config).forward(&a[0]), &args, &vars);
    assert!(relative_error(&ours[0], &expected[0]) < 1e-12 && relative_error(&ours[1], &expected[1]) < 1e-12);
    let worst = relative_error(&theirs[1], &expected[1]);
    assert!(worst > 0.1, "candle_nn's Conv1d is right now (error {worst}): update nn's documentation");
}

#[test]
fn conv2d_absorbs_a_batch_norm() {
    let of = |seed: u64| random(seed, &[2], DType::F32).as_detached_tensor();
    let (mean, var, scale, shift) = (of(4), of(5).sqr().unwrap(), of(6), of(7));
    let (x, kernel) = (random(1, &[1, 3, 4, 4], DType::F32), random(2, &[2, 3, 2, 2], DType::F32));
    let ours = nn::BatchNorm::new(2, mean.clone(), var.clone(), scale.clone(), shift.clone(), 1e-3).unwrap();
    let theirs = candle_nn::BatchNorm::new(2, mean, var, scale, shift, 1e-3).unwrap();
    for bias in [None, Some(of(3))] {
        let a = nn::Conv2d::new(kernel.as_tensor().clone(), bias.clone(), Default::default()).absorb_bn(&ours).unwrap();
        let b =
            candle_nn::Conv2d::new(kernel.as_tensor().clone(), bias, Default::default()).absorb_bn(&theirs).unwrap();
        super::assert_close("absorbed", &a.forward(&x).unwrap(), &b.forward(&x).unwrap(), 1e-5);
    }
}

#[test]
fn convolutions_reject_sizes_that_do_not_fit() {
    let x = random(1, &[1, 3, 4], DType::F32);
    let kernel = |shape: &[usize]| random(2, shape, DType::F32).as_tensor().clone();
    let with = |config| nn::Conv1d::new(kernel(&[2, 3, 2]), None, config).forward(&x);
    let default = nn::Conv1dConfig::default();
    for config in [
        nn::Conv1dConfig { stride: 0, ..default },
        nn::Conv1dConfig { dilation: 0, ..default },
        nn::Conv1dConfig { dilation: 9, ..default },
        nn::Conv1dConfig { groups: 0, ..default },
        nn::Conv1dConfig { groups: 2, ..default },
    ] {
        assert!(super::super::message(with(config)).contains("Conv1d"), "{config:?}");
    }
    let transposed = nn::ConvTranspose1dConfig { padding: 9, ..Default::default() };
    let error = super::super::message(nn::ConvTranspose1d::new(kernel(&[3, 2, 2]), None, transposed).forward(&x));
    assert!(error.contains("padding 9"), "{error}");
}

/// Candle divides the gradient by the number of elements under the kernel, and has none for other strides.
#[test]
fn max_pooling_is_right_unlike_candles() {
    let values: Vec<f32> = (0..64).map(|i| ((i * 37) % 64) as f32 / 16.).collect();
    let x = Var::from_tensor(&Tensor::from_vec(values, (1, 1, 8, 8), &Device::Cpu).unwrap()).unwrap();
    let of = |y: candle_core::Result<Tensor>| {
        let y = y.unwrap();
        let grads = y.sum_all().unwrap().backward()?;
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        candle_core::Result::Ok((flat(&y), flat(grads.get(&x).unwrap())))
    };
    let (ours, theirs) = (of(nn::max_pool2d(&x, 2)).unwrap(), of(x.max_pool2d(2)).unwrap());
    assert_eq!(ours.0, theirs.0);
    // Each output is one element of the input.
    assert_eq!(
        (ours.1.iter().sum::<f32>(), theirs.1.iter().sum::<f32>()),
        (16., 4.),
        "Candle is right now: update docs"
    );
    assert!(ours.1.iter().zip(&theirs.1).all(|(ours, theirs)| *ours == theirs * 4.));
    assert!(of(x.max_pool2d_with_stride(3, 2)).is_err() && of(x.avg_pool2d_with_stride(3, 2)).is_err());
    assert_eq!(of(nn::max_pool2d_with_stride(&x, 3, 2)).unwrap().1.iter().sum::<f32>(), 9.);
    let (ours, theirs) = (of(nn::avg_pool2d(&x, 2)).unwrap(), of(x.avg_pool2d(2)).unwrap());
    assert!(ours.0.iter().zip(&theirs.0).chain(ours.1.iter().zip(&theirs.1)).all(|(a, b)| (a - b).abs() < 1e-6));
}
