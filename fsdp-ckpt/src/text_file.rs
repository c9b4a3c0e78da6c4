//! Configuration and tokenizer files of a model directory.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::store::location;
use crate::{Error, Result};

/// Returns an error about a file of the model.
pub(crate) fn malformed(path: &Path, item: Option<&str>, reason: impl Into<String>) -> Error {
    Error::Malformed { path: path.to_path_buf(), item: item.map(str::to_string), reason: reason.into() }
}

/// Reads a JSON file of a directory; `None` if it does not exist.
pub(crate) fn read_json<T: DeserializeOwned>(dir: &Path, name: &str) -> Result<Option<T>> {
    let Some(text) = read_text(dir, name)? else { return Ok(None) };
    let parsed = serde_json::from_str(&text);
    parsed.map(Some).map_err(|error| malformed(&dir.join(name), None, format!("it can't be read: {error}")))
}

/// Largest size of a configuration or tokenizer file.
const MAX_FILE: u64 = 1 << 28;

/// Reads a text file of a directory; `None` if it does not exist.
pub(crate) fn read_text(dir: &Path, name: &str) -> Result<Option<String>> {
    let Some(bytes) = location(dir)?.store()?.read(name, MAX_FILE)? else { return Ok(None) };
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|error| malformed(&dir.join(name), None, format!("it is not UTF-8 text: {error}")))
}
