use candle_core::{DType, Device, Tensor};

use super::super::attention::causal::composite;
use super::super::{causal_attention, causal_attention_qkv};
use super::{DTYPES, assert_close, check, message, random};

#[test]
fn attention_matches_the_composite() {
    // batch, queries, keys, heads, key heads, head dimension: one row, a full block, several, more keys than queries,
    // grouped heads.
    let cases = [
        (1, 1, 1, 1, 1, 1),
        (2, 5, 5, 2, 2, 4),
        (1, 64, 64, 1, 1, 8),
        (2, 67, 67, 4, 2, 16),
        (1, 150, 150, 3, 1, 7),
        (2, 1, 9, 4, 1, 8),
        (1, 66, 80, 6, 2, 5),
        // Enough for several threads, where there are any.
        (2, 130, 130, 4, 2, 64),
    ];
    for dtype in DTYPES {
        for (batch, queries, keys, heads, kv_heads, dim) in cases {
            let q = random(1, &[batch, queries, heads * dim], dtype);
            let k = random(2, &[batch, keys, kv_heads * dim], dtype);
            let v = random(3, &[batch, keys, kv_heads * dim], dtype);
            let scale = 1.0 / (dim as f64).sqrt();
            check(
                &format!("attention {dtype:?} {queries}x{keys}, {heads}/{kv_heads} heads of {dim}"),
                &[&q, &k, &v],
                || causal_attention(&q, &k, &v, heads, kv_heads, scale),
                || composite(&q, &k, &v, heads, kv_heads, scale),
            );
        }
    }
}

#[test]
fn attention_takes_separate_heads_and_views() {
    let q = random(1, &[2, 6, 4, 8], DType::F32);
    let kv = random(2, &[2, 4, 6, 8], DType::F32);
    let k = || kv.transpose(1, 2)?.narrow(2, 0, 2);
    let v = || kv.transpose(1, 2)?.narrow(2, 2, 2);
    check(
        "attention on views",
        &[&q, &kv],
        || causal_attention(&q, &k()?, &v()?, 4, 2, 0.3),
        || composite(&q.flatten_from(2)?, &k()?.flatten_from(2)?, &v()?.flatten_from(2)?, 4, 2, 0.3),
    );
}

#[test]
fn fused_qkv_matches_the_composite() {
    for dtype in DTYPES {
        for (heads, kv_heads, steps) in [(3, 3, 70), (4, 2, 9), (2, 1, 1)] {
            let qkv = random(1, &[2, steps, (heads + 2 * kv_heads) * 4], dtype);
            check(
                "fused attention",
                &[&qkv],
                || causal_attention_qkv(&qkv, heads, kv_heads, 0.5),
                || {
                    let (q, kv) = (heads * 4, kv_heads * 4);
                    let (k, v) = (qkv.narrow(2, q, kv)?, qkv.narrow(2, q + kv, kv)?);
                    composite(&qkv.narrow(2, 0, q)?, &k, &v, heads, kv_heads, 0.5)
                },
            );
        }
    }
}

#[test]
fn a_cache_gives_the_same_as_the_whole_sequence() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(seed, &[2, 10, 12], DType::F32).as_detached_tensor());
    let whole = causal_attention(&q, &k, &v, 3, 3, 0.5).unwrap();
    for step in 0..10 {
        let seen = |t: &Tensor| t.narrow(1, 0, step + 1).unwrap();
        let one = causal_attention(&q.narrow(1, step, 1).unwrap(), &seen(&k), &seen(&v), 3, 3, 0.5).unwrap();
        assert_close("cached step", &one, &whole.narrow(1, step, 1).unwrap(), 1e-6);
    }
}

#[test]
fn large_scores_and_a_negative_scale_stay_finite() {
    for scale in [300.0, -300.0] {
        let [q, k, v] = [1, 2, 3].map(|seed| random(seed, &[1, 20, 8], DType::F32).as_detached_tensor());
        let y = causal_attention(&q, &k, &v, 1, 1, scale).unwrap();
        assert_close("peaked", &y, &composite(&q, &k, &v, 1, 1, scale).unwrap(), 1e-3);
    }
}

#[test]
fn errors_name_the_shapes() {
    let t = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let m = message(causal_attention(&t(&[1, 4, 8]), &t(&[1, 3, 8]), &t(&[1, 3, 8]), 2, 2, 1.0));
    assert!(m.contains("S >= T") && m.contains("[1, 3, 8]"), "{m}");
    let m = message(causal_attention(&t(&[1, 4, 8]), &t(&[1, 4, 8]), &t(&[1, 4, 4]), 2, 2, 1.0));
    assert!(m.contains("[1, 4, 4]"), "{m}");
    let m = message(causal_attention(&t(&[1, 4, 9]), &t(&[1, 4, 9]), &t(&[1, 4, 9]), 3, 2, 1.0));
    assert!(m.contains("multiple"), "{m}");
    let m = message(causal_attention(&t(&[4, 9]), &t(&[1, 4, 9]), &t(&[1, 4, 9]), 3, 3, 1.0));
    assert!(m.contains("causal_attention: q") && m.contains("[4, 9]"), "{m}");
    let m = message(causal_attention_qkv(&t(&[1, 4, 10]), 3, 3, 1.0));
    assert!(m.contains("causal_attention_qkv") && m.contains("[1, 4, 10]"), "{m}");
    let m = message(causal_attention_qkv(&t(&[1, 4, 0]), 1, 1, 1.0));
    assert!(m.contains("width"), "{m}");
}
