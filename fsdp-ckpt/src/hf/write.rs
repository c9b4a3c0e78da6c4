//! Writing a Hugging Face model directory from any source, with little memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_core::layout::Region;
use serde_json::{Map, Value, json};

use crate::hf::{INDEX, JoinedExperts, SINGLE};
use crate::placeholder::Placeholder;
use crate::safetensors::{Entry, write_file};
use crate::source::{WriteSummary, stream};
use crate::store::{Store, found_instead, location, placeholder_in, split};
use crate::text_file::read_json;
use crate::{Error, Result, TensorSource};

/// Configuration and tokenizer files that [`config_files`] looks for.
const CONFIG: [&str; 14] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
];

/// Key of `config.json` that describes codes.
const CODES: &str = "quantization_config";

/// Returns the configuration and tokenizer files of a model directory.
///
/// # Errors
/// [`Error::NotFound`] without a `config.json`.
pub fn config_files(dir: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let dir = dir.as_ref();
    let there = match location(dir)?.store()?.list() {
        Err(Error::NotFound { .. }) => Vec::new(),
        names => names?,
    };
    let files: Vec<PathBuf> =
        CONFIG.iter().filter(|name| there.iter().any(|there| there == *name)).map(|name| dir.join(name)).collect();
    if files.first().is_none_or(|path| !path.ends_with(CONFIG[0])) {
        return Err(Error::NotFound { path: dir.to_path_buf(), looked_for: CONFIG[0].to_string() });
    }
    Ok(files)
}

/// Writes the tensors of `source` as the directory `dst`: `model.safetensors`, or files with at most `max_shard_bytes`
/// of tensors and an index. A larger tensor gets its own file. Copies `config_files` beside them.
///
/// # Errors
/// [`Error::AlreadyExists`] if `dst` exists; [`Error::Argument`] if there are no tensors; [`Error::Io`]; the errors of
/// [`TensorSource::read`].
pub fn write(
    dst: impl AsRef<Path>,
    source: &dyn TensorSource,
    max_shard_bytes: u64,
    config_files: &[PathBuf],
) -> Result<WriteSummary> {
    write_with(dst.as_ref(), source, max_shard_bytes, config_files, BTreeMap::new())
}

/// [`write()`] with entries for the `__metadata__` of each file. The single experts of gpt-oss are joined, because
/// transformers reads no others. Their `config.json` then has no `quantization_config`, since codes were decoded. Has the same errors, and those of [`JoinedExperts::new`].
pub fn write_with(
    dst: &Path,
    source: &dyn TensorSource,
    max_shard_bytes: u64,
    config_files: &[PathBuf],
    mut metadata: BTreeMap<String, String>,
) -> Result<WriteSummary> {
    let joined = JoinedExperts::of(source)?;
    let source = joined.as_ref().map_or(source, |joined| joined as &dyn TensorSource);
    let parts = partition(source, max_shard_bytes);
    if parts.is_empty() {
        return Err(Error::Argument(format!("{} has no tensors for a model", source.path().display())));
    }
    let staging = location(dst)?.stage()?;
    let store = location(dst)?.open_staging(&staging.name())?;
    metadata.insert("format".into(), "pt".into());
    let (mut map, mut total) = (BTreeMap::new(), 0);
    for (at, names) in parts.iter().enumerate() {
        let file = match parts.len() {
            1 => SINGLE.to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", at + 1),
        };
        let entries: Vec<Entry> = names
            .iter()
            .map(|&name| {
                let tensor = &source.tensors()[name];
                Entry { name: name.to_string(), dtype: tensor.dtype, shape: tensor.shape.clone() }
            })
            .collect();
        write_file(&*store, &file, &entries, &metadata, &mut |index, sink| {
            stream(source, &entries[index].name, &Region::whole(&entries[index].shape), sink)
        })?;
        for name in names {
            total += source.tensors()[*name].bytes();
            map.insert(*name, file.clone());
        }
    }
    for path in config_files {
        match joined.is_some() && path.ends_with(CONFIG[0]) {
            true => copy_without_codes(path, &*store)?,
            false => copy(path, &*store)?,
        }
    }
    let written = WriteSummary { path: dst.to_path_buf(), tensors: map.len(), files: parts.len(), bytes: total };
    if parts.len() == 1 {
        staging.publish()?;
    } else {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        staging.commit(INDEX, format!("{index:#}\n").as_bytes())?;
    }
    Ok(written)
}

/// Distributes the tensors' names over files.
fn partition(source: &dyn TensorSource, most: u64) -> Vec<Vec<&str>> {
    let mut parts: Vec<Vec<&str>> = Vec::new();
    let mut room = 0;
    for (name, tensor) in source.tensors() {
        let bytes = tensor.bytes();
        match parts.last_mut() {
            Some(part) if bytes <= room => part.push(name),
            _ => {
                parts.push(vec![name]);
                room = most;
            }
        }
        room = room.saturating_sub(bytes);
    }
    parts
}

/// Copies a `config.json` of weights that were decoded, without the description of their codes.
fn copy_without_codes(path: &Path, store: &dyn Store) -> Result<()> {
    let (dir, name) = split(path)?;
    let missing = || Error::NotFound { path: dir.clone(), looked_for: name.clone() };
    let mut config = read_json::<Map<String, Value>>(&dir, &name)?.ok_or_else(missing)?;
    config.remove(CODES);
    let text = format!("{:#}\n", Value::Object(config));
    let mut to = store.create(&name, text.len() as u64)?;
    to.append(text.as_bytes())?;
    to.finish()
}

fn copy(path: &Path, store: &dyn Store) -> Result<()> {
    let from = location(path)?.open()?;
    if let Some(found) = placeholder_in(&*from).filter(|found| *found != Placeholder::Empty) {
        return Err(found_instead(path, found));
    }
    let mut to = store.create(&split(path)?.1, from.bytes())?;
    let mut block = vec![0; from.bytes().min(1 << 20) as usize];
    let mut at = 0;
    while at < from.bytes() {
        let block = &mut block[..(from.bytes() - at).min(1 << 20) as usize];
        from.read_exact_at(block, at)?;
        to.append(block)?;
        at += block.len() as u64;
    }
    to.finish()
}
