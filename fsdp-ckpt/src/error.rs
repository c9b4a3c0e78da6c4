//! What can go wrong with checkpoints.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::escape::shown;
use crate::file_names::{MANIFEST, copying, rank_of};

/// The errors of this crate. Each names the file, tensor or rank at fault and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("can't {action} {}", shown(path.display()))]
    Io {
        /// What was tried: "open", "write", ...
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// An object store did not do what it was asked for.
    #[error("can't {action} {}: {}", shown(path.display()), shown(reason))]
    Object {
        /// What was tried: "read", "write", "list", ...
        action: &'static str,
        /// The URL of the object or prefix.
        path: PathBuf,
        /// What went wrong, and what to do.
        reason: String,
        /// The store's own words.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A file or directory that should be there is not.
    #[error("{} holds no {}", shown(path.display()), shown(looked_for))]
    NotFound {
        /// Where it was looked for.
        path: PathBuf,
        /// What was looked for.
        looked_for: String,
    },
    /// A file that is not what a safetensors file should be.
    #[error("{} is not a whole safetensors file: {}", shown(path.display()), shown(reason))]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of PyTorch's that can't be used.
    #[error("{}: {}{}", shown(path.display()), named("", item.as_ref()), shown(reason))]
    NotTorch {
        /// The file.
        path: PathBuf,
        /// The tensor or value it is about, if one.
        item: Option<String>,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that is too large for what it should be.
    #[error("{} has {bytes} bytes; what it should be has {most} at most", shown(path.display()))]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// A tensor that is not there.
    #[error("{} has no tensor \"{}\"{}", shown(path.display()), shown(tensor), shown(hint))]
    MissingTensor {
        /// The file or directory.
        path: PathBuf,
        /// The name that was asked for.
        tensor: String,
        /// Names that are there and look alike, in words; may be empty.
        hint: String,
    },
    /// A tensor of a dtype that this crate does not read.
    #[error(
        "tensor \"{}\" in {} has dtype {}; supported are U8, U32, I64, BF16, F16, F32 and F64",
        shown(tensor),
        shown(path.display()),
        shown(dtype)
    )]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype's name.
        dtype: String,
    },
    /// Names that don't match as they should.
    #[error("{} does not hold what is to be loaded: {}", shown(path.display()), shown(mismatch(missing, unexpected)))]
    Names {
        /// The checkpoint or model.
        path: PathBuf,
        /// Names that it lacks.
        missing: Vec<String>,
        /// Names that it should not have.
        unexpected: Vec<String>,
    },
    /// A tensor that can't go where it should.
    #[error(
        "{} holds tensor \"{}\" with {}; load it into the model that was saved",
        shown(path.display()),
        shown(tensor),
        shown(reason)
    )]
    Misfit {
        /// The checkpoint or model.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What it is and what was expected.
        reason: String,
    },
    /// Tensors of dtypes that this crate does not read, where all are needed.
    #[error(
        "{} has {} tensors of dtypes that can't be read: {}; they can be left out (--skip-unreadable)",
        shown(path.display()),
        tensors.len(),
        shown(some(tensors.iter().map(|(name, dtype)| format!("\"{name}\" ({dtype})"))))
    )]
    Dtypes {
        /// The file or directory.
        path: PathBuf,
        /// Their names and dtypes.
        tensors: BTreeMap<String, String>,
    },
    /// A request for a part of a tensor that can't be.
    #[error("tensor \"{}\": {}", shown(tensor), shown(reason))]
    Request {
        /// The tensor.
        tensor: String,
        /// What was asked and what was expected.
        reason: String,
    },
    /// The index of a Hugging Face model that can't be used.
    #[error("{}: {}", shown(path.display()), shown(reason))]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A manifest that can't be used.
    #[error("{}: {}{}", shown(path.display()), named("tensor ", tensor.as_ref()), shown(reason))]
    Manifest {
        /// The manifest file.
        path: PathBuf,
        /// The tensor it is about, if one.
        tensor: Option<String>,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint written by a newer version of this crate.
    #[error(
        "{} has format version {version}, this program reads versions up to {known}; use a newer fsdp-ckpt",
        shown(path.display())
    )]
    Newer {
        /// The manifest file.
        path: PathBuf,
        /// Its version.
        version: u64,
        /// The newest version known here.
        known: u64,
    },
    /// A directory without a manifest.
    #[error(
        "incomplete checkpoint: {} is missing, the save did not finish; use another step",
        shown(path.join(MANIFEST).display())
    )]
    Incomplete {
        /// The directory.
        path: PathBuf,
    },
    /// A part of a checkpoint that hosts saved in directories of their own: files are missing that others wrote.
    #[error(
        "{0} is a part of a checkpoint: it lacks {1}; copy the directories of this name from all hosts into one, in \
            any order, as `{2}` does",
        shown(path.display()),
        shown(lacking(files)),
        shown(copying(files.values().next().map_or("HOST", String::as_str), path))
    )]
    Elsewhere {
        /// The part.
        path: PathBuf,
        /// The files that are not here, each with the host that wrote it.
        files: BTreeMap<String, String>,
    },
    /// What the hosts' directories of one name hold makes no checkpoint together.
    #[error("the hosts' directories {} make no checkpoint together: {}", shown(path.display()), shown(reason))]
    Apart {
        /// The name that the directories have on every host.
        path: PathBuf,
        /// What is wrong, naming hosts, and what to do.
        reason: String,
        /// Whether it is damaged, or not finished: not where what is missing may be elsewhere.
        damaged: bool,
    },
    /// The target of a save is there already.
    #[error("{} exists already; choose another name or remove it", shown(path.display()))]
    Exists {
        /// The target.
        path: PathBuf,
    },
    /// Bytes on disk that are not those that were written.
    #[error(
        "tensor \"{}\" in {} is damaged: its checksum is {found:08x}, {expected:08x} was written; use another \
            checkpoint",
        shown(tensor),
        shown(path.display())
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The checksum that was kept: a CRC-32C in our manifest, a CRC-32 in PyTorch's files.
        expected: u32,
        /// That of the bytes that were read.
        found: u32,
    },
    /// The header of a file that is not the one that was written.
    #[error(
        "{}: its header is damaged: its checksum is {found:08x}, {expected:08x} was written; use another checkpoint",
        shown(path.display())
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// The CRC-32C that the manifest keeps.
        expected: u32,
        /// That of the header that was read.
        found: u32,
    },
    /// The ranks' shards don't make whole tensors.
    #[error("tensor \"{}\": {}", shown(tensor), shown(reason))]
    Shards {
        /// The tensor.
        tensor: String,
        /// What is wrong, naming ranks.
        reason: String,
    },
    /// A shard's memory could not be read.
    #[error("tensor \"{}\" can't be read: {}", shown(tensor), shown(reason))]
    Unreadable {
        /// The tensor.
        tensor: String,
        /// The cause.
        reason: String,
    },
    /// Arguments that can't be.
    #[error("{}", shown(_0))]
    Argument(String),
    /// A rank failed; every rank of the group gets this.
    #[error("rank {rank} failed to {phase}: {}", shown(cause))]
    Rank {
        /// The rank that failed.
        rank: usize,
        /// What it was doing.
        phase: &'static str,
        /// Its error with all causes, in words.
        cause: String,
        /// Its error, on the rank that failed.
        error: Option<Box<Error>>,
    },
    /// A save in the background failed.
    #[error("the asynchronous save of {} failed", shown(path.display()))]
    AsyncSave {
        /// The checkpoint that it was to become.
        path: PathBuf,
        /// The cause.
        source: Box<Error>,
    },
    /// A save in the background is still running.
    #[error(
        "the asynchronous save of {} is still running on rank {rank}; try again later, or wait for it",
        shown(path.display())
    )]
    Busy {
        /// The checkpoint that it is to become.
        path: PathBuf,
        /// The first rank that is not done.
        rank: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Group(#[from] fsdp_core::Error),
}

impl Error {
    /// It and its causes in one line.
    pub fn with_causes(&self) -> String {
        chain(self)
    }

    /// Whether it says that a checkpoint is not as it was written: bytes that changed, files that are missing or too
    /// short. It is not damage when the system or a store refuses something, when a checkpoint is of a newer version,
    /// or when it is another model's.
    pub fn is_damage(&self) -> bool {
        match self {
            Error::NotFound { .. }
            | Error::NotSafetensors { .. }
            | Error::TooLarge { .. }
            | Error::Manifest { .. }
            | Error::Incomplete { .. }
            | Error::Checksum { .. }
            | Error::Header { .. }
            | Error::Apart { damaged: true, .. } => true,
            // A file that went, or became shorter, after its checkpoint was opened.
            Error::Io { action: "open" | "read", source, .. } => {
                matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
            }
            _ => false,
        }
    }
}

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Turns an [`io::Error`] into [`Error::Io`], for `map_err`.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { action, path: path.to_path_buf(), source }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(&format!(": {}", shown(cause)));
        next = cause.source();
    }
    text
}

/// Files that are missing, by the hosts that wrote them, with their ranks.
pub(crate) fn lacking(files: &BTreeMap<String, String>) -> String {
    let mut hosts = BTreeMap::<&str, Vec<&str>>::new();
    for (file, host) in files {
        hosts.entry(host).or_default().push(file);
    }
    let listed = hosts.into_iter().map(|(host, files)| {
        let ranks: Vec<_> = files.iter().filter_map(|file| Some(rank_of(file)?.to_string())).collect();
        let s = if files.len() > 1 { "s" } else { "" };
        let files = some(files.iter().map(|file| (*file).to_string()));
        format!("the file{s} of rank{s} {}, which {host} wrote ({files})", some(ranks.into_iter()))
    });
    listed.collect::<Vec<_>>().join(" and ")
}

/// What a message is about, in front of it.
fn named(what: &str, name: Option<&String>) -> String {
    name.map(|name| format!("{what}\"{}\": ", shown(name))).unwrap_or_default()
}

/// Names that are missing and that nobody knows, a few of each.
fn mismatch(missing: &[String], unexpected: &[String]) -> String {
    let few = |names: &[String], what: &str| {
        let shown: Vec<String> = names.iter().take(5).map(|name| format!("\"{name}\"")).collect();
        let more =
            if names.len() > shown.len() { format!(" and {} more", names.len() - shown.len()) } else { String::new() };
        (!names.is_empty()).then(|| format!("it {what} {}{more}", shown.join(", ")))
    };
    let parts = [few(missing, "lacks"), few(unexpected, "has unexpected")];
    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// The first of a list, and how many more there are.
fn some(items: impl ExactSizeIterator<Item = String>) -> String {
    const MOST: usize = 20;
    let more = items.len().saturating_sub(MOST);
    let listed = items.take(MOST).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}

/// "; did you mean ...?" for a name that is not among `names`.
pub(crate) fn did_you_mean<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    // A prefix more or less ("model.", "transformer.") is by far the commonest slip.
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
    fn no_error_says_anything_that_steers_a_terminal() {
        let text = || "a\u{1b}[2J\nb".to_string();
        let (path, tensor, reason) = (|| PathBuf::from(text()), text, text);
        let io = || io::Error::other(text());
        let errors = [
            Error::Io { action: "open", path: path(), source: io() },
            Error::Object { action: "read", path: path(), reason: reason(), source: Some(Box::new(io())) },
            Error::NotFound { path: path(), looked_for: text() },
            Error::NotSafetensors { path: path(), reason: reason() },
            Error::NotTorch { path: path(), item: Some(text()), reason: reason() },
            Error::TooLarge { path: path(), bytes: 2, most: 1 },
            Error::MissingTensor { path: path(), tensor: tensor(), hint: text() },
            Error::DType { path: path(), tensor: tensor(), dtype: text() },
            Error::Names { path: path(), missing: vec![text()], unexpected: vec![text()] },
            Error::Misfit { path: path(), tensor: tensor(), reason: reason() },
            Error::Dtypes { path: path(), tensors: [(text(), text())].into() },
            Error::Request { tensor: tensor(), reason: reason() },
            Error::Index { path: path(), reason: reason() },
            Error::Manifest { path: path(), tensor: Some(tensor()), reason: reason() },
            Error::Newer { path: path(), version: 2, known: 1 },
            Error::Incomplete { path: path() },
            Error::Elsewhere { path: path(), files: [(text(), text())].into() },
            Error::Apart { path: path(), reason: reason(), damaged: true },
            Error::Exists { path: path() },
            Error::Checksum { path: path(), tensor: tensor(), expected: 1, found: 2 },
            Error::Header { path: path(), expected: 1, found: 2 },
            Error::Shards { tensor: tensor(), reason: reason() },
            Error::Unreadable { tensor: tensor(), reason: reason() },
            Error::Argument(text()),
            Error::Rank { rank: 0, phase: "test", cause: text(), error: None },
            Error::AsyncSave { path: path(), source: Box::new(Error::Argument(text())) },
            Error::Busy { path: path(), rank: 0 },
        ];
        for error in errors {
            let said = [error.to_string(), error.with_causes()];
            assert!(!said.iter().any(|said| said.contains(char::is_control)), "{said:?}");
        }
    }
}
