//! Whether there is room for a run: looked at before anything of it is made, because memory that is refused in the
//! midst of it ends the process without a word.

use std::fmt;

use anyhow::bail;
use fsdp_candle::World;
use fsdp_examples::models::{Lora, ModelConfig};
use fsdp_examples::ranks::Ranks;
use indicatif::{BinaryBytes, HumanCount};

use crate::args::Args;
use crate::optimizer_flags::Kind;

/// Bytes of an f32.
const F32: f64 = 4.;
/// What a parameter takes besides its values, at the least.
const TENSOR: f64 = 1024.;
/// The sample at the end sees so many tokens, whatever the batch.
const FEWEST_TOKENS: usize = 64;

/// Fails unless this rank can have the memory that its run takes at the least, and all ranks of this machine together
/// are below what the machine has.
pub(crate) fn check(
    args: &Args,
    config: &ModelConfig,
    lora: Option<&Lora>,
    positions: usize,
    world: &World,
) -> anyhow::Result<()> {
    if !world.device().is_cpu() {
        return Ok(()); // memory that a device refuses is an error by itself
    }
    let needs = needs(args, config, lora, positions, args.ranks(world)?);
    let total: f64 = needs.iter().map(|(_, bytes)| bytes).sum();
    let ranks = world.env().local_world_size;
    let machine = rustix::system::sysinfo();
    let machine = (machine.totalram as f64 + machine.totalswap as f64) * f64::from(machine.mem_unit.max(1));
    let missing = if ranks as f64 * total > machine {
        let all = if ranks > 1 { format!(" for its {ranks} ranks") } else { String::new() };
        format!("this machine has {}{all}", Bytes(machine))
    } else if let Err(error) = Vec::<u8>::new().try_reserve_exact(total as usize) {
        format!("the system refuses so much: {error}")
    } else {
        return Ok(());
    };
    let much = needs.iter().filter(|(_, bytes)| *bytes >= total / 100.);
    let needs = much.map(|(what, bytes)| format!("{} for {what}", Bytes(*bytes))).collect::<Vec<_>>();
    bail!(
        "rank {} needs at least {} of memory ({}), and {missing}. Use a smaller model, --batch-size, --seq-len or \
         --lora-rank, or a larger machine with more ranks",
        world.rank(),
        Bytes(total),
        needs.join(", ")
    );
}

/// What a rank needs for what, in bytes: never more than it will really take.
fn needs(args: &Args, config: &ModelConfig, lora: Option<&Lora>, positions: usize, ranks: Ranks) -> Vec<(String, f64)> {
    let size = config.size(lora);
    // Norms are whole on each rank that computes with them: too little is said of them.
    let tensor = ranks.tensor as f64;
    let shards = ranks.shard as f64 * tensor;
    // A parameter that is trained has a gradient, and what the optimizer keeps of it.
    let kept = match args.optimizer.optimizer {
        Kind::Adamw | Kind::Adam => 2.,
        Kind::Adamw8bit => 0.5,
        Kind::Sgd if args.optimizer.momentum == Some(0.) => 0.,
        Kind::Sgd | Kind::Muon => 1.,
    };
    let (frozen, trained) = match lora {
        Some(_) => (size.base, size.adapters),
        None => (0., size.base),
    };
    let holders = if args.shard_optimizer_over_replicas { shards * ranks.replicate as f64 } else { shards };
    let state = F32 * (frozen / shards + (2. + kept) * trained / holders);
    let tokens = (args.batch_size * args.seq_len).max(FEWEST_TOKENS) as f64;
    let compute = args.param_dtype.dtype().size_in_bytes() as f64;
    let parameters = Count(size.base + size.adapters);
    vec![
        (format!("its shards of {parameters} parameters, with gradients and optimizer state"), state),
        ("the largest unit's gathered parameters".into(), compute * size.largest_unit / tensor),
        (format!("the widest activation of {} tokens", Count(tokens)), compute * size.widest * tokens / tensor),
        (format!("the names and shapes of {} parameter tensors", Count(size.tensors)), TENSOR * size.tensors),
        ("rotary tables".into(), F32 * size.rotary * positions as f64),
    ]
}

/// Above this, numbers are not spelled out.
const MOST: f64 = 1e18;

struct Bytes(f64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < MOST { BinaryBytes(self.0 as u64).fmt(f) } else { write!(f, "{:.1e} bytes", self.0) }
    }
}

struct Count(f64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < MOST { HumanCount(self.0 as u64).fmt(f) } else { write!(f, "{:.1e}", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lora::Adapters;
    use clap::Parser;

    fn total(flags: &[&str], ranks: usize) -> f64 {
        let args = Args::try_parse_from([&["train"], flags].concat()).unwrap();
        let lora = Adapters::of(&args).unwrap().map(|adapters| adapters.lora);
        let ranks = Ranks::new(ranks, args.replicate, args.tensor_parallel).unwrap();
        needs(&args, &ModelConfig::builtin().unwrap(), lora.as_ref(), 128, ranks).iter().map(|(_, bytes)| bytes).sum()
    }

    #[test]
    fn needs_follow_from_model_batch_and_ranks() {
        let one = total(&[], 1);
        // Five million parameters with a gradient and two moments.
        assert!((80e6..120e6).contains(&one), "{one}");
        assert!((0.4..0.8).contains(&(total(&[], 2) / one)));
        assert_eq!(total(&["--replicate", "2"], 2), one);
        // Layers that ranks compute together are divided as well.
        assert!((0.4..0.55).contains(&(total(&["--tensor-parallel", "2"], 2) / one)));
        assert_eq!(total(&["--replicate", "2", "--shard-optimizer-over-replicas"], 2), total(&[], 2));
        // Nothing but the shards is divided.
        assert!(total(&["--batch-size", "4000"], 2) > 4000. * 128. * 688. * 4.);
        assert!(total(&["--lora-rank", "8"], 1) < one / 2.);
        assert!(total(&["--lora-rank", "4611686018427387904"], 1) > 1e21);
        assert!(total(&["--param-dtype", "bf16"], 1) < one);
        let of = |optimizer| total(&["--optimizer", optimizer], 1);
        assert!(of("adam") == one && of("adamw8bit") < of("sgd") && of("sgd") == of("muon") && of("muon") < one);
    }

    #[test]
    fn sizes_of_every_order_can_be_read() {
        assert_eq!(Bytes(f64::from(1 << 30)).to_string(), "1.00 GiB");
        assert_eq!(Bytes(3e30).to_string(), "3.0e30 bytes");
        assert_eq!((Count(1e6).to_string(), Count(1e40).to_string()), ("1,000,000".into(), "1.0e40".into()));
    }
}
