use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::attention::composite::composite;
use super::super::{
    AttentionOptions, Documents, attention, attention_in_documents, attention_qkv, attention_qkv_in_documents,
    causal_attention, causal_attention_qkv,
};
use super::{DTYPES, assert_close, check, cuda_device, message, random};

/// Returns the CPU, and a CUDA device if there is one.
fn devices() -> impl Iterator<Item = Device> {
    std::iter::once(Device::Cpu).chain(cuda_device())
}

/// Batch, queries, keys, heads, key heads, head dimension.
type Case = (usize, usize, usize, usize, usize, usize);

/// Compares the fused operation with the composite in f64.
fn check_case(dtype: DType, (batch, queries, keys, heads, kv_heads, dim): Case, options: &AttentionOptions) {
    let q = random(1, &[batch, queries, heads * dim], dtype);
    let k = random(2, &[batch, keys, kv_heads * dim], dtype);
    let v = random(3, &[batch, keys, kv_heads * dim], dtype);
    // A query that sees one key gives it the whole weight, so the scores' gradients are zero up to rounding.
    let vars = if keys == 1 || options.window == Some(1) { vec![&v] } else { vec![&q, &k, &v] };
    for device in devices() {
        let place = device.location();
        let on = |t: &Var| t.to_device(&device);
        check(
            &format!("attention {dtype:?} {queries}x{keys}, {heads}/{kv_heads} heads of {dim}, {options:?}, {place:?}"),
            &vars,
            || attention(&on(&q)?, &on(&k)?, &on(&v)?, heads, kv_heads, options)?.to_device(&Device::Cpu),
            || {
                let wide = |t: &Var| t.to_dtype(DType::F64);
                composite(&wide(&q)?, &wide(&k)?, &wide(&v)?, heads, kv_heads, options, None, None, None)?
                    .to_dtype(dtype)
            },
        );
    }
}

#[test]
fn causal_attention_matches_the_composite() {
    // One row, a full block, several, more keys than queries, grouped heads.
    let cases = [
        (1, 1, 1, 1, 1, 1),
        (2, 5, 5, 2, 2, 4),
        (1, 128, 128, 1, 1, 8),
        (2, 131, 131, 4, 2, 16),
        (1, 150, 150, 3, 1, 7),
        (2, 1, 9, 4, 1, 8),
        (1, 66, 80, 6, 2, 5),
        // Enough work for several threads.
        (2, 130, 130, 4, 2, 64),
        // Two tiles of keys on the CPU, of 192 and the rest, and two blocks of a device, of 256 queries and the rest.
        (1, 300, 300, 2, 1, 4),
    ];
    for dtype in DTYPES {
        for case in cases {
            check_case(dtype, case, &AttentionOptions::causal(1.0 / (case.5 as f64).sqrt()));
        }
    }
}

#[test]
fn options_match_the_composite() {
    // A block has 128 queries, and a tile 192 keys. The cases have one full block and a part, more keys than queries,
    // two tiles, and less than a block.
    let long: (&[Case], &[usize]) = (&[(2, 131, 131, 4, 2, 8), (1, 130, 230, 6, 2, 5)], &[1, 8, 129, 200, usize::MAX]);
    let short: (&[Case], &[usize]) = (&[(2, 13, 17, 4, 2, 4)], &[1, 5, 17]);
    for dtype in DTYPES {
        let (cases, windows) = if dtype == DType::F32 { long } else { short };
        for &case in cases {
            for causal in [true, false] {
                for window in windows.iter().copied().map(Some).chain([None]) {
                    for softcap in [None, Some(0.7)] {
                        check_case(dtype, case, &AttentionOptions { scale: 0.6, causal, window, softcap, dropout: 0. });
                    }
                }
            }
        }
        // Bidirectional attention takes fewer keys than queries.
        check_case(dtype, (2, 70, 9, 4, 2, 4), &AttentionOptions::bidirectional(-0.5));
    }
}

/// Heads of 64 and 128 elements in half precision have kernels of their own on devices, with blocks of 64 queries or keys
/// and tiles of 32 or 64 of the others.
#[test]
fn kernels_for_tensor_cores_match_the_composite() {
    let causal = AttentionOptions::causal(0.15);
    let bidirectional = AttentionOptions::bidirectional(0.15);
    for (case, options) in [
        ((1, 1, 1, 1, 1, 64), causal),
        ((2, 70, 70, 4, 2, 64), causal),
        ((1, 130, 130, 3, 1, 128), causal),
        ((2, 9, 75, 2, 2, 64), causal),
        ((1, 128, 128, 1, 1, 64), bidirectional),
        ((1, 66, 3, 2, 1, 128), bidirectional),
        ((1, 200, 200, 1, 1, 64), AttentionOptions { window: Some(70), ..causal }),
        ((1, 100, 130, 2, 1, 64), AttentionOptions { window: Some(20), ..bidirectional }),
        ((1, 70, 70, 2, 1, 128), AttentionOptions { softcap: Some(0.7), ..causal }),
    ] {
        [DType::BF16, DType::F16].into_iter().for_each(|dtype| check_case(dtype, case, &options));
    }
    // Elements that do not begin at a multiple of 16 bytes.
    let all = random(4, &[3 + 70 * 64], DType::BF16);
    for device in devices() {
        let on = || all.narrow(0, 3, 70 * 64)?.to_device(&device)?.reshape((1, 70, 64));
        let shifted = || all.to_device(&device)?.narrow(0, 3, 70 * 64)?.reshape((1, 70, 64));
        let whole = || all.narrow(0, 3, 70 * 64)?.reshape((1, 70, 64));
        check(
            "attention on an odd address",
            &[&all],
            || attention(&shifted()?, &on()?, &shifted()?, 1, 1, &causal)?.to_device(&Device::Cpu),
            || composite(&whole()?, &whole()?, &whole()?, 1, 1, &causal, None, None, None),
        );
    }
    // In one tensor, and in documents.
    let documents = packed(&[&[1, 99, 40], &[140]]);
    for dtype in [DType::BF16, DType::F16] {
        let qkv = random(1, &[2, 140, 4 * 64], dtype);
        for device in devices() {
            let on = || qkv.to_device(&device);
            let part = |at, len| qkv.narrow(2, at, len);
            for documents in [None, Some(&documents)] {
                check(
                    &format!("{dtype:?} {:?} {documents:?}", device.location()),
                    &[&qkv],
                    || {
                        let y = match documents {
                            Some(documents) => attention_qkv_in_documents(&on()?, 2, 1, &causal, documents)?,
                            None => attention_qkv(&on()?, 2, 1, &causal)?,
                        };
                        y.to_device(&Device::Cpu)
                    },
                    || {
                        composite(
                            &part(0, 128)?,
                            &part(128, 64)?,
                            &part(192, 64)?,
                            2,
                            1,
                            &causal,
                            None,
                            documents,
                            None,
                        )
                    },
                );
            }
        }
    }
}

/// Compares the composite with loops over one head.
#[test]
fn the_composite_matches_loops() {
    let (queries, keys, dim) = (5, 7, 3);
    let tensors = [(1, queries), (2, keys), (3, keys)].map(|(seed, n)| random(seed, &[1, n, dim], DType::F64));
    let [q, k, v] = tensors.each_ref().map(|t| t.squeeze(0).unwrap().to_vec2::<f64>().unwrap());
    for (causal, window, softcap) in
        [(true, None, None), (true, Some(3), Some(0.5)), (false, Some(2), None), (false, None, Some(0.5))]
    {
        let options = AttentionOptions { scale: 0.8, causal, window, softcap, dropout: 0. };
        let mut want = vec![];
        for (i, q) in q.iter().enumerate() {
            let position = i + keys - queries;
            let sees = |j: &usize| !(causal && *j > position) && window.is_none_or(|w| j.abs_diff(position) < w);
            let weight = |j: usize| {
                let score = 0.8 * q.iter().zip(&k[j]).map(|(a, b)| a * b).sum::<f64>();
                softcap.map_or(score, |cap: f64| cap * (score / cap).tanh()).exp()
            };
            let total: f64 = (0..keys).filter(sees).map(weight).sum();
            want.extend((0..dim).map(|d| (0..keys).filter(sees).map(|j| weight(j) * v[j][d]).sum::<f64>() / total));
        }
        let want = Tensor::from_vec(want, (1, queries, dim), &Device::Cpu).unwrap();
        let found = composite(&tensors[0], &tensors[1], &tensors[2], 1, 1, &options, None, None, None).unwrap();
        assert_close(&format!("{options:?}"), &found, &want, 1e-12);
    }
}

#[test]
fn attention_takes_separate_heads_and_views() {
    let q = random(1, &[2, 6, 4, 8], DType::F32);
    let kv = random(2, &[2, 4, 6, 8], DType::F32);
    let k = || kv.transpose(1, 2)?.narrow(2, 0, 2);
    let v = || kv.transpose(1, 2)?.narrow(2, 2, 2);
    let options = AttentionOptions::causal(0.3);
    for device in devices() {
        let on = |t: &Tensor| t.to_device(&device);
        check(
            "attention on views",
            &[&q, &kv],
            || {
                let kv = on(&kv)?.transpose(1, 2)?;
                let (k, v) = (kv.narrow(2, 0, 2)?, kv.narrow(2, 2, 2)?);
                causal_attention(&on(&q)?, &k, &v, 4, 2, 0.3)?.to_device(&Device::Cpu)
            },
            || {
                composite(
                    &q.flatten_from(2)?,
                    &k()?.flatten_from(2)?,
                    &v()?.flatten_from(2)?,
                    4,
                    2,
                    &options,
                    None,
                    None,
                    None,
                )
            },
        );
    }
}

#[test]
fn fused_qkv_matches_the_composite() {
    for dtype in DTYPES {
        for (heads, kv_heads, steps) in [(3, 3, 70), (4, 2, 9), (2, 1, 1)] {
            for options in [
                AttentionOptions::causal(0.5),
                AttentionOptions { window: Some(4), softcap: Some(0.9), ..AttentionOptions::causal(0.5) },
            ] {
                let qkv = random(1, &[2, steps, (heads + 2 * kv_heads) * 4], dtype);
                for device in devices() {
                    check(
                        "fused attention",
                        &[&qkv],
                        || attention_qkv(&qkv.to_device(&device)?, heads, kv_heads, &options)?.to_device(&Device::Cpu),
                        || {
                            let (q, kv) = (heads * 4, kv_heads * 4);
                            let (k, v) = (qkv.narrow(2, q, kv)?, qkv.narrow(2, q + kv, kv)?);
                            composite(&qkv.narrow(2, 0, q)?, &k, &v, heads, kv_heads, &options, None, None, None)
                        },
                    );
                }
            }
        }
    }
}

#[test]
fn cached_steps_match_the_whole_sequence() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(seed, &[2, 10, 12], DType::F32).as_detached_tensor());
    for window in [None, Some(4)] {
        let options = AttentionOptions { window, ..AttentionOptions::causal(0.5) };
        let whole = attention(&q, &k, &v, 3, 3, &options).unwrap();
        for step in 0..10 {
            let seen = |t: &Tensor| t.narrow(1, 0, step + 1).unwrap();
            let one = attention(&q.narrow(1, step, 1).unwrap(), &seen(&k), &seen(&v), 3, 3, &options).unwrap();
            assert_close("cached step", &one, &whole.narrow(1, step, 1).unwrap(), 1e-6);
        }
    }
}

/// Every device drops the weights that the composite drops, in forward and backward, with packed documents as well.
#[test]
fn devices_drop_the_same_weights() {
    let documents = packed(&[&[200, 37], &[237]]);
    let options = AttentionOptions { dropout: 0.3, ..AttentionOptions::causal(0.4) };
    for documents in [None, Some(&documents)] {
        let [q, k, v] = [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| random(seed, &[2, 237, heads * 5], DType::F64));
        for (device, dtype) in devices().flat_map(|device| [(device.clone(), DType::F32), (device, DType::F64)]) {
            let run = |device: &Device, dtype| {
                crate::random::manual_seed(5);
                let on = |x: &Tensor| x.to_dtype(dtype)?.to_device(device);
                let (q, k, v) = (on(&q)?, on(&k)?, on(&v)?);
                let y = match documents {
                    Some(documents) => attention_in_documents(&q, &k, &v, 4, 2, &options, documents)?,
                    None => attention(&q, &k, &v, 4, 2, &options)?,
                };
                y.to_device(&Device::Cpu)?.to_dtype(DType::F64)
            };
            let composite = || run(&Device::Cpu, DType::F64);
            let what = format!("{dtype:?}, {:?}", device.location());
            check(&what, &[&q, &k, &v], || run(&device, dtype), composite);
        }
    }
}

#[test]
fn large_scores_stay_finite() {
    for (scale, softcap) in [(300.0, None), (-300.0, None), (3e4, Some(50.0)), (-3e4, Some(50.0))] {
        let [q, k, v] = [1, 2, 3].map(|seed| random(seed, &[1, 20, 8], DType::F32).as_detached_tensor());
        let options = AttentionOptions { softcap, ..AttentionOptions::causal(scale) };
        let y = attention(&q, &k, &v, 1, 1, &options).unwrap();
        assert_close("peaked", &y, &composite(&q, &k, &v, 1, 1, &options, None, None, None).unwrap(), 1e-3);
    }
}

/// A query whose first tile of keys has no finite score sees the others.
#[test]
fn a_tile_of_infinite_scores_has_no_weight() {
    let keys = 200;
    let far = |at: usize| if at < 192 { -1e30f32 } else { 0. };
    let q = Tensor::full(1e10f32, (1, 1, 4), &Device::Cpu).unwrap();
    let k = Tensor::from_vec((0..4 * keys).map(|i| far(i / 4)).collect(), (1, keys, 4), &Device::Cpu).unwrap();
    let v = random(1, &[1, keys, 4], DType::F32).as_detached_tensor();
    let y = attention(&q, &k, &v, 1, 1, &AttentionOptions::bidirectional(1.)).unwrap();
    assert_close("the rest", &y, &v.narrow(1, 192, 8).unwrap().mean_keepdim(1).unwrap(), 1e-6);
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
    let none = AttentionOptions::bidirectional(1.0);
    let m = message(attention(&t(&[1, 4, 8]), &t(&[1, 0, 8]), &t(&[1, 0, 8]), 2, 2, &none));
    assert!(m.contains("S >= 1"), "{m}");
}

#[test]
fn rejects_options_out_of_range() {
    let t = Tensor::zeros((1, 4, 8), DType::F32, &Device::Cpu).unwrap();
    let with = |window, softcap| {
        message(attention(&t, &t, &t, 2, 2, &AttentionOptions { window, softcap, ..AttentionOptions::causal(1.0) }))
    };
    assert!(with(Some(0), None).contains("attention: a window of 0"));
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(with(None, Some(cap)).contains("must be above 0"), "{cap}");
    }
}

/// Lengths by row: one document, many documents, and documents longer than a block of 128 queries and than a tile of
/// 192 keys.
const PACKED: [&[&[usize]]; 4] = [&[&[1]], &[&[9], &[9]], &[&[1, 2, 5, 1], &[4, 5]], &[&[200, 3, 67], &[1, 269]]];

fn packed(rows: &[&[usize]]) -> Documents {
    Documents::new(rows.iter().map(|row| row.to_vec()).collect()).unwrap()
}

fn options() -> Vec<AttentionOptions> {
    let causal = AttentionOptions::causal(0.4);
    vec![
        causal,
        AttentionOptions { window: Some(3), softcap: Some(0.7), ..causal },
        AttentionOptions::bidirectional(0.4),
        AttentionOptions { window: Some(130), ..AttentionOptions::bidirectional(0.4) },
    ]
}

/// Runs each document by itself, and concatenates the results.
fn alone(documents: &Documents, x: &[&Tensor], run: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<Tensor> {
    let rows = (0..documents.batch()).map(|row| {
        let mut first = 0;
        let parts = documents.row(row).iter().map(|&length| {
            let part = |x: &&Tensor| x.narrow(0, row, 1)?.narrow(1, first, length)?.contiguous();
            let parts = x.iter().map(part).collect::<Result<Vec<_>>>()?;
            first += length;
            run(&parts)
        });
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)
    });
    Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)
}

#[test]
fn documents_match_separate_attention() {
    for dtype in DTYPES {
        for rows in PACKED {
            let documents = packed(rows);
            let (batch, steps) = (documents.batch(), documents.steps());
            for options in options() {
                let [q, k, v] =
                    [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| random(seed, &[batch, steps, heads * 5], dtype));
                // A query that sees one key gives it the whole weight, so the scores' gradients are zero up to
                // rounding.
                let vars = if steps == 1 { vec![&v] } else { vec![&q, &k, &v] };
                let what = format!("{dtype:?} {rows:?} {options:?}");
                let run = || attention_in_documents(&q, &k, &v, 4, 2, &options, &documents);
                let each = |x: &[Tensor]| attention(&x[0], &x[1], &x[2], 4, 2, &options);
                check(&format!("alone, {what}"), &vars, run, || alone(&documents, &[&q, &k, &v], each));
                for device in devices() {
                    let on = |x: &Tensor| x.to_device(&device);
                    let run = || {
                        let y = attention_in_documents(&on(&q)?, &on(&k)?, &on(&v)?, 4, 2, &options, &documents)?;
                        y.to_device(&Device::Cpu)
                    };
                    check(&format!("composite, {what}, {:?}", device.location()), &vars, run, || {
                        let wide = |x: &Tensor| x.to_dtype(DType::F64);
                        let y = composite(
                            &wide(&q)?,
                            &wide(&k)?,
                            &wide(&v)?,
                            4,
                            2,
                            &options,
                            None,
                            Some(&documents),
                            None,
                        )?;
                        y.to_dtype(dtype)
                    });
                }
                let qkv = random(4, &[batch, steps, 8 * 5], dtype);
                if steps > 1 {
                    let each = |x: &[Tensor]| attention_qkv(&x[0], 4, 2, &options);
                    let run = || attention_qkv_in_documents(&qkv, 4, 2, &options, &documents);
                    check(&format!("one, {what}"), &[&qkv], run, || alone(&documents, &[&qkv], each));
                }
            }
        }
    }
}

/// A document has the same bits as if it were alone, because blocks end where the document ends.
#[test]
fn documents_have_the_bits_of_separate_attention() {
    let documents = packed(PACKED[3]);
    let options = AttentionOptions::causal(0.4);
    let qkv = random(1, &[2, 270, 8 * 5], DType::F32).as_detached_tensor();
    let bits = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
    let found: Vec<u32> = bits(attention_qkv_in_documents(&qkv, 4, 2, &options, &documents).unwrap());
    let want: Vec<u32> = bits(alone(&documents, &[&qkv], |x| attention_qkv(&x[0], 4, 2, &options)).unwrap());
    assert!(found == want);
    // A single document gives the same bits as attention without documents.
    let whole = packed(&[&[270], &[270]]);
    let found: Vec<u32> = bits(attention_qkv_in_documents(&qkv, 4, 2, &options, &whole).unwrap());
    let want: Vec<u32> = bits(attention_qkv(&qkv, 4, 2, &options).unwrap());
    assert!(found == want);
}

/// Compares with values worked out by hand, in f64.
#[test]
fn the_composite_separates_documents() {
    let documents = packed(&[&[2, 3]]);
    let q = Tensor::zeros((1, 5, 1), DType::F64, &Device::Cpu).unwrap();
    let v = Tensor::new(&[[[1f64], [3.], [10.], [20.], [60.]]], &Device::Cpu).unwrap();
    let of = |options| composite(&q, &q, &v, 1, 1, &options, None, Some(&documents), None).unwrap();
    let want = |values: [f64; 5]| Tensor::new(&values, &Device::Cpu).unwrap().reshape((1, 5, 1)).unwrap();
    assert_close("causal", &of(AttentionOptions::causal(1.)), &want([1., 2., 10., 15., 30.]), 1e-15);
    assert_close("both ways", &of(AttentionOptions::bidirectional(1.)), &want([2., 2., 30., 30., 30.]), 1e-15);
}

#[test]
fn rejects_invalid_documents() {
    for (rows, part) in [
        (vec![], "needs at least one row"),
        (vec![vec![2, 0]], "row 0 has documents of [2, 0] tokens"),
        (vec![vec![2], vec![1, 2]], "their sum must be 2"),
        (vec![vec![usize::MAX, 2]], "fits in usize"),
    ] {
        let error = Documents::new(rows).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let (documents, options) = (packed(&[&[2, 3]]), AttentionOptions::causal(1.));
    let x = |batch: usize, steps: usize| Tensor::zeros((batch, steps, 4), DType::F32, &Device::Cpu).unwrap();
    let m = message(attention_in_documents(&x(2, 5), &x(2, 5), &x(2, 5), 1, 1, &options, &documents));
    assert!(m.contains("attention_in_documents: the documents have 1 rows of 5 tokens"), "{m}");
    let m = message(attention_in_documents(&x(1, 5), &x(1, 6), &x(1, 6), 1, 1, &options, &documents));
    assert!(m.contains("the input has 1 of 6"), "{m}");
    let m = message(attention_qkv_in_documents(&x(1, 4), 2, 1, &options, &documents));
    assert!(m.contains("attention_qkv_in_documents"), "{m}");
}
