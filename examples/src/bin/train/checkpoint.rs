//! Checkpoints of a run: where they are, what is in them, and going on from one.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use fsdp_candle::{
    AdamW, ReduceOp, ShardedVarMap, World, load_model, load_optimizer, model_tensors, optimizer_tensors,
};
use fsdp_ckpt::{Checkpoint, SaveState, TensorShard, hf};
use fsdp_examples::models::config::BUILTIN;
use serde_json::{Map, Value};

use crate::args::{Args, Resume};

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    /// Steps taken.
    pub(crate) step: usize,
    /// Sequences consumed, over all ranks: the position in the data, whatever the world size.
    pub(crate) sequences: u64,
}

/// Where a run keeps its checkpoints, and the one that it goes on from.
pub(crate) struct Checkpoints<'a> {
    dir: PathBuf,
    resume_from: Option<PathBuf>,
    world: &'a World,
}

impl<'a> Checkpoints<'a> {
    pub(crate) fn new(args: &Args, world: &'a World) -> anyhow::Result<Self> {
        let resume_from = match &args.resume {
            Resume::None => None,
            Resume::Auto => match &args.checkpoint_dir {
                Some(dir) => fsdp_ckpt::latest(dir)?,
                None => bail!("--resume auto looks into --checkpoint-dir: pass it"),
            },
            Resume::Path(path) => Some(path.clone()),
        };
        let dir = match &args.checkpoint_dir {
            Some(dir) => {
                if args.resume == Resume::None
                    && let Some(old) = fsdp_ckpt::latest(dir)?
                {
                    bail!(
                        "{} is a checkpoint of an earlier run: pass --resume auto to go on from it, or another --checkpoint-dir",
                        old.display()
                    );
                }
                dir.clone()
            }
            None => fresh_dir(world)?,
        };
        Ok(Checkpoints { dir, resume_from, world })
    }

    /// Loads the checkpoint to go on from, if there is one; tells how far it had come.
    pub(crate) fn resume(&self, vars: &ShardedVarMap, optim: &mut AdamW) -> anyhow::Result<Done> {
        let Some(path) = &self.resume_from else { return Ok(Done::default()) };
        let checkpoint = Checkpoint::open(path).with_context(|| format!("can't resume from {}", path.display()))?;
        load_model(vars, &checkpoint)?;
        load_optimizer(optim, &checkpoint)?;
        let number = |key: &str| {
            checkpoint.values().get(key).and_then(Value::as_u64).with_context(|| {
                format!("{} does not say at which {key} it was saved; train saves that", path.display())
            })
        };
        let done = Done { step: number("step")? as usize, sequences: number("sequences")? };
        if self.world.rank() == 0 {
            eprintln!("resumed from {} at step {}", path.display(), done.step);
        }
        Ok(done)
    }

    /// Saves model, optimizer and position; the directory is named after the step. Collective.
    pub(crate) fn save(&self, vars: &ShardedVarMap, optim: &AdamW, done: &Done) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(format!("step-{:08}", done.step));
        // A run that had nothing left to do is where it resumed from already.
        if self.resume_from.as_deref().is_some_and(|from| same_file(from, &path)) {
            return Ok(path);
        }
        let mut tensors = model_tensors(vars);
        tensors.extend(optimizer_tensors(optim));
        let values = Map::from_iter([
            ("step".to_string(), Value::from(done.step)),
            ("sequences".to_string(), Value::from(done.sequences)),
        ]);
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values };
        fsdp_ckpt::save(&path, self.world.group().as_ref(), &state)
            .with_context(|| format!("can't save {}", path.display()))?;
        Ok(path)
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// `checkpoints/run-NNN` with the next free number: without --checkpoint-dir, every run has its own. Collective.
fn fresh_dir(world: &World) -> anyhow::Result<PathBuf> {
    let root = Path::new("checkpoints");
    let last = std::fs::read_dir(root)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("run-")?.parse::<u32>().ok())
        .max()
        .unwrap_or(0);
    // Ranks look at different instants; the largest number is free for all.
    let number = world.all_reduce(&[f64::from(last)], ReduceOp::Max)?[0] as u32 + 1;
    Ok(root.join(format!("run-{number:03}")))
}

/// Writes the model as a Hugging Face directory: weights, configuration and, if there is one, the tokenizer. Collective.
pub(crate) fn export_hf(dir: &Path, args: &Args, world: &World, vars: &ShardedVarMap) -> anyhow::Result<()> {
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
