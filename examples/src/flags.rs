//! Values of flags that several programs have.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;
use clap::ValueEnum;
use fsdp_candle::activation_checkpoint::{ActivationOffload, CheckpointPolicy};
use fsdp_candle::{AttentionExchange, ReshardAfterForward, World};
use serde::{Serialize, Serializer};

/// Parses `--reshard-after-forward`.
pub fn reshard(text: &str) -> Result<ReshardAfterForward, String> {
    match text {
        "default" => Ok(ReshardAfterForward::Default),
        "always" => Ok(ReshardAfterForward::Always),
        "never" => Ok(ReshardAfterForward::Never),
        number => match number.parse() {
            Ok(ranks) => Ok(ReshardAfterForward::To(ranks)),
            Err(_) => Err("it must be default, always, never, or a number of processes".into()),
        },
    }
}

/// Parses a finite number that is `wanted`, which `what` describes.
pub fn number(text: &str, what: &str, wanted: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.trim().parse().ok().filter(|&x: &f64| x.is_finite() && wanted(x)).ok_or_else(|| format!("it must be {what}"))
}

/// Parses a number above 0.
pub fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0, such as 3e-4", |x| x > 0.0)
}

/// Parses a number of at least 0.
pub fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0, such as 0.1", |x| x >= 0.0)
}

/// `--context-exchange`: how attention gets what the ranks of `--context-parallel` hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ContextExchange {
    /// Keys and values of all processes are gathered; for any number of heads
    Gather,
    /// Heads are exchanged for positions (Ulysses); N must divide the key heads of a process
    Heads,
}

impl From<ContextExchange> for AttentionExchange {
    fn from(exchange: ContextExchange) -> Self {
        match exchange {
            ContextExchange::Gather => AttentionExchange::Gather,
            ContextExchange::Heads => AttentionExchange::Heads,
        }
    }
}

/// `--activation-offload`: storage of the inputs of recomputed blocks between forward and backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActivationPlace {
    /// Where they are.
    None,
    /// Host memory.
    Cpu,
    /// A file in this directory.
    Disk(PathBuf),
}

impl ActivationPlace {
    /// Adds this place to a policy.
    pub fn offload(&self, policy: CheckpointPolicy, world: &World) -> anyhow::Result<CheckpointPolicy> {
        Ok(match self {
            ActivationPlace::None => policy,
            ActivationPlace::Cpu => policy.offload(ActivationOffload::cpu(world)),
            ActivationPlace::Disk(dir) => {
                policy.offload(ActivationOffload::disk(world, dir).context("--activation-offload")?)
            }
        })
    }
}

impl Serialize for ActivationPlace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ActivationPlace::None => "none".serialize(serializer),
            ActivationPlace::Cpu => "cpu".serialize(serializer),
            // Each host may have its own directory.
            ActivationPlace::Disk(_) => "disk".serialize(serializer),
        }
    }
}

impl FromStr for ActivationPlace {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.split_once(':')) {
            ("none", _) => Ok(ActivationPlace::None),
            ("cpu", _) => Ok(ActivationPlace::Cpu),
            (_, Some(("disk", dir))) if !dir.is_empty() => Ok(ActivationPlace::Disk(dir.into())),
            _ => Err("it must be none, cpu, or disk:DIR with an existing directory, such as disk:/nvme"),
        }
    }
}
