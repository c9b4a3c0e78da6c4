//! Checkpoints of a run: what is in them, and going on from one.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use fsdp_candle::nn::is_adapter;
use fsdp_candle::{
    AdamW, ShardedVarMap, StateDictOptions, World, get_model_state_dict, load_model, load_optimizer, model_tensors,
    optimizer_tensors, optimizer_values,
};
use fsdp_ckpt::{AsyncSaver, LoadOptions, MODEL, SaveState, TensorSource, WhenBusy, hf};
use fsdp_examples::models::config::BUILTIN;

use crate::adapters;
use crate::agree::{Finding, worst};
use crate::args::{Args, Resume};
use crate::done::{Done, has_optimizer};
use crate::places::{Places, same_file, step_name};
use crate::setup;

/// A run's checkpoints.
pub(crate) struct Checkpoints<'a> {
    places: Places,
    world: &'a World,
    sequences_per_step: u64,
    keep: Option<NonZeroUsize>,
    /// Where saves go on in the background.
    saver: Option<AsyncSaver>,
}

impl<'a> Checkpoints<'a> {
    /// Collective.
    pub(crate) fn new(args: &Args, world: &'a World) -> anyhow::Result<Self> {
        let sequences_per_step = args.sequences_per_step(world.size());
        let places = Places::new(args, world)?;
        let keep = args.keep.and_then(NonZeroUsize::new);
        let saver = match (args.async_save, keep) {
            (false, _) => None,
            (true, None) => Some(AsyncSaver::new(world.group().clone(), WhenBusy::Wait)?),
            (true, Some(keep)) => Some(AsyncSaver::new(world.group().clone(), WhenBusy::Wait)?.keep_newest(keep)),
        };
        Ok(Checkpoints { places, world, sequences_per_step, keep, saver })
    }

    /// Loads the checkpoint to go on from, if there is one; tells how far it had come. Where `--resume auto` chose one that turns out to be damaged, it is
    /// set aside, and an older one loaded. Collective.
    pub(crate) fn resume(&mut self, args: &Args, vars: &ShardedVarMap, optim: &mut AdamW) -> anyhow::Result<Done> {
        while let Some(path) = self.places.resume_from.clone() {
            let failed = || format!("can't resume from {}", path.display());
            // Nothing is loaded before everything has been found good: of a damaged checkpoint nothing gets into the model.
            let (source, own) = self.verify(&path);
            match worst(self.world, own)? {
                Finding::Damaged(why) if args.resume == Resume::Auto => {
                    self.places.fall_back(args, self.world, &why)?;
                }
                Finding::Damaged(why) | Finding::Failed(why) => return Err(anyhow!(why).context(failed())),
                Finding::Good => {
                    let Some(source) = source else { bail!("a checkpoint that was not opened was found good") };
                    let done = self.load(&*source, vars, optim).with_context(failed)?;
                    self.world.group().barrier().wait().context("another rank could not resume")?;
                    return Ok(done);
                }
            }
        }
        Ok(Done::default())
    }

    /// Opens a checkpoint and checks this rank's share of the checksums, so that all is read once.
    fn verify(&self, path: &Path) -> (Option<Box<dyn TensorSource>>, Finding) {
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let opened = fsdp_ckpt::open(path).and_then(|source| source.verify_share(rank, ranks).map(|_| source));
        match opened {
            Ok(source) => (Some(source), Finding::Good),
            Err(error) if error.is_damage() => (None, Finding::Damaged(error.with_causes())),
            Err(error) => (None, Finding::Failed(format!("rank {rank}: {}", error.with_causes()))),
        }
    }

    fn load(&self, source: &dyn TensorSource, vars: &ShardedVarMap, optim: &mut AdamW) -> anyhow::Result<Done> {
        let is_of_adapters = source.tensors().keys().any(|name| is_adapter(name));
        ensure!(
            !is_of_adapters || vars.params().iter().any(|param| is_adapter(param.name())),
            "it holds LoRA adapters: pass the --lora-rank that it was trained with"
        );
        let of_model = LoadOptions { include: vec![format!("{MODEL}*")], ..LoadOptions::default() };
        let loaded = load_model(vars, source, &of_model)?;
        let has_optimizer = has_optimizer(source);
        if has_optimizer {
            load_optimizer(optim, source, &LoadOptions::default())?;
        }
        let done = Done::of(source, self.sequences_per_step)?;
        if self.world.rank() == 0 {
            let fresh = if has_optimizer { "" } else { ", with a fresh optimizer: it holds none" };
            eprintln!("resumed from {} at step {}{fresh}", source.path().display(), done.step);
            if !loaded.unexpected.is_empty() {
                eprintln!("not loaded, the model has no such parameters: {}", loaded.unexpected.join(", "));
            }
        }
        Ok(done)
    }

    /// Saves model, optimizer and position, or begins to; the directory is named after the step. Collective.
    pub(crate) fn save(&mut self, vars: &ShardedVarMap, optim: &AdamW, done: &Done) -> anyhow::Result<PathBuf> {
        let path = self.places.checkpoints.join(step_name(done.step));
        // A run that had nothing left to do is where it resumed from already.
        if self.places.resume_from.as_deref().is_some_and(|from| same_file(from, &path)) {
            // It may have been killed after it saved and before it removed older ones.
            self.remove_older(&path);
            return Ok(path);
        }
        let mut tensors = model_tensors(vars)?;
        tensors.extend(optimizer_tensors(optim)?);
        let mut values = done.values();
        values.extend(optimizer_values(optim));
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values };
        let failed = || format!("can't save {}", path.display());
        match &mut self.saver {
            Some(saver) => saver.save(&path, &state).with_context(failed)?,
            None => {
                fsdp_ckpt::save(&path, self.world.group().as_ref(), &state).with_context(failed)?;
                self.remove_older(&path);
            }
        }
        Ok(path)
    }

    /// Leaves `newest` and those that --keep allows beside it.
    fn remove_older(&self, newest: &Path) {
        if let Some(keep) = self.keep.filter(|_| self.world.rank() == 0)
            && let Err(error) = fsdp_ckpt::keep_newest(&self.places.checkpoints, keep, &[newest])
        {
            eprintln!("can't remove older checkpoints: {:#}", anyhow::Error::from(error));
        }
    }

    /// Waits for what is being saved. Collective.
    pub(crate) fn finish(&mut self) -> anyhow::Result<()> {
        if let Some(saver) = &mut self.saver {
            saver.wait()?;
        }
        Ok(())
    }
}

/// Writes the model as a Hugging Face directory: weights, configuration and, if there is one, the tokenizer. Of a run that trains adapters, it writes
/// these. Collective.
pub(crate) fn export_hf(dir: &Path, args: &Args, world: &World, vars: &ShardedVarMap) -> anyhow::Result<()> {
    if let Some(config) = setup::lora(args) {
        return adapters::export(dir, config, args.model.as_ref(), world, vars);
    }
    let tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("");
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
