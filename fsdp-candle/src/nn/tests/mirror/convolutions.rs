use candle_core::{DType, Module, Tensor};

use super::super::super as nn;
use super::{check, random, run, tensors};

#[test]
fn over_one_dimension() {
    // Length, kernel, groups, padding, stride, dilation; some leave a rest.
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
fn over_two_dimensions() {
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
fn transposed() {
    for (groups, padding, output_padding, stride, dilation) in [(1, 0, 0, 1, 1), (2, 1, 1, 2, 1), (1, 1, 0, 3, 2)] {
        let config = nn::ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups };
        check(
            "ConvTranspose1d",
            &[&[2, 4, 5], &[4, 3, 3], &[3 * groups]],
            &|a| nn::ConvTranspose1d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]),
            // Candle's is right for one element of a batch at a time alone.
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

/// Candle's `conv1d` copies a kernel that is not contiguous and then uses the other one: of its own gradient as well.
#[test]
fn candles_kernel_gradient_is_wrong_where_ours_is_right() {
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
    let apart = |a: &Tensor, b: &Tensor| {
        let size = |t: Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
        size((a - b).unwrap()) / size(b.clone())
    };
    assert!(apart(&ours[0], &expected[0]) < 1e-12 && apart(&ours[1], &expected[1]) < 1e-12);
    let worst = apart(&theirs[1], &expected[1]);
    assert!(worst > 0.1, "candle_nn's Conv1d has come to be right, by {worst}: say so in nn's documentation");
}

#[test]
fn a_batch_norm_is_absorbed() {
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
fn what_does_not_fit_is_an_error() {
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
