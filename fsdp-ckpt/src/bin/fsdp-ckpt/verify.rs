//! `fsdp-ckpt verify`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Result, bail};
use bytesize::ByteSize;
use fsdp_ckpt::{Checksums, Error, Format, NonFinite, TensorSource, escape, non_finite};
use serde_json::json;

use crate::{bar, open, print_json};

/// Returns whether the checkpoint is valid.
pub(crate) fn run(dir: &Path, finite: bool, as_json: bool) -> Result<bool> {
    let source = open(dir)?;
    let bar = bar("verifying", source.bytes());
    let (mut chunks, mut bytes, mut sums) = (0usize, 0u64, 0usize);
    // Errors with their tensors: a file that can't be opened is reported once.
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
    // Damaged numbers need not be checked.
    let strange = match finite && damaged.is_empty() {
        true => {
            bar.reset();
            bar.set_message("looking for NaN");
            Some(non_finite(&*source, &mut |read| bar.inc(read))?)
        }
        false => None,
    };
    bar.finish_and_clear();
    let ok = damaged.is_empty() && strange.as_ref().is_none_or(Vec::is_empty);
    let (files, unreadable) = (source.files().len(), source.unreadable());
    if as_json {
        let list: Vec<_> =
            damaged.iter().map(|(error, tensors)| json!({ "error": error, "tensors": tensors })).collect();
        print_json(&json!({
            "ok": ok, "format": source.format().to_string(), "files": files, "chunks": chunks, "bytes": bytes,
            "checksums": sums, "covered": source.checksums(), "damaged": list, "non_finite": strange,
            "unreadable": unreadable,
        }))?;
        return Ok(ok);
    }
    let mut out = std::io::stdout().lock();
    for (error, tensors) in &damaged {
        writeln!(out, "{error}")?;
        if tensors.len() > 1 || !error.contains(&escape(tensors[0]).to_string()) {
            writeln!(out, "  it holds {}", some(tensors))?;
        }
    }
    let place = escape(dir.display());
    if !unreadable.is_empty() {
        writeln!(out, "{place}: {} tensors of unsupported dtypes were not read", unreadable.len())?;
    }
    if !damaged.is_empty() {
        let count: usize = damaged.values().map(Vec::len).sum();
        bail!("{place} is damaged: {count} of its {chunks} chunks can't be used; use another checkpoint");
    }
    let kept = not_covered(&*source);
    writeln!(out, "{place}: ok, {chunks} chunks in {files} files, {}{kept}", ByteSize(bytes))?;
    match strange.as_deref() {
        None => {}
        Some([]) if unreadable.is_empty() => writeln!(out, "all floating point numbers are finite")?,
        Some([]) => writeln!(out, "all floating point numbers that were read are finite")?,
        Some(strange) => {
            strange.iter().try_for_each(|tensor| writeln!(out, "{}", counted(tensor)))?;
            let numbers: u64 = strange.iter().map(|tensor| tensor.nan + tensor.infinite).sum();
            let tensors = strange.len();
            bail!("{place} has {numbers} numbers that are not finite, in {tensors} tensors; use an earlier checkpoint");
        }
    }
    Ok(true)
}

/// Describes the parts of a source without checksums.
fn not_covered(source: &dyn TensorSource) -> &'static str {
    match (source.checksums(), source.format()) {
        (Checksums::Everything, _) => "",
        (Checksums::Tensors, Format::Fsdp) => {
            "; written by an older fsdp-ckpt: its manifest and headers have no checksums"
        }
        (Checksums::Tensors, _) => "; names, shapes and values have no checksums",
        (Checksums::Nothing, _) => "; this format has no checksums: only file sizes were checked",
    }
}

fn counted(found: &NonFinite) -> String {
    let NonFinite { tensor, dtype, elements, nan, infinite, first, file } = found;
    let (tensor, file) = (escape(tensor), escape(file));
    let counts = format!("of {elements} numbers {nan} are NaN and {infinite} infinite");
    format!("\"{tensor}\" ({dtype}): {counts}, the first at {first:?}, in {file}")
}

/// Formats an error without the advice that is printed once at the end.
fn in_words(error: Error) -> String {
    let text = format!("{:#}", anyhow::Error::from(error));
    escape(text.strip_suffix("; use another checkpoint").unwrap_or(&text)).to_string()
}

fn some(tensors: &[&str]) -> String {
    let more = tensors.len().saturating_sub(8);
    let listed = tensors.iter().take(8).map(|name| format!("\"{}\"", escape(name))).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}
