//! Attention within packed documents, against a plain composition and against each document alone.

use candle_core::{DType, Device, Result, Tensor};

use super::super::attention::fused::composite;
use super::super::{
    AttentionOptions, Documents, attention, attention_in_documents, attention_qkv, attention_qkv_in_documents,
};
use super::{DTYPES, assert_close, check, message, random};

/// Lengths by row: one document, many, and documents longer than a block of 64 queries.
const PACKED: [&[&[usize]]; 4] = [&[&[1]], &[&[9], &[9]], &[&[1, 2, 5, 1], &[4, 5]], &[&[70, 3, 67], &[1, 139]]];

fn packed(rows: &[&[usize]]) -> Documents {
    Documents::new(rows.iter().map(|row| row.to_vec()).collect()).unwrap()
}

fn options() -> Vec<AttentionOptions> {
    let causal = AttentionOptions::causal(0.4);
    vec![
        causal,
        AttentionOptions { window: Some(3), softcap: Some(0.7), ..causal },
        AttentionOptions::bidirectional(0.4),
        AttentionOptions { window: Some(66), ..AttentionOptions::bidirectional(0.4) },
    ]
}

/// Each document by itself, put together again.
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
fn it_is_attention_in_each_document_alone() {
    for dtype in DTYPES {
        for rows in PACKED {
            let documents = packed(rows);
            let (batch, steps) = (documents.batch(), documents.steps());
            for options in options() {
                let [q, k, v] =
                    [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| random(seed, &[batch, steps, heads * 5], dtype));
                // Who sees one key alone gives it all: gradients of scores are zero, but for rounding.
                let vars = if steps == 1 { vec![&v] } else { vec![&q, &k, &v] };
                let what = format!("{dtype:?} {rows:?} {options:?}");
                let run = || attention_in_documents(&q, &k, &v, 4, 2, &options, &documents);
                let each = |x: &[Tensor]| attention(&x[0], &x[1], &x[2], 4, 2, &options);
                check(&format!("alone, {what}"), &vars, run, || alone(&documents, &[&q, &k, &v], each));
                check(&format!("composite, {what}"), &vars, run, || {
                    let wide = |x: &Tensor| x.to_dtype(DType::F64);
                    let y = composite(&wide(&q)?, &wide(&k)?, &wide(&v)?, 4, 2, &options, Some(&documents))?;
                    y.to_dtype(dtype)
                });
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

/// The fused operation computes a document to the bit as if it were alone: its blocks end where the document ends.
#[test]
fn a_document_does_not_feel_its_neighbours() {
    let documents = packed(PACKED[3]);
    let options = AttentionOptions::causal(0.4);
    let qkv = random(1, &[2, 140, 8 * 5], DType::F32).as_detached_tensor();
    let bits = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
    let found: Vec<u32> = bits(attention_qkv_in_documents(&qkv, 4, 2, &options, &documents).unwrap());
    let want: Vec<u32> = bits(alone(&documents, &[&qkv], |x| attention_qkv(&x[0], 4, 2, &options)).unwrap());
    assert!(found == want);
    // As one document it is the attention that knows of none.
    let whole = packed(&[&[140], &[140]]);
    let found: Vec<u32> = bits(attention_qkv_in_documents(&qkv, 4, 2, &options, &whole).unwrap());
    let want: Vec<u32> = bits(attention_qkv(&qkv, 4, 2, &options).unwrap());
    assert!(found == want);
}

/// Value by value, in 64 bits.
#[test]
fn the_composite_keeps_documents_apart() {
    let documents = packed(&[&[2, 3]]);
    let q = Tensor::zeros((1, 5, 1), DType::F64, &Device::Cpu).unwrap();
    let v = Tensor::new(&[[[1f64], [3.], [10.], [20.], [60.]]], &Device::Cpu).unwrap();
    let of = |options| composite(&q, &q, &v, 1, 1, &options, Some(&documents)).unwrap();
    let want = |values: [f64; 5]| Tensor::new(&values, &Device::Cpu).unwrap().reshape((1, 5, 1)).unwrap();
    assert_close("causal", &of(AttentionOptions::causal(1.)), &want([1., 2., 10., 15., 30.]), 1e-15);
    assert_close("both ways", &of(AttentionOptions::bidirectional(1.)), &want([2., 2., 30., 30., 30.]), 1e-15);
}

#[test]
fn documents_that_do_not_fit_are_refused() {
    for (rows, part) in [
        (vec![], "there must be a row"),
        (vec![vec![2, 0]], "row 0 has documents of [2, 0] tokens"),
        (vec![vec![2], vec![1, 2]], "together they must be 2"),
        (vec![vec![usize::MAX, 2]], "can be counted"),
    ] {
        let error = Documents::new(rows).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let (documents, options) = (packed(&[&[2, 3]]), AttentionOptions::causal(1.));
    let x = |batch: usize, steps: usize| Tensor::zeros((batch, steps, 4), DType::F32, &Device::Cpu).unwrap();
    let m = message(attention_in_documents(&x(2, 5), &x(2, 5), &x(2, 5), 1, 1, &options, &documents));
    assert!(m.contains("attention_in_documents: the documents are of 1 rows of 5 tokens"), "{m}");
    let m = message(attention_in_documents(&x(1, 5), &x(1, 6), &x(1, 6), 1, 1, &options, &documents));
    assert!(m.contains("the input has 1 of 6"), "{m}");
    let m = message(attention_qkv_in_documents(&x(1, 4), 2, 1, &options, &documents));
    assert!(m.contains("attention_qkv_in_documents"), "{m}");
}
