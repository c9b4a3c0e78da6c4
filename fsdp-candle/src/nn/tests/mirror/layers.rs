use std::collections::HashMap;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::VarBuilder;

use super::super::super::{self as nn, RNN};
use super::{check, check_on, random, run, tensors};

#[test]
fn linear() {
    for x in [&[4usize, 5][..], &[2, 3, 5], &[2, 2, 3, 5]] {
        check(
            "Linear",
            &[x, &[3, 5], &[3]],
            &|a| nn::Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0]),
            Some(&|a| candle_nn::Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0])),
        );
    }
}

/// Candle takes the rows of a batch that are not adjacent as if they were, and gets another result.
#[test]
fn candles_linear_is_wrong_where_ours_is_right() {
    let (x, w) = (random(1, &[2, 5, 3], DType::F64), random(2, &[4, 5], DType::F64));
    let view = |x: &Tensor| x.transpose(1, 2);
    let plain = |a: &[Tensor]| view(&a[0])?.contiguous()?.reshape((6, 5))?.matmul(&a[1].t()?)?.reshape((2, 3, 4));
    let vars = [x, w];
    let args = tensors(&vars);
    let (expected_y, expected) = run(&plain, &args, &vars);
    let (y, grads) = run(&|a| nn::Linear::new(a[1].clone(), None).forward(&view(&a[0])?), &args, &vars);
    let (wrong_y, wrong) = run(&|a| candle_nn::Linear::new(a[1].clone(), None).forward(&view(&a[0])?), &args, &vars);
    let apart = |a: &Tensor, b: &Tensor| {
        let size = |t: Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
        size((a - b).unwrap()) / size(b.clone())
    };
    assert!(apart(&y, &expected_y) < 1e-12 && grads.iter().zip(&expected).all(|(a, b)| apart(a, b) < 1e-12));
    let worst = apart(&wrong_y, &expected_y).max(apart(&wrong[0], &expected[0])).max(apart(&wrong[1], &expected[1]));
    assert!(worst > 0.1, "candle_nn's Linear has come to be right, by {worst}: say so in nn's documentation");
}

#[test]
fn embedding_takes_ids_of_each_dtype() {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let ids = super::super::random_ids(2, &[2, 3], 7).to_dtype(dtype).unwrap();
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
        // Candle's layer takes no f64.
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
        for x in [&[6usize, 3][..], &[4, 3, 2]] {
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
fn running_statistics_are_candles() {
    let of = |value: f32| Tensor::full(value, 3, &Device::Cpu).unwrap();
    let x = random(1, &[5, 3, 2], DType::F32);
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

/// The arguments are small, so that rounding does not grow from step to step.
fn check_small(what: &str, shapes: &[&[usize]], ours: super::F, candle: super::F) {
    let fresh = |dtype| -> Vec<Var> {
        let small = |(shape, seed): (&&[usize], u64)| (random(seed, shape, dtype).as_detached_tensor() * 0.5).unwrap();
        shapes.iter().zip(1..).map(|of| Var::from_tensor(&small(of)).unwrap()).collect()
    };
    check_on(what, &fresh, ours, Some(candle));
}
