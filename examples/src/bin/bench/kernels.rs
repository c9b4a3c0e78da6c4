//! `bench kernels`: bandwidth and arithmetic of each kernel of a step, beside those of a copy and of a product.

use std::time::Instant;

use anyhow::Context;
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use fsdp_candle::nn::{self, Rotary, RotaryOptions};
use fsdp_candle::{
    AdamW, AdamWConfig, DeviceChoice, Float8Recipe, FullyShard, ReshardAfterForward, ShardedVarMap, World,
    clip_grad_norm, fully_shard, grad_norm, no_grad,
};
use fsdp_train::console::Console;
use serde::Serialize;

use crate::precision::Precision;
use crate::{count, print};

/// Measures the kernels of a training step, with the sizes of a layer of Llama 3.1 8B.
///
/// The copy shows the bandwidth that the device reaches, and the product its arithmetic. Backward includes passes of
/// Candle, whose bytes count as well: Candle sets the gradient of the result to ones, and adds each gradient of an
/// input to zeros.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compute device.
    #[arg(long, default_value = "cpu", value_parser = fsdp_train::job::device_parser())]
    pub(crate) device: DeviceChoice,
    /// Dtype of activations and weights.
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    dtype: Precision,
    /// Tokens of the sequence. The cross-entropy has at most 2048 of them.
    #[arg(long, default_value_t = 8192, value_parser = count(1 << 20))]
    tokens: usize,
    /// Width of the hidden states.
    #[arg(long, default_value_t = 4096, value_parser = count(1 << 16))]
    width: usize,
    /// Width inside the MLP.
    #[arg(long, default_value_t = 14336, value_parser = count(1 << 18))]
    inner: usize,
    /// Heads of queries.
    #[arg(long, default_value_t = 32, value_parser = count(1 << 10))]
    heads: usize,
    /// Heads of keys and values.
    #[arg(long, default_value_t = 8, value_parser = count(1 << 10))]
    kv_heads: usize,
    /// Rows of the embedding.
    #[arg(long, default_value_t = 128_256, value_parser = count(1 << 20))]
    vocabulary: usize,
    /// Measure only rows with this text in their name.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Number of runs. The best counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

/// The name of attention's rows.
const ATTENTION: &str = "causal attention";

/// The least work of a pass.
#[derive(Clone, Copy)]
enum Work {
    /// Bytes that it reads and writes.
    Bytes(usize),
    /// Multiplications and additions.
    Operations(usize),
}

#[derive(Serialize)]
struct Times<'a> {
    name: &'a str,
    /// `forward`, `backward` or `step`.
    pass: &'a str,
    ms: f64,
    /// 10^9 bytes a second, of kernels that memory bounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    gb_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tflop_s: Option<f64>,
    /// The library of the kernel, if it is not this project's.
    #[serde(skip_serializing_if = "Option::is_none")]
    library: Option<&'a str>,
}

/// A kernel with its inputs.
type Compute = Box<dyn Fn() -> Result<Tensor>>;

/// A kernel: its name, the work of forward and of backward, if it has one, and its inputs.
struct Kernel {
    name: &'static str,
    forward: Work,
    backward: Option<Work>,
    make: fn(&Bench<'_>) -> Result<Compute>,
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let Args { width, heads, kv_heads, .. } = *args;
    anyhow::ensure!(
        width.is_multiple_of(2 * heads) && heads.is_multiple_of(kv_heads),
        "--width {width}, --heads {heads} and --kv-heads {kv_heads}: a head must have an even width, and the heads of \
         keys must divide those of queries"
    );
    anyhow::ensure!(world.size() == 1, "bench kernels measures one process, and there are {}", world.size());
    if !args.json {
        print(format_args!("{:<24} {:<9} {:>10} {:>10} {:>10}", "kernel", "pass", "ms", "GB/s", "TFLOP/s"))?;
    }
    let attention = nn::attention_library(world.device())?;
    let bench = Bench { args, device: world.device(), dtype: args.dtype.into(), attention };
    for kernel in bench.kernels().iter().filter(|kernel| kernel.name.contains(&args.only)) {
        bench.passes(kernel).with_context(|| format!("{} failed", kernel.name))?;
    }
    bench.float8_product(world)?;
    bench.optimizer(world)
}

struct Bench<'a> {
    args: &'a Args,
    device: &'a Device,
    dtype: DType,
    /// The library that computes attention, if it is not this project's.
    attention: Option<String>,
}

impl Bench<'_> {
    fn kernels(&self) -> [Kernel; 12] {
        let Args { tokens, width, inner, vocabulary, .. } = *self.args;
        let size = self.dtype.size_in_bytes();
        let (hidden, mlp, logits) = (size * tokens * width, size * tokens * inner, size * self.rows() * vocabulary);
        let table = size * vocabulary * width;
        // Candle writes ones, writes zeros, reads both terms of a sum and writes it.
        let backward = |own: usize, result: usize, inputs: usize| Some(own + result + 4 * inputs);
        // A product multiplies and adds. Causal queries see half of the scores.
        let (product, scores) = (2 * tokens * width * inner, tokens * tokens * width);
        let kernel = |name, forward, backward: Option<Work>, make| Kernel { name, forward, backward, make };
        let moves = |name, forward, backward: Option<usize>, make| {
            kernel(name, Work::Bytes(forward), backward.map(Work::Bytes), make)
        };
        let computes = |name, forward, backward, make| {
            kernel(name, Work::Operations(forward), Some(Work::Operations(backward)), make)
        };
        [
            moves("copy", 2 * hidden, None, |of| {
                let [x] = of.hidden()?;
                Ok(Box::new(move || x.copy()))
            }),
            moves("cast", hidden + tokens * width * self.other().size_in_bytes(), None, |of| {
                let ([x], other) = (of.hidden()?, of.other());
                Ok(Box::new(move || x.to_dtype(other)))
            }),
            moves("sum", 3 * hidden, None, |of| {
                let [x, y] = of.hidden()?;
                Ok(Box::new(move || nn::add(&x, &y)))
            }),
            moves("RMS norm", 2 * hidden, backward(3 * hidden, hidden, hidden), |of| {
                let ([x], [w]) = (of.hidden()?, of.vars(of.args.width)?);
                let norm = nn::RmsNorm::new(w, 1e-5);
                Ok(Box::new(move || norm.forward(&x)))
            }),
            moves("layer norm", 2 * hidden, backward(3 * hidden, hidden, hidden), |of| {
                let ([x], [w, b]) = (of.hidden()?, of.vars(of.args.width)?);
                let norm = nn::LayerNorm::new(w, b, 1e-5);
                Ok(Box::new(move || norm.forward(&x)))
            }),
            moves("SwiGLU", 3 * mlp, backward(5 * mlp, mlp, 2 * mlp), |of| {
                let [gate, up] = of.vars((of.args.tokens, of.args.inner))?;
                Ok(Box::new(move || nn::silu_mul(&gate, &up)))
            }),
            moves("GELU", 2 * mlp, backward(3 * mlp, mlp, mlp), |of| {
                let [x] = of.vars((of.args.tokens, of.args.inner))?;
                Ok(Box::new(move || nn::gelu(&x)))
            }),
            moves("rotary embedding", 2 * hidden, backward(2 * hidden, hidden, hidden), |of| {
                let [x] = of.hidden()?;
                let pairs = of.args.width / of.args.heads / 2;
                let frequencies: Vec<f32> = (0..pairs).map(|pair| 0.9f32.powi(pair as i32)).collect();
                let tables = Rotary::with_options(&frequencies, RotaryOptions::default(), of.args.tokens, of.device)?;
                Ok(Box::new(move || tables.apply(&x, 0)))
            }),
            moves("embedding", 2 * hidden, backward(hidden + table, hidden, table), |of| {
                let [table] = of.vars((of.args.vocabulary, of.args.width))?;
                let (ids, embedding) = (of.ids(of.args.tokens)?, nn::Embedding::new(table, of.args.width));
                Ok(Box::new(move || embedding.forward(&ids)))
            }),
            moves("cross-entropy", logits, backward(2 * logits, 0, logits), |of| {
                let ([x], ids) = (of.vars((of.rows(), of.args.vocabulary))?, of.ids(of.rows())?);
                Ok(Box::new(move || nn::cross_entropy(&x, &ids)))
            }),
            computes("product", product, 2 * product, |of| {
                let ([x], [w]) = (of.hidden()?, of.vars((of.args.inner, of.args.width))?);
                let linear = nn::Linear::new(w, None);
                Ok(Box::new(move || linear.forward(&x)))
            }),
            computes(ATTENTION, 2 * scores, 5 * scores, |of| {
                let Args { tokens, width, heads, kv_heads, .. } = *of.args;
                let ([q], [k, v]) = (of.hidden()?, of.vars((1, tokens, width / heads * kv_heads))?);
                let scale = ((width / heads) as f64).powf(-0.5);
                Ok(Box::new(move || nn::causal_attention(&q, &k, &v, heads, kv_heads, scale)))
            }),
        ]
    }

    fn passes(&self, kernel: &Kernel) -> anyhow::Result<()> {
        let compute = (kernel.make)(self)?;
        self.show(kernel.name, "forward", kernel.forward, || compute().map(drop).map_err(Into::into))?;
        let Some(work) = kernel.backward else { return Ok(()) };
        let y = compute()?;
        self.show(kernel.name, "backward", work, || y.backward().map(drop).map_err(Into::into))
    }

    /// Measures the product of a layer in 8-bit floats, with the casts of its operands.
    fn float8_product(&self, world: &World) -> anyhow::Result<()> {
        let Args { tokens, width, inner, .. } = *self.args;
        for (name, recipe) in [("8-bit product", Float8Recipe::Tensorwise), ("8-bit rows", Float8Recipe::Rowwise)] {
            if !name.contains(&self.args.only) {
                continue;
            }
            let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, self.device);
            vars.convert_to_float8_training(recipe, |_| true)?;
            let opts = FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::Never);
            let model = fully_shard(&opts, vars.builder(self.dtype), |vb| nn::linear_no_bias(width, inner, vb))?;
            let x = Tensor::ones((tokens, width), self.dtype, self.device)?;
            // Older GPUs have no 8-bit floats.
            match no_grad(|| model.forward(&x)) {
                Ok(_) => self.show(name, "forward", Work::Operations(2 * tokens * width * inner), || {
                    no_grad(|| model.forward(&x)).map(drop).map_err(Into::into)
                })?,
                Err(error) => Console::Stderr.line(format_args!("{name} is not measured: {error}")),
            }
        }
        Ok(())
    }

    /// Measures the norm, clipping and AdamW for an f32 weight.
    fn optimizer(&self, world: &World) -> anyhow::Result<()> {
        let Args { width, inner, .. } = *self.args;
        let names = ["gradient norm", "clipping", "AdamW"];
        let [norm, clipping, adamw] = names.map(|name| name.contains(&self.args.only));
        if !(norm || clipping || adamw) {
            return Ok(());
        }
        let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, self.device);
        let opts = FullyShard::new(&vars);
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(width, inner, vb))?;
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
        let y = model.forward(&Tensor::ones((1, width), DType::F32, self.device)?)?;
        let mut grads = model.backward(&y.sqr()?.mean_all()?)?;
        let weight = DType::F32.size_in_bytes() * width * inner;
        if norm {
            self.show(names[0], "step", Work::Bytes(weight), || {
                grad_norm(&vars, &grads)?;
                Ok(())
            })?;
        }
        if clipping {
            // The norm, and a product with a factor near 1.
            let work = Work::Bytes(3 * weight);
            self.show(names[1], "step", work, || {
                clip_grad_norm(&vars, &mut grads, 1e-6)?;
                Ok(())
            })?;
        }
        if adamw {
            // Reads the weight, its gradient and two moments. Writes all but the gradient.
            self.show(names[2], "step", Work::Bytes(7 * weight), || Ok(optim.step(&grads)?))?;
        }
        Ok(())
    }

    /// Measures a pass, and prints its row.
    fn show(
        &self,
        name: &str,
        pass: &str,
        work: Work,
        mut compute: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // The device runs behind the host: several calls in a run hide the time of the first call's launch.
        const CALLS: u32 = 4;
        let mut best = f64::INFINITY;
        for run in 0..=self.args.runs {
            self.device.synchronize()?;
            let start = Instant::now();
            (0..CALLS).try_for_each(|_| compute())?;
            self.device.synchronize()?;
            // The first run takes memory from the device.
            if run > 0 {
                best = best.min(start.elapsed().as_secs_f64() / f64::from(CALLS));
            }
        }
        let (gb_s, tflop_s) = match work {
            Work::Bytes(bytes) => (Some(bytes as f64 / best / 1e9), None),
            Work::Operations(count) => (None, Some(count as f64 / best / 1e12)),
        };
        let library = self.attention.as_deref().filter(|_| name == ATTENTION);
        let times = Times { name, pass, ms: best * 1e3, gb_s, tflop_s, library };
        if self.args.json {
            return print(serde_json::to_string(&times)?);
        }
        let cell = |rate: Option<f64>| rate.map_or(String::new(), |rate| format!("{rate:.1}"));
        let library = library.map_or(String::new(), |library| format!("  {library}"));
        print(format_args!("{name:<24} {pass:<9} {:>10.3} {:>10} {:>10}{library}", times.ms, cell(gb_s), cell(tflop_s)))
    }

    /// Returns the dtype to cast to.
    fn other(&self) -> DType {
        if self.dtype == DType::F32 { DType::BF16 } else { DType::F32 }
    }

    /// Returns the rows of logits.
    fn rows(&self) -> usize {
        self.args.tokens.min(2048)
    }

    /// Returns random hidden states of one sequence.
    fn hidden<const N: usize>(&self) -> Result<[Tensor; N]> {
        self.vars((1, self.args.tokens, self.args.width))
    }

    /// Returns random variables.
    fn vars<const N: usize>(&self, shape: impl Into<candle_core::Shape>) -> Result<[Tensor; N]> {
        let shape = shape.into();
        let var = || {
            let values = Tensor::randn(0f32, 1., &shape, self.device)?.to_dtype(self.dtype)?;
            Ok(Var::from_tensor(&values)?.as_tensor().clone())
        };
        let vars = (0..N).map(|_| var()).collect::<Result<Vec<_>>>()?;
        vars.try_into().map_err(|_| candle_core::Error::msg("another number of variables"))
    }

    /// Returns ids of tokens.
    fn ids(&self, count: usize) -> Result<Tensor> {
        let ids: Vec<u32> = (0..count).map(|i| (i * 7919 % self.args.vocabulary) as u32).collect();
        Tensor::new(ids, self.device)
    }
}
