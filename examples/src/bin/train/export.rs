//! `--export-hf`: the model as a Hugging Face directory, or the adapters as PEFT reads them.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use fsdp_candle::{ShardedVarMap, StateDictOptions, World, get_model_state_dict};
use fsdp_ckpt::TensorShard;
use fsdp_ckpt::hf::{self, ExportOptions};
use fsdp_examples::models::config::BUILTIN;

use crate::agree::from_rank;
use crate::args::Args;
use crate::exported::may_replace;
use crate::exported::{RUN, STEP, run_of};
use crate::lora::Adapters;
use crate::peft;
use crate::places::Places;

/// What makes a model directory besides the weights.
const CONFIG_FILES: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
];

/// An export at the end of a run.
pub(crate) struct Export<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) step: usize,
    pub(crate) places: &'a Places,
    /// What the run trains, if it is not the model.
    pub(crate) adapters: Option<&'a Adapters>,
}

impl Export<'_> {
    /// Writes weights, configuration and, if there is one, the tokenizer; of a run that trains adapters, these.
    /// Collective.
    pub(crate) fn write(&self, args: &Args, world: &World, vars: &ShardedVarMap) -> anyhow::Result<()> {
        let Export { dir, step, places, adapters } = *self;
        let tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("");
        // Hours have passed since the run began: somebody else's weights may have come into the place of its own.
        let replace = places.replaces_export
            && from_rank(world, 0, || may_replace(dir, Some(&places.checkpoints), args.steps.max(step)))?;
        let metadata = [(RUN, run_of(&places.checkpoints)?), (STEP, step.to_string())];
        let mut options = ExportOptions {
            metadata: BTreeMap::from(metadata.map(|(key, value)| (key.to_owned(), value))),
            replace,
            ..ExportOptions::default()
        };
        let write = |tensors: &[TensorShard], options: &ExportOptions| {
            let outcome = hf::export_with(dir, world.group(), tensors, options);
            outcome.with_context(|| format!("can't export to {}", dir.display()))
        };
        if let Some(adapters) = adapters {
            options.file = peft::WEIGHTS.into();
            write(&peft::of(tensors), &options)?;
            return match world.rank() {
                0 => peft::write_config(dir, adapters.lora.config, args.model.as_deref(), vars),
                _ => Ok(()),
            };
        }
        options.config_files = args
            .model
            .iter()
            .flat_map(|model| CONFIG_FILES.iter().map(|name| model.join(name)))
            .filter(|path| path.exists())
            .collect();
        write(&tensors, &options)?;
        if args.model.is_none() && world.rank() == 0 {
            std::fs::write(dir.join("config.json"), BUILTIN)
                .with_context(|| format!("can't write {}/config.json", dir.display()))?;
        }
        Ok(())
    }
}
