use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Module;
use fsdp_core::process_group::local;

use super::*;
use crate::activation_checkpoint::checkpoint;
use crate::nn::rotary_emb::{rope, rope_i, rope_slow, rope_thd};
use crate::nn::{self, AttentionOptions, Documents, Rotary, attention, attention_in_documents};
use crate::random::{self, Part, RngState, in_part};

const EXCHANGES: [AttentionExchange; 2] = [AttentionExchange::Gather, AttentionExchange::Heads];

/// Values without a pattern, the same for the same `seed`.
fn noise(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_near(found: &Tensor, want: &Tensor, limit: f64, what: &str) {
    assert_eq!(found.dims(), want.dims(), "{what}");
    for (at, (found, want)) in values(found).into_iter().zip(values(want)).enumerate() {
        assert!((found - want).abs() <= limit * want.abs().max(1.), "{what}: element {at} is {found}, not {want}");
    }
}

/// Returns the output of `f` on variables, and the gradients of the output's product with `weights`.
fn with_gradients(
    inputs: &[Tensor],
    weights: &Tensor,
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors)?;
    let mut grads = (&y * weights)?.sum_all()?.backward()?;
    let mut all = vec![y.detach()];
    for var in &vars {
        all.push(grads.remove(var).unwrap());
    }
    Ok(all)
}

/// Runs `f` on whole sequences and on the parts of `ranks` ranks, and compares outputs and gradients.
fn compare(
    ranks: usize,
    exchange: AttentionExchange,
    inputs: &[Tensor],
    weights: &Tensor,
    limit: f64,
    what: &str,
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Sync,
) {
    random::set_rng_state(RngState::new(4));
    let want = with_gradients(inputs, weights, &f).unwrap();
    local::run(ranks, |group| {
        random::set_rng_state(RngState::new(4));
        let context = ContextParallel::with_exchange(&group, exchange);
        let own: Vec<Tensor> = inputs.iter().map(|x| context.split(x, 1).unwrap()).collect();
        let weights = context.split(weights, 1).unwrap();
        let found = with_gradients(&own, &weights, |own| context.run(|| f(own))).unwrap();
        for (at, (found, want)) in found.iter().zip(&want).enumerate() {
            let of = if at == 0 { "output".into() } else { format!("gradient {}", at - 1) };
            let rank = group.rank();
            let what = format!("{what}, {exchange:?}, rank {rank} of {ranks}: {of}");
            assert_near(found, &context.split(want, 1).unwrap(), limit, &what);
        }
    });
}

fn documents(rows: &[&[usize]]) -> Documents {
    Documents::new(rows.iter().map(|row| row.to_vec()).collect()).unwrap()
}

#[test]
fn rotary_embeddings_have_the_positions_of_the_sequence() {
    let (batch, steps, heads, dim) = (2, 12, 2, 4);
    let rotary = Rotary::new(100., dim, 16, &Device::Cpu).unwrap();
    let long = Rotary::new(7., dim, 16, &Device::Cpu).unwrap();
    let scaled = rotary.clone().with_long(6, &long).unwrap();
    let packed = documents(&[&[3, 9], &[12]]);
    let tables = |seed| noise(&[16, dim / 2], seed, DType::F32);
    let (cos, sin) = (tables(1), tables(2));
    let by_row = |x: &Tensor| x.unsqueeze(0)?.repeat((batch, 1, 1));
    let (row_cos, row_sin) = (by_row(&cos).unwrap(), by_row(&sin).unwrap());
    let x = noise(&[batch, steps, heads, dim], 3, DType::F32);
    let weights = noise(&[batch, steps, heads, dim], 4, DType::F32);
    // Attention that passes its values on, since a forward without attention is an error.
    let through = |y: Tensor| {
        let values = y.flatten_from(2)?;
        let near = AttentionOptions { window: Some(1), ..AttentionOptions::causal(1.) };
        attention(&values.zeros_like()?, &values.zeros_like()?, &values, heads, heads, &near)?.reshape(y.shape())
    };
    for ranks in [2, 3] {
        let check = |what: &str, f: &(dyn Fn(&Tensor) -> Result<Tensor> + Sync)| {
            let inputs = [x.clone()];
            compare(ranks, AttentionExchange::Gather, &inputs, &weights, 1e-6, what, |x| through(f(&x[0])?));
        };
        check("Rotary", &|x| rotary.apply(x, 0));
        check("Rotary with angles for long sequences", &|x| scaled.apply(x, 0));
        check("Rotary in documents", &|x| rotary.apply_in_documents(x, &packed));
        check("Rotary in documents, with angles for long ones", &|x| scaled.apply_in_documents(x, &packed));
        check("rope_thd", &|x| rope_thd(x, &cos, &sin));
        check("rope_thd with tables of each row", &|x| rope_thd(x, &row_cos, &row_sin));
        check("rope_slow", &|x| {
            rope_slow(&x.transpose(1, 2)?.contiguous()?, &cos, &sin)?.transpose(1, 2)?.contiguous()
        });
        check("rope", &|x| rope(&x.transpose(1, 2)?.contiguous()?, &cos, &sin)?.transpose(1, 2)?.contiguous());
        check("rope_i", &|x| rope_i(&x.transpose(1, 2)?.contiguous()?, &cos, &sin)?.transpose(1, 2)?.contiguous());
    }
}

/// Dropout between layers and in attention, in a checkpointed block whose backward runs outside of the forward.
#[test]
fn dropout_and_checkpoints_follow_the_sequence() {
    let (batch, steps, width) = (2, 24, 4);
    let x = noise(&[batch, steps, width], 1, DType::F32);
    let weights = noise(&[batch, steps, width], 2, DType::F32);
    let rotary = Rotary::new(100., width, steps, &Device::Cpu).unwrap();
    let block = move |x: Tensor| {
        let x = nn::ops::dropout(&x, 0.4)?;
        let q = rotary.apply(&x, 0)?;
        let options = AttentionOptions { dropout: 0.4, ..AttentionOptions::causal(0.5) };
        nn::ops::dropout(&attention(&q, &q, &x, 2, 2, &options)?, 0.4)
    };
    let block = Arc::new(block);
    for (ranks, exchange) in [(2, EXCHANGES[0]), (2, EXCHANGES[1]), (3, EXCHANGES[0]), (4, EXCHANGES[0])] {
        for checkpointed in [false, true] {
            let what = format!("checkpointed: {checkpointed}");
            compare(ranks, exchange, std::slice::from_ref(&x), &weights, 1e-5, &what, |x| {
                let (block, x) = (block.clone(), x[0].clone());
                if checkpointed { checkpoint(move |x: Tensor| block(x), x) } else { block(x) }
            });
        }
    }
}

/// Ranks that split sequences further, as sequence parallelism does, draw for their part of this rank's tokens.
#[test]
fn parts_of_parts_draw_their_own_numbers() {
    let x = Tensor::ones((2, 24, 5), DType::F32, &Device::Cpu).unwrap();
    random::set_rng_state(RngState::new(9));
    let want = nn::ops::dropout(&x, 0.5).unwrap();
    local::run(3, |group| {
        let context = ContextParallel::new(&group);
        let want = context.split(&want, 1).unwrap();
        let scope = Scope::new(context.clone());
        for index in 0..2 {
            random::set_rng_state(RngState::new(9));
            let part = Part { dim: 1, index, count: 2 };
            let own = context.split(&x, 1).unwrap().narrow(1, 4 * index, 4).unwrap();
            let found = with_scope(Some(scope.clone()), || in_part(part, || nn::ops::dropout(&own, 0.5))).unwrap();
            assert_near(&found, &want.narrow(1, 4 * index, 4).unwrap(), 0., "a part of a part");
        }
    });
}

#[test]
fn gathered_sequences_and_sums_have_the_gradient_of_one_loss() {
    let x = noise(&[2, 12, 3], 1, DType::F32);
    let weights = noise(&[2, 12, 3], 2, DType::F32);
    let loss = |x: &Tensor, weights: &Tensor| (x * weights)?.sum((1, 2))?.sqr()?.sum_all();
    let var = Var::from_tensor(&x).unwrap();
    let want = loss(&var, &weights).unwrap().backward().unwrap().remove(&var).unwrap();
    local::run(3, |group| {
        let context = ContextParallel::new(&group);
        let own = Var::from_tensor(&context.split(&x, 1).unwrap()).unwrap();
        let of_whole = loss(&context.gather(&own, 1).unwrap(), &weights).unwrap();
        let terms = (own.as_tensor() * context.split(&weights, 1).unwrap()).unwrap().sum((1, 2)).unwrap();
        let of_sums = context.sum(&terms).unwrap().sqr().unwrap().sum_all().unwrap();
        for loss in [of_whole, of_sums] {
            let found = loss.backward().unwrap().remove(&own).unwrap();
            // The average over ranks divides by their number.
            let want = (context.split(&want, 1).unwrap() * 3.).unwrap();
            assert_near(&found, &want, 1e-5, "gradient");
        }
    });
}

#[test]
fn positions_and_parts_agree() {
    local::run(2, |group| {
        let context = ContextParallel::new(&group);
        let ids = Tensor::arange(0u32, 16, &Device::Cpu).unwrap().reshape((2, 8)).unwrap();
        let own = context.split(&ids, 1).unwrap().to_vec2::<u32>().unwrap();
        let positions = context.positions(8).unwrap();
        assert_eq!(own, [positions.clone(), positions.iter().map(|at| at + 8).collect()]);
        assert_eq!(positions, if group.rank() == 0 { [0, 1, 6, 7] } else { [2, 3, 4, 5] });
        assert_eq!(context.multiple(), 4);
    });
    let context = ContextParallel::new(&ProcessGroup::single_rank(std::time::Duration::from_secs(1)).unwrap());
    assert_eq!((context.multiple(), context.positions(3).unwrap()), (1, vec![0, 1, 2]));
}

#[test]
fn errors_say_what_to_call() {
    local::run(2, |group| {
        let context = ContextParallel::new(&group);
        let x = noise(&[1, 4, 8], 1, DType::F32);
        let error = |f: &dyn Fn() -> Result<Tensor>| context.run(f).unwrap_err().to_string();
        let told = |error: String, parts: &[&str]| {
            parts.iter().for_each(|part| assert!(error.contains(part), "{error}"));
        };
        told(error(&|| Ok(x.clone())), &["ran no attention of `fsdp_candle::nn`", "`nn::attention`"]);
        let scores = noise(&[1, 2, 4, 4], 2, DType::F32);
        told(error(&|| nn::ops::softmax_last_dim(&scores)), &["scores of attention", "`nn::attention`"]);
        told(error(&|| context.run(|| Ok(x.clone()))), &["the forward of another is running"]);
        let last = x.narrow(1, 2, 2).unwrap();
        told(
            error(&|| nn::causal_attention(&last, &x, &x, 2, 2, 1.)),
            &["as many keys as queries", "2 queries", "4 keys"],
        );
        let odd = x.narrow(1, 0, 3).unwrap();
        told(error(&|| nn::causal_attention(&odd, &odd, &odd, 2, 2, 1.)), &["two chunks", "`ContextParallel::split`"]);
        let short = documents(&[&[4]]);
        let options = AttentionOptions::causal(1.);
        told(
            error(&|| attention_in_documents(&x, &x, &x, 2, 2, &options, &short)),
            &["1 rows of 4 tokens, but the input has 1 of 8"],
        );
        let rotary = Rotary::new(100., 4, 6, &Device::Cpu).unwrap();
        told(error(&|| rotary.apply(&x, 0)), &["positions 0..8 exceed the tables' 6"]);
        let short_tables = || {
            nn::rotary_emb::rope_slow(
                &x.reshape((1, 2, 4, 4))?,
                &noise(&[4, 2], 1, DType::F32),
                &noise(&[4, 2], 1, DType::F32),
            )
        };
        told(error(&short_tables), &["rope_slow", "rows of the whole sequence"]);
        told(context.gather(&odd, 1).unwrap_err().to_string(), &["two chunks of each sequence, found 3 tokens"]);
        let conv = nn::Conv1d::new(noise(&[4, 4, 3], 1, DType::F32), None, candle_nn::Conv1dConfig::default());
        told(error(&|| conv.forward(&x)), &["Conv1d: in a context-parallel forward"]);
        told(error(&|| rotary.apply(&x, 2)), &["the offset must be 0, found 2"]);
        let cos = noise(&[4, 2], 1, DType::F32);
        let heads = x.reshape((1, 4, 2, 4)).unwrap();
        told(error(&|| rope_thd(&heads, &cos, &cos)), &["rows of the whole sequence", "at least 8, found [4, 2]"]);
        told(error(&|| nn::ops::dropout(&heads, 0.5)), &["dropout takes [batch, T, width]"]);
        told(context.split(&odd, 1).unwrap_err().to_string(), &["3 tokens", "4 chunks", "pad it to 4"]);
        let by_heads = ContextParallel::with_exchange(&group, AttentionExchange::Heads);
        let one = by_heads.run(|| nn::causal_attention(&x, &x, &x, 1, 1, 1.)).unwrap_err().to_string();
        told(one, &["can't share 1 key heads", "AttentionExchange::Gather"]);
        let mask = nn::attention::AttnMask::Mask(Tensor::zeros((4, 4), DType::F32, &Device::Cpu).unwrap());
        let masked = || nn::attention::flash_attn::<f32>(&heads, &heads, &heads, 1., mask.clone(), None, None);
        told(error(&masked), &["no mask but a causal one"]);
        // A layer without attention works beside one with it.
        let linear = nn::Linear::new(noise(&[8, 8], 3, DType::F32), None);
        context.run(|| nn::causal_attention(&x, &x, &linear.forward(&x)?, 2, 2, 1.)).unwrap();
    });
}
