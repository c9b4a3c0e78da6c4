//! `bench attention`: forward and backward of causal attention.

use candle_core::{Device, Var};
use fsdp_candle::nn::causal_attention;
use fsdp_train::metrics::peak_memory_bytes;
use serde::Serialize;

use crate::{count, passes, print};

/// Measures causal self-attention of one sequence in f32, in this process. `RAYON_NUM_THREADS` sets the threads.
/// tests/interop/attention.py measures the same in PyTorch.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Lengths of the sequence.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1024,4096,8192",
          value_parser = count(1 << 20))]
    tokens: Vec<usize>,
    /// Heads of queries, keys and values.
    #[arg(long, default_value_t = 12, value_parser = count(1 << 10))]
    heads: usize,
    /// Width of a head.
    #[arg(long, default_value_t = 64, value_parser = count(1 << 10))]
    head_dim: usize,
    /// Number of runs. The best counts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Times {
    tokens: usize,
    forward_ms: f64,
    backward_ms: f64,
    /// Peak resident memory of the process so far.
    peak_rss_bytes: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.json {
        print(format_args!("{:>8} {:>12} {:>12}", "tokens", "forward, ms", "backward, ms"))?;
    }
    let scale = 1. / (args.head_dim as f64).sqrt();
    for &tokens in &args.tokens {
        let random = || Var::randn(0f32, 1., (1, tokens, args.heads * args.head_dim), &Device::Cpu);
        let [q, k, v] = [random()?, random()?, random()?];
        let attention = || causal_attention(&q, &k, &v, args.heads, args.heads, scale);
        let [forward_ms, backward_ms] = passes::best(args.runs, attention)?;
        let times = Times { tokens, forward_ms, backward_ms, peak_rss_bytes: peak_memory_bytes() };
        match args.json {
            true => print(serde_json::to_string(&times)?)?,
            false => print(format_args!("{tokens:>8} {forward_ms:>12.1} {backward_ms:>12.1}"))?,
        }
    }
    Ok(())
}
