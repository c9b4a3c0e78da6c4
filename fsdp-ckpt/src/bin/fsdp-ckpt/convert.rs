//! `fsdp-ckpt convert` and `fsdp-ckpt consolidate`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use bytesize::ByteSize;
use clap::error::ErrorKind;
use clap::{Args, ValueEnum};
use fsdp_ckpt::convert::{View, check, write_fsdp};
use fsdp_ckpt::torch::{DcpOptions, write_dcp};
use fsdp_ckpt::{TensorSource, WriteSummary, escape, hf};
use fsdp_core::{DType, MeshLayout};
use indicatif::ProgressBar;
use serde_json::json;

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

A checkpoint loads at any world size as it is. Written for the world size that reads it, it loads faster, because each \
rank then reads its own file.")]
pub(crate) struct Convert {
    /// A checkpoint or model of any format.
    src: PathBuf,
    /// The new directory.
    dst: PathBuf,
    /// Format to write.
    #[arg(long, value_name = "FORMAT")]
    to: To,
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
    /// With --to hf: copy config.json and the tokenizer's files from this directory.
    #[arg(long, value_name = "DIR")]
    config_from: Option<PathBuf>,
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

impl Convert {
    pub(crate) fn run(&self) -> Result<()> {
        let of_hf =
            [("--max-shard-size", self.max_shard_size.is_some()), ("--config-from", self.config_from.is_some())];
        let of_ranks = [("--world-size", self.world_size.is_some()), ("--mesh", self.mesh.is_some())];
        let (name, strange) = match self.to {
            To::Fsdp => ("fsdp", of_hf.to_vec()),
            To::Hf => ("hf", of_ranks.to_vec()),
            To::TorchDcp => ("torch-dcp", [&of_hf[..], &of_ranks[1..]].concat()),
        };
        if let Some((flag, _)) = strange.iter().find(|(_, given)| *given) {
            let message = format!("{flag} can't be used with --to {name}");
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, message).into());
        }
        let config = match &self.config_from {
            Some(dir) => hf::config_files(dir).context("--config-from")?,
            None => Vec::new(),
        };
        let source = open(&self.src)?;
        let work = Work::begin(&*source, &self.src, &self.dst, self.skip_unreadable)?;
        let mut view = match self.to {
            To::Hf => View::model(&*source),
            To::Fsdp | To::TorchDcp => View::training(&*source),
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
                Ok(write_fsdp(&self.dst, view, &mesh)?)
            }
            To::TorchDcp => {
                let world_size = self.world_size.as_ref().map_or(1, MeshLayout::size);
                Ok(write_dcp(&self.dst, view, &DcpOptions::new(world_size))?)
            }
            To::Hf => {
                let most = self.max_shard_size.unwrap_or(ByteSize::gb(5));
                Ok(hf::write(&self.dst, view, most.0, &config)?)
            }
        })
    }
}

impl Consolidate {
    pub(crate) fn run(&self) -> Result<()> {
        let source = open(&self.src)?;
        let work = Work::begin(&*source, &self.src, &self.dst, self.skip_unreadable)?;
        let most = self.max_shard_size.map_or(u64::MAX, |size| size.0);
        work.write(View::all(&*source), "safetensors", self.json, &|view| Ok(hf::write(&self.dst, view, most, &[])?))
    }
}

/// The common parts of both commands.
struct Work<'a> {
    source: &'a dyn TensorSource,
    src: &'a Path,
    dst: &'a Path,
    started: Instant,
    bar: ProgressBar,
}

impl<'a> Work<'a> {
    fn begin(source: &'a dyn TensorSource, src: &'a Path, dst: &'a Path, skip_unreadable: bool) -> Result<Self> {
        let started = Instant::now();
        if source.tensors().is_empty() && source.unreadable().is_empty() {
            bail!("{} has no tensors", src.display());
        }
        let bar = bar("verifying", source.bytes());
        check(source, dst, skip_unreadable, &mut |bytes| bar.inc(bytes))?;
        Ok(Work { source, src, dst, started, bar })
    }

    fn write(
        self,
        view: View<'a>,
        to: &str,
        as_json: bool,
        write: &dyn Fn(&View) -> Result<WriteSummary>,
    ) -> Result<()> {
        self.bar.reset();
        self.bar.set_message("writing");
        let seen = |bytes| self.bar.inc(bytes);
        let view = view.on_read(&seen);
        let written = write(&view)?;
        self.bar.finish_and_clear();

        let seconds = self.started.elapsed().as_secs_f64();
        let (left_out, skipped) = (view.left_out(), self.source.unreadable());
        if as_json {
            let converted = view.converted().into_iter();
            let converted: Vec<_> =
                converted.map(|([from, to], count)| json!({ "from": from, "to": to, "tensors": count })).collect();
            return print_json(&json!({
                "from": self.source.format().to_string(), "to": to, "path": written.path,
                "tensors": written.tensors, "files": written.files, "bytes": written.bytes,
                "converted": converted, "overflowed": view.overflowed(), "left_out": left_out,
                "unreadable": skipped, "seconds": seconds,
            }));
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
        for ([from, to], count) in view.converted() {
            writeln!(out, "  {count} tensors were converted from {from} to {to}")?;
        }
        if view.overflowed() > 0 {
            writeln!(out, "  {} numbers overflowed the new dtype and are infinite", view.overflowed())?;
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
