use candle_core::{DType, Result, Tensor};

use super::super::super::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu, flash_attn_varlen_unfused};
use super::super::super::{attention::cpu_flash, ops};
use super::{check, random};

/// Computes attention in the dtype of the query.
fn ours(a: &[Tensor], mask: AttnMask, max_bias: Option<f32>, softcap: Option<f32>) -> Result<Tensor> {
    match a[0].dtype() {
        DType::F64 => flash_attn::<f64>(&a[0], &a[1], &a[2], 0.5, mask, max_bias, softcap),
        DType::F16 => flash_attn::<half::f16>(&a[0], &a[1], &a[2], 0.5, mask, max_bias, softcap),
        DType::BF16 => flash_attn::<half::bf16>(&a[0], &a[1], &a[2], 0.5, mask, max_bias, softcap),
        _ => flash_attn::<f32>(&a[0], &a[1], &a[2], 0.5, mask, max_bias, softcap),
    }
}

fn theirs(a: &[Tensor], mask: AttnMask, max_bias: Option<f32>, softcap: Option<f32>) -> Result<Tensor> {
    let [q, k, v] = [0, 1, 2].map(|i| a[i].to_dtype(DType::F32).unwrap().contiguous().unwrap());
    candle_nn::attention::flash_attn::<f32>(&q, &k, &v, 0.5, mask, max_bias, softcap)?.to_dtype(a[0].dtype())
}

/// Returns a mask that hides every third key.
fn holes(queries: usize, keys: usize, dtype: DType) -> AttnMask {
    let mask = (0..queries * keys).map(|i| if i % 3 == 2 { f32::NEG_INFINITY } else { i as f32 / 20. }).collect();
    let mask = Tensor::from_vec(mask, (1, 1, queries, keys), &candle_core::Device::Cpu).unwrap();
    AttnMask::Mask(mask.to_dtype(dtype).unwrap())
}

#[test]
fn flash_attention() {
    for (batch, queries, keys, heads, kv_heads) in [(1, 5, 5, 4, 2), (2, 4, 4, 2, 2), (1, 1, 6, 2, 1), (1, 3, 5, 2, 2)]
    {
        let shapes: [&[usize]; 3] =
            [&[batch, queries, heads, 4], &[batch, keys, kv_heads, 4], &[batch, keys, kv_heads, 4]];
        let masks = [
            ("none", AttnMask::None),
            ("causal", AttnMask::causal_with_offset(keys - queries)),
            ("mask", holes(queries, keys, DType::F32)),
        ];
        for (name, mask) in masks {
            for (max_bias, softcap) in [(None, None), (Some(8.), None), (Some(8.), Some(2.))] {
                let is_candles = batch == 1 || (softcap.is_none() && name != "mask");
                let candle = |a: &[Tensor]| theirs(a, mask.clone(), max_bias, softcap);
                check_wide(
                    &format!("flash_attn {name}, {queries} of {keys}, bias {max_bias:?}, cap {softcap:?}"),
                    &shapes,
                    &|a| ours(a, mask.clone(), max_bias, softcap),
                    is_candles.then_some(&candle),
                );
            }
        }
    }
}

/// [`check`] for functions that Candle computes in f32 for every dtype.
fn check_wide(what: &str, shapes: &[&[usize]], ours: super::F, candle: Option<super::F>) {
    check(what, shapes, ours, None);
    if let Some(candle) = candle {
        let args: Vec<Tensor> =
            shapes.iter().zip(1..).map(|(shape, seed)| random(seed, shape, DType::F32).as_detached_tensor()).collect();
        super::assert_close(what, &ours(&args).unwrap(), &candle(&args).unwrap(), 2e-6);
    }
}

#[test]
fn flash_attention_returns_candles_dtype() {
    for (batch, dtype, expected) in [
        (1, DType::F16, DType::F32),
        (2, DType::F16, DType::F16),
        (1, DType::BF16, DType::F32),
        (1, DType::F32, DType::F32),
    ] {
        let x = random(1, &[batch, 3, 2, 4], dtype).as_detached_tensor();
        let of = |y: Tensor| (y.dtype(), y.dims().to_vec());
        let found = of(ours(&[x.clone(), x.clone(), x.clone()], AttnMask::causal(), None, None).unwrap());
        assert_eq!(found, (expected, vec![batch, 2, 3, 4]));
        let candles = match dtype {
            DType::F16 => {
                candle_nn::attention::flash_attn::<half::f16>(&x, &x, &x, 0.5, AttnMask::causal(), None, None)
            }
            DType::BF16 => {
                candle_nn::attention::flash_attn::<half::bf16>(&x, &x, &x, 0.5, AttnMask::causal(), None, None)
            }
            _ => candle_nn::attention::flash_attn::<f32>(&x, &x, &x, 0.5, AttnMask::causal(), None, None),
        };
        assert_eq!(of(candles.unwrap()), found);
    }
}

#[test]
fn cpu_flash_functions() {
    let x = random(1, &[1, 3, 2, 4], DType::F32).as_detached_tensor();
    let all = |a: &[Tensor], mask| ours(a, mask, None, None).unwrap();
    let args = [x.clone(), x.clone(), x.clone()];
    let causal = cpu_flash::causal::run_causal_attn_cpu::<f32>(&x, &x, &x, 0.5, 0, None, None).unwrap();
    super::assert_close("causal", &causal, &all(&args, AttnMask::causal()), 1e-6);
    let standard = cpu_flash::standard::run_flash_attn_cpu::<f32>(&x, &x, &x, None, 0.5, None, None).unwrap();
    super::assert_close("standard", &standard, &all(&args, AttnMask::None), 1e-6);
    #[allow(deprecated)]
    let older = super::super::super::cpu_flash_attention::run_flash_attn_cpu::<f32>(&x, &x, &x, None, 0.5, None, None);
    super::assert_close("older", &older.unwrap(), &standard, 1e-6);
    assert!(flash_attn::<f64>(&x, &x, &x, 0.5, AttnMask::None, None, None).is_err());
}

#[test]
fn packed_sequences() {
    let lengths = |lengths: &[u32]| Tensor::new(lengths, &candle_core::Device::Cpu).unwrap();
    let (of_q, of_k) = (lengths(&[3, 1, 2]), lengths(&[4, 1, 2]));
    for (causal, window, bias) in [
        (true, (None, None), false),
        (false, (None, None), true),
        (false, (Some(1), Some(1)), false),
        (true, (Some(1), None), true),
    ] {
        let slopes = bias.then(|| Tensor::new(&[0.5f32, 0.25], &candle_core::Device::Cpu).unwrap());
        let call = |a: &[Tensor]| {
            let (left, right) = window;
            let (q, k, v) = (&a[0], &a[1], &a[2]);
            flash_attn_varlen_unfused(q, k, v, slopes.as_ref(), &of_q, &of_k, 3, 4, 0.5, causal, left, right)
        };
        let candle = |a: &[Tensor]| {
            let (left, right) = window;
            let [q, k, v] = [0, 1, 2].map(|i| a[i].contiguous().unwrap());
            let function = candle_nn::attention::flash_attn_varlen_unfused;
            function(&q, &k, &v, slopes.as_ref(), &of_q, &of_k, 3, 4, 0.5, causal, left, right)
        };
        check_wide(&format!("varlen {causal} {window:?}"), &[&[6, 2, 4], &[7, 1, 4], &[7, 1, 4]], &call, Some(&candle));
        let x: Vec<Tensor> = [6, 7, 7].map(|n| random(n as u64, &[n, 2, 4], DType::F32).as_detached_tensor()).into();
        let (left, right) = window;
        let fused =
            flash_attn_varlen_cpu(&x[0], &x[1], &x[2], slopes.as_ref(), &of_q, &of_k, 3, 4, 0.5, causal, left, right);
        super::assert_close("varlen", &fused.unwrap(), &call(&x).unwrap(), 1e-6);
    }
}

#[test]
fn scaled_dot_products() {
    // Compared with a chain of Candle's operations, because Candle's `sdpa` is for Metal only.
    let plain = |a: &[Tensor]| {
        let scores = (a[0].matmul(&a[1].t()?)? * 0.5)?;
        let scores = ((scores / 3.0)?.tanh()? * 3.0)?;
        candle_nn::ops::softmax(&scores, 3)?.matmul(&a[2])
    };
    let shapes: [&[usize]; 3] = [&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 6]];
    check(
        "sdpa",
        &shapes,
        &|a| ops::sdpa(&a[0], &a[1], &a[2], None, false, 0.5, 3.0),
        Some(&|a| plain(&[a[0].contiguous()?, a[1].clone(), a[2].clone()])),
    );
    check("sdpa causal", &shapes, &|a| ops::sdpa(&a[0], &a[1], &a[2], None, true, 0.5, 1.0), None);
    let mask = random(7, &[2, 1, 3, 5], DType::F32).as_detached_tensor();
    check("sdpa with a mask", &shapes, &|a| ops::sdpa(&a[0], &a[1], &a[2], Some(&mask), false, 0.5, 1.0), None);
}
