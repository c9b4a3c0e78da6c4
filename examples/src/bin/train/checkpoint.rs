//! Checkpoints of a run: what is in them, and going on from one.

use std::path::{Path, PathBuf};

use anyhow::Context;
use fsdp_candle::{AdamW, ShardedVarMap, World, load_model, load_optimizer, model_tensors, optimizer_tensors};
use fsdp_ckpt::{Checkpoint, SaveState, TensorShard, TensorSource, hf};
use fsdp_examples::models::config::BUILTIN;

use crate::adapters;
use crate::args::Args;
use crate::done::Done;
use crate::places::{Places, same_file, step_name};
use crate::setup;

/// A run's checkpoints.
pub(crate) struct Checkpoints<'a> {
    places: Places,
    world: &'a World,
}

impl<'a> Checkpoints<'a> {
    /// Collective.
    pub(crate) fn new(args: &Args, world: &'a World) -> anyhow::Result<Self> {
        Ok(Checkpoints { places: Places::new(args, world)?, world })
    }

    /// Loads the checkpoint to go on from, if there is one; tells how far it had come.
    pub(crate) fn resume(&self, vars: &ShardedVarMap, optim: &mut AdamW) -> anyhow::Result<Done> {
        let Some(path) = &self.places.resume_from else { return Ok(Done::default()) };
        let checkpoint = Checkpoint::open(path).with_context(|| format!("can't resume from {}", path.display()))?;
        // Each rank checks a share of the checksums, so that all is read once.
        checkpoint
            .verify_share(self.world.rank(), self.world.size())
            .with_context(|| format!("can't resume from {}", path.display()))?;
        load_model(vars, &checkpoint)?;
        load_optimizer(optim, &checkpoint)?;
        let done = Done::of(&checkpoint, path)?;
        self.world.group().barrier().wait().context("another rank could not resume")?;
        if self.world.rank() == 0 {
            eprintln!("resumed from {} at step {}", path.display(), done.step);
        }
        Ok(done)
    }

    /// Saves model, optimizer and position; the directory is named after the step. Collective.
    pub(crate) fn save(&self, vars: &ShardedVarMap, optim: &AdamW, done: &Done) -> anyhow::Result<PathBuf> {
        let path = self.places.checkpoints.join(step_name(done.step));
        // A run that had nothing left to do is where it resumed from already.
        if self.places.resume_from.as_deref().is_some_and(|from| same_file(from, &path)) {
            return Ok(path);
        }
        let mut tensors = model_tensors(vars);
        tensors.extend(optimizer_tensors(optim));
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: done.values() };
        fsdp_ckpt::save(&path, self.world.group().as_ref(), &state)
            .with_context(|| format!("can't save {}", path.display()))?;
        Ok(path)
    }
}

/// Writes the model as a Hugging Face directory: weights, configuration and, if there is one, the tokenizer. Of a run that trains adapters, it writes
/// these. Collective.
pub(crate) fn export_hf(dir: &Path, args: &Args, world: &World, vars: &ShardedVarMap) -> anyhow::Result<()> {
    if let Some(config) = setup::lora(args) {
        return adapters::export(dir, config, args.model.as_ref(), world, vars);
    }
    let tensors: Vec<TensorShard> = model_tensors(vars)
        .into_iter()
        .zip(vars.params())
        .map(|(tensor, param)| TensorShard { fqn: param.name().into(), ..tensor })
        .collect();
    let beside: Vec<PathBuf> = args
        .model
        .iter()
        .flat_map(|model| CONFIG_FILES.iter().map(|name| model.join(name)))
        .filter(|path| path.exists())
        .collect();
    hf::export(dir, world.group().as_ref(), &tensors, &beside)
        .with_context(|| format!("can't export the model to {}", dir.display()))?;
    if args.model.is_none() && world.rank() == 0 {
        std::fs::write(dir.join("config.json"), BUILTIN)
            .with_context(|| format!("can't write {}/config.json", dir.display()))?;
    }
    Ok(())
}

/// What makes a model directory besides the weights.
const CONFIG_FILES: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];
