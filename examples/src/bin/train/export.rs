//! `--export-hf`: the model as a Hugging Face directory, or the adapters as PEFT reads them.
//! What an earlier export has left, and which run may replace it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use crc_fast::CrcAlgorithm;
use fsdp_candle::{ShardedVarMap, StateDictOptions, World, get_model_state_dict};
use fsdp_ckpt::hf::{self, ExportOptions};
use fsdp_ckpt::{SafetensorsFile, TensorShard};
use fsdp_examples::models::config::BUILTIN;

use crate::adapters::{Adapters, PEFT_WEIGHTS, adapter_tensors, write_peft_config};
use crate::agreement::broadcast_result;
use crate::args::Args;
use crate::directories::RunDirs;
use crate::flag_types::is_url;

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
    pub(crate) dirs: &'a RunDirs,
    /// What the run trains, if it is not the model.
    pub(crate) adapters: Option<&'a Adapters>,
}

impl Export<'_> {
    /// Writes weights, configuration and, if there is one, the tokenizer; of a run that trains adapters, these.
    /// Collective.
    pub(crate) fn write(&self, args: &Args, world: &World, vars: &ShardedVarMap) -> anyhow::Result<()> {
        let Export { dir, step, dirs, adapters } = *self;
        let tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("");
        // Hours have passed since the run began: somebody else's weights may have come into the place of its own.
        let replace = dirs.replaces_export
            && broadcast_result(world, 0, || may_replace(dir, Some(&dirs.checkpoints), args.steps.max(step)))?;
        let metadata = [(RUN, run_id(&dirs.checkpoints)?), (STEP, step.to_string())];
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
            options.file = PEFT_WEIGHTS.into();
            write(&adapter_tensors(tensors), &options)?;
            return match world.rank() {
                0 => write_peft_config(dir, adapters.lora.config, args.model.as_deref(), vars),
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

/// What the header of an exported file says of where it comes from.
pub(crate) const RUN: &str = "candle_fsdp.run";
pub(crate) const STEP: &str = "candle_fsdp.step";

/// The names under which a directory may hold weights; the first and the last are those that an export writes.
const WEIGHTS: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", PEFT_WEIGHTS];

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
            (Some(run), Some(checkpoints)) => *run == run_id(checkpoints)?,
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
pub(crate) fn run_id(checkpoints: &Path) -> anyhow::Result<String> {
    let path = match is_url(checkpoints) {
        true => checkpoints.components().collect(),
        false => checkpoints.canonicalize().with_context(|| format!("can't open {}", checkpoints.display()))?,
    };
    Ok(format!("{:016x}", crc_fast::checksum(CrcAlgorithm::Crc64Nvme, path.as_os_str().as_encoded_bytes())))
}
