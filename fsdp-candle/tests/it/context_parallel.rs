//! Ranks that share sequences compute what one rank computes, on the host and on devices.

use candle_core::{DType, Result, Tensor, Var};
use fsdp_candle::nn::{
    self, AttentionOptions, Documents, Rotary, attention, attention_in_documents, attention_qkv,
    attention_qkv_in_documents,
};
use fsdp_candle::random::{RngState, set_rng_state};
use fsdp_candle::{AttentionExchange, ContextParallel};

use crate::common::{alone, device, elements, input, one_of, ranks};

const EXCHANGES: [AttentionExchange; 2] = [AttentionExchange::Gather, AttentionExchange::Heads];

fn tensor(seed: usize, shape: &[usize], dtype: DType) -> Tensor {
    (input(seed, shape) * 2.).unwrap().to_dtype(dtype).unwrap()
}

fn assert_near(found: &Tensor, want: &[f64], limit: f64, what: &str) {
    let found = elements::<f64>(found);
    assert_eq!(found.len(), want.len(), "{what}");
    for (at, (found, want)) in found.iter().zip(want).enumerate() {
        assert!((found - want).abs() <= limit * want.abs().max(1.), "{what}: element {at} is {found}, not {want}");
    }
}

/// Returns the output of `f`, and the gradients of its product with `weights`.
fn with_gradients(
    inputs: &[Tensor],
    weights: &Tensor,
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    set_rng_state(RngState::new(4));
    let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors)?;
    let mut grads = (&y * weights)?.sum_all()?.backward()?;
    Ok(std::iter::once(y.detach()).chain(vars.iter().map(|var| grads.remove(var).unwrap())).collect())
}

/// Runs `f` on whole sequences, and on the parts of `count` ranks, on tensors of these shapes.
fn compare(
    count: usize,
    exchange: AttentionExchange,
    (dtype, shapes, output): (DType, &[Vec<usize>], &[usize]),
    limit: f64,
    what: &str,
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Sync,
) {
    let made = || -> (Vec<Tensor>, Tensor) {
        let inputs = shapes.iter().enumerate().map(|(seed, shape)| tensor(seed, shape, dtype));
        (inputs.collect(), tensor(shapes.len(), output, dtype))
    };
    let want: Vec<(Vec<usize>, Vec<f64>)> = {
        let _world = alone();
        let (inputs, weights) = made();
        let all = with_gradients(&inputs, &weights, &f).unwrap();
        all.iter().map(|tensor| (tensor.dims().to_vec(), elements(tensor))).collect()
    };
    ranks(count, |world| {
        let context = ContextParallel::with_exchange(world.group(), exchange);
        let (inputs, weights) = made();
        let own: Vec<Tensor> = inputs.iter().map(|x| context.split(x, 1).unwrap()).collect();
        let weights = context.split(&weights, 1).unwrap();
        let found = with_gradients(&own, &weights, |own| context.run(|| f(own))).unwrap();
        for (at, (found, (dims, want))) in found.iter().zip(&want).enumerate() {
            let of = if at == 0 { "output".into() } else { format!("gradient {}", at - 1) };
            let what = format!("{what}, {exchange:?}, rank {} of {count}: {of}", world.rank());
            let whole = Tensor::from_slice(want, &dims[..], &candle_core::Device::Cpu).unwrap();
            assert_near(found, &elements(&context.split(&whole, 1).unwrap()), limit, &what);
        }
    });
}

fn documents(rows: &[&[usize]]) -> Documents {
    Documents::new(rows.iter().map(|row| row.to_vec()).collect()).unwrap()
}

#[test]
fn attention_is_that_of_whole_sequences() {
    let causal = AttentionOptions::causal(0.3);
    let all = [
        causal,
        AttentionOptions::bidirectional(0.3),
        AttentionOptions { window: Some(5), ..causal },
        AttentionOptions { window: Some(7), ..AttentionOptions::bidirectional(0.3) },
        AttentionOptions { softcap: Some(2.), ..causal },
        AttentionOptions { dropout: 0.3, ..causal },
    ];
    // Documents that end within chunks, and one that is longer than any rank's part.
    let packed = documents(&[&[5, 1, 14, 4], &[24]]);
    let mut cases = vec![];
    for (count, heads, kv_heads) in [(2, 4, 2), (3, 6, 3), (4, 4, 4), (2, 3, 3), (3, 2, 1)] {
        for exchange in EXCHANGES {
            let is_possible = exchange == AttentionExchange::Gather || kv_heads % count == 0;
            for options in all.iter().filter(|_| is_possible) {
                for packed in [None, Some(&packed)] {
                    // A device has kernels for tensor cores in half precision, with heads of 64 elements.
                    for (dtype, dim) in [(DType::F32, 4), (DType::BF16, 64), (DType::F16, 4), (DType::F64, 4)] {
                        cases.push((count, heads, kv_heads, exchange, options, packed, dtype, dim));
                    }
                }
            }
        }
    }
    for (count, heads, kv_heads, exchange, options, packed, dtype, dim) in cases.into_iter().step_by(one_of(23)) {
        let limit = match dtype {
            DType::BF16 => 5e-2,
            DType::F16 => 6e-3,
            _ => 2e-5,
        };
        let what = format!("{heads} and {kv_heads} heads of {dim}, {options:?}, {packed:?}, {dtype:?}");
        let of = |heads: usize| vec![2, 24, heads * dim];
        let shapes = [of(heads), of(kv_heads), of(kv_heads)];
        compare(count, exchange, (dtype, &shapes, &of(heads)), limit, &what, |x| match packed {
            Some(packed) => attention_in_documents(&x[0], &x[1], &x[2], heads, kv_heads, options, packed),
            None => attention(&x[0], &x[1], &x[2], heads, kv_heads, options),
        });
        let shapes = [of(heads + 2 * kv_heads)];
        compare(count, exchange, (dtype, &shapes, &of(heads)), limit, &format!("qkv, {what}"), |x| match packed {
            Some(packed) => attention_qkv_in_documents(&x[0], heads, kv_heads, options, packed),
            None => attention_qkv(&x[0], heads, kv_heads, options),
        });
    }
}

/// Rotary embeddings, dropout between layers, and sequences of several blocks of a kernel.
#[test]
fn layers_have_the_positions_of_the_sequence() {
    let packed = documents(&[&[100, 3, 153]]);
    for (exchange, in_documents) in EXCHANGES.into_iter().flat_map(|exchange| [(exchange, false), (exchange, true)]) {
        for dtype in [DType::F32, DType::BF16] {
            let shape = vec![1, 256, 128];
            let limit = if dtype == DType::BF16 { 5e-2 } else { 2e-5 };
            let packed = &packed;
            compare(
                2,
                exchange,
                (dtype, std::slice::from_ref(&shape), &shape),
                limit,
                &format!("{dtype:?}, {in_documents}"),
                |x| {
                    let rotary = Rotary::new(100., 64, 256, &device())?;
                    let x = nn::ops::dropout(&x[0], 0.2)?;
                    let options = AttentionOptions::causal(0.125);
                    match in_documents {
                        true => {
                            let q = rotary.apply_in_documents(&x, packed)?;
                            attention_in_documents(&q, &q, &x, 2, 2, &options, packed)
                        }
                        false => {
                            let q = rotary.apply(&x, 0)?;
                            attention(&q, &q, &x, 2, 2, &options)
                        }
                    }
                },
            );
        }
    }
}
