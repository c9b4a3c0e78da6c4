//! The error type of this crate.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt::{Display, Formatter};
use std::io;
use std::path::{Path, PathBuf};

use fsdp_core::file_limit;

use crate::escape::escape;
use crate::file_names::{MANIFEST, copy_command, rank_of_file};

/// A part of a training state that may be its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPart {
    /// The keys that lead to it, joined by dots. [`ROOT`](crate::ROOT) for tensors outside of dicts.
    pub name: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub bytes: u64,
}

/// Errors of this crate. Each message names the file, tensor or rank, and how to fix the problem where there is a way.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A file system operation failed.
    Io {
        /// Operation: "open", "write", ...
        action: &'static str,
        /// File or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A request to an object store failed.
    Object {
        /// Operation: "read", "write", "list", ...
        action: &'static str,
        /// URL of the object or prefix.
        path: PathBuf,
        /// Cause and fix.
        reason: String,
        /// Error of the store's client.
        source: Option<Box<dyn StdError + Send + Sync>>,
    },
    /// An expected file or directory is missing.
    NotFound {
        /// Directory that was searched.
        path: PathBuf,
        /// Missing item.
        looked_for: String,
    },
    /// A safetensors file is truncated or malformed.
    NotSafetensors {
        /// File.
        path: PathBuf,
        /// Found and expected content.
        reason: String,
    },
    /// A file of PyTorch, or the index of a Hugging Face model, is malformed or unsupported.
    Malformed {
        /// File.
        path: PathBuf,
        /// Tensor or value with the problem, if there is one.
        item: Option<String>,
        /// Found and expected content.
        reason: String,
    },
    /// Several parts of a training state may be its model, or none is called as the caller says.
    Parts {
        /// File or checkpoint.
        path: PathBuf,
        /// Name that the caller gave.
        wanted: Option<String>,
        /// The parts that may be the model.
        parts: Vec<ModelPart>,
    },
    /// A manifest is malformed.
    Manifest {
        /// Manifest file.
        path: PathBuf,
        /// Tensor with the problem, if there is one.
        tensor: Option<String>,
        /// Found and expected content.
        reason: String,
    },
    /// A file is larger than its format allows.
    TooLarge {
        /// File.
        path: PathBuf,
        /// Size of the file.
        bytes: u64,
        /// Largest allowed size.
        most: u64,
    },
    /// A checkpoint was written by a newer version of this crate.
    UnsupportedVersion {
        /// Manifest file.
        path: PathBuf,
        /// Version of the manifest.
        version: u64,
        /// Newest supported version.
        known: u64,
    },
    /// A directory has no manifest.
    Incomplete {
        /// Directory.
        path: PathBuf,
    },
    /// A directory is one host's part of a checkpoint, without the files of other hosts.
    MissingParts {
        /// Directory.
        path: PathBuf,
        /// Missing files, each with the host that wrote it.
        files: BTreeMap<String, String>,
    },
    /// The hosts' directories of one name do not form a checkpoint.
    InconsistentParts {
        /// Name of the directories.
        path: PathBuf,
        /// Problem and fix, with the hosts' names.
        reason: String,
        /// Whether the checkpoint is damaged or unfinished. False where missing files may exist on another host.
        damaged: bool,
    },
    /// Bytes on disk differ from the bytes that were written.
    Checksum {
        /// File.
        path: PathBuf,
        /// Tensor; `None` for the file's header.
        tensor: Option<String>,
        /// Recorded checksum: CRC-32C in our manifest, CRC-32 in PyTorch's files.
        expected: u32,
        /// Checksum of the bytes on disk.
        found: u32,
    },
    /// A tensor does not exist.
    MissingTensor {
        /// File or directory.
        path: PathBuf,
        /// Requested name.
        tensor: String,
        /// Suggestion of similar names; may be empty.
        hint: String,
    },
    /// Tensors have dtypes that this crate does not read.
    UnsupportedDTypes {
        /// File or directory.
        path: PathBuf,
        /// Dtype of each such tensor, by name.
        tensors: BTreeMap<String, String>,
    },
    /// The names of a source differ from the names to load.
    NameMismatch {
        /// Checkpoint or model.
        path: PathBuf,
        /// Names that the source lacks.
        missing: Vec<String>,
        /// Names that the source should not have.
        unexpected: Vec<String>,
    },
    /// The shape or dtype of a tensor differs from the memory to load it into.
    TensorMismatch {
        /// Checkpoint or model.
        path: PathBuf,
        /// Tensor.
        tensor: String,
        /// Found and expected shape or dtype.
        reason: String,
    },
    /// A read asks for a region that the tensor does not have, or passes a buffer of another size.
    InvalidRead {
        /// Tensor.
        tensor: String,
        /// Requested and expected region or size.
        reason: String,
    },
    /// The ranks' shards do not form whole tensors.
    InvalidShards {
        /// Tensor.
        tensor: String,
        /// Problem, with the ranks' numbers.
        reason: String,
    },
    /// The memory of a shard can't be read or written.
    ShardMemory {
        /// Tensor.
        tensor: String,
        /// Cause.
        reason: String,
    },
    /// The target of a save exists.
    AlreadyExists {
        /// Target.
        path: PathBuf,
    },
    /// An argument is invalid.
    Argument(String),
    /// A rank failed. Every rank of the group gets this error.
    Rank {
        /// Rank that failed.
        rank: usize,
        /// Phase in which it failed.
        phase: &'static str,
        /// Its error with all causes, as text.
        cause: String,
        /// Its error; `None` on the other ranks.
        error: Option<Box<Error>>,
    },
    /// A collective of a save failed.
    Save {
        /// Target of the save.
        path: PathBuf,
        /// Cause.
        source: Box<fsdp_core::Error>,
    },
    /// A collective of [`open_for`](crate::open_for) failed.
    Open {
        /// The checkpoint or model.
        path: PathBuf,
        /// Cause.
        source: Box<fsdp_core::Error>,
    },
    /// An asynchronous save failed.
    AsyncSave {
        /// Target of the save.
        path: PathBuf,
        /// Cause.
        source: Box<Error>,
    },
    /// An asynchronous save is still running.
    Busy {
        /// Target of the save.
        path: PathBuf,
        /// First rank that has not finished.
        rank: usize,
    },
    /// A collective failed.
    Group(fsdp_core::Error),
}

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns the message with all causes, in one line.
    pub fn with_causes(&self) -> String {
        chain(self)
    }

    /// Returns whether a checkpoint was changed after it was written: changed bytes, or missing or truncated files.
    ///
    /// Refusals of the system or a store, newer versions, and checkpoints of another model are not damage.
    pub fn is_damage(&self) -> bool {
        match self {
            Error::NotFound { .. }
            | Error::NotSafetensors { .. }
            | Error::TooLarge { .. }
            | Error::Manifest { .. }
            | Error::Incomplete { .. }
            | Error::Checksum { .. }
            | Error::InconsistentParts { damaged: true, .. } => true,
            // A file that was removed or truncated after its checkpoint was opened.
            Error::Io { action: "open" | "read", source, .. } => {
                matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
            }
            _ => false,
        }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Group(error) => error.fmt(f),
            Error::Save { path, source } => write!(f, "the save of {} failed: {source}", escape(path.display())),
            Error::Open { path, source } => write!(f, "opening {} failed: {source}", escape(path.display())),
            // Paths, names and reasons hold text from files.
            _ => escape(Message(self)).fmt(f),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            Error::Object { source: Some(source), .. } => Some(&**source),
            Error::Save { source, .. } | Error::Open { source, .. } => source.source(),
            Error::AsyncSave { source, .. } => Some(&**source),
            Error::Group(error) => error.source(),
            _ => None,
        }
    }
}

impl From<fsdp_core::Error> for Error {
    fn from(error: fsdp_core::Error) -> Self {
        Error::Group(error)
    }
}

/// An error's message before it is escaped.
struct Message<'a>(&'a Error);

impl Display for Message<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let item = |what: &str, name: &Option<String>| {
            name.as_ref().map_or(String::new(), |name| format!("{what}\"{name}\": "))
        };
        match self.0 {
            Error::Io { action, path, .. } => write!(f, "can't {action} {}", path.display()),
            Error::Object { action, path, reason, .. } => write!(f, "can't {action} {}: {reason}", path.display()),
            Error::NotFound { path, looked_for } => write!(f, "{} has no {looked_for}", path.display()),
            Error::NotSafetensors { path, reason } => {
                write!(f, "{} is not a valid safetensors file: {reason}", path.display())
            }
            Error::Malformed { path, item: name, reason } => {
                write!(f, "{}: {}{reason}", path.display(), item("", name))
            }
            Error::Parts { path, wanted, parts } => {
                let part =
                    |part: &ModelPart| format!("`{}` ({} tensors, {} bytes)", part.name, part.tensors, part.bytes);
                let parts = parts.iter().map(part).collect::<Vec<_>>().join(", ");
                match wanted {
                    Some(wanted) if parts.is_empty() => {
                        write!(f, "{} has no model {wanted:?}: no part of it has matrices", path.display())
                    }
                    Some(wanted) => write!(f, "{} has no model {wanted:?}: its parts are {parts}", path.display()),
                    None => {
                        write!(f, "{}: several parts may be the model: {parts}", path.display())
                    }
                }
            }
            Error::Manifest { path, tensor, reason } => {
                write!(f, "{}: {}{reason}", path.display(), item("tensor ", tensor))
            }
            Error::TooLarge { path, bytes, most } => {
                write!(f, "{} has {bytes} bytes, expected at most {most}", path.display())
            }
            Error::UnsupportedVersion { path, version, known } => write!(
                f,
                "{} has format version {version}, expected at most {known}; use a newer fsdp-ckpt",
                path.display()
            ),
            Error::Incomplete { path } => {
                let manifest = path.join(MANIFEST);
                write!(f, "incomplete checkpoint: {} is missing; use another step", manifest.display())
            }
            Error::MissingParts { path, files } => {
                let host = files.values().next().map_or("HOST", String::as_str);
                let (files, copy) = (describe_missing(files), copy_command(host, path));
                write!(f, "{} is one host's part of a checkpoint: it lacks {files}; ", path.display())?;
                write!(f, "copy this directory from all hosts into one: `{copy}`")
            }
            Error::InconsistentParts { path, reason, .. } => {
                write!(f, "the hosts' directories {} do not form a checkpoint: {reason}", path.display())
            }
            Error::Checksum { path, tensor, expected, found } => {
                match tensor {
                    Some(tensor) => write!(f, "tensor \"{tensor}\" in {} is damaged: ", path.display())?,
                    None => write!(f, "the header of {} is damaged: ", path.display())?,
                }
                write!(f, "checksum {found:08x}, expected {expected:08x}; use another checkpoint")
            }
            Error::MissingTensor { path, tensor, hint } => {
                write!(f, "{} has no tensor \"{tensor}\"{hint}", path.display())
            }
            Error::UnsupportedDTypes { path, tensors } => {
                let listed = join(tensors.iter().map(|(name, dtype)| format!("\"{name}\" ({dtype})")), 20);
                let supported = "expected U8, U32, I64, BF16, F16, F32 or F64";
                write!(f, "{} has unsupported dtypes: {listed}; {supported}", path.display())
            }
            Error::NameMismatch { path, missing, unexpected } => {
                let few = |names: &[String]| join(names.iter().map(|name| format!("\"{name}\"")), 5);
                let parts = [("lacks", missing), ("has unexpected", unexpected)];
                let parts = parts.iter().filter(|(_, names)| !names.is_empty());
                let parts: Vec<_> = parts.map(|(what, names)| format!("it {what} {}", few(names))).collect();
                write!(f, "the names in {} do not match: {}", path.display(), parts.join("; "))
            }
            Error::TensorMismatch { path, tensor, reason } => write!(
                f,
                "tensor \"{tensor}\" in {} has {reason}; load it into the model that was saved",
                path.display()
            ),
            Error::InvalidRead { tensor, reason } | Error::InvalidShards { tensor, reason } => {
                write!(f, "tensor \"{tensor}\": {reason}")
            }
            Error::ShardMemory { tensor, reason } => write!(f, "can't access tensor \"{tensor}\": {reason}"),
            Error::AlreadyExists { path } => {
                write!(f, "{} exists already; choose another name or remove it", path.display())
            }
            Error::Argument(text) => f.write_str(text),
            Error::Rank { rank, phase, cause, .. } => write!(f, "rank {rank} failed to {phase}: {cause}"),
            Error::AsyncSave { path, .. } => write!(f, "the asynchronous save of {} failed", path.display()),
            Error::Busy { path, rank } => write!(
                f,
                "the asynchronous save of {} is still running on rank {rank}; wait for it or try again later",
                path.display()
            ),
            Error::Save { source, .. } | Error::Open { source, .. } => source.fmt(f),
            Error::Group(error) => error.fmt(f),
        }
    }
}

/// Converts an [`io::Error`] to [`Error::Io`], for `map_err`.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { action, path: path.to_path_buf(), source: file_limit::explained(source) }
}

/// Returns the messages of an error and its causes in one line.
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(&format!(": {}", escape(cause)));
        next = cause.source();
    }
    text
}

/// Describes missing files by the host and ranks that wrote them.
pub(crate) fn describe_missing(files: &BTreeMap<String, String>) -> String {
    let mut hosts = BTreeMap::<&str, Vec<&String>>::new();
    for (file, host) in files {
        hosts.entry(host).or_default().push(file);
    }
    let listed = hosts.into_iter().map(|(host, files)| {
        let ranks: Vec<_> = files.iter().filter_map(|file| Some(rank_of_file(file)?.to_string())).collect();
        let s = if files.len() > 1 { "s" } else { "" };
        let files = join(files.iter().map(|file| (*file).clone()), 20);
        format!("the file{s} of rank{s} {} from {host} ({files})", join(ranks.into_iter(), 20))
    });
    listed.collect::<Vec<_>>().join(" and ")
}

/// Joins the first `most` items, and counts the rest.
fn join(items: impl ExactSizeIterator<Item = String>, most: usize) -> String {
    let more = items.len().saturating_sub(most);
    let listed = items.take(most).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}

/// Returns "; did you mean ...?" for a name that is not among `names`.
pub(crate) fn did_you_mean<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    // A missing or extra prefix ("model.", "transformer.") is the most common mistake.
    let extends = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|prefix| prefix.ends_with('.'));
    let near: Vec<&str> = names
        .filter(|have| !have.is_empty() && !name.is_empty() && (extends(have, name) || extends(name, have)))
        .take(3)
        .collect();
    if near.is_empty() { String::new() } else { format!("; did you mean {near:?}?") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_escaped() {
        let text = || "a\u{1b}[2J\nb".to_string();
        let (path, tensor, reason) = (|| PathBuf::from(text()), text, text);
        let io = || io::Error::other(text());
        let errors = [
            Error::Io { action: "open", path: path(), source: io() },
            Error::Object { action: "read", path: path(), reason: reason(), source: Some(Box::new(io())) },
            Error::NotFound { path: path(), looked_for: text() },
            Error::Malformed { path: path(), item: Some(text()), reason: reason() },
            Error::Manifest { path: path(), tensor: Some(tensor()), reason: reason() },
            Error::MissingParts { path: path(), files: [(text(), text())].into() },
            Error::Checksum { path: path(), tensor: Some(tensor()), expected: 1, found: 2 },
            Error::UnsupportedDTypes { path: path(), tensors: [(text(), text())].into() },
            Error::NameMismatch { path: path(), missing: vec![text()], unexpected: vec![text()] },
            Error::Argument(text()),
            Error::Rank { rank: 0, phase: "test", cause: text(), error: None },
            Error::AsyncSave { path: path(), source: Box::new(Error::Argument(text())) },
        ];
        for error in errors {
            let messages = [error.to_string(), error.with_causes()];
            assert!(!messages.iter().any(|message| message.contains(char::is_control)), "{messages:?}");
        }
    }
}
