//! `--export-hf` writes the model as a Hugging Face directory, or the adapters as a PEFT directory. `--export-gguf`
//! writes the model as a GGUF file.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use crc_fast::CrcAlgorithm;
use fsdp_candle::{ShardedVarMap, World, model_tensors};
use fsdp_ckpt::convert::View;
use fsdp_ckpt::gguf::{self, GgufOptions, GgufSummary, Quantization};
use fsdp_ckpt::hf::{self, ExportOptions, HfModel};
use fsdp_ckpt::merge::Merged;
use fsdp_ckpt::{SafetensorsFile, TensorShard};
use fsdp_train::console::Console;
use fsdp_train::input::read_text;
use fsdp_train::models::config::{BUILTIN, ModelConfig};
use fsdp_train::writable::try_file_and_directory;
use indicatif::BinaryBytes;
use serde_json::Value;

use crate::adapters::{Adapters, PEFT_WEIGHTS, adapter_tensors, write_peft_config};
use crate::agreement::broadcast_result;
use crate::args::Args;
use crate::directories::RunDirs;
use crate::flag_types::is_url;
use crate::task::TextExport;

/// Writes weights, configuration and tokenizer to --export-hf, or the adapters of a run that trains them. `step` is the
/// last step of the run. Collective.
pub(crate) fn export(
    args: &Args,
    world: &World,
    vars: &ShardedVarMap,
    adapters: Option<&Adapters>,
    texts: Option<TextExport>,
    dirs: &RunDirs,
    step: usize,
) -> anyhow::Result<()> {
    let Some(dir) = &args.export_hf else { return Ok(()) };
    let mut tensors = model_tensors(vars)?;
    for tensor in &mut tensors {
        tensor.fqn = tensor.fqn.strip_prefix(fsdp_ckpt::MODEL).unwrap_or(&tensor.fqn).to_owned();
    }
    if let Some(texts) = &texts {
        tensors.iter_mut().for_each(|tensor| tensor.fqn = (texts.name)(&tensor.fqn));
    }
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
        write(&adapter_tensors(tensors, texts.as_ref()), &options)?;
        return match world.rank() {
            0 => {
                let base = args.model_name.as_deref().or(args.model.as_deref());
                write_peft_config(dir, adapters.lora.config, base, vars, texts.as_ref())
            }
            _ => Ok(()),
        };
    }
    let untied = args.model.as_deref().map(|model| untied(model, &tensors)).transpose()?.flatten();
    if let Some(model) = &args.model {
        options.config_files = hf::config_files(model)?;
        let is_written = texts.is_some() || untied.is_some();
        options.config_files.retain(|path| !(is_written && path.ends_with("config.json")));
    }
    match hf::has_split_experts(tensors.iter().map(|tensor| tensor.fqn.as_str())) {
        true => write_joined(dir, world, &tensors, &options)?,
        false => write(&tensors, &options)?,
    };
    if let Some(untied) = untied.filter(|_| world.rank() == 0) {
        write_files(dir, &[("config.json".into(), untied)])?;
    }
    if let Some(texts) = &texts {
        return if world.rank() == 0 { write_files(dir, &texts.files) } else { Ok(()) };
    }
    if args.model.is_none() && world.rank() == 0 {
        std::fs::write(dir.join("config.json"), BUILTIN)
            .with_context(|| format!("can't write {}/config.json", dir.display()))?;
    }
    Ok(())
}

/// Writes a model whose experts are joined to one tensor for each layer. All ranks write their shards of single experts, of
/// which rank 0 then makes the model's file. Collective.
fn write_joined(dir: &Path, world: &World, tensors: &[TensorShard], options: &ExportOptions) -> anyhow::Result<u64> {
    let failed = || format!("can't export to {}", dir.display());
    let staging = dir.join(STAGING);
    broadcast_result(world, 0, || match std::fs::remove_dir_all(&staging) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(failed),
        _ => Ok(()),
    })?;
    hf::export(&staging, world.group(), tensors, &[]).with_context(failed)?;
    broadcast_result(world, 0, || {
        let (joined, metadata) = (staging.join("joined"), options.metadata.clone());
        let single = HfModel::open(&staging)?;
        let written = hf::write_with(&joined, &single, u64::MAX, &options.config_files, metadata)?;
        // Complete before it replaces an earlier export.
        for entry in std::fs::read_dir(&joined)? {
            let entry = entry?;
            std::fs::rename(entry.path(), dir.join(entry.file_name()))?;
        }
        std::fs::remove_dir_all(&staging)?;
        Ok(written.bytes)
    })
    .with_context(failed)
}

/// Directory of an export that is not complete.
const STAGING: &str = ".export";

/// A GGUF file that rank 0 writes from the last checkpoint.
pub(crate) struct GgufExport {
    file: PathBuf,
    checkpoint: PathBuf,
    /// Directory of the configuration and the tokenizer.
    model: PathBuf,
    options: GgufOptions,
    /// Factor of the adapters in the checkpoint, if the run trains adapters.
    adapter_scale: Option<f64>,
}

/// Fails on every rank if --export-gguf can't be written. Collective.
pub(crate) fn check_gguf(args: &Args, world: &World) -> anyhow::Result<()> {
    let (Some(file), Some(model)) = (&args.export_gguf, &args.model) else { return Ok(()) };
    broadcast_result(world, 0, || {
        let flag = || format!("--export-gguf {}", file.display());
        ensure!(!is_url(file), "{}: expected a path on this host, found a URL", flag());
        ensure!(file.symlink_metadata().is_err(), "{}: it exists; remove it, or pass another path", flag());
        try_file_and_directory(file).with_context(|| format!("can't write {}", flag()))?;
        gguf::check(model, &gguf_options(args)).with_context(flag)
    })
}

fn gguf_options(args: &Args) -> GgufOptions {
    // Checkpoints are f32.
    let quantization = Some(args.gguf_quantize.unwrap_or(Quantization::F32));
    GgufOptions { quantization, ..GgufOptions::default() }
}

impl GgufExport {
    /// Returns what rank 0 writes; `None` on other ranks, and without the flag.
    pub(crate) fn new(args: &Args, world: &World, adapters: Option<&Adapters>, checkpoint: &Path) -> Option<Self> {
        let file = args.export_gguf.clone().filter(|_| world.rank() == 0)?;
        let config = adapters.map(|adapters| adapters.lora.config);
        Some(GgufExport {
            file,
            checkpoint: checkpoint.to_path_buf(),
            model: args.model.clone()?,
            options: gguf_options(args),
            adapter_scale: config.map(|config| config.alpha / config.rank as f64),
        })
    }

    /// Writes the file. Not collective, so that no other rank waits for it.
    pub(crate) fn write(&self) -> anyhow::Result<()> {
        let failed = || format!("can't export to {} from {}", self.file.display(), self.checkpoint.display());
        let checkpoint = fsdp_ckpt::open(&self.checkpoint).with_context(failed)?;
        let view = View::model(&*checkpoint);
        let written = match self.adapter_scale {
            Some(scale) => {
                let merged = Merged::in_checkpoint(&view, scale).with_context(failed)?.in_f32();
                gguf::write(&self.file, &merged, &self.model, &self.options)
            }
            None => gguf::write(&self.file, &view, &self.model, &self.options),
        };
        let GgufSummary { quantization, bytes, overflowed, notes, .. } = written.with_context(failed)?;
        for note in notes {
            Console::Stderr.line(format_args!("note: {note}"));
        }
        if overflowed > 0 {
            Console::Stderr.line(format_args!("warning: {overflowed} numbers overflowed f16 and are infinite"));
        }
        let (file, size) = (self.file.display(), BinaryBytes(bytes));
        Console::Stdout.line(format_args!("exported: {file} ({}, {size})", quantization.name()));
        Ok(())
    }
}

/// Returns the model's `config.json` without the tie of embedding and head, if the trained model has both.
fn untied(model: &Path, tensors: &[TensorShard]) -> anyhow::Result<Option<Value>> {
    let has_head = tensors.iter().any(|tensor| tensor.fqn == "lm_head.weight");
    if !has_head || !matches!(ModelConfig::from_dir(model)?, ModelConfig::Decoder(config) if config.tied) {
        return Ok(None);
    }
    let mut config: Value = serde_json::from_str(&read_text(&model.join("config.json"))?)?;
    config["tie_word_embeddings"] = false.into();
    // Exported weights are numbers.
    config.as_object_mut().map(|config| config.remove("quantization_config"));
    Ok(Some(config))
}

fn write_files(dir: &Path, files: &[(PathBuf, Value)]) -> anyhow::Result<()> {
    for (name, content) in files {
        let path = dir.join(name);
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(path.parent().unwrap_or(dir))?;
            std::fs::write(&path, format!("{content:#}\n"))
        };
        write().with_context(|| format!("can't write {}", path.display()))?;
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
