//! `fsdp-ckpt verify`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Result, bail};
use bytesize::ByteSize;
use fsdp_ckpt::{Error, TensorEntry};
use serde_json::json;

use crate::progress::bar;

/// Whether all is well.
pub(crate) fn run(dir: &Path, as_json: bool) -> Result<bool> {
    let source = crate::open(dir)?;
    let bar = bar("verifying", source.tensors().values().map(TensorEntry::bytes).sum());
    let (mut chunks, mut bytes, mut sums) = (0usize, 0u64, 0usize);
    // What is wrong, with the tensors that it concerns: a file that can't be opened is told once.
    let mut damaged = BTreeMap::<String, Vec<&str>>::new();
    for (fqn, tensor) in source.tensors() {
        for (at, chunk) in tensor.chunks.iter().enumerate() {
            let mut seen = |read| {
                bytes += read;
                bar.inc(read);
            };
            chunks += 1;
            sums += usize::from(source.has_checksum(chunk));
            if let Err(error) = source.verify_chunk(fqn, at, &mut seen) {
                damaged.entry(in_words(error)).or_default().push(fqn);
            }
        }
    }
    bar.finish_and_clear();
    let (files, unreadable) = (source.files().len(), source.unreadable());
    if as_json {
        let list: Vec<_> =
            damaged.iter().map(|(error, tensors)| json!({ "error": error, "tensors": tensors })).collect();
        crate::print_json(&json!({
            "ok": damaged.is_empty(), "format": source.format().to_string(), "files": files, "chunks": chunks,
            "bytes": bytes, "checksums": sums, "damaged": list, "unreadable": unreadable,
        }))?;
        return Ok(damaged.is_empty());
    }
    let mut out = std::io::stdout().lock();
    for (error, tensors) in &damaged {
        writeln!(out, "{error}")?;
        if tensors.len() > 1 || !error.contains(tensors[0]) {
            writeln!(out, "  it holds {}", some(tensors))?;
        }
    }
    if !unreadable.is_empty() {
        writeln!(out, "{}: {} tensors of other dtypes were not read", dir.display(), unreadable.len())?;
    }
    if !damaged.is_empty() {
        let count: usize = damaged.values().map(Vec::len).sum();
        bail!("{} is damaged: {count} of its {chunks} chunks can't be used; use another checkpoint", dir.display());
    }
    let kept = match sums {
        0 => "; this format keeps no checksums: the files are whole, their numbers may be others",
        _ => "",
    };
    writeln!(out, "{}: ok, {chunks} chunks in {files} files, {}{kept}", dir.display(), ByteSize(bytes))?;
    Ok(true)
}

/// An error without the advice that comes once, at the end.
fn in_words(error: Error) -> String {
    let text = format!("{:#}", anyhow::Error::from(error));
    text.strip_suffix("; use another checkpoint").unwrap_or(&text).to_string()
}

fn some(tensors: &[&str]) -> String {
    let more = tensors.len().saturating_sub(8);
    let listed = tensors.iter().take(8).map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}
