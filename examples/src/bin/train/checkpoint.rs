//! Checkpoints of a run: contents, saving and resuming.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use fsdp_candle::nn::is_adapter;
use fsdp_candle::{
    ShardedOptimizer, ShardedVarMap, ValuesOf, World, load_model, load_optimizer, model_tensors, optimizer_tensors,
    optimizer_values,
};
use fsdp_ckpt::{AsyncSaver, LoadOptions, MODEL, SaveOptions, SaveState, TensorShard, TensorSource, WhenBusy, escape};
use fsdp_core::DType;
use fsdp_core::layout::Region;
use fsdp_train::console::Console;
use serde_json::{Map, Value};

use crate::agreement::{RankResult, worst_result};
use crate::args::Args;
use crate::directories::{Hosts, RunDirs, same_file};
use crate::flag_types::Resume;
use crate::optimizer::LossScale;
use crate::report::{ADVICE, find_non_finite};
use crate::run_record::{Changes, Record};
use crate::setup;
use crate::task::Task;

/// Checkpoints of a run.
pub(crate) struct Checkpoints<'a> {
    pub(crate) dirs: RunDirs,
    world: &'a World,
    sequences_per_step: u64,
    keep: Option<NonZeroUsize>,
    /// Saver in the background (--async-save).
    saver: Option<AsyncSaver>,
    /// Last step after which the weights were found finite.
    pub(crate) finite_after: usize,
    /// Newest checkpoint that this run has saved or resumed from.
    newest: Option<PathBuf>,
    /// Checkpoint that is being saved in the background.
    in_progress: Option<PathBuf>,
}

impl<'a> Checkpoints<'a> {
    /// Chooses the directories, and the checkpoint to resume from. Collective.
    pub(crate) fn new(args: &Args, hosts: Hosts, world: &'a World) -> anyhow::Result<Self> {
        let sequences_per_step = args.sequences_per_step(world)?;
        let dirs = RunDirs::new(args, hosts, world)?;
        let keep = args.keep.and_then(NonZeroUsize::new);
        let saver = match (args.async_save, keep) {
            (false, _) => None,
            (true, None) => Some(AsyncSaver::new(world.group().clone(), WhenBusy::Wait)?),
            (true, Some(keep)) => Some(AsyncSaver::new(world.group().clone(), WhenBusy::Wait)?.keep_newest(keep)),
        };
        let (newest, in_progress) = (None, None);
        Ok(Checkpoints { dirs, world, sequences_per_step, keep, saver, finite_after: 0, newest, in_progress })
    }

    /// Loads the checkpoint to resume from, if any, and returns its position. A checkpoint that `--resume auto` chose
    /// and that is damaged or not finite is renamed, and an older one loaded. Fails if the initial weights are not
    /// finite, or if the checkpoint's settings do not match this run. Collective.
    pub(crate) fn resume(
        &mut self,
        args: &Args,
        vars: &ShardedVarMap,
        optim: &mut dyn ShardedOptimizer,
        loss_scale: &mut LossScale,
        record: &Record,
        task: &dyn Task,
    ) -> anyhow::Result<Position> {
        while let Some(path) = self.dirs.resume_from.clone() {
            let failed = || format!("can't resume from {}", path.display());
            // Everything is verified first, so no value of a damaged checkpoint gets into the model.
            let mut tensors = model_tensors(vars)?;
            // An optimizer with hidden state can't be loaded.
            tensors.extend(optimizer_tensors(optim).unwrap_or_default());
            let (source, own) = self.verify(&path, &tensors);
            match worst_result(self.world, own)? {
                RankResult::Damaged(why) if args.resume == Resume::Auto => {
                    self.dirs.fall_back(args, self.world, &why)?;
                }
                RankResult::Damaged(why) | RankResult::Failed(why) => return Err(anyhow!(why).context(failed())),
                RankResult::Passed => {
                    let Some(source) = source else {
                        bail!("a checkpoint passed verification without being opened: please report this")
                    };
                    let changes = changes(args, &*source, record).with_context(failed)?;
                    let loaded = self.load(args, &*source, vars, optim, loss_scale, task);
                    let (done, about) = loaded.with_context(failed)?;
                    self.world.group().barrier().wait().context("another rank could not resume")?;
                    match find_non_finite(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
                        None => {
                            if self.world.rank() == 0 {
                                let (path, step) = (path.display(), done.step);
                                Console::Stderr.line(format_args!("resumed from {path} at step {step}{about}"));
                                if !changes.is_empty() {
                                    let changes = changes.join("\n  ");
                                    let about = "this run differs from the run that saved the checkpoint:";
                                    Console::Stderr.line(format_args!("warning: {about}\n  {changes}"));
                                }
                            }
                            (self.finite_after, self.newest) = (done.step, Some(path));
                            return Ok(done);
                        }
                        Some(found) if args.resume == Resume::Auto => {
                            // The older checkpoint replaces all weights, but may lack optimizer state.
                            optim.reset()?;
                            self.dirs.fall_back(args, self.world, &found.to_string())?;
                        }
                        Some(found) => return Err(anyhow!("{found}; pass an older checkpoint").context(failed())),
                    }
                }
            }
        }
        if let Some(found) = find_non_finite(vars, &[ValuesOf::Parameters])? {
            let (from, advice) = match setup::pretrained(args)? {
                Some(dir) => (format!("from {}", dir.display()), "pass another --model, or --init random"),
                None => ("drawn at random".into(), "look at initializer_range in the model's config.json"),
            };
            bail!("the weights {from} are not finite before the first step: {found}; {advice}");
        }
        Ok(Position::default())
    }

    /// Describes the newest good checkpoint for an error message. Waits for a save in the background. Collective.
    pub(crate) fn newest_checkpoint(&mut self) -> String {
        let mut text = match self.finish() {
            Ok(()) => String::new(),
            Err(error) => format!("The last save failed as well: {error:#}. "),
        };
        text.push_str(&match &self.newest {
            Some(path) => format!("The newest good checkpoint is {}", path.display()),
            None => "This run has no checkpoint yet".into(),
        });
        text
    }

    /// Adds the newest good checkpoint to the error of a step that failed because of this rank's disk.
    pub(crate) fn explain_failed_step(&mut self, step: usize, error: anyhow::Error) -> anyhow::Error {
        match error.downcast_ref() {
            // No save runs in the background then, so this rank can do it alone.
            Some(fsdp_candle::Error::StateOnDisk { .. }) => {
                anyhow!("step {step} failed: {error}. {}", self.newest_checkpoint())
            }
            _ => error,
        }
    }

    /// Opens a checkpoint, of which this rank reads its parts of `tensors`, and verifies this rank's share of the
    /// checksums. Together the ranks read everything once. Collective.
    fn verify(&self, path: &Path, tensors: &[TensorShard]) -> (Option<Box<dyn TensorSource>>, RankResult) {
        let rank = self.world.rank();
        let (reader, readers) = self.dirs.hosts.readers(self.world);
        let opened = self.dirs.hosts.open_for(path, self.world, tensors);
        let opened = opened.and_then(|source| source.verify_share(reader, readers).map(|_| source));
        match opened {
            Ok(source) => (Some(source), RankResult::Passed),
            // The rank that failed reports it.
            Err(fsdp_ckpt::Error::Rank { error: None, .. }) => (None, RankResult::Passed),
            Err(error) if error.is_damage() => (None, RankResult::Damaged(error.with_causes())),
            Err(error) => (None, RankResult::Failed(format!("rank {rank}: {}", error.with_causes()))),
        }
    }

    /// Loads model, optimizer and loss scale. Returns the position, and a description of the parts that are missing.
    fn load(
        &self,
        args: &Args,
        source: &dyn TensorSource,
        vars: &ShardedVarMap,
        optim: &mut dyn ShardedOptimizer,
        loss_scale: &mut LossScale,
        task: &dyn Task,
    ) -> anyhow::Result<(Position, String)> {
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
        if let Some(note) = task.resume(source.values(), args)? {
            about.push_str(&format!(", {note}"));
        }
        if !loaded.unexpected.is_empty() {
            let names = escape(loaded.unexpected.join(", "));
            about.push_str(&format!("\nnot loaded, the model has no such parameters: {names}"));
        }
        Ok((Position::read(source, self.sequences_per_step)?, about))
    }

    /// Saves model, optimizer, loss scale, position, settings and the place in corpora, or starts a save in the background. The directory is
    /// named after the step. Fails if a value is not finite. Collective.
    pub(crate) fn save(
        &mut self,
        vars: &ShardedVarMap,
        optim: &dyn ShardedOptimizer,
        loss_scale: &LossScale,
        done: &Position,
        record: &Record,
        task: &dyn Task,
    ) -> anyhow::Result<PathBuf> {
        let path = self.dirs.checkpoints.join(step_name(done.step));
        if let Some(found) = find_non_finite(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
            let (step, since) = (done.step, self.finite_after);
            bail!(
                "{} was not saved: after step {step}, {found}. They were finite after step {since}. {}. {ADVICE}",
                path.display(),
                self.newest_checkpoint()
            );
        }
        self.finite_after = done.step;
        // A run without steps to take has resumed from this checkpoint.
        if self.dirs.resume_from.as_deref().is_some_and(|from| same_file(from, &path)) {
            // An earlier run may have been killed between the save and the removal of older checkpoints.
            self.remove_older(&path);
            return Ok(path);
        }
        let mut tensors = model_tensors(vars)?;
        tensors.extend(optimizer_tensors(optim)?);
        let mut values = done.values();
        values.extend(optimizer_values(optim));
        values.extend(loss_scale.values());
        values.extend(record.values()?);
        values.extend(task.values()?);
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values };
        let failed = || format!("can't save {}", path.display());
        let options = SaveOptions { finite: true, host: self.dirs.hosts.name() };
        match &mut self.saver {
            Some(saver) => {
                // Waits for the save before.
                saver.save_with(&path, &state, &options).with_context(failed)?;
                let before = self.in_progress.replace(path.clone());
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

    /// Keeps `newest` and the checkpoints that --keep allows beside it. Collective.
    fn remove_older(&self, newest: &Path) {
        let RunDirs { checkpoints, hosts, .. } = &self.dirs;
        if let Some(keep) = self.keep
            && let Err(error) = hosts.keep_newest(checkpoints, keep, newest, self.world)
            && self.world.rank() == 0
        {
            let error = anyhow::Error::from(error);
            Console::Stderr.line(format_args!("can't remove older checkpoints: {error:#}"));
        }
    }

    /// Waits for the save in the background. Collective.
    pub(crate) fn finish(&mut self) -> anyhow::Result<()> {
        let in_progress = self.in_progress.take();
        if let Some(saver) = &mut self.saver {
            saver.wait()?;
        }
        self.newest = in_progress.or(self.newest.take());
        Ok(())
    }
}

/// Lists the settings that differ from the run that saved the checkpoint. Fails if they can't be continued.
fn changes(args: &Args, source: &dyn TensorSource, record: &Record) -> anyhow::Result<Vec<String>> {
    let Changes { refused, reported } = match record.changes_since(source) {
        Err(error) if args.resume_anyway => Changes { refused: vec![format!("{error:#}")], reported: vec![] },
        changes => changes.context("pass --resume-anyway to continue with unknown changes")?,
    };
    ensure!(
        args.resume_anyway || refused.is_empty(),
        "its settings do not fit this run:\n  {}\nPass the settings that it was saved with, or --resume-anyway to continue",
        refused.join("\n  ")
    );
    Ok([refused, reported].concat())
}

/// Describes saved optimizer state that this run's optimizer does not use, if any.
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

/// Position of a run in its steps and its data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Position {
    /// Steps taken.
    pub(crate) step: usize,
    /// Sequences read by all ranks: the position in the data at any world size.
    pub(crate) sequences: u64,
    /// Norm of the last step's gradients, if known.
    pub(crate) grad_norm: Option<f64>,
}

impl Position {
    /// Reads the position of a checkpoint. For another program's checkpoint, takes the optimizer's step (0 without an
    /// optimizer), and assumes this run's sequences per step.
    pub(crate) fn read(source: &dyn TensorSource, sequences_per_step: u64) -> anyhow::Result<Self> {
        let number = |key: &str| source.values().get(key).and_then(Value::as_u64);
        if let (Some(step), Some(sequences)) = (number("step"), number("sequences")) {
            let grad_norm = source.values().get("grad_norm").and_then(Value::as_f64);
            return Ok(Position { step: step as usize, sequences, grad_norm });
        }
        let step = optimizer_step(source)?;
        let sequences = step.checked_mul(sequences_per_step).with_context(|| {
            format!("{}: {step} steps of {sequences_per_step} sequences are beyond any count", source.path().display())
        })?;
        Ok(Position { step: step as usize, sequences, grad_norm: None })
    }

    /// Returns the values to save in a checkpoint.
    pub(crate) fn values(&self) -> Map<String, Value> {
        let mut values = Map::from_iter([
            ("step".to_string(), Value::from(self.step)),
            ("sequences".to_string(), Value::from(self.sequences)),
        ]);
        values.extend(self.grad_norm.map(|norm| ("grad_norm".to_string(), Value::from(norm))));
        values
    }
}

/// Largest count up to which f64 holds every whole number.
const MOST_STEPS: f32 = (1_u64 << 53) as f32;

/// Returns the highest step count of any parameter.
fn optimizer_step(source: &dyn TensorSource) -> anyhow::Result<u64> {
    let is_step = |name: &str| name.starts_with("optim.state.") && name.ends_with(".step");
    let mut most = 0;
    for (name, tensor) in source.tensors().iter().filter(|(name, _)| is_step(name)) {
        let what = || format!("{} holds {name} as {} {:?}", source.path().display(), tensor.dtype, tensor.shape);
        ensure!(
            tensor.dtype == DType::F32 && tensor.shape.iter().product::<usize>() == 1,
            "{}: expected one f32 step count",
            what()
        );
        let mut step = [0; 4];
        source.read(name, &Region::whole(&tensor.shape), &mut step)?;
        let step = f32::from_ne_bytes(step);
        ensure!((0. ..=MOST_STEPS).contains(&step) && step.fract() == 0., "{}: {step} is not a step count", what());
        most = most.max(step as u64);
    }
    Ok(most)
}

/// Returns whether a checkpoint holds optimizer state.
pub(crate) fn has_optimizer(source: &dyn TensorSource) -> bool {
    source.tensors().keys().any(|name| name.starts_with("optim.state."))
}

/// Returns the name of the checkpoint at a step.
pub(crate) fn step_name(step: usize) -> String {
    format!("step-{step:08}")
}

/// Returns the step in a checkpoint's name.
pub(crate) fn step_of(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok().filter(|&step| step_name(step) == name)
}
