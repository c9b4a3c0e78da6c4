use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Device, Module, Result, Tensor};

use super::super::super::{self as nn, AttentionOptions, Documents, loss, moe, ops, rotary_emb};
use super::super::random_ids;
use super::{F, check};
use crate::random::manual_seed;

#[test]
fn activations() {
    use nn::Activation::*;
    for act in [
        Gelu,
        NewGelu,
        Relu,
        Relu2,
        Relu6,
        Silu,
        Sigmoid,
        HardSigmoid,
        Swiglu,
        Swish,
        Mish,
        HardSwish,
        Elu(0.7),
        LeakyRelu(0.1),
        GeluPytorchTanh,
    ] {
        let theirs = candle_nn::Activation::from(act);
        assert_eq!(nn::Activation::from(theirs), act);
        let name = serde_json::to_string(&act).unwrap();
        assert_eq!(name, serde_json::to_string(&theirs).unwrap());
        assert_eq!(serde_json::from_str::<nn::Activation>(&name).unwrap(), act);
        check(&format!("{act:?}"), &[&[3, 8]], &|a| act.forward(&a[0]), Some(&|a| theirs.forward(&a[0])));
    }
    for name in
        ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "relu6", "silu", "swish", "mish", "hardswish"]
    {
        let name = format!("\"{name}\"");
        let theirs = serde_json::from_str::<candle_nn::Activation>(&name).unwrap();
        assert_eq!(serde_json::from_str::<nn::Activation>(&name).unwrap(), theirs.into());
    }
    assert_eq!(nn::Activation::default(), candle_nn::Activation::default().into());
}

#[test]
fn functions_of_one_tensor() {
    use candle_nn::ops as theirs;
    let cases: [(&str, F, F); 14] = [
        ("softmax", &|a| ops::softmax(&a[0], D::Minus1), &|a| theirs::softmax(&a[0], D::Minus1)),
        ("softmax of another dimension", &|a| ops::softmax(&a[0], 1), &|a| theirs::softmax(&a[0], 1)),
        ("softmax_last_dim", &|a| ops::softmax_last_dim(&a[0]), &|a| theirs::softmax_last_dim(&a[0])),
        ("log_softmax", &|a| ops::log_softmax(&a[0], 2), &|a| theirs::log_softmax(&a[0], 2)),
        ("silu", &|a| ops::silu(&a[0]), &|a| theirs::silu(&a[0])),
        ("swiglu", &|a| ops::swiglu(&a[0]), &|a| theirs::swiglu(&a[0])),
        ("sigmoid", &|a| ops::sigmoid(&a[0]), &|a| theirs::sigmoid(&a[0])),
        ("hard_sigmoid", &|a| ops::hard_sigmoid(&a[0]), &|a| theirs::hard_sigmoid(&a[0])),
        ("mish", &|a| ops::mish(&a[0]), &|a| theirs::mish(&a[0])),
        ("leaky_relu", &|a| ops::leaky_relu(&a[0], 0.2), &|a| theirs::leaky_relu(&a[0], 0.2)),
        ("pixel_shuffle", &|a| ops::pixel_shuffle(&four(a)?, 2), &|a| theirs::pixel_shuffle(&four(a)?, 2)),
        ("pixel_unshuffle", &|a| ops::pixel_unshuffle(&flat(a)?, 2), &|a| theirs::pixel_unshuffle(&flat(a)?, 2)),
        ("replication_pad2d", &|a| ops::replication_pad2d(&flat(a)?, 1), &|a| theirs::replication_pad2d(&flat(a)?, 1)),
        ("Identity", &|a| ops::Identity::new().forward(&a[0]), &|a| theirs::Identity::new().forward(&a[0])),
    ];
    for (what, ours, theirs) in cases {
        check(what, &[&[2, 4, 6]], ours, Some(theirs));
    }
    check("selu", &[&[3, 5]], &|a| ops::selu(&a[0], 1.5, 1.25), None);
    let x = super::random(1, &[40], DType::F32);
    super::assert_close("selu", &ops::selu(&x, 1.67, 1.05).unwrap(), &theirs::selu(&x, 1.67, 1.05).unwrap(), 1e-6);
}

fn four(a: &[Tensor]) -> Result<Tensor> {
    a[0].reshape((2, 4, 2, 3))
}

fn flat(a: &[Tensor]) -> Result<Tensor> {
    a[0].reshape((2, 1, 4, 6))
}

/// Arguments for which Candle's gradient is NaN.
#[test]
fn gradients_of_large_arguments_are_finite() {
    let x = candle_core::Var::new(&[-200f32, -100., 0., 100., 200.], &Device::Cpu).unwrap();
    let t = Tensor::new(&[1f32, 0., 1., 0., 1.], &Device::Cpu).unwrap();
    let slopes = |y: Result<Tensor>| {
        let grads = y.unwrap().sum_all().unwrap().backward().unwrap();
        grads.get(&x).unwrap().to_vec1::<f32>().unwrap()
    };
    for (found, expected) in [
        (slopes(ops::mish(&x)), [0., 0., 0.6, 1., 1.]),
        (slopes(ops::selu(&x, 1., 1.)), [0., 0., 1., 1., 1.]),
        (slopes(loss::binary_cross_entropy_with_logit(&x, &t)), [-0.2, 0., -0.1, 0.2, 0.]),
    ] {
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} {expected:?}");
    }
}

#[test]
fn normalizations() {
    use candle_nn::ops as theirs;
    let shapes: [&[usize]; 3] = [&[2, 3, 8], &[8], &[8]];
    let rms: F = &|a| theirs::rms_norm_slow(&a[0], &a[1], 1e-5);
    check("rms_norm", &shapes[..2], &|a| ops::rms_norm(&a[0], &a[1], 1e-5), Some(rms));
    check("rms_norm_slow", &shapes[..2], &|a| ops::rms_norm_slow(&a[0], &a[1], 1e-5), Some(rms));
    let layer: F = &|a| theirs::layer_norm_slow(&a[0], &a[1], &a[2], 1e-5);
    check("layer_norm", &shapes, &|a| ops::layer_norm(&a[0], &a[1], &a[2], 1e-5), Some(layer));
    check("layer_norm_slow", &shapes, &|a| ops::layer_norm_slow(&a[0], &a[1], &a[2], 1e-5), Some(layer));
}

#[test]
fn rotary_embeddings() {
    use candle_nn::rotary_emb as theirs;
    type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let pairs: [(&str, Rope, Rope); 3] = [
        ("rope", rotary_emb::rope, theirs::rope),
        ("rope_i", rotary_emb::rope_i, theirs::rope_i),
        ("rope_thd", rotary_emb::rope_thd, theirs::rope_thd),
    ];
    for (what, ours, theirs) in pairs {
        // More positions than steps, and separate tables for each element of the batch.
        for table in [&[5usize, 2][..], &[2, 3, 2]] {
            let x: &[usize] = if what == "rope_thd" { &[2, 3, 2, 4] } else { &[2, 2, 3, 4] };
            check(what, &[x, table, table], &|a| ours(&a[0], &a[1], &a[2]), Some(&|a| theirs(&a[0], &a[1], &a[2])));
            // Constant tables use the fused operation.
            let constant = |a: &[Tensor]| ours(&a[0], &a[1].detach(), &a[2].detach());
            let table = |seed, a: &[Tensor]| super::random(seed, table, a[0].dtype()).as_detached_tensor();
            check(what, &[x], &|a| constant(&[a[0].clone(), table(5, a), table(6, a)]), None);
        }
    }
    let t = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let error = super::super::message(rotary_emb::rope(&t(&[1, 1, 4, 4]), &t(&[3, 2]), &t(&[3, 2])));
    assert!(error.contains("[3, 2]") && error.contains("at least 4"), "{error}");
    assert!(rotary_emb::rope(&t(&[1, 1, 4, 4]), &t(&[4, 2]), &t(&[4, 1])).is_err());
}

#[test]
fn losses() {
    use candle_nn::loss as theirs;
    let targets = random_ids(3, &[4], 5);
    check("nll", &[&[4, 5]], &|a| loss::nll(&a[0].contiguous()?, &targets), Some(&|a| theirs::nll(&a[0], &targets)));
    check(
        "cross_entropy",
        &[&[4, 5]],
        &|a| loss::cross_entropy(&a[0], &targets),
        Some(&|a| theirs::cross_entropy(&a[0], &targets)),
    );
    check("mse", &[&[3, 4], &[3, 4]], &|a| loss::mse(&a[0], &a[1]), Some(&|a| theirs::mse(&a[0], &a[1])));
    check(
        "binary_cross_entropy_with_logit",
        &[&[3, 4]],
        &|a| loss::binary_cross_entropy_with_logit(&a[0], &a[0].detach().gt(0.1f32)?.to_dtype(a[0].dtype())?),
        Some(&|a| theirs::binary_cross_entropy_with_logit(&a[0], &a[0].gt(0.1f32)?.to_dtype(a[0].dtype())?)),
    );
    check(
        "huber",
        &[&[3, 4], &[3, 4]],
        &|a| loss::huber(&a[0], &a[1], 0.5),
        Some(&|a| theirs::huber(&a[0], &a[1], 0.5)),
    );
    assert!(loss::cross_entropy(&Tensor::zeros((1, 2, 3), DType::F32, &Device::Cpu).unwrap(), &targets).is_err());
}

/// Returns the routes of 4 tokens to 2 of 3 experts, sorted by expert.
fn routes() -> (Tensor, Tensor) {
    let experts = [0u32, 2, 2, 0, 0, 2, 2, 0];
    let mut order: Vec<u32> = (0..8).collect();
    order.sort_by_key(|&route| experts[route as usize]);
    let sorted: Vec<u32> = order.iter().map(|&route| experts[route as usize]).collect();
    (Tensor::new(order, &Device::Cpu).unwrap(), Tensor::new(sorted, &Device::Cpu).unwrap())
}

#[test]
fn experts_and_their_router() {
    let (order, experts) = routes();
    let (tokens, topk) = (4, 2);
    check(
        "moe_gemm",
        &[&[tokens, 3], &[3, 5, 3]],
        &|a| moe::moe_gemm(&a[0], &a[1], &None, &order, &experts, topk, true),
        Some(&|a| plain_experts(&a[0], &a[1], None)),
    );
    // The route weights are f32, the output of the router's softmax. Their gradient flows on to the router.
    check(
        "moe_gemm with route weights",
        &[&[tokens * topk, 3], &[3, 5, 3], &[tokens, topk]],
        &|a| moe::moe_gemm(&a[0], &a[1], &Some(a[2].clone()), &order, &experts, topk, true),
        Some(&|a| plain_experts(&a[0], &a[1], Some(&a[2]))),
    );
    let error = super::super::message(moe::moe_gemm(
        &Tensor::zeros((4, 3), DType::F32, &Device::Cpu).unwrap(),
        &Tensor::zeros((2, 5, 3), DType::F32, &Device::Cpu).unwrap(),
        &None,
        &order,
        &experts,
        topk,
        false,
    ));
    assert!(error.contains("expert 2") && error.contains("number of experts is 2"), "{error}");
}

/// Computes the experts route by route.
fn plain_experts(x: &Tensor, weights: &Tensor, of_routes: Option<&Tensor>) -> Result<Tensor> {
    let experts = [0usize, 2, 2, 0, 0, 2, 2, 0];
    let rows = experts.iter().enumerate().map(|(route, &expert)| {
        let row = x.narrow(0, if of_routes.is_some() { route } else { route / 2 }, 1)?;
        let y = row.matmul(&weights.narrow(0, expert, 1)?.squeeze(0)?.t()?)?;
        match of_routes {
            None => Ok(y),
            Some(of_routes) => y.broadcast_mul(&of_routes.narrow(0, route / 2, 1)?.narrow(1, route % 2, 1)?),
        }
    });
    Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)
}

#[test]
fn quantized_experts() {
    let (order, experts) = routes();
    let x = super::random(1, &[4, 32], DType::F32);
    let weights = super::random(2, &[3, 5, 32], DType::F32);
    let quantized = QTensor::quantize(&weights, GgmlDType::Q8_0).unwrap();
    let call = |dtype| moe::moe_gemm_gguf(&x, &quantized, &None, &order, &experts, 2, true, dtype).unwrap();
    let expected = plain_experts(&x, &weights, None).unwrap();
    super::assert_close("quantized", &call(DType::F32), &expected, 2e-2);
    assert_eq!(call(DType::BF16).dtype(), DType::F32);
    assert!(call(DType::F32).sum_all().unwrap().backward().unwrap().get(&x).is_some());
}

#[test]
fn dropout() {
    for p in [0.25, 0.9] {
        check(
            "dropout",
            &[&[3, 37]],
            &|a| {
                manual_seed(5);
                ops::dropout(&a[0], p)
            },
            None,
        );
    }
    // Compares with Candle if nothing is dropped.
    let x = Tensor::new(&[1f32, -2., 3.], &Device::Cpu).unwrap();
    for (p, train) in [(0., true), (0.5, false)] {
        let [ours, theirs] =
            [nn::Dropout::new(p).forward(&x, train), candle_nn::Dropout::new(p).forward(&x, train)].map(Result::unwrap);
        assert_eq!(ours.to_vec1::<f32>().unwrap(), theirs.to_vec1::<f32>().unwrap());
    }
    for p in [-0.1, 1., f32::NAN] {
        let error = ops::dropout(&x, p).unwrap_err().to_string();
        assert!(error.contains("dropping an element must be in [0, 1), found"), "{error}");
        assert!(candle_nn::ops::dropout(&x, p).is_err());
    }
}

#[test]
fn attention_with_dropout() {
    let documents = Documents::new(vec![vec![2, 3], vec![5]]).unwrap();
    for (causal, window, softcap) in [(true, None, None), (false, Some(2), None), (true, None, Some(2.))] {
        let options = AttentionOptions { scale: 0.6, causal, window, softcap, dropout: 0.3 };
        check(
            "attention with dropout",
            &[&[2, 5, 16], &[2, 5, 8], &[2, 5, 8]],
            &|a| {
                manual_seed(5);
                nn::attention(&a[0], &a[1], &a[2], 4, 2, &options)
            },
            None,
        );
        check(
            "attention in documents with dropout",
            &[&[2, 5, 32]],
            &|a| {
                manual_seed(5);
                nn::attention_qkv_in_documents(&a[0], 4, 2, &options, &documents)
            },
            None,
        );
    }
    let q = Tensor::zeros((1, 2, 4), DType::F32, &Device::Cpu).unwrap();
    let options = AttentionOptions { dropout: 1., ..AttentionOptions::causal(1.) };
    let error = nn::attention(&q, &q, &q, 1, 1, &options).unwrap_err().to_string();
    assert!(error.contains("attention: the probability of dropping an element"), "{error}");
}
