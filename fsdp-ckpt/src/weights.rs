//! Finding the weights in a model directory, as transformers does, and telling apart a directory without weights from one
//! whose weights can't be read.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::io_error;
use crate::hf::{HfModel, INDEX, SINGLE, Shard};
use crate::placeholder::broken_link;
use crate::store::{location, require_local};
use crate::torch::{BIN, BIN_INDEX, LEGACY, TorchFile};
use crate::{Error, Result, TensorSource};

/// Files of weights, in the order in which transformers looks for them.
const FILES: [&str; 4] = [SINGLE, INDEX, BIN, BIN_INDEX];

/// Ends of the names of weights in other formats.
const OTHER_FORMATS: [&str; 10] =
    [".ckpt.index", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".ot", ".keras", ".nemo", ".tflite"];
/// Ends of the names of training states.
const STATES: [&str; 4] = [".pt", ".pth", ".ckpt", ".distcp"];
/// Ends of the names of unfinished downloads.
const UNFINISHED: [&str; 6] = [".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download"];
/// Directory within the model's in which the client of the hub keeps unfinished downloads.
const DOWNLOADS: &str = ".cache/huggingface/download";
/// Files of transformers' trainer that hold no weights.
const SETTINGS: [&str; 3] = ["training_args.bin", "scheduler.pt", "rng_state.pth"];
/// Largest size of a configuration.
const MAX_CONFIG: u64 = 1 << 24;

/// Opens the weights of a Hugging Face model directory: the file that [`find_weights`] returns. `None` for a directory
/// without weights.
///
/// # Errors
/// The errors of [`find_weights`], [`HfModel::open`] and [`TorchFile::open_model`].
pub fn open_weights(dir: impl AsRef<Path>) -> Result<Option<Box<dyn TensorSource>>> {
    let dir = dir.as_ref();
    Ok(match find_weights(dir)? {
        None => None,
        Some(path) if path.ends_with(BIN) || path.ends_with(BIN_INDEX) => Some(Box::new(TorchFile::open_model(dir)?)),
        Some(_) => Some(Box::new(HfModel::open(dir)?)),
    })
}

/// Returns the file of weights that transformers loads from a model directory of this host: `model.safetensors`,
/// `model.safetensors.index.json`, `pytorch_model.bin` or `pytorch_model.bin.index.json`. `None` for a directory without
/// weights of any format.
///
/// ```
/// use fsdp_ckpt::find_weights;
///
/// let dir = tempfile::tempdir()?;
/// std::fs::write(dir.path().join("config.json"), "{}")?;
/// assert_eq!(find_weights(dir.path())?, None);
/// std::fs::write(dir.path().join("model.fp16.safetensors"), "")?;
/// assert!(find_weights(dir.path()).unwrap_err().to_string().contains("model.fp16.safetensors"));
/// std::fs::write(dir.path().join("model.safetensors"), "")?;
/// assert_eq!(find_weights(dir.path())?, Some(dir.path().join("model.safetensors")));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Malformed`] for weights that are not read: of another format or name, unfinished downloads, links to missing
/// files; [`Error::Io`].
pub fn find_weights(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    let dir = dir.as_ref();
    let dir = require_local(dir, "a model directory")?;
    let unread = |path: PathBuf, reason: String| Err(Error::Malformed { path, item: None, reason });
    let adapters = dir.join("adapter_config.json");
    if adapters.exists() {
        let reason = "transformers adds these adapters to a model: merge them into it, or remove the file";
        return unread(adapters, reason.into());
    }
    if let Some(name) = named_weights(dir)? {
        let reason = format!("its transformers_weights names {name}, and only {} are read", FILES.join(", "));
        return unread(dir.join("config.json"), reason);
    }
    for path in FILES.map(|name| dir.join(name)) {
        match std::fs::metadata(&path) {
            Ok(status) if status.is_file() => return Ok(Some(path)),
            Ok(_) => return unread(path, "it is not a file, expected the model's weights".into()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if path.symlink_metadata().is_ok() {
                    return unread(path.clone(), broken_link(&path));
                }
            }
            Err(error) => return Err(io_error("open", &path)(error)),
        }
    }
    let expected = format!("{} has none of {}", dir.display(), FILES.join(", "));
    for name in names(dir)? {
        if let Some(what) = weights(&dir.join(&name), &name) {
            return unread(dir.join(&name), format!("{what}. {expected}"));
        }
    }
    let is_snapshot = dir.parent().is_some_and(|parent| parent.ends_with("snapshots"));
    let blobs = is_snapshot.then(|| dir.join("../../blobs"));
    for from in std::iter::once(dir.join(DOWNLOADS)).chain(blobs).filter(|from| from.is_dir()) {
        if let Some(name) = names(&from)?.into_iter().find(|name| name.ends_with(UNFINISHED[0])) {
            return unread(from.join(name), format!("it is an unfinished download: download it again. {expected}"));
        }
    }
    Ok(None)
}

/// Returns the sorted names in a directory.
fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(dir).map_err(io_error("list", dir))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(io_error("list", dir))?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// Returns the value of `transformers_weights` in `config.json`, by which a model names its file of weights.
fn named_weights(dir: &Path) -> Result<Option<String>> {
    let text = location(dir)?.store()?.read("config.json", MAX_CONFIG)?;
    let config: Option<Value> = text.and_then(|text| serde_json::from_slice(&text).ok());
    Ok(config.and_then(|config| Some(config.get("transformers_weights")?.as_str()?.to_string())))
}

/// Describes a file that holds weights, and the way to use them; `None` for other files.
fn weights(path: &Path, name: &str) -> Option<String> {
    let lower = name.to_ascii_lowercase();
    if SETTINGS.contains(&name) {
        return None;
    }
    let what = if name == "optimizer.pt" {
        "it is the state of an optimizer, and the model's weights are missing: copy them to the directory".into()
    } else if lower.starts_with("adapter_") {
        "it belongs to adapters of PEFT, not to a whole model: use the model that they were trained on".into()
    } else if ends(&lower, &UNFINISHED) {
        "it is an unfinished download: download it again".into()
    } else {
        match (Format::of(path, name)?, Shard::of(name)) {
            (Format::Other, _) => {
                "it holds weights in a format that is not read: load it with transformers, and save it \
                                   by save_pretrained, which writes model.safetensors"
                    .into()
            }
            (Format::State, _) => {
                "it is a training state: convert it to a Hugging Face model with fsdp-ckpt convert".into()
            }
            (Format::Safetensors, Some(_)) => format!("it is one file of several, whose index is missing: add {INDEX}"),
            (Format::Torch, Some(_)) => format!("it is one file of several, whose index is missing: add {BIN_INDEX}"),
            (format, None) => format!(
                "it holds weights under a name that transformers does not load; if they are this model's weights, \
                 rename it to {}",
                if format == Format::Torch { BIN } else { SINGLE }
            ),
        }
    };
    Some(match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => broken_link(path),
        Err(error) => error.to_string(),
        Ok(_) => what,
    })
}

fn ends(name: &str, ends: &[&str]) -> bool {
    ends.iter().any(|end| name.ends_with(end))
}

/// Format of a file that holds weights, maybe under another name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Safetensors,
    Torch,
    State,
    Other,
}

impl Format {
    /// Returns the format by the file's name, or else by its first bytes; `None` if it holds no weights.
    fn of(path: &Path, name: &str) -> Option<Self> {
        let lower = name.to_ascii_lowercase();
        let names_model = ["model", "weights", "consolidated"].iter().any(|part| lower.contains(part));
        let is_array = ends(&lower, &[".npz", ".npy"]) && names_model;
        if lower.contains(".safetensor") {
            Some(Format::Safetensors)
        } else if ends(&lower, &OTHER_FORMATS) || is_array || lower.contains(".ckpt.data-") {
            Some(Format::Other)
        } else if ends(&lower, &STATES) || lower == ".metadata" {
            Some(Format::State)
        } else if lower.contains(".bin") && names_model {
            Some(Format::Torch)
        } else {
            Self::of_contents(path)
        }
    }

    fn of_contents(path: &Path) -> Option<Self> {
        let mut start = Vec::new();
        // To open a pipe would block.
        let status = path.metadata().ok().filter(|status| status.is_file())?;
        File::open(path).and_then(|file| file.take(128).read_to_end(&mut start)).ok()?;
        let header = u64::from_le_bytes(*start.first_chunk()?);
        let is_archive = start.starts_with(b"PK\x03\x04") && start.windows(9).any(|part| part == b"/data.pkl");
        if header < status.len() && start.get(8) == Some(&b'{') {
            Some(Format::Safetensors)
        } else if is_archive || start.starts_with(LEGACY) {
            Some(Format::Torch)
        } else {
            start.starts_with(b"GGUF").then_some(Format::Other)
        }
    }
}
