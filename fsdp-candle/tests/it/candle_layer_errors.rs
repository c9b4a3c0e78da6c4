//! Candle's own layers applied to a sharded parameter: whatever Candle's error is, the unit explains it.

use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::{self as cn, ModuleT, RNN, VarBuilder};
use fsdp_candle::{FullyShard, World, fully_shard, nn};

use crate::common::{alone, batch, built, refused, vars};

type Use = Box<dyn Fn() -> Result<Tensor>>;
type Build = fn(VarBuilder) -> Result<Use>;

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

/// The operation, on a parameter of this shape.
fn op(vb: VarBuilder, shape: &[usize], op: fn(&Tensor) -> Result<Tensor>) -> Result<Use> {
    let weight = vb.get(shape, "weight")?;
    Ok(Box::new(move || op(&weight)))
}

fn layer(module: impl Module + 'static, shape: &'static [usize]) -> Result<Use> {
    Ok(Box::new(move || module.forward(&ones(shape))))
}

#[test]
fn explains_candles_errors_about_sharded_parameters() {
    let uses: [(&str, Build); 31] = [
        ("Linear", |vb| layer(cn::linear(4, 4, vb)?, &[3, 4])),
        ("Embedding", |vb| {
            let table = cn::embedding(5, 4, vb)?;
            Ok(Box::new(move || table.forward(&Tensor::new(&[1u32], &Device::Cpu)?)))
        }),
        ("LayerNorm", |vb| layer(cn::layer_norm(4, 1e-5, vb)?, &[3, 4])),
        ("LayerNorm without bias", |vb| layer(cn::layer_norm_no_bias(4, 1e-5, vb)?, &[3, 4])),
        ("RmsNorm", |vb| layer(cn::rms_norm(4, 1e-5, vb)?, &[3, 4])),
        ("RmsNorm of half floats", |vb| {
            let norm = cn::rms_norm(4, 1e-5, vb)?;
            Ok(Box::new(move || norm.forward(&ones(&[3, 4]).to_dtype(DType::BF16)?)))
        }),
        ("GroupNorm", |vb| layer(cn::group_norm(2, 4, 1e-5, vb)?, &[3, 4, 2])),
        ("BatchNorm", |vb| {
            let norm = cn::batch_norm(4, 1e-5, vb)?;
            Ok(Box::new(move || norm.forward_t(&ones(&[3, 4]), true)))
        }),
        ("Conv1d", |vb| layer(cn::conv1d(3, 4, 2, Default::default(), vb)?, &[2, 3, 5])),
        ("Conv2d", |vb| layer(cn::conv2d(3, 4, 2, Default::default(), vb)?, &[2, 3, 5, 5])),
        ("Conv2d of one pixel", |vb| layer(cn::conv2d(3, 4, 1, Default::default(), vb)?, &[2, 3, 5, 5])),
        ("ConvTranspose1d", |vb| layer(cn::conv_transpose1d(3, 4, 2, Default::default(), vb)?, &[2, 3, 5])),
        ("ConvTranspose2d", |vb| layer(cn::conv_transpose2d(3, 4, 2, Default::default(), vb)?, &[2, 3, 5, 5])),
        ("PReLU", |vb| layer(cn::prelu(Some(4), vb)?, &[3, 4])),
        ("LSTM", |vb| {
            let lstm = cn::lstm(4, 3, Default::default(), vb)?;
            Ok(Box::new(move || lstm.states_to_tensor(&lstm.seq(&ones(&[2, 3, 4]))?)))
        }),
        ("GRU", |vb| {
            let gru = cn::gru(4, 3, Default::default(), vb)?;
            Ok(Box::new(move || gru.states_to_tensor(&gru.seq(&ones(&[2, 3, 4]))?)))
        }),
        ("softmax_last_dim", |vb| op(vb, &[3, 4], cn::ops::softmax_last_dim)),
        ("softmax", |vb| op(vb, &[3, 4], |w| cn::ops::softmax(w, D::Minus1))),
        ("sigmoid", |vb| op(vb, &[3, 4], cn::ops::sigmoid)),
        ("rope of it", |vb| op(vb, &[1, 2, 3, 4], |w| cn::rotary_emb::rope(w, &ones(&[3, 2]), &ones(&[3, 2])))),
        ("rope by it", |vb| op(vb, &[3, 2], |w| cn::rotary_emb::rope(&ones(&[1, 2, 3, 4]), w, w))),
        ("rope_i by it", |vb| op(vb, &[3, 2], |w| cn::rotary_emb::rope_i(&ones(&[1, 2, 3, 4]), w, w))),
        ("a norm of it", |vb| op(vb, &[3, 4], |w| cn::ops::rms_norm(w, &ones(&[4]), 1e-5))),
        ("reading it", |vb| op(vb, &[4], |w| Tensor::new(w.to_vec1::<f32>()?, &Device::Cpu))),
        ("an element of it", |vb| op(vb, &[3, 4], |w| w.i((1, 2))?.sqr())),
        ("copying it", |vb| op(vb, &[3, 4], |w| w.t()?.contiguous())),
        ("its largest", |vb| op(vb, &[3, 4], |w| w.argmax(1))),
        ("sorting it", |vb| op(vb, &[3, 4], |w| Ok(w.sort_last_dim(true)?.0))),
        ("a choice by it", |vb| op(vb, &[3, 4], |w| ones(&[3, 4]).gt(0.)?.where_cond(w, &ones(&[3, 4])))),
        ("gathering from it", |vb| op(vb, &[3, 4], |w| w.gather(&Tensor::zeros((3, 4), DType::U32, &Device::Cpu)?, 1))),
        ("stacking it", |vb| op(vb, &[3, 4], |w| Tensor::stack(&[w, &ones(&[3, 4])], 0))),
    ];
    for (what, build) in uses {
        let world = World::single().unwrap();
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let vb = vars.builder(DType::F32);
        let inner = fully_shard(&opts, vb.pp("inner"), build).unwrap();
        let outer = fully_shard(&opts, vb, |vb| nn::linear(4, 4, vb.pp("outer"))).unwrap();
        println!("{what}");
        let parts = ["FSDP unit `(root)`", "`inner`", "through its FsdpModule"];
        refused(outer.call(|_| (inner.inner())()), &parts);
    }
}

#[test]
fn keeps_unrelated_candle_errors() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    let unit = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| cn::rms_norm(4, 1e-5, vb)).unwrap();
    let x = ones(&[3, 4]).to_dtype(DType::BF16).unwrap();
    let text = unit.call(|norm| norm.forward(&x)).unwrap_err().to_string();
    assert!(text.contains("unsupported dtype for rmsnorm BF16") && !text.contains("F4"), "{text}");
}

#[test]
fn calls_without_hooks_name_parameter_and_fix() {
    let world = alone();
    let (_vars, model) = built(&world, 4);
    refused(
        model.inner().blocks[0].inner().forward(&batch(0, 4)),
        &["parameter `blocks.0.norm.weight`", "through its FsdpModule"],
    );
}

#[test]
fn candles_error_for_a_sharded_weight() {
    let world = alone();
    let vars = vars(&world);
    let vb = vars.builder(DType::F32);
    let unit = fully_shard(&FullyShard::new(&vars), vb, |vb| candle_nn::linear(4, 4, vb)).unwrap();
    // Cited by the crate's documentation.
    refused(unit.inner().forward(&batch(0, 4)), &["dtype mismatch in matmul, lhs: F32, rhs: F4"]);
}
