//! `--export-hf`: the model as a Hugging Face directory, or the adapters as PEFT reads them; and which earlier export a
//! run may replace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use crc_fast::CrcAlgorithm;
use fsdp_candle::{ShardedVarMap, StateDictOptions, World, get_model_state_dict};
use fsdp_ckpt::hf::{self, ExportOptions};
use fsdp_ckpt::{SafetensorsFile, TensorShard};
use fsdp_examples::models::config::BUILTIN;

use crate::adapters;
use crate::args::Args;
use crate::places::Places;
use crate::setup;

/// What the header of an exported file says of where it comes from.
const RUN: &str = "candle_fsdp.run";
const STEP: &str = "candle_fsdp.step";

/// The names under which a directory may hold weights; the first and the last are those that an export writes.
const WEIGHTS: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", adapters::WEIGHTS];

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

/// An export at the end of a run.
pub(crate) struct Export<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) step: usize,
    pub(crate) places: &'a Places,
}

impl Export<'_> {
    /// Writes weights, configuration and, if there is one, the tokenizer; of a run that trains adapters, these.
    /// Collective.
    pub(crate) fn write(&self, args: &Args, world: &World, vars: &ShardedVarMap) -> anyhow::Result<()> {
        let Export { dir, step, places } = *self;
        let tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("");
        let metadata = [(RUN, run_of(&places.checkpoints)?), (STEP, step.to_string())];
        let mut options = ExportOptions {
            metadata: BTreeMap::from(metadata.map(|(key, value)| (key.to_owned(), value))),
            replace: places.replaces_export,
            ..ExportOptions::default()
        };
        let write = |tensors: &[TensorShard], options: &ExportOptions| {
            let outcome = hf::export_with(dir, world.group().as_ref(), tensors, options);
            outcome.with_context(|| format!("can't export to {}", dir.display()))
        };
        if let Some(config) = setup::lora(args) {
            options.file = adapters::WEIGHTS.into();
            write(&adapters::of(tensors), &options)?;
            return match world.rank() {
                0 => adapters::write_config(dir, config, args.model.as_deref(), vars),
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

/// Whether a run that goes on from a checkpoint in `checkpoints`, if it does, and ends at step `last` may replace what
/// is in `dir`: it may when the run itself has exported that, before it was started again. Weights of anybody else are
/// an error.
pub(crate) fn may_replace(dir: &Path, checkpoints: Option<&Path>, last: usize) -> anyhow::Result<bool> {
    let there: Vec<PathBuf> =
        WEIGHTS.iter().map(|name| dir.join(name)).filter(|path| path.symlink_metadata().is_ok()).collect();
    for path in &there {
        let header = SafetensorsFile::open(path).ok();
        let said = |key: &str| header.as_ref().and_then(|file| file.metadata().get(key));
        let is_own = match (said(RUN), checkpoints) {
            (Some(run), Some(checkpoints)) => *run == run_of(checkpoints)?,
            _ => false,
        };
        let step = said(STEP).and_then(|step| step.parse::<usize>().ok());
        if is_own && step.is_some_and(|step| step <= last) {
            continue;
        }
        let whose = match step {
            Some(step) if is_own => format!("which this run exported at step {step}, and it is to end at step {last}"),
            Some(step) => format!("which another run exported at step {step}"),
            None => "which this program did not export".into(),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        bail!(
            "--export-hf {}: it holds weights already, in {name}, {whose}; remove them, or pass another directory",
            dir.display()
        );
    }
    Ok(!there.is_empty())
}

/// Tells the runs of one directory of checkpoints from those of others, and says nothing else of it.
fn run_of(checkpoints: &Path) -> anyhow::Result<String> {
    let path = checkpoints.canonicalize().with_context(|| format!("can't open {}", checkpoints.display()))?;
    Ok(format!("{:016x}", crc_fast::checksum(CrcAlgorithm::Crc64Nvme, path.as_os_str().as_encoded_bytes())))
}
