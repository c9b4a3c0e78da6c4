//! `fsdp-ckpt inspect`.

mod picture;
pub(crate) mod steps;
mod tree;

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use bytesize::ByteSize;
use fsdp_ckpt::{Checkpoint, Format, TensorSource, escape};
use serde_json::{Map, Value, json};

use picture::{TensorsByFile, draw_svg, draw_text};

use crate::print_json;

/// Width if stdout is not a terminal.
const PLAIN_WIDTH: usize = 120;

pub(crate) fn run(dir: &Path, as_json: bool, svg: Option<&Path>, full: bool) -> Result<()> {
    let source = match fsdp_ckpt::open(dir) {
        Ok(source) => source,
        Err(error) => {
            let steps = steps::list(dir);
            if steps.is_empty() {
                return Err(error.into());
            }
            if svg.is_some() {
                bail!("{} is the directory of a run; --svg draws one of its steps", dir.display());
            }
            return steps::show(dir, &steps, as_json);
        }
    };
    if let Some(path) = svg {
        // Never replace an existing file.
        let mut file = std::fs::File::create_new(path).with_context(|| format!("can't create {}", path.display()))?;
        draw_svg(&TensorsByFile::of(&*source, usize::MAX), &title(&*source), &mut file)
            .with_context(|| format!("can't write {}", path.display()))?;
    }
    if as_json {
        return print_json(&describe(&*source)?);
    }
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    print(&*source, full, &mut out)?;
    Ok(out.flush()?)
}

fn title(source: &dyn TensorSource) -> String {
    let mesh = source.mesh().map_or(String::new(), |mesh| format!(", mesh {mesh}"));
    format!("{} ({}{mesh})", source.path().display(), source.format())
}

/// Reopens a checkpoint of this crate's format, for the fields that other formats lack.
fn ours(source: &dyn TensorSource) -> Result<Option<Checkpoint>> {
    match source.format() {
        Format::Fsdp => Ok(Some(Checkpoint::open(source.path())?)),
        _ => Ok(None),
    }
}

fn describe(source: &dyn TensorSource) -> Result<Value> {
    let tensors: Map<String, Value> = source
        .tensors()
        .iter()
        .map(|(fqn, tensor)| {
            let sharded: Vec<Value> =
                tree::sharded(tensor).into_iter().map(|(dim, count)| json!({ "dim": dim, "count": count })).collect();
            let about = json!({
                "dtype": tensor.dtype, "shape": tensor.shape, "bytes": tensor.bytes(),
                "sharded": sharded, "chunks": tensor.chunks,
            });
            (fqn.clone(), about)
        })
        .collect();
    let ours = ours(source)?;
    Ok(json!({
        "path": source.path(),
        "format": source.format().to_string(),
        "created_by": ours.as_ref().map(Checkpoint::created_by),
        "finite_when_saved": ours.as_ref().map(Checkpoint::is_finite),
        "covered": source.checksums(),
        "world_size": source.mesh().map(|mesh| mesh.size()),
        "mesh": source.mesh(),
        "tensors": tensors,
        "unreadable": source.unreadable(),
        "files": source.files(),
        "values": source.values(),
    }))
}

fn print(source: &dyn TensorSource, full: bool, out: &mut dyn Write) -> Result<()> {
    let tensors = source.tensors();
    let total = source.bytes();
    writeln!(out, "{}", escape(source.path().display()))?;
    writeln!(out, "  format      {}", source.format())?;
    let ours = ours(source)?;
    if let Some(ours) = &ours {
        writeln!(out, "  written by  {}", escape(ours.created_by()))?;
    }
    if let Some(mesh) = source.mesh() {
        writeln!(out, "  mesh        {} of {} ranks", escape(mesh), mesh.size())?;
    }
    writeln!(out, "  tensors     {} of {} together", tensors.len(), ByteSize(total))?;
    if let Some(ours) = ours {
        let about =
            if ours.is_finite() { "checked when saved" } else { "not checked; see `fsdp-ckpt verify --finite`" };
        writeln!(out, "  finite      {about}")?;
    }

    writeln!(out, "\nTENSORS")?;
    tree::print(source, full, out)?;
    if !source.unreadable().is_empty() {
        writeln!(out, "\nUNSUPPORTED DTYPES")?;
        for (name, dtype) in source.unreadable() {
            writeln!(out, "  {}  {}", escape(name), escape(dtype))?;
        }
    }

    let by_file = TensorsByFile::of(source, 40);
    writeln!(out, "\nFILES")?;
    for (at, file) in by_file.files.iter().enumerate() {
        let plural = if file.chunks == 1 { "" } else { "s" };
        let (size, chunks) = (ByteSize(file.bytes).to_string(), file.chunks);
        writeln!(out, "  {:>3}  {}  {size:>10}  {chunks} chunk{plural}", at + 1, file.name)?;
    }
    if by_file.files.len() > 1 {
        let terminal = std::io::stdout().is_terminal();
        let width = match terminal_size::terminal_size() {
            Some((terminal_size::Width(width), _)) if terminal => usize::from(width),
            _ => PLAIN_WIDTH,
        };
        let color = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        writeln!(out, "\nTENSORS BY FILE (bars are relative to the largest share of the row)")?;
        draw_text(&by_file, width, color, out)?;
    }

    if !source.values().is_empty() {
        writeln!(out, "\nVALUES")?;
        for (key, value, count) in values(source.values(), full) {
            let alike = if count > 1 { format!("  ({count} alike)") } else { String::new() };
            writeln!(out, "  {} = {}{alike}", escape(key), escape(value))?;
        }
    }
    Ok(())
}

/// Returns the values to show. Equal values of PyTorch's optimizers (`optim.param_groups.<fqn>.lr`) are merged.
fn values(all: &Map<String, Value>, full: bool) -> Vec<(String, &Value, usize)> {
    const GROUPS: &str = "optim.param_groups.";
    let mut shown = Vec::<(String, &Value, usize)>::new();
    for (key, value) in all {
        let option = key.strip_prefix(GROUPS).and_then(|rest| rest.rsplit_once('.'));
        let key = match option {
            Some((_, option)) if !full => format!("{GROUPS}*.{option}"),
            _ => key.clone(),
        };
        match shown.iter_mut().find(|(known, same, _)| *known == key && *same == value) {
            Some((.., count)) => *count += 1,
            None => shown.push((key, value, 1)),
        }
    }
    shown
}
