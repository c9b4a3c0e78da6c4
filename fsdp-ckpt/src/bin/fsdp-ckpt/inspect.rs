//! `fsdp-ckpt inspect`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::Result;
use fsdp_ckpt::{Checkpoint, TensorSource};
use serde_json::{Map, Value, json};

pub(crate) fn run(dir: &Path, as_json: bool) -> Result<()> {
    let checkpoint = Checkpoint::open(dir)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if as_json {
        serde_json::to_writer_pretty(&mut out, &describe(&checkpoint)).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        print(&checkpoint, &mut out)?;
    }
    Ok(out.flush()?)
}

fn describe(checkpoint: &Checkpoint) -> Value {
    let tensors: Map<String, Value> = checkpoint
        .tensors()
        .iter()
        .map(|(fqn, tensor)| {
            let about =
                json!({ "dtype": tensor.dtype, "shape": tensor.shape, "bytes": tensor.bytes(), "chunks": tensor.chunks });
            (fqn.clone(), about)
        })
        .collect();
    json!({
        "path": checkpoint.path(),
        "created_by": checkpoint.created_by(),
        "world_size": checkpoint.world_size(),
        "mesh": checkpoint.mesh(),
        "tensors": tensors,
        "files": checkpoint.files(),
        "values": checkpoint.values(),
    })
}

fn print(checkpoint: &Checkpoint, out: &mut dyn Write) -> std::io::Result<()> {
    let tensors = checkpoint.tensors();
    let total: u64 = tensors.values().map(fsdp_ckpt::TensorEntry::bytes).sum();
    writeln!(out, "{}", checkpoint.path().display())?;
    writeln!(out, "  written by  {}", checkpoint.created_by())?;
    if let Some(mesh) = checkpoint.mesh() {
        writeln!(out, "  mesh        {mesh} of {} ranks", mesh.size())?;
    }
    writeln!(out, "  tensors     {} of {} bytes together", tensors.len(), total)?;

    writeln!(out, "\nTENSORS")?;
    let names = tensors.keys().map(|fqn| fqn.chars().count()).max().unwrap_or(0);
    let shapes: Vec<String> = tensors.values().map(|tensor| format!("{:?}", tensor.shape)).collect();
    let widest = shapes.iter().map(String::len).max().unwrap_or(0);
    for ((fqn, tensor), shape) in tensors.iter().zip(&shapes) {
        let (dtype, bytes, chunks) = (tensor.dtype.name(), tensor.bytes(), tensor.chunks.len());
        let plural = if chunks == 1 { "" } else { "s" };
        writeln!(out, "  {fqn:<names$}  {dtype:<4}  {shape:<widest$}  {bytes:>12} bytes  {chunks} chunk{plural}")?;
    }

    writeln!(out, "\nFILES")?;
    let mut chunks = BTreeMap::<&str, usize>::new();
    for chunk in tensors.values().flat_map(|tensor| &tensor.chunks) {
        *chunks.entry(&chunk.file).or_default() += 1;
    }
    for (name, file) in checkpoint.files() {
        let chunks = chunks.get(name.as_str()).copied().unwrap_or(0);
        writeln!(out, "  {name}  {:>12} bytes  {chunks} chunk{}", file.bytes, if chunks == 1 { "" } else { "s" })?;
    }

    if !checkpoint.values().is_empty() {
        writeln!(out, "\nVALUES")?;
        for (key, value) in checkpoint.values() {
            writeln!(out, "  {key} = {value}")?;
        }
    }
    Ok(())
}
