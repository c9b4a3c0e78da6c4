use candle_core::{DType, Device, Tensor, Var};

use super::super::attention::composite::composite;
use super::super::{AttentionOptions, Documents, attention_with_sinks};
use super::{DTYPES, check, cuda_device, message, random};

fn devices() -> impl Iterator<Item = Device> {
    std::iter::once(Device::Cpu).chain(cuda_device())
}

/// The softmax of a row with one more score, whose weight is left out.
#[test]
fn sinks_match_a_further_score() {
    let causal = AttentionOptions::causal(0.6);
    let packed = Documents::new(vec![vec![3, 9, 1], vec![13]]).unwrap();
    let window = AttentionOptions { window: Some(4), ..causal };
    for (queries, keys, kv_heads, dim, options, documents) in [
        (13, 13, 4, 8, causal, None),
        (13, 17, 2, 5, window, None),
        (13, 13, 1, 8, AttentionOptions { softcap: Some(0.7), ..causal }, Some(&packed)),
        (13, 13, 2, 64, window, Some(&packed)),
        (5, 3, 2, 64, AttentionOptions::bidirectional(-0.3), None),
        (150, 150, 2, 8, causal, None),
    ] {
        for dtype in DTYPES {
            let q = random(1, &[2, queries, 4 * dim], dtype);
            let k = random(2, &[2, keys, kv_heads * dim], dtype);
            let v = random(3, &[2, keys, kv_heads * dim], dtype);
            // One sink takes nearly all of the weight, one nearly none.
            let values = Tensor::new(&[0.3f32, -20., 20., 1.5], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let sinks = Var::from_tensor(&values).unwrap();
            for device in devices() {
                let on = |t: &Var| t.to_device(&device);
                check(
                    &format!("{dtype:?} {queries}x{keys} {options:?} {documents:?} on {:?}", device.location()),
                    &[&q, &k, &v, &sinks],
                    || {
                        let (q, k, v, sinks) = (on(&q)?, on(&k)?, on(&v)?, on(&sinks)?);
                        let y = attention_with_sinks(&q, &k, &v, 4, kv_heads, &options, documents, &sinks)?;
                        y.to_device(&Device::Cpu)
                    },
                    || {
                        let wide = |t: &Var| t.to_dtype(DType::F64);
                        let (q, k, v, sinks) = (wide(&q)?, wide(&k)?, wide(&v)?, wide(&sinks)?);
                        composite(&q, &k, &v, 4, kv_heads, &options, None, documents, Some(&sinks))?.to_dtype(dtype)
                    },
                );
            }
        }
    }
}

#[test]
fn bad_sinks_are_refused() {
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let q = zeros(&[1, 3, 8], DType::F32);
    let with =
        |sinks: &Tensor| message(attention_with_sinks(&q, &q, &q, 2, 2, &AttentionOptions::causal(1.), None, sinks));
    let error = with(&zeros(&[3], DType::F32));
    assert!(error.contains("attention_with_sinks: the sinks must be [2], one for each head, found [3]"), "{error}");
    let error = with(&zeros(&[2], DType::F64));
    assert!(error.contains("the sinks"), "{error}");
}
