//! The adapters that a run trains: as the flags have them, or as PEFT has written them.

use anyhow::{Context, ensure};
use fsdp_candle::ShardedVarMap;
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_examples::models::{Lora, Targets};

use crate::args::Args;
use crate::peft::Peft;

/// The projections of queries and values, or the one layer that makes both, in all families.
const USUAL: [&str; 6] = ["q_proj", "v_proj", "qkv_proj", "attn.c_attn", "self.query", "self.value"];
/// So many names an error lists.
const MOST_NAMES: usize = 16;

/// What a run trains in the place of its parameters.
pub(crate) struct Adapters {
    pub(crate) lora: Lora,
    /// Where they are read from.
    pub(crate) from: Option<Peft>,
}

impl Adapters {
    /// As the flags say, if they do.
    pub(crate) fn of(args: &Args) -> anyhow::Result<Option<Self>> {
        if let Some(dir) = &args.lora_from {
            let from = Peft::open(dir).with_context(|| format!("--lora-from {}", dir.display()))?;
            return Ok(Some(Adapters { lora: from.lora()?, from: Some(from) }));
        }
        let Some(rank) = args.lora_rank else { return Ok(None) };
        let targets = match &args.lora_targets[..] {
            [] => Targets::new(USUAL),
            patterns => Targets::new(patterns.iter().map(String::as_str)),
        };
        let config = LoraConfig { rank, alpha: args.lora_alpha.unwrap_or(2. * rank as f64) };
        Ok(Some(Adapters { lora: Lora { config, targets: targets.context("--lora-targets")? }, from: None }))
    }

    /// Has the model that is built next trained so.
    pub(crate) fn apply(&self, vars: &ShardedVarMap) {
        let targets = self.lora.targets.clone();
        vars.freeze(|name| !is_adapter(name));
        vars.adapt(self.lora.config, move |layer| targets.meant(layer));
    }

    /// Fails unless the model has the layers that are meant.
    pub(crate) fn check(&self, args: &Args, vars: &ShardedVarMap) -> anyhow::Result<()> {
        let adapted = vars.adapted();
        if let Some(from) = &self.from {
            return from.check(&adapted);
        }
        let idle = match args.lora_targets.is_empty() {
            true => None,
            false => self.lora.targets.idle(&adapted),
        };
        ensure!(
            idle.is_none() && !adapted.is_empty(),
            "--lora-targets: {} means no fully connected layer of the model; it has {}",
            idle.map_or("the default".into(), |pattern| format!("`{pattern}`")),
            layers(vars)
        );
        Ok(())
    }
}

/// The matrices of the model, those that differ by a number once.
fn layers(vars: &ShardedVarMap) -> String {
    let mut names: Vec<String> = vec![];
    for param in vars.params().iter().filter(|param| param.shape().rank() == 2 && !is_adapter(param.name())) {
        let Some(layer) = param.name().strip_suffix(".weight") else { continue };
        let parts = layer.split('.').map(|part| if part.parse::<u64>().is_ok() { "*" } else { part });
        let name = parts.collect::<Vec<_>>().join(".");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let more = names.len().saturating_sub(MOST_NAMES);
    names.truncate(MOST_NAMES);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}
