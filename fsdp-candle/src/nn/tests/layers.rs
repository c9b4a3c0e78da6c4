use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarMap;

use super::super::{embedding as embedding_file, layer_norm as layer_norm_file, linear as linear_file, *};
use super::{DTYPES, assert_close, check, message, positions, random, random_ids};
use crate::graph::is_output;

#[test]
fn linear_takes_views() {
    for dtype in [DType::F32, DType::BF16] {
        let x = random(1, &[6, 3, 4], dtype);
        let w = random(2, &[6, 5], dtype);
        let forward = |x: &Tensor, w: &Tensor| Linear::new(w.clone(), None).forward(x);
        let view = || -> Result<_> { Ok((x.transpose(0, 2)?.narrow(1, 1, 2)?, w.t()?)) };
        check(
            "linear on views",
            &[&x, &w],
            || view().and_then(|(x, w)| forward(&x, &w)),
            || view().and_then(|(x, w)| linear_file::composite(&x, &w, None, false)),
        );
    }
}

#[test]
fn a_large_linear_matches_the_composite() {
    let (x, w) = (random(1, &[150, 260], DType::F32), random(2, &[300, 260], DType::F32));
    let layer = Linear::new(w.as_tensor().clone(), None);
    check("large linear", &[&x, &w], || layer.forward(&x), || linear_file::composite(&x, &w, None, false));
}

// A rank may have no part of a layer's inputs or outputs.
#[test]
fn linear_layers_may_have_no_inputs_or_no_outputs() {
    let zeros = |tensor: &Tensor, dims: [usize; 3]| {
        assert_eq!(tensor.dims(), dims);
        let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values, vec![0.; dims.iter().product()]);
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (inputs, outputs) in [(0, 3), (3, 0)] {
            let (x, w) = (random(1, &[2, 4, inputs], dtype), random(2, &[outputs, inputs], dtype));
            let y = Linear::new(w.as_tensor().clone(), None).forward(&x).unwrap();
            zeros(&y, [2, 4, outputs]);
            let grads = y.sum_all().unwrap().backward().unwrap();
            zeros(grads.get(&x).unwrap(), [2, 4, inputs]);
            assert_eq!(grads.get(&w).unwrap().dims(), [outputs, inputs]);
        }
    }
}

#[test]
fn a_constant_input_gets_no_gradient() {
    let x = random(1, &[4, 3], DType::F32).as_detached_tensor();
    let w = random(2, &[2, 3], DType::F32);
    let y = Linear::new(w.as_tensor().clone(), None).forward(&x).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&x).is_none());
    let expected = x.sum(0).unwrap().broadcast_as((2, 3)).unwrap();
    assert_close("dw", grads.get(&w).unwrap(), &expected, 1e-6);
}

#[test]
fn a_weight_used_twice_gets_both_gradients() {
    let x = random(1, &[2, 5, 8], DType::F32);
    let w = random(2, &[8, 8], DType::F32);
    let ids = random_ids(3, &[2, 5], 8);
    let table = Embedding::new(w.as_tensor().clone(), w.dims()[1]);
    let head = Linear::new(w.as_tensor().clone(), None);
    check(
        "tied",
        &[&x, &w],
        || head.forward(&(table.forward(&ids)? + x.as_tensor())?),
        || linear_file::composite(&(embedding_file::composite(&w, &ids)? + x.as_tensor())?, &w, None, false),
    );
}

/// PyTorch's `padding_idx`: lookups of the row give it no gradient, but a head that shares the weight does.
#[test]
fn a_padding_row_has_no_gradient_from_lookups() {
    let ids = Tensor::new(&[[3u32, 0, 3], [7, 2, 3]], &Device::Cpu).unwrap();
    for dtype in DTYPES {
        let w = random(1, &[8, 6], dtype);
        for padding in [0, 3, 5, 7] {
            let new = || Embedding::new(w.as_tensor().clone(), 6).with_padding_idx(Some(padding)).unwrap();
            assert_eq!(new().padding_idx(), Some(padding));
            let is_padding = Tensor::arange(0u32, 8, &Device::Cpu).unwrap().eq(padding as u32).unwrap();
            let is_padding = is_padding.unsqueeze(1).unwrap().broadcast_as((8, 6)).unwrap();
            let stopped = || is_padding.where_cond(&w.as_detached_tensor(), w.as_tensor());
            for ids in [&ids, &ids.to_dtype(DType::I64).unwrap(), &ids.to_dtype(DType::U8).unwrap()] {
                let reference = || embedding_file::composite(&stopped()?, ids);
                check("padding", &[&w], || new().forward(ids), reference);
                let head = Linear::new(w.as_tensor().clone(), None);
                let tied = || linear_file::composite(&reference()?, &w, None, false);
                check("padding and a tied head", &[&w], || head.forward(&new().forward(ids)?), tied);
            }
        }
        let table = || Embedding::new(w.as_tensor().clone(), 6);
        assert_eq!(table().with_padding_idx(None).unwrap().padding_idx(), None);
        let error = table().with_padding_idx(Some(8)).unwrap_err().to_string();
        assert!(error.contains("padding_idx is 8, but the vocabulary has 8 ids"), "{error}");
    }
}

#[test]
fn norms_match_the_composite() {
    for dtype in DTYPES {
        for shape in [vec![3, 3], vec![5, 7], vec![2, 3, 64], vec![4, 200], vec![300, 200]] {
            let hidden = shape[shape.len() - 1];
            let x = Var::from_tensor(&(random(1, &shape, dtype).as_tensor() + 3.0).unwrap()).unwrap();
            let (w, b) = (random(2, &[hidden], dtype), random(3, &[hidden], dtype));
            let layer = LayerNorm::new(w.as_tensor().clone(), b.as_tensor().clone(), 1e-5);
            check(
                "layer norm",
                &[&x, &w, &b],
                || layer.forward(&x),
                || layer_norm_file::composite(&x, &w, Some(&b), 1e-5, true),
            );
            let layer = LayerNorm::new_no_bias(w.as_tensor().clone(), 1e-5);
            check(
                "layer norm without bias",
                &[&x, &w],
                || layer.forward(&x),
                || layer_norm_file::composite(&x, &w, None, 1e-5, true),
            );
            let layer = RmsNorm::new(w.as_tensor().clone(), 1e-6);
            check(
                "rms norm",
                &[&x, &w],
                || layer.forward(&x),
                || layer_norm_file::composite(&x, &w, None, 1e-6, false),
            );
        }
    }
}

#[test]
fn activations_match_the_composite() {
    for dtype in DTYPES {
        for shape in [vec![1], vec![3, 37], vec![4, 5, 8], vec![40_001]] {
            let (x, up) = (random(1, &shape, dtype), random(2, &shape, dtype));
            check("silu", &[&x], || silu(&x), || x.silu());
            check("gelu", &[&x], || gelu(&x), || x.gelu());
            check("gelu_erf", &[&x], || gelu_erf(&x), || x.gelu_erf());
            check("silu_mul", &[&x, &up], || silu_mul(&x, &up), || x.silu()? * up.as_tensor());
            check("add", &[&x, &up], || add(&x, &up), || x.as_tensor() + up.as_tensor());
        }
        let x = random(5, &[6, 4], dtype);
        check("gelu of a view", &[&x], || gelu(&x.t()?), || x.t()?.gelu());
    }
}

#[test]
fn layers_compute_the_activations_that_they_read_again() {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let functions: [(&str, Function, Function); 4] = [
        ("silu", silu, Tensor::silu),
        ("gelu", gelu, Tensor::gelu),
        ("gelu_erf", gelu_erf, Tensor::gelu_erf),
        ("silu_mul", |x| silu_mul(x, &x.affine(2., 1.)?), |x| x.silu()? * x.affine(2., 1.)?),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (x, w) = (random(1, &[3, 5], dtype), random(2, &[4, 5], dtype));
        let layer = Linear::new(w.as_tensor().clone(), None);
        for (name, function, composite) in functions {
            let forward = || {
                let activation = function(&x)?;
                let (output, id) = (layer.forward(&activation)?, activation.id());
                assert!(is_output(id));
                drop(activation);
                assert!(!is_output(id), "the graph keeps {name} of {dtype:?}");
                Ok(output)
            };
            check(name, &[&x, &w], forward, || linear_file::composite(&composite(&x)?, &w, None, false));
        }
    }
}

/// Compares with f64 over the curved range of the functions, relative to each value.
#[test]
fn activations_are_accurate_relative_to_each_value() {
    let x: Vec<f32> = (-1200..=1200).map(|i| i as f32 * 0.01).collect();
    let t = Tensor::new(x.as_slice(), &Device::Cpu).unwrap();
    let s = |x: f64| 1.0 / (1.0 + (-x).exp());
    let tanh_gelu = |x: f64| x * s(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x));
    let erf_gelu = |x: f64| x * 0.5 * candle_core::cpu::erf::erfc_f64(-x * std::f64::consts::FRAC_1_SQRT_2);
    let compare = |name: &str, found: Tensor, exact: &dyn Fn(f64) -> f64, bound: f64| {
        for (&x, y) in x.iter().zip(found.to_vec1::<f32>().unwrap()) {
            let exact = exact(f64::from(x));
            // Below 1e-30 the exponent's rounding and f32's range dominate.
            if exact.abs() > 1e-30 {
                let error = (f64::from(y) - exact).abs() / exact.abs();
                assert!(error < bound, "{name}({x}) is {y}, expected {exact}: relative error {error:e}");
            }
        }
    };
    compare("silu", silu(&t).unwrap(), &|x| x * s(x), 4e-7);
    // The argument of the exponential reaches 60, which scales its rounding error.
    compare("gelu", gelu(&t).unwrap(), &tanh_gelu, 1e-5);
    compare("gelu_erf", gelu_erf(&t).unwrap(), &erf_gelu, 5e-6);
}

#[test]
fn activations_of_extreme_values_are_finite() {
    let x = Tensor::new(&[-1e30f32, -1000., -100., 0., 100., 1000., 1e30, f32::NAN], &Device::Cpu).unwrap();
    for (name, y) in [("silu", silu(&x)), ("gelu_erf", gelu_erf(&x))] {
        let y = y.unwrap().to_vec1::<f32>().unwrap();
        assert!(y[1].abs() < 1e-30 && y[2].abs() < 1e-30 && y[3] == 0.0, "{name}: {y:?}");
        assert_eq!(y[4..7], [100., 1000., 1e30], "{name}");
        assert!(y[7].is_nan(), "{name}");
    }
    let y = gelu(&x).unwrap().to_vec1::<f32>().unwrap();
    assert!(y[1].abs() < 1e-30 && y[2].abs() < 1e-30 && y[4] == 100. && y[7].is_nan(), "{y:?}");
    let x = Var::from_tensor(&x).unwrap();
    let dx = gelu(&x).unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap().to_vec1::<f32>().unwrap();
    assert!(dx[..3].iter().all(|dx| dx.abs() < 1e-30) && dx[4..7] == [1.; 3] && dx[7].is_nan(), "{dx:?}");
}

#[test]
fn rotary_matches_the_composite() {
    let rotary = Rotary::new(10_000.0, 6, 20, &Device::Cpu).unwrap();
    for dtype in DTYPES {
        for (shape, offset) in [(vec![2, 5, 3, 6], 0), (vec![1, 1, 18], 19), (vec![3, 4, 6], 7), (vec![40, 20, 48], 0)]
        {
            let x = random(1, &shape, dtype);
            check("rotary", &[&x], || rotary.apply(&x, offset), || rotary.composite(&x, &positions(offset, &x)));
        }
    }
    // At position 1, pair 0 (elements 0 and 3) is rotated by one radian.
    let x = Tensor::new(&[[[1f32, 0., 0., 0., 0., 0.]]], &Device::Cpu).unwrap();
    let y = rotary.apply(&x, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!((y[0], y[3]), (1f32.cos(), 1f32.sin()));
}

#[test]
fn errors_name_the_function_and_the_shapes() {
    let cpu = &Device::Cpu;
    let t = |shape: &[usize]| Tensor::zeros(shape, DType::F32, cpu).unwrap();
    let half = t(&[2, 4]).to_dtype(DType::BF16).unwrap();
    let layer = Linear::new(t(&[3, 4]), None);
    let m = message(layer.forward(&t(&[2, 5])));
    assert!(m.contains("Linear") && m.contains("[2, 5]") && m.contains("[3, 4]"), "{m}");
    let m = message(layer.forward(&half));
    assert!(m.contains("Linear") && m.contains("BF16") && m.contains("F32"), "{m}");
    let m = message(Linear::new(t(&[3, 4]), Some(t(&[4]))).forward(&t(&[2, 4])));
    assert!(m.contains("bias") && m.contains("[3]"), "{m}");
    let m = message(Gpt2Linear::new(t(&[4, 3]), None).forward(&t(&[2, 3])));
    assert!(m.contains("Gpt2Linear") && m.contains("[4, 3]"), "{m}");
    let m = message(LayerNorm::new_no_bias(t(&[4]), 1e-5).forward(&t(&[2, 3])));
    assert!(m.contains("LayerNorm") && m.contains("[2, 3]"), "{m}");
    let m = message(RmsNorm::new(t(&[4]), 1e-5).forward(&t(&[])));
    assert!(m.contains("RmsNorm"), "{m}");
    let m = message(silu_mul(&t(&[2, 3]), &t(&[3, 2])));
    assert!(m.contains("silu_mul") && m.contains("[3, 2]"), "{m}");

    let table = Embedding::new(t(&[10, 4]), 4);
    let m = message(table.forward(&Tensor::new(&[1u32, 10], cpu).unwrap()));
    assert!(m.contains("id 10") && m.contains("vocabulary size is 10"), "{m}");
    let m = message(table.forward(&Tensor::new(&[1i64, -1], cpu).unwrap()));
    assert!(m.contains("id -1") && m.contains("element 1 of 2"), "{m}");
    let m = message(table.forward(&Tensor::new(&[1f32], cpu).unwrap()));
    assert!(m.contains("u32") && m.contains("F32"), "{m}");
    assert!(message(Embedding::new(t(&[10, 4]), 5).forward(&Tensor::new(&[1u32], cpu).unwrap())).contains("[10, 4]"));

    let rotary = Rotary::new(10_000.0, 4, 8, cpu).unwrap();
    let m = message(rotary.apply(&t(&[1, 4, 8]), 5));
    assert!(m.contains("5..9") && m.contains('8'), "{m}");
    assert!(message(rotary.apply(&t(&[1, 4, 6]), 0)).contains("Rotary"));
    assert!(Rotary::new(10_000.0, 5, 8, cpu).unwrap_err().to_string().contains("even"));
    let _ = silu(&t(&[0, 3])).unwrap();
}

#[test]
fn partially_rotated_heads_match_the_composite() {
    for (head_dim, factor) in [(Some(7), 1.0), (Some(4), 1.5), (None, 0.5)] {
        let options = RotaryOptions { head_dim, factor };
        let rotary = Rotary::with_options(&[1.0, 0.25], options, 9, &Device::Cpu).unwrap();
        let width = head_dim.unwrap_or(4);
        assert_eq!(rotary.head_dim(), width);
        for dtype in DTYPES {
            for (shape, offset) in [(vec![2, 5, 3, width], 0), (vec![1, 2, 3 * width], 7)] {
                let x = random(1, &shape, dtype);
                check("rotary", &[&x], || rotary.apply(&x, offset), || rotary.composite(&x, &positions(offset, &x)));
            }
        }
    }
    // Two of the head's three elements are rotated by half a radian and doubled. The third stays.
    let options = RotaryOptions { head_dim: Some(3), factor: 2.0 };
    let rotary = Rotary::with_options(&[0.5], options, 4, &Device::Cpu).unwrap();
    let x = Tensor::new(&[[[1f32, 0., 5.]]], &Device::Cpu).unwrap();
    let y = rotary.apply(&x, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(y, [2. * 0.5f32.cos(), 2. * 0.5f32.sin(), 5.]);
}

#[test]
fn rejects_more_frequencies_than_a_head_has() {
    let options = RotaryOptions { head_dim: Some(3), factor: 1.0 };
    let m = Rotary::with_options(&[1.0, 0.5], options, 4, &Device::Cpu).unwrap_err().to_string();
    assert!(m.contains("2 frequencies rotate 4 elements, but a head has 3"), "{m}");
    let rotary = Rotary::with_options(&[1.0], options, 4, &Device::Cpu).unwrap();
    let x = Tensor::zeros((1, 1, 4), DType::F32, &Device::Cpu).unwrap();
    assert!(message(rotary.apply(&x, 0)).contains("heads * 3"));
}

#[test]
fn each_document_starts_at_position_0() {
    let rotary = Rotary::new(100.0, 4, 4, &Device::Cpu).unwrap();
    let documents = Documents::new(vec![vec![2, 4], vec![3, 3]]).unwrap();
    for dtype in DTYPES {
        let x = random(1, &[2, 6, 8], dtype);
        let alone = |row: usize, first: usize, count: usize| {
            rotary.apply(&x.narrow(0, row, 1)?.narrow(1, first, count)?.contiguous()?, 0)
        };
        check(
            "rotary in documents",
            &[&x],
            || rotary.apply_in_documents(&x, &documents),
            || {
                let first = Tensor::cat(&[alone(0, 0, 2)?, alone(0, 2, 4)?], 1)?;
                Tensor::cat(&[first, Tensor::cat(&[alone(1, 0, 3)?, alone(1, 3, 3)?], 1)?], 0)
            },
        );
    }
    let x = Tensor::zeros((1, 5, 4), DType::F32, &Device::Cpu).unwrap();
    let of = |lengths: &[usize]| Documents::new(vec![lengths.to_vec()]).unwrap();
    assert!(message(rotary.apply_in_documents(&x, &of(&[5]))).contains("5 tokens exceeds the tables' 4"));
    assert!(message(rotary.apply_in_documents(&x, &of(&[2, 2]))).contains("1 rows of 4 tokens"));
}

/// A Llama-like and a GPT-2-like block between one embedding and one head, with every layer once.
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

/// A small step along the gradient changes the loss by the step times the gradient's squared norm.
#[test]
fn gradients_of_a_model_predict_its_loss() {
    let vars = VarMap::new();
    let (ids, targets) = (random_ids(1, &[2, 7], 13), random_ids(5, &[2, 7], 13));
    let loss = |vars: &VarMap| model(&VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu), &ids, &targets).unwrap();
    // The variables exist after the first forward. Candle draws their values without a seed.
    loss(&vars);
    let mut all: Vec<_> = vars.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    assert_eq!(all.len(), 22, "{all:?}");
    all.sort_by(|a, b| a.0.cmp(&b.0));
    for (seed, (_, var)) in (1..).zip(&all) {
        var.set(&(random(seed, var.dims(), DType::F32).as_detached_tensor() * 0.3).unwrap()).unwrap();
    }
    let grads = loss(&vars).backward().unwrap();
    let mut squared = 0.0;
    for (name, var) in &all {
        let grad = grads.get(var).unwrap_or_else(|| panic!("no gradient for {name}"));
        let norm = grad.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(norm > 0.0 && norm.is_finite(), "{name} has the gradient norm {norm}");
        squared += f64::from(norm);
    }
    // The central difference has an error of third order.
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
