//! Ranks that share sequences compute what one rank computes, on the host and on devices.

use candle_core::{DType, Module, Result, Tensor, Var};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::nn::attention::{AttnMask, flash_attn};
use fsdp_candle::nn::rotary_emb::{rope, rope_i, rope_slow, rope_thd};
use fsdp_candle::nn::{
    self, AttentionOptions, Documents, Rotary, attention, attention_in_documents, attention_qkv,
    attention_qkv_in_documents,
};
use fsdp_candle::random::{Part, RngState, in_part, set_rng_state};
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

/// Each function with the angles of the whole sequence, and attention that passes its values on, because a forward without
/// attention is an error.
#[test]
fn rotary_embeddings_have_the_positions_of_the_sequence() {
    type Rotate<'a> = &'a (dyn Fn(&Tensor, [Tensor; 2]) -> Result<Tensor> + Sync);
    let shape = vec![2, 12, 2, 4];
    let rotary = || Rotary::new(100., 4, 16, &device());
    let scaled = || rotary()?.with_long(6, &Rotary::new(7., 4, 16, &device())?);
    let packed = documents(&[&[3, 9], &[12]]);
    let of_each_row = |table: &Tensor| table.unsqueeze(0)?.repeat((2, 1, 1));
    let heads_first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let all: [(&str, Rotate<'_>); 9] = [
        ("Rotary", &|x, _| rotary()?.apply(x, 0)),
        ("Rotary with angles for long sequences", &|x, _| scaled()?.apply(x, 0)),
        ("Rotary in documents", &|x, _| rotary()?.apply_in_documents(x, &packed)),
        ("Rotary in documents, with angles for long ones", &|x, _| scaled()?.apply_in_documents(x, &packed)),
        ("rope_thd", &|x, [cos, sin]| rope_thd(x, &cos, &sin)),
        ("rope_thd, a table for each row", &|x, [cos, sin]| rope_thd(x, &of_each_row(&cos)?, &of_each_row(&sin)?)),
        ("rope", &|x, [cos, sin]| heads_first(&rope(&heads_first(x)?, &cos, &sin)?)),
        ("rope_i", &|x, [cos, sin]| heads_first(&rope_i(&heads_first(x)?, &cos, &sin)?)),
        ("rope_slow", &|x, [cos, sin]| heads_first(&rope_slow(&heads_first(x)?, &cos, &sin)?)),
    ];
    for (count, (what, rotate)) in [2, 3].into_iter().flat_map(|count| all.map(|case| (count, case))) {
        let shapes = [shape.clone()];
        compare(count, AttentionExchange::Gather, (DType::F32, &shapes, &shape), 1e-6, what, |x| {
            let tables = [7, 8].map(|seed| tensor(seed, &[16, 2], DType::F32));
            let y = rotate(&x[0], tables)?;
            let values = y.flatten_from(2)?;
            let near = AttentionOptions { window: Some(1), ..AttentionOptions::causal(1.) };
            attention(&values.zeros_like()?, &values.zeros_like()?, &values, 2, 2, &near)?.reshape(y.shape())
        });
    }
}

/// Dropout between layers and in attention, in a checkpointed block whose backward runs outside of the forward.
#[test]
fn dropout_and_checkpoints_follow_the_sequence() {
    let shape = vec![2, 24, 4];
    for (count, exchange) in [(2, EXCHANGES[0]), (2, EXCHANGES[1]), (3, EXCHANGES[0]), (4, EXCHANGES[0])] {
        for checkpointed in [false, true] {
            let (what, shapes) = (format!("checkpointed: {checkpointed}"), [shape.clone()]);
            compare(count, exchange, (DType::F32, &shapes, &shape), 1e-5, &what, |x| {
                let rotary = Rotary::new(100., 4, 24, &device())?;
                let block = move |x: Tensor| {
                    let x = nn::ops::dropout(&x, 0.4)?;
                    let q = rotary.apply(&x, 0)?;
                    let options = AttentionOptions { dropout: 0.4, ..AttentionOptions::causal(0.5) };
                    nn::ops::dropout(&attention(&q, &q, &x, 2, 2, &options)?, 0.4)
                };
                if checkpointed { checkpoint(block, x[0].clone()) } else { block(x[0].clone()) }
            });
        }
    }
}

/// Ranks that split sequences further, as sequence parallelism does, draw for their part of this rank's tokens.
#[test]
fn parts_of_parts_draw_their_own_numbers() {
    let ones = || Tensor::ones((2, 24, 6), DType::F32, &device());
    let drop = |x: &Tensor, part: Option<Part>| -> Result<Tensor> {
        set_rng_state(RngState::new(9));
        match part {
            Some(part) => in_part(part, || nn::ops::dropout(x, 0.5)),
            None => nn::ops::dropout(x, 0.5),
        }
    };
    ranks(3, |world| {
        let context = ContextParallel::new(world.group());
        let want = context.split(&drop(&ones().unwrap(), None).unwrap(), 1).unwrap();
        for index in 0..2 {
            let own = context.split(&ones().unwrap(), 1).unwrap().narrow(1, 4 * index, 4).unwrap();
            let part = Part { dim: 1, index, count: 2 };
            let mut found = None;
            let forward = || {
                found = Some(drop(&own, Some(part))?);
                nn::causal_attention(&own, &own, &own, 2, 2, 1.)
            };
            context.run(forward).unwrap();
            let want = elements::<f64>(&want.narrow(1, 4 * index, 4).unwrap());
            assert_near(&found.unwrap(), &want, 0., "a part of a part");
        }
    });
}

#[test]
fn gathered_sequences_and_sums_have_the_gradient_of_one_loss() {
    let made = || [1, 2].map(|seed| tensor(seed, &[2, 12, 3], DType::F32));
    let loss = |x: &Tensor, weights: &Tensor| (x * weights)?.sum((1, 2))?.sqr()?.sum_all();
    ranks(3, |world| {
        let context = ContextParallel::new(world.group());
        let [x, weights] = made();
        let var = Var::from_tensor(&x).unwrap();
        let want = loss(&var, &weights).unwrap().backward().unwrap().remove(&var).unwrap();
        let own = Var::from_tensor(&context.split(&x, 1).unwrap()).unwrap();
        let of_whole = loss(&context.gather(&own, 1).unwrap(), &weights).unwrap();
        let terms = (own.as_tensor() * context.split(&weights, 1).unwrap()).unwrap().sum((1, 2)).unwrap();
        let of_sums = context.sum(&terms).unwrap().sqr().unwrap().sum_all().unwrap();
        for loss in [of_whole, of_sums] {
            let found = loss.backward().unwrap().remove(&own).unwrap();
            // The average over ranks divides by their number.
            let want = elements::<f64>(&(context.split(&want, 1).unwrap() * 3.).unwrap());
            assert_near(&found, &want, 1e-5, "gradient");
        }
    });
}

#[test]
fn positions_and_parts_agree() {
    ranks(2, |world| {
        let context = ContextParallel::new(world.group());
        let ids = Tensor::arange(0u32, 16, &device()).unwrap().reshape((2, 8)).unwrap();
        let own = context.split(&ids, 1).unwrap().to_vec2::<u32>().unwrap();
        let positions = context.positions(8).unwrap();
        assert_eq!(own, [positions.clone(), positions.iter().map(|at| at + 8).collect()]);
        assert_eq!(positions, if world.rank() == 0 { [0, 1, 6, 7] } else { [2, 3, 4, 5] });
        assert_eq!(context.multiple(), 4);
    });
    let context = ContextParallel::new(alone().group());
    assert_eq!((context.multiple(), context.positions(3).unwrap()), (1, vec![0, 1, 2]));
}

#[test]
fn errors_say_what_to_call() {
    ranks(2, |world| {
        let context = ContextParallel::new(world.group());
        let x = tensor(1, &[1, 4, 8], DType::F32);
        let (odd, last, heads) =
            (x.narrow(1, 0, 3).unwrap(), x.narrow(1, 2, 2).unwrap(), x.reshape((1, 4, 2, 4)).unwrap());
        let (table, scores) = (tensor(1, &[4, 2], DType::F32), tensor(2, &[1, 2, 4, 4], DType::F32));
        let (short, causal) = (documents(&[&[4]]), AttentionOptions::causal(1.));
        let rotary = Rotary::new(100., 4, 6, &device()).unwrap();
        let conv = nn::Conv1d::new(tensor(1, &[4, 4, 3], DType::F32), None, candle_nn::Conv1dConfig::default());
        let mask = AttnMask::Mask(Tensor::zeros((4, 4), DType::F32, &device()).unwrap());
        type Forward<'a> = &'a dyn Fn() -> Result<Tensor>;
        let cases: [(Forward<'_>, &[&str]); 13] = [
            (&|| Ok(x.clone()), &["ran no attention of `fsdp_candle::nn`", "`nn::attention`"]),
            (&|| nn::ops::softmax_last_dim(&scores), &["scores of attention", "`nn::attention`"]),
            (&|| context.run(|| Ok(x.clone())), &["the forward of another is running"]),
            (&|| nn::causal_attention(&last, &x, &x, 2, 2, 1.), &["as many keys as queries", "2 queries", "4 keys"]),
            (&|| nn::causal_attention(&odd, &odd, &odd, 2, 2, 1.), &["two chunks", "`ContextParallel::split`"]),
            (
                &|| attention_in_documents(&x, &x, &x, 2, 2, &causal, &short),
                &["1 rows of 4 tokens, but the input has 1 of 8"],
            ),
            (&|| rotary.apply(&x, 0), &["positions 0..8 exceed the tables' 6"]),
            (&|| rotary.apply(&x, 2), &["the offset must be 0, found 2"]),
            (&|| rope_thd(&heads, &table, &table), &["rows of the whole sequence", "at least 8, found [4, 2]"]),
            (&|| rope_slow(&heads.transpose(1, 2)?, &table, &table), &["rope_slow", "rows of the whole sequence"]),
            (&|| nn::ops::dropout(&heads, 0.5), &["dropout takes [batch, T, width]"]),
            (&|| conv.forward(&x), &["Conv1d: in a context-parallel forward"]),
            (
                &|| flash_attn::<f32>(&heads, &heads, &heads, 1., mask.clone(), None, None),
                &["no mask but a causal one"],
            ),
        ];
        let told = |error: String, parts: &[&str]| {
            parts.iter().for_each(|part| assert!(error.contains(part), "{error}"));
        };
        for (forward, parts) in cases {
            told(context.run(forward).unwrap_err().to_string(), parts);
        }
        told(context.gather(&odd, 1).unwrap_err().to_string(), &["two chunks of each sequence, found 3 tokens"]);
        told(context.split(&odd, 1).unwrap_err().to_string(), &["3 tokens", "4 chunks", "pad it to 4"]);
        let by_heads = ContextParallel::with_exchange(world.group(), AttentionExchange::Heads);
        let one = by_heads.run(|| nn::causal_attention(&x, &x, &x, 1, 1, 1.)).unwrap_err().to_string();
        told(one, &["can't share 1 key heads", "AttentionExchange::Gather"]);
        // A layer without attention works beside one with it.
        let linear = nn::Linear::new(tensor(3, &[8, 8], DType::F32), None);
        context.run(|| nn::causal_attention(&x, &x, &linear.forward(&x)?, 2, 2, 1.)).unwrap();
    });
}
