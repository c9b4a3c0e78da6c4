//! Checkpoints of a run: what is in them, and going on from one.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use fsdp_candle::nn::is_adapter;
use fsdp_candle::{
    ShardedOptimizer, ShardedVarMap, ValuesOf, World, load_model, load_optimizer, model_tensors, optimizer_tensors,
    optimizer_values,
};
use fsdp_ckpt::{AsyncSaver, LoadOptions, MODEL, SaveOptions, SaveState, TensorSource, WhenBusy, escape};
use fsdp_examples::console::Console;

use crate::agree::{Finding, worst};
use crate::args::{Args, Resume};
use crate::done::{Done, has_optimizer};
use crate::export::Export;
use crate::health::{ADVICE, look};
use crate::hosts::Hosts;
use crate::lora::Adapters;
use crate::loss_scale::LossScale;
use crate::places::{Places, same_file};
use crate::record::{Changes, Record};
use crate::setup;
use crate::steps::step_name;

/// A run's checkpoints.
pub(crate) struct Checkpoints<'a> {
    places: Places,
    world: &'a World,
    sequences_per_step: u64,
    keep: Option<NonZeroUsize>,
    /// Where saves go on in the background.
    saver: Option<AsyncSaver>,
    /// The step after which the weights were looked at last, and were finite.
    finite_after: usize,
    /// The newest checkpoint that this run has saved, or gone on from.
    newest: Option<PathBuf>,
    /// The one that is being saved in the background.
    growing: Option<PathBuf>,
}

impl<'a> Checkpoints<'a> {
    /// Collective.
    pub(crate) fn new(args: &Args, hosts: Hosts, world: &'a World) -> anyhow::Result<Self> {
        let sequences_per_step = args.sequences_per_step(world)?;
        let places = Places::new(args, hosts, world)?;
        let keep = args.keep.and_then(NonZeroUsize::new);
        let saver = match (args.async_save, keep) {
            (false, _) => None,
            (true, None) => Some(AsyncSaver::new(world.group().clone(), WhenBusy::Wait)?),
            (true, Some(keep)) => Some(AsyncSaver::new(world.group().clone(), WhenBusy::Wait)?.keep_newest(keep)),
        };
        let (newest, growing) = (None, None);
        Ok(Checkpoints { places, world, sequences_per_step, keep, saver, finite_after: 0, newest, growing })
    }

    /// Loads the checkpoint to go on from, if there is one; tells how far it had come. Where `--resume auto` chose one
    /// that turns out to be damaged, or to hold values that are not finite, it is set aside, and an older one loaded.
    /// Weights that no training can start from are an error, and so is a checkpoint of a run that this one can't
    /// continue. Collective.
    pub(crate) fn resume(
        &mut self,
        args: &Args,
        vars: &ShardedVarMap,
        optim: &mut dyn ShardedOptimizer,
        loss_scale: &mut LossScale,
        record: &Record,
    ) -> anyhow::Result<Done> {
        while let Some(path) = self.places.resume_from.clone() {
            let failed = || format!("can't resume from {}", path.display());
            // Nothing is loaded before everything has been found good: of a damaged checkpoint nothing gets into the
            // model.
            let (source, own) = self.verify(&path);
            match worst(self.world, own)? {
                Finding::Damaged(why) if args.resume == Resume::Auto => {
                    self.places.fall_back(args, self.world, &why)?;
                }
                Finding::Damaged(why) | Finding::Failed(why) => return Err(anyhow!(why).context(failed())),
                Finding::Good => {
                    let Some(source) = source else { bail!("a checkpoint that was not opened was found good") };
                    let changes = changes(args, &*source, record).with_context(failed)?;
                    let loaded = self.load(args, &*source, vars, optim, loss_scale);
                    let (done, about) = loaded.with_context(failed)?;
                    self.world.group().barrier().wait().context("another rank could not resume")?;
                    match look(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
                        None => {
                            if self.world.rank() == 0 {
                                let (path, step) = (path.display(), done.step);
                                Console::Stderr.line(format_args!("resumed from {path} at step {step}{about}"));
                                if !changes.is_empty() {
                                    let changes = changes.join("\n  ");
                                    let about = "this run is not the one that saved it:";
                                    Console::Stderr.line(format_args!("warning: {about}\n  {changes}"));
                                }
                            }
                            (self.finite_after, self.newest) = (done.step, Some(path));
                            return Ok(done);
                        }
                        Some(found) if args.resume == Resume::Auto => {
                            // The older one has all weights, but need not have moments.
                            optim.reset()?;
                            self.places.fall_back(args, self.world, &found.to_string())?;
                        }
                        Some(found) => return Err(anyhow!("{found}; pass an older one").context(failed())),
                    }
                }
            }
        }
        if let Some(found) = look(vars, &[ValuesOf::Parameters])? {
            let (from, way_out) = match setup::pretrained(args)? {
                Some(dir) => (format!("from {}", dir.display()), "pass another --model, or --init random"),
                None => ("drawn at random".into(), "look at initializer_range in the model's config.json"),
            };
            bail!("the weights {from} are no good before any step: {found}; {way_out}");
        }
        Ok(Done::default())
    }

    /// The step after which the weights were found finite last.
    pub(crate) fn finite_after(&self) -> usize {
        self.finite_after
    }

    /// Which checkpoint is to be gone on from if the run ends here, in words. Collective: a save in the background ends
    /// first.
    pub(crate) fn healthy(&mut self) -> String {
        let mut text = match self.finish() {
            Ok(()) => String::new(),
            Err(error) => format!("The last save failed as well: {error:#}. "),
        };
        text.push_str(&match &self.newest {
            Some(path) => format!("The newest healthy checkpoint, {}, is untouched", path.display()),
            None => "There is no checkpoint of this run yet".into(),
        });
        text
    }

    /// Opens a checkpoint and checks this rank's share of the checksums, so that all is read once.
    fn verify(&self, path: &Path) -> (Option<Box<dyn TensorSource>>, Finding) {
        let rank = self.world.rank();
        let (reader, readers) = self.places.hosts.readers(self.world);
        let opened = self.places.hosts.open(path, self.world);
        let opened = opened.and_then(|source| source.verify_share(reader, readers).map(|_| source));
        match opened {
            Ok(source) => (Some(source), Finding::Good),
            Err(error) if error.is_damage() => (None, Finding::Damaged(error.with_causes())),
            Err(error) => (None, Finding::Failed(format!("rank {rank}: {}", error.with_causes()))),
        }
    }

    /// Loads what is there; tells how far it had come, and in words what it has not.
    fn load(
        &self,
        args: &Args,
        source: &dyn TensorSource,
        vars: &ShardedVarMap,
        optim: &mut dyn ShardedOptimizer,
        loss_scale: &mut LossScale,
    ) -> anyhow::Result<(Done, String)> {
        let is_of_adapters = source.tensors().keys().any(|name| is_adapter(name));
        ensure!(
            !is_of_adapters || vars.params().iter().any(|param| is_adapter(param.name())),
            "it holds LoRA adapters: pass the --lora-rank, --lora-alpha and --lora-targets that it was trained with"
        );
        let of_model = LoadOptions { include: vec![format!("{MODEL}*")], ..LoadOptions::default() };
        let loaded = load_model(vars, source, &of_model)?;
        let mut about = String::new();
        match is_of_another(source, optim) {
            Some(why) if args.resume_anyway => about.push_str(&format!(", with a fresh optimizer: {why}")),
            Some(why) => bail!("{why}: pass the --optimizer, and its options, that it was trained with"),
            None if has_optimizer(source) => drop(load_optimizer(optim, source, &LoadOptions::default())?),
            None => about.push_str(", with a fresh optimizer: it holds none"),
        }
        loss_scale.resume(source)?;
        if !loaded.unexpected.is_empty() {
            let names = escape(loaded.unexpected.join(", "));
            about.push_str(&format!("\nnot loaded, the model has no such parameters: {names}"));
        }
        Ok((Done::of(source, self.sequences_per_step)?, about))
    }

    /// Saves model, optimizer, loss scale, position and record, or begins to; the directory is named after the step.
    /// Values that are not finite are an error. Collective.
    pub(crate) fn save(
        &mut self,
        vars: &ShardedVarMap,
        optim: &dyn ShardedOptimizer,
        loss_scale: &LossScale,
        done: &Done,
        record: &Record,
    ) -> anyhow::Result<PathBuf> {
        let path = self.places.checkpoints.join(step_name(done.step));
        if let Some(found) = look(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
            let (step, since) = (done.step, self.finite_after);
            bail!(
                "{} was not saved: after step {step}, {found}. They were finite after step {since}. {}. {ADVICE}",
                path.display(),
                self.healthy()
            );
        }
        self.finite_after = done.step;
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
        values.extend(loss_scale.values());
        values.extend(record.values()?);
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values };
        let failed = || format!("can't save {}", path.display());
        let options = SaveOptions { finite: true, host: self.places.hosts.name() };
        match &mut self.saver {
            Some(saver) => {
                // It waits for the one before.
                saver.save_with(&path, &state, &options).with_context(failed)?;
                let before = self.growing.replace(path.clone());
                self.newest = before.or(self.newest.take());
            }
            None => {
                fsdp_ckpt::save_with(&path, self.world.group(), &state, &options).with_context(failed)?;
                self.remove_older(&path);
                self.newest = Some(path.clone());
            }
        }
        Ok(path)
    }

    /// Leaves `newest` and those that --keep allows beside it. Collective.
    fn remove_older(&self, newest: &Path) {
        let Places { checkpoints, hosts, .. } = &self.places;
        if let Some(keep) = self.keep
            && let Err(error) = hosts.keep_newest(checkpoints, keep, newest, self.world)
            && self.world.rank() == 0
        {
            let error = anyhow::Error::from(error);
            Console::Stderr.line(format_args!("can't remove older checkpoints: {error:#}"));
        }
    }

    /// Waits for what is being saved. Collective.
    pub(crate) fn finish(&mut self) -> anyhow::Result<()> {
        let growing = self.growing.take();
        if let Some(saver) = &mut self.saver {
            saver.wait()?;
        }
        self.newest = growing.or(self.newest.take());
        Ok(())
    }

    /// Writes the model, which is that of the last save, to --export-hf, if it is there. Collective.
    pub(crate) fn export(
        &self,
        args: &Args,
        vars: &ShardedVarMap,
        adapters: Option<&Adapters>,
        done: &Done,
    ) -> anyhow::Result<()> {
        match &args.export_hf {
            Some(dir) => Export { dir, step: done.step, places: &self.places, adapters }.write(args, self.world, vars),
            None => Ok(()),
        }
    }
}

/// Lists how this run differs from the run that saved a checkpoint. Fails where the difference can't be right.
fn changes(args: &Args, source: &dyn TensorSource, record: &Record) -> anyhow::Result<Vec<String>> {
    let Changes { refused, said } = match record.changes_since(source) {
        Err(error) if args.resume_anyway => Changes { refused: vec![format!("{error:#}")], said: vec![] },
        changes => changes.context("pass --resume-anyway to go on without knowing what has changed")?,
    };
    ensure!(
        args.resume_anyway || refused.is_empty(),
        "its weights and optimizer state would mean something else in this run:\n  {}\nPass what it was saved with, or \
         --resume-anyway to go on all the same",
        refused.join("\n  ")
    );
    Ok([refused, said].concat())
}

/// In words, which optimizer state a checkpoint has that is not the state that this run keeps.
fn is_of_another(source: &dyn TensorSource, optim: &dyn ShardedOptimizer) -> Option<String> {
    optim.states().into_iter().find_map(|state| {
        let prefix = format!("optim.state.{}.", state.param.name());
        let held: Vec<&str> = source.tensors().keys().filter_map(|name| name.strip_prefix(&prefix)).collect();
        let lacks = state.names().any(|name| !held.contains(&name));
        (!held.is_empty() && lacks).then(|| {
            format!(
                "it holds {} of `{}`, and this run's optimizer keeps {}",
                held.join(", "),
                state.param.name(),
                state.names().collect::<Vec<_>>().join(", ")
            )
        })
    })
}
