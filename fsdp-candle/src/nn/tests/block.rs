use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use super::super::*;
use super::random_ids;

/// A Llama-like and a GPT-2-like block on one embedding, with a head: every layer once.
fn model(vb: &VarBuilder, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (heads, kv_heads, dim, width, vocabulary) = (4, 2, 4, 16, 13);
    let mut x = embedding(vocabulary, width, vb.pp("wte"))?.forward(ids)?;
    {
        let vb = vb.pp("llama");
        let rotary = Rotary::new(10_000.0, dim, 32, vb.device())?;
        let h = rms_norm(width, 1e-6, vb.pp("norm"))?.forward(&x)?;
        let q = linear_no_bias(width, heads * dim, vb.pp("q"))?.forward(&h)?;
        let k = linear_no_bias(width, kv_heads * dim, vb.pp("k"))?.forward(&h)?;
        let v = linear_b(width, kv_heads * dim, false, vb.pp("v"))?.forward(&h)?;
        let (q, k) = (rotary.apply(&q, 0)?, rotary.apply(&k, 0)?);
        let a = causal_attention(&q, &k, &v, heads, kv_heads, 0.5)?;
        x = (x + linear(width, width, vb.pp("o"))?.forward(&a)?)?;
        let (gate, up) = (linear_no_bias(width, 24, vb.pp("gate"))?, linear_no_bias(width, 24, vb.pp("up"))?);
        let h = silu_mul(&gate.forward(&x)?, &up.forward(&x)?)?;
        x = (x + linear_no_bias(24, width, vb.pp("down"))?.forward(&h)?)?;
    }
    {
        let vb = vb.pp("gpt2");
        let h = layer_norm(width, 1e-5, vb.pp("ln_1"))?.forward(&x)?;
        let qkv = gpt2_linear(width, 3 * width, vb.pp("c_attn"))?.forward(&h)?;
        let a = causal_attention_qkv(&qkv, heads, heads, 0.5)?;
        x = (x + gpt2_linear(width, width, vb.pp("c_proj"))?.forward(&a)?)?;
        let h = layer_norm_no_bias(width, 1e-5, vb.pp("ln_2"))?.forward(&x)?;
        let h = gelu(&gpt2_linear(width, 32, vb.pp("c_fc"))?.forward(&h)?)?;
        x = (x + gpt2_linear(32, width, vb.pp("mlp_proj"))?.forward(&h)?)?;
    }
    let head = linear_no_bias(width, vocabulary, vb.pp("head"))?;
    let separate = cross_entropy(&head.forward(&x)?, targets)?;
    let fused = linear_cross_entropy(&x, head.weight(), targets)?;
    (separate + fused)? * 0.5
}

/// The gradients' direction is the loss's steepest: a small step along it changes the loss by the step times the
/// squared norm.
#[test]
fn gradients_reach_every_parameter_and_predict_the_loss() {
    let vars = VarMap::new();
    let (ids, targets) = (random_ids(1, &[2, 7], 13), random_ids(5, &[2, 7], 13));
    let loss = |vars: &VarMap| model(&VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu), &ids, &targets).unwrap();
    let first = loss(&vars);
    let grads = first.backward().unwrap();
    let mut squared = 0.0;
    let all: Vec<_> = vars.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    assert_eq!(all.len(), 22, "{all:?}");
    for (name, var) in &all {
        let grad = grads.get(var).unwrap_or_else(|| panic!("no gradient for {name}"));
        let norm = grad.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(norm > 0.0 && norm.is_finite(), "{name} has the gradient norm {norm}");
        squared += f64::from(norm);
    }
    // Half a step to either side: the error is of third order.
    let step = 1e-2 / squared.sqrt();
    let moved = |by: f64| {
        for (_, var) in &all {
            var.set(&(var.as_tensor() + (grads.get(var).unwrap() * by).unwrap()).unwrap().detach()).unwrap();
        }
        f64::from(loss(&vars).to_scalar::<f32>().unwrap())
    };
    let above = moved(step);
    let below = moved(-2.0 * step);
    let found = (above - below) / (2.0 * step);
    assert!((found / squared - 1.0).abs() < 5e-3, "the loss changes at {found}, the gradients say {squared}");
}
