//! Layers of random shapes and options on a CUDA device: beside f64 on the CPU, and with the same bits each time.
//!
//! `FSDP_RANDOM_LAYERS` sets the number of layers, `FSDP_RANDOM_SEED` the first seed, and `FSDP_RANDOM_REPEATS` how often
//! each layer is computed again.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::*;
use super::experts::Mixture;
use super::{Choices, DTYPES, bits, compare_within, cuda_device, random, random_ids, run, tolerance};
use crate::random::manual_seed;

/// Returns a number from the environment.
fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

type Compute = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// A layer: its description, its inputs, and its computation on their device.
struct Layer {
    what: String,
    inputs: Vec<Var>,
    compute: Compute,
}

fn attention_of(choices: &mut Choices, dtype: DType) -> Layer {
    let (batch, kv_heads, group) = (choices.between(1, 2), choices.between(1, 2), choices.between(1, 3));
    let (heads, dim) = (kv_heads * group, choices.one_of(&[5, 8, 64, 64, 128, 128]));
    // More than one block and one tile of each kernel.
    let (queries, longer) = (choices.between(2, 300), choices.between(0, 70));
    let causal = choices.between(0, 2) > 0;
    let window = choices.between(2, 2 * queries);
    let options = AttentionOptions {
        scale: (dim as f64).powf(-0.5),
        causal,
        // With one visible key, the scores have no gradient but rounding.
        window: choices.maybe(window),
        softcap: choices.maybe(0.7),
        dropout: choices.maybe(0.3).unwrap_or(0.),
    };
    let first = choices.between(1, queries - 1);
    let documents = choices.maybe(vec![vec![first, queries - first]; batch]);
    let keys = if documents.is_some() { queries } else { queries + longer };
    let what = format!(
        "attention {batch} x {queries} x {keys}, {heads}/{kv_heads} heads of {dim}, {options:?}, {documents:?}"
    );
    let documents = documents.map(|documents| Documents::new(documents).unwrap());
    let input = |seed, steps, heads| random(seed, &[batch, steps, heads * dim], dtype);
    Layer {
        what,
        inputs: vec![input(1, queries, heads), input(2, keys, kv_heads), input(3, keys, kv_heads)],
        compute: Box::new(move |x| {
            manual_seed(5);
            match &documents {
                Some(documents) => attention_in_documents(&x[0], &x[1], &x[2], heads, kv_heads, &options, documents),
                None => attention(&x[0], &x[1], &x[2], heads, kv_heads, &options),
            }
        }),
    }
}

fn norm_of(choices: &mut Choices, dtype: DType) -> Layer {
    let (rows, width) = (choices.between(1, 90), choices.one_of(&[3, 8, 64, 257, 1024, 2052]));
    let x = Var::from_tensor(&(random(1, &[rows, width], dtype).as_tensor() + 3.).unwrap()).unwrap();
    let mut inputs = vec![x, random(2, &[width], dtype)];
    if choices.between(0, 1) == 0 {
        let what = format!("rms norm {rows} x {width}");
        return Layer { what, inputs, compute: Box::new(|x| RmsNorm::new(x[1].clone(), 1e-2).forward(&x[0])) };
    }
    inputs.push(random(3, &[width], dtype));
    let compute = |x: &[Tensor]| LayerNorm::new(x[1].clone(), x[2].clone(), 1e-2).forward(&x[0]);
    Layer { what: format!("layer norm {rows} x {width}"), inputs, compute: Box::new(compute) }
}

fn activation_of(choices: &mut Choices, dtype: DType) -> Layer {
    let shape = [choices.between(1, 20), 2 * choices.between(1, 150)];
    let what = format!("activation of {shape:?}");
    match choices.between(0, 2) {
        0 => Layer {
            what,
            inputs: vec![random(1, &shape, dtype), random(2, &shape, dtype)],
            compute: Box::new(|x| silu_mul(&x[0], &x[1])),
        },
        1 => Layer { what, inputs: vec![random(1, &shape, dtype)], compute: Box::new(|x| ops::swiglu(&x[0])) },
        _ => Layer { what, inputs: vec![random(1, &shape, dtype)], compute: Box::new(|x| silu(&x[0])) },
    }
}

fn rotary_of(choices: &mut Choices, dtype: DType) -> Layer {
    let (steps, pairs, offset) = (choices.between(1, 40), choices.between(1, 32), choices.between(0, 9));
    let frequencies: Vec<f32> = (0..pairs).map(|pair| 0.5f32.powi(pair as i32)).collect();
    let tables = |device: &Device| Rotary::with_options(&frequencies, RotaryOptions::default(), 50, device).unwrap();
    let (own, on_device) = (tables(&Device::Cpu), cuda_device().map(|device| tables(&device)));
    let shape = [choices.between(1, 3), steps, choices.between(1, 4) * 2 * pairs];
    Layer {
        what: format!("rotary {shape:?} from {offset}"),
        inputs: vec![random(1, &shape, dtype)],
        compute: Box::new(move |x| match &on_device {
            Some(tables) if x[0].device().is_cuda() => tables.apply(&x[0], offset),
            _ => own.apply(&x[0], offset),
        }),
    }
}

fn loss_of(choices: &mut Choices, dtype: DType) -> Layer {
    let (rows, width) = (choices.between(2, 60), choices.between(1, 40));
    let classes = choices.one_of(&[2, 33, 700, 1100]);
    let options = CrossEntropyOptions {
        label_smoothing: choices.maybe(0.1).unwrap_or(0.),
        reduction: choices.one_of(&[Reduction::Mean, Reduction::Sum, Reduction::None]),
        softcap: choices.maybe(0.7),
        ..Default::default()
    };
    let ignores = choices.between(0, 1) == 0;
    let ids: Vec<u32> = random_ids(5, &[rows], classes).to_vec1().unwrap();
    let ids = ids.into_iter().enumerate().map(|(row, id)| if ignores && row % 3 == 1 { IGNORED } else { id });
    let targets = Tensor::from_iter(ids, &Device::Cpu).unwrap();
    if choices.between(0, 1) == 0 {
        return Layer {
            what: format!("cross entropy {rows} x {classes}, {options:?}"),
            inputs: vec![random(4, &[rows, classes], dtype)],
            compute: Box::new(move |x| cross_entropy_with(&x[0], &targets, &options)),
        };
    }
    Layer {
        what: format!("head {rows} x {width} x {classes}, {options:?}"),
        inputs: vec![random(1, &[rows, width], dtype), random(2, &[classes, width], dtype)],
        compute: Box::new(move |x| linear_cross_entropy_with(&x[0], &x[1], &targets, &options)),
    }
}

fn embedding_of(choices: &mut Choices, dtype: DType) -> Layer {
    let (vocabulary, width) = (choices.between(2, 30), choices.between(1, 70));
    let ids = random_ids(1, &[choices.between(1, 4), choices.between(1, 90)], vocabulary);
    Layer {
        what: format!("embedding {vocabulary} x {width} of {:?}", ids.dims()),
        inputs: vec![random(3, &[vocabulary, width], dtype)],
        compute: Box::new(move |x| Embedding::new(x[0].clone(), width).forward(&ids.to_device(x[0].device())?)),
    }
}

fn mixture_of(choices: &mut Choices, dtype: DType) -> Layer {
    let mixture = Mixture::random(choices);
    let what = format!("{mixture:?}");
    Layer { what, inputs: mixture.inputs(dtype), compute: Box::new(move |x| mixture.forward(x)) }
}

#[test]
fn random_layers_match_f64_and_repeat_their_bits() {
    let Some(device) = cuda_device() else { return };
    let (first, layers) = (number("FSDP_RANDOM_SEED", 1), number("FSDP_RANDOM_LAYERS", 40));
    for seed in first..first + layers {
        let mut choices = Choices(seed);
        let dtype = choices.one_of(&DTYPES);
        // Attention has most of the kernels and options.
        let make = choices.one_of(&[
            attention_of,
            attention_of,
            attention_of,
            attention_of,
            norm_of,
            activation_of,
            rotary_of,
            loss_of,
            loss_of,
            embedding_of,
            mixture_of,
        ]);
        let Layer { what, inputs, compute } = make(&mut choices, dtype);
        let what = format!("FSDP_RANDOM_SEED={seed} FSDP_RANDOM_LAYERS=1: {what}");
        let found = compare_within(&what, tolerance(dtype), &device, &inputs, &compute);
        for _ in 0..number("FSDP_RANDOM_REPEATS", 1) {
            let again = run(&what, &inputs, &|x| x.to_device(&device), &compute);
            assert!(found.iter().map(bits).eq(again.iter().map(bits)), "{what} {dtype:?}: other bits");
        }
    }
}
