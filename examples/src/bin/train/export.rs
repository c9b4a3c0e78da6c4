//! `--export-hf`: writes the model as a Hugging Face directory, or the adapters as a PEFT directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use crc_fast::CrcAlgorithm;
use fsdp_candle::{ShardedVarMap, StateDictOptions, World, get_model_state_dict};
use fsdp_ckpt::hf::{self, ExportOptions};
use fsdp_ckpt::{SafetensorsFile, TensorShard};
use fsdp_train::models::config::BUILTIN;

use crate::adapters::{Adapters, PEFT_WEIGHTS, adapter_tensors, write_peft_config};
use crate::agreement::broadcast_result;
use crate::args::Args;
use crate::directories::RunDirs;
use crate::flag_types::is_url;

/// Files of a model directory besides the weights.
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

/// Writes weights, configuration and tokenizer to --export-hf, or the adapters of a run that trains them. `step` is the
/// last step of the run. Collective.
pub(crate) fn export(
    args: &Args,
    world: &World,
    vars: &ShardedVarMap,
    adapters: Option<&Adapters>,
    dirs: &RunDirs,
    step: usize,
) -> anyhow::Result<()> {
    let Some(dir) = &args.export_hf else { return Ok(()) };
    let tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("");
    // Checked again, because another run may have exported there since the first step.
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
            0 => {
                let base = args.model_name.as_deref().or(args.model.as_deref());
                write_peft_config(dir, adapters.lora.config, base, vars)
            }
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

/// Metadata in the header of an exported file: the run and the step.
pub(crate) const RUN: &str = "candle_fsdp.run";
pub(crate) const STEP: &str = "candle_fsdp.step";

/// File names of weights. An export writes the first or the last.
const WEIGHTS: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", PEFT_WEIGHTS];

/// Returns whether the run may replace the weights in `dir`, because it exported them itself before it was resumed from
/// a checkpoint in `checkpoints`. `last` is the step at which the run ends. Fails for other weights.
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

/// Returns a hash that identifies the run by its checkpoint directory.
pub(crate) fn run_id(checkpoints: &Path) -> anyhow::Result<String> {
    let path = match is_url(checkpoints) {
        true => checkpoints.components().collect(),
        false => checkpoints.canonicalize().with_context(|| format!("can't open {}", checkpoints.display()))?,
    };
    Ok(format!("{:016x}", crc_fast::checksum(CrcAlgorithm::Crc64Nvme, path.as_os_str().as_encoded_bytes())))
}
