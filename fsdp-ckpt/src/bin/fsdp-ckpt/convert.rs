//! `fsdp-ckpt convert`, `fsdp-ckpt consolidate` and `fsdp-ckpt merge`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bytesize::ByteSize;
use clap::error::ErrorKind;
use clap::{Args, ValueEnum};
use fsdp_ckpt::convert::{View, check, write_fsdp};
use fsdp_ckpt::gguf::{self, GgufOptions, GgufSummary, Quantization};
use fsdp_ckpt::merge::Merged;
use fsdp_ckpt::torch::{DcpOptions, write_dcp};
use fsdp_ckpt::{Error, TensorSource, TrainingState, WriteSummary, escape, hf};
use fsdp_core::{DType, MeshLayout};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::{bar, open, print_json};

/// Largest number of ranks; the memory of plans grows with it.
const MOST_RANKS: usize = 4096;

#[derive(Clone, Copy, ValueEnum)]
enum To {
    /// This project's format, which `train --resume` loads. Includes optimizer state.
    Fsdp,
    /// A Hugging Face model directory: only the parameters, under their own names.
    Hf,
    /// The classic format of PyTorch DCP, which dcp.load and FileSystemReader read. Includes optimizer state.
    TorchDcp,
    /// A GGUF file for llama.cpp and programs built on it: the parameters and the tokenizer.
    Gguf,
}

/// Types of matrices in a GGUF file.
#[derive(Clone, Copy, ValueEnum)]
enum Quantize {
    F32,
    F16,
    Bf16,
    /// 8.5 bits for each weight.
    #[value(name = "q8_0")]
    Q8_0,
    /// 4.5 bits for each weight.
    #[value(name = "q4_0")]
    Q4_0,
    /// About 4.8 bits for each weight: llama.cpp's mix of Q4_K and Q6_K.
    #[value(name = "q4_k_m")]
    Q4KM,
    /// 6.6 bits for each weight.
    #[value(name = "q6_k")]
    Q6K,
}

#[derive(Clone, Copy, ValueEnum)]
enum To16 {
    Bf16,
    F16,
    F32,
}

#[derive(Args)]
#[command(after_help = "EXAMPLES:
    fsdp-ckpt convert runs/llama/step-00000010 llama-hf --to hf --config-from base-model
    fsdp-ckpt convert runs/llama/step-00000010 llama-hf --to hf --dtype bf16 --max-shard-size 5GB
    fsdp-ckpt convert base-model runs/llama/step-00000000 --to fsdp --world-size 8
    fsdp-ckpt convert runs/llama/step-00000010 step-on-8 --to fsdp --mesh 2x4
    fsdp-ckpt convert runs/llama/step-00000010 llama-dcp --to torch-dcp --world-size 4
    fsdp-ckpt convert llama-hf llama.gguf --to gguf --quantize q4_k_m
    fsdp-ckpt convert runs/lora/step-00000010 merged --to hf --lora-alpha 16 --config-from base-model

A checkpoint loads at any world size as it is. Written for the world size that reads it, it loads faster, because each \
rank then reads its own file.")]
pub(crate) struct Convert {
    /// A checkpoint or model of any format.
    src: PathBuf,
    /// The new directory; with --to gguf, the new file.
    dst: PathBuf,
    /// Format to write.
    #[arg(long, value_name = "FORMAT")]
    to: To,
    /// The model in a training state of PyTorch: the keys that lead to it, such as ema or app.model. It is found without
    /// this if there is only one.
    #[arg(long, value_name = "KEYS")]
    part: Option<String>,
    /// With --to fsdp or torch-dcp: number of ranks to write for [default: 1].
    #[arg(long, value_name = "N", value_parser = world_size, conflicts_with = "mesh")]
    world_size: Option<MeshLayout>,
    /// With --to fsdp: mesh to write for, as REPLICASxSHARDS.
    #[arg(long, value_name = "RxS", value_parser = mesh)]
    mesh: Option<MeshLayout>,
    /// Dtype for floating point parameters. Optimizer state and integers keep their dtypes.
    #[arg(long)]
    dtype: Option<To16>,
    /// With --to hf: most bytes of tensors in a file, such as 5GB or 500MiB [default: 5GB].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_shard_size: Option<ByteSize>,
    /// With --to hf or gguf: take config.json and the tokenizer's files from this directory. The default with gguf is
    /// SRC.
    #[arg(long, value_name = "DIR")]
    config_from: Option<PathBuf>,
    /// With --to gguf: types of the matrices [default: 16 bits where SRC has 16 bits, otherwise f32].
    #[arg(long, value_name = "TYPE")]
    quantize: Option<Quantize>,
    /// With --to gguf: llama.cpp's name of the pre-tokenizer, if tokenizer.json has rules that are not recognised.
    #[arg(long, value_name = "NAME")]
    pre_tokenizer: Option<String>,
    /// With --to hf or gguf: merge the LoRA adapters of the checkpoint SRC, with this alpha, as --lora-alpha in training.
    #[arg(long, value_name = "ALPHA")]
    lora_alpha: Option<f64>,
    /// Also write the tensor OLD under the name NEW, both as in the destination. May be repeated.
    ///
    /// PyTorch's state dicts hold a parameter that two layers share under both names; for GPT-2 pass
    /// model.lm_head.weight=model.transformer.wte.weight.
    #[arg(long, value_name = "NEW=OLD", value_parser = alias)]
    alias: Vec<(String, String)>,
    /// Leave out tensors of unsupported dtypes.
    #[arg(long)]
    skip_unreadable: bool,
    /// Write a summary as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(after_help = "EXAMPLES:
    fsdp-ckpt consolidate torch-hf-checkpoint whole
    fsdp-ckpt consolidate runs/llama/step-00000010 whole --max-shard-size 5GB")]
pub(crate) struct Consolidate {
    /// A checkpoint or model of any format.
    src: PathBuf,
    /// The new directory.
    dst: PathBuf,
    /// Most bytes of tensors in a file, such as 5GB or 500MiB [default: all in one file].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_shard_size: Option<ByteSize>,
    /// Leave out tensors of unsupported dtypes.
    #[arg(long)]
    skip_unreadable: bool,
    /// Write a summary as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(after_help = "EXAMPLES:
    fsdp-ckpt merge base-model adapters merged
    fsdp-ckpt merge runs/llama/step-00000010 adapters merged --config-from base-model

To serve the result with llama.cpp: fsdp-ckpt convert merged merged.gguf --to gguf --quantize q4_k_m")]
pub(crate) struct Merge {
    /// The model that the adapters were trained on, in any format.
    base: PathBuf,
    /// A directory with adapter_config.json and adapter_model.safetensors.
    adapter: PathBuf,
    /// The new directory.
    dst: PathBuf,
    /// If BASE is a training state of PyTorch: the keys that lead to its model, as in fsdp-ckpt convert.
    #[arg(long, value_name = "KEYS")]
    part: Option<String>,
    /// Most bytes of tensors in a file, such as 5GB or 500MiB [default: 5GB].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_shard_size: Option<ByteSize>,
    /// Copy config.json and the tokenizer's files from this directory [default: BASE].
    #[arg(long, value_name = "DIR")]
    config_from: Option<PathBuf>,
    /// Write a summary as JSON.
    #[arg(long)]
    json: bool,
}

fn world_size(text: &str) -> Result<MeshLayout, String> {
    layout(&[("dp_shard", ranks(text)?)])
}

fn alias(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((new, old)) if !new.is_empty() && !old.is_empty() => Ok((new.into(), old.into())),
        _ => Err("expected NEW=OLD, two names of tensors".into()),
    }
}

fn mesh(text: &str) -> Result<MeshLayout, String> {
    match text.split_once('x') {
        Some((replicas, shards)) => layout(&[("dp_replicate", ranks(replicas)?), ("dp_shard", ranks(shards)?)]),
        None => Err("expected REPLICASxSHARDS, such as 2x4".into()),
    }
}

fn ranks(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MOST_RANKS).contains(number));
    number.ok_or_else(|| format!("{text:?} is not a number from 1 to {MOST_RANKS}"))
}

fn layout(dims: &[(&str, usize)]) -> Result<MeshLayout, String> {
    let mesh = MeshLayout::new(dims).map_err(|error| error.to_string())?;
    if mesh.size() > MOST_RANKS { Err(format!("more than {MOST_RANKS} ranks")) } else { Ok(mesh) }
}

fn size(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|_| "expected a number and a unit, such as 5GB or 500MiB".to_string())?;
    if size.0 == 0 { Err("expected more than 0 bytes".into()) } else { Ok(size) }
}

impl To16 {
    fn dtype(self) -> DType {
        match self {
            To16::Bf16 => DType::BF16,
            To16::F16 => DType::F16,
            To16::F32 => DType::F32,
        }
    }
}

impl Quantize {
    fn quantization(self) -> Quantization {
        match self {
            Quantize::F32 => Quantization::F32,
            Quantize::F16 => Quantization::F16,
            Quantize::Bf16 => Quantization::BF16,
            Quantize::Q8_0 => Quantization::Q8_0,
            Quantize::Q4_0 => Quantization::Q4_0,
            Quantize::Q4KM => Quantization::Q4KM,
            Quantize::Q6K => Quantization::Q6K,
        }
    }
}

impl Convert {
    pub(crate) fn run(&self) -> Result<()> {
        let shard_size = ("--max-shard-size", self.max_shard_size.is_some());
        let config_from = ("--config-from", self.config_from.is_some());
        let of_ranks = [("--world-size", self.world_size.is_some()), ("--mesh", self.mesh.is_some())];
        let of_gguf = [("--quantize", self.quantize.is_some()), ("--pre-tokenizer", self.pre_tokenizer.is_some())];
        let of_others = [("--dtype", self.dtype.is_some()), ("--alias", !self.alias.is_empty())];
        let alpha = ("--lora-alpha", self.lora_alpha.is_some());
        let (name, strange) = match self.to {
            To::Fsdp => ("fsdp", [&[shard_size, config_from, alpha][..], &of_gguf].concat()),
            To::Hf => ("hf", [of_ranks, of_gguf].concat()),
            To::TorchDcp => ("torch-dcp", [&[shard_size, config_from, of_ranks[1], alpha][..], &of_gguf].concat()),
            To::Gguf => ("gguf", [&[shard_size][..], &of_ranks, &of_others].concat()),
        };
        if let Some((flag, _)) = strange.iter().find(|(_, given)| *given) {
            let message = format!("{flag} can't be used with --to {name}");
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, message).into());
        }
        let config = match &self.config_from {
            Some(dir) => hf::config_files(dir).context("--config-from")?,
            None => Vec::new(),
        };
        let source = training_state(&self.src, self.part.as_deref())?;
        if matches!(self.to, To::Fsdp | To::TorchDcp) {
            source.check_optimizer()?;
        }
        let work = Work::begin(&source, &self.src, &self.dst, Some(self.skip_unreadable))?.noting(source.notes());
        let model = View::model(&source);
        let merged = match self.to {
            To::Hf | To::Gguf => self.with_adapters(&model)?,
            To::Fsdp | To::TorchDcp => None,
        };
        let mut view = match self.to {
            To::Hf | To::Gguf => merged.as_ref().map_or_else(|| View::model(&source), |merged| View::all(merged)),
            To::Fsdp => View::training(&source),
            To::TorchDcp => View::training(&source).decoded(),
        };
        if let Some(dtype) = self.dtype {
            view = view.dtype(dtype.dtype())?;
        }
        for (alias, of) in &self.alias {
            view = view.alias(alias, of).with_context(|| format!("--alias {alias}={of}"))?;
        }
        work.write(view, name, self.json, &|view| match self.to {
            To::Fsdp => {
                let mesh = match self.world_size.as_ref().or(self.mesh.as_ref()) {
                    Some(mesh) => mesh.clone(),
                    None => MeshLayout::new(&[("dp_shard", 1)])?,
                };
                Ok(write_fsdp(&self.dst, view, &mesh)?.into())
            }
            To::TorchDcp => {
                let world_size = self.world_size.as_ref().map_or(1, MeshLayout::size);
                Ok(write_dcp(&self.dst, view, &DcpOptions::new(world_size))?.into())
            }
            To::Hf => {
                let most = self.max_shard_size.unwrap_or(ByteSize::gb(5));
                Ok(hf::write(&self.dst, view, most.0, &config)?.into())
            }
            To::Gguf => {
                let dir = self.config_from.as_ref().unwrap_or(&self.src);
                let options = GgufOptions {
                    quantization: self.quantize.map(Quantize::quantization),
                    pre_tokenizer: self.pre_tokenizer.clone(),
                    name: None,
                };
                Ok(gguf::write(&self.dst, view, dir, &options)?.into())
            }
        })
    }
}

impl Convert {
    /// Returns the model with its adapters merged, or `None` if it has none.
    fn with_adapters<'a>(&self, model: &'a View<'_>) -> Result<Option<Merged<'a>>> {
        let path = model.path().display();
        let Some(any) = model.tensors().keys().find(|name| name.contains(".lora_")) else {
            ensure!(self.lora_alpha.is_none(), "--lora-alpha: {path} has no LoRA adapters");
            return Ok(None);
        };
        let down = model.tensors().iter().filter(|(name, _)| name.ends_with(".lora_A.weight"));
        let ranks: Vec<usize> = down.map(|(_, tensor)| tensor.shape.first().copied().unwrap_or(0)).collect();
        let (&rank, count) = (ranks.first().with_context(|| format!("{path} has {any}, but no lora_A"))?, ranks.len());
        let Some(alpha) = self.lora_alpha else {
            bail!(
                "{path} has LoRA adapters of {count} weights, of rank {rank}, which the new model would lack: pass the \
                 --lora-alpha that they were trained with, to merge them (the default of train is {}). To get them in \
                 PEFT's format, pass --export-hf to train",
                2 * rank
            )
        };
        ensure!(
            ranks.iter().all(|other| *other == rank && rank > 0),
            "{path} has adapters of several ranks: {ranks:?}"
        );
        let merged = Merged::in_checkpoint(model, alpha / rank as f64)?;
        // The type of GGUF is chosen apart from that of the base.
        Ok(Some(if self.quantize.is_some() { merged.in_f32() } else { merged }))
    }
}

impl Consolidate {
    pub(crate) fn run(&self) -> Result<()> {
        let source = open(&self.src)?;
        let work = Work::begin(&*source, &self.src, &self.dst, Some(self.skip_unreadable))?;
        let most = self.max_shard_size.map_or(u64::MAX, |size| size.0);
        work.write(View::all(&*source), "safetensors", self.json, &|view| {
            Ok(hf::write(&self.dst, view, most, &[])?.into())
        })
    }
}

/// Opens a source. A training state of PyTorch gets the names of this project.
fn training_state(path: &Path, part: Option<&str>) -> Result<TrainingState> {
    TrainingState::find(open(path)?, part).map_err(|error| match &error {
        Error::Parts { parts, .. } if !parts.is_empty() => anyhow!("{error}; choose one by --part"),
        _ => error.into(),
    })
}

impl Merge {
    pub(crate) fn run(&self) -> Result<()> {
        let base = training_state(&self.base, self.part.as_deref())?;
        let config = match &self.config_from {
            Some(dir) => hf::config_files(dir).context("--config-from")?,
            None => {
                hf::config_files(&self.base).map_err(|error| anyhow!("{error}; --config-from names its directory"))?
            }
        };
        let work = Work::begin(&base, &self.base, &self.dst, None)?.noting(base.notes());
        let model = View::model(&base);
        let merged = Merged::new(&model, &self.adapter).map_err(|error| match error {
            Error::MissingTensor { ref path, .. } if path == model.path() => {
                anyhow!("{error}; pass the base of these adapters")
            }
            _ => error.into(),
        })?;
        let [adapters, replaced] = merged.changed();
        let most = self.max_shard_size.unwrap_or(ByteSize::gb(5));
        work.write(View::all(&merged), "hf", self.json, &|view| {
            let mut outcome = Outcome::from(hf::write(&self.dst, view, most.0, &config)?);
            outcome.details.insert("merged".into(), adapters.into());
            outcome.details.insert("replaced".into(), replaced.into());
            outcome.notes.push(format!("{adapters} weights were merged with adapters, {replaced} were replaced"));
            Ok(outcome)
        })
    }
}

/// Result of a write, with what only some formats report.
struct Outcome {
    written: WriteSummary,
    /// More fields of the JSON summary.
    details: Map<String, Value>,
    /// More lines of the summary.
    notes: Vec<String>,
    /// Numbers that overflowed while they were written.
    overflowed: u64,
}

impl From<WriteSummary> for Outcome {
    fn from(written: WriteSummary) -> Self {
        Outcome { written, details: Map::new(), notes: Vec::new(), overflowed: 0 }
    }
}

impl From<GgufSummary> for Outcome {
    fn from(summary: GgufSummary) -> Self {
        let tensors = summary.types.values().sum();
        let mut details = Map::new();
        details.insert("architecture".into(), summary.architecture.into());
        details.insert("quantization".into(), summary.quantization.name().into());
        details.insert("types".into(), json!(summary.types));
        details.insert("tokenizer".into(), summary.tokenizer.into());
        details.insert("notes".into(), json!(summary.notes));
        let types: Vec<_> = summary.types.iter().map(|(name, count)| format!("{count} in {name}")).collect();
        let tokenizer = match summary.tokenizer {
            "no_vocab" => "without a tokenizer".to_string(),
            kind => format!("with a tokenizer of kind {kind}"),
        };
        let mut notes = vec![
            format!("architecture {}, {}, {tokenizer}", summary.architecture, summary.quantization.name()),
            format!("tensors: {}", types.join(", ")),
        ];
        notes.extend(summary.notes);
        let written = WriteSummary { path: summary.path, tensors, files: 1, bytes: summary.bytes };
        Outcome { written, details, notes, overflowed: summary.overflowed }
    }
}

/// The common parts of the commands.
struct Work<'a> {
    source: &'a dyn TensorSource,
    src: &'a Path,
    dst: &'a Path,
    started: Instant,
    bar: ProgressBar,
    /// Lines of the summary about the source.
    notes: Vec<String>,
}

impl<'a> Work<'a> {
    /// `skip_unreadable` is the flag of this name; `None` for a command without it.
    fn begin(
        source: &'a dyn TensorSource,
        src: &'a Path,
        dst: &'a Path,
        skip_unreadable: Option<bool>,
    ) -> Result<Self> {
        let started = Instant::now();
        if source.tensors().is_empty() && source.unreadable().is_empty() {
            bail!("{} has no tensors", src.display());
        }
        let bar = bar("verifying", source.bytes());
        let checked = check(source, dst, skip_unreadable == Some(true), &mut |bytes| bar.inc(bytes));
        checked.map_err(|error| match &error {
            Error::UnsupportedDTypes { .. } if skip_unreadable.is_some() => {
                anyhow!("{error}; --skip-unreadable leaves them out")
            }
            _ => error.into(),
        })?;
        Ok(Work { source, src, dst, started, bar, notes: vec![] })
    }

    fn noting(self, notes: Vec<String>) -> Self {
        Work { notes, ..self }
    }

    fn write(self, view: View<'a>, to: &str, as_json: bool, write: &dyn Fn(&View) -> Result<Outcome>) -> Result<()> {
        self.bar.reset();
        self.bar.set_message("writing");
        let seen = |bytes| self.bar.inc(bytes);
        let view = view.on_read(&seen);
        let Outcome { written, details, notes, overflowed } = write(&view)?;
        self.bar.finish_and_clear();

        let seconds = self.started.elapsed().as_secs_f64();
        let (left_out, skipped) = (view.left_out(), self.source.unreadable());
        let overflowed = view.overflowed() + overflowed;
        if as_json {
            let converted = view.converted().into_iter();
            let converted: Vec<_> =
                converted.map(|([from, to], count)| json!({ "from": from, "to": to, "tensors": count })).collect();
            let mut summary = json!({
                "from": self.source.format().to_string(), "to": to, "path": written.path,
                "tensors": written.tensors, "files": written.files, "bytes": written.bytes,
                "converted": converted, "overflowed": overflowed, "left_out": left_out,
                "unreadable": skipped, "seconds": seconds, "source": self.notes,
            });
            if let Value::Object(summary) = &mut summary {
                summary.extend(details);
            }
            return print_json(&summary);
        }
        let mut out = std::io::stdout().lock();
        let files = if written.files == 1 { "1 file".to_string() } else { format!("{} files", written.files) };
        writeln!(
            out,
            "{}: {to}, {} tensors, {} in {files}, from {} ({}) in {seconds:.1} s",
            escape(self.dst.display()),
            written.tensors,
            ByteSize(written.bytes),
            escape(self.src.display()),
            self.source.format(),
        )?;
        for note in &self.notes {
            writeln!(out, "  {}", escape(note))?;
        }
        for ([from, to], count) in view.converted() {
            writeln!(out, "  {count} tensors were converted from {from} to {to}")?;
        }
        for note in notes {
            writeln!(out, "  {}", escape(note))?;
        }
        if overflowed > 0 {
            writeln!(out, "  {overflowed} numbers overflowed the new dtype and are infinite")?;
        }
        if left_out > 0 {
            writeln!(out, "  {left_out} tensors that are not parameters (optimizer state) were left out")?;
        }
        if !skipped.is_empty() {
            writeln!(out, "  {} tensors of unsupported dtypes were left out", skipped.len())?;
        }
        Ok(())
    }
}
