//! Storage of files: directories of this host ([`local`]) and prefixes of object stores (`object`).
//!
//! Formats use [`Store`] to list, read and write the files of a directory by name, and [`Staging`] to create a
//! directory that appears when it is complete. `s3://bucket/path` and similar URLs are object stores; `file:///path`
//! and all other paths are directories of this host. URLs are not percent-decoded.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::io_error;
use crate::placeholder::{Placeholder, START};
use crate::region::CopyRun;
use crate::{Error, Result};

mod local;
#[cfg(feature = "object-store")]
mod object;
mod staging;

#[cfg(test)]
pub(crate) use local::LocalFile;
use staging::LocalPath;
pub(crate) use staging::{LocalStaging, remove_stale};

/// Targets of the traces of files that are opened or created, and of files whose sizes are looked up.
pub(crate) const OPENED: &str = "fsdp_ckpt::opened";
pub(crate) const LOOKED_UP: &str = "fsdp_ckpt::looked_up";

/// Returns the location of a path in its store.
pub(crate) fn location(path: &Path) -> Result<Box<dyn Location + '_>> {
    match PathKind::of(path)? {
        PathKind::Local(path) => Ok(Box::new(LocalPath(path))),
        #[cfg(feature = "object-store")]
        PathKind::Object(url) => Ok(Box::new(object::ObjectPath(url))),
        #[cfg(not(feature = "object-store"))]
        PathKind::Object(url) => Err(Error::Argument(format!(
            "{url} is in an object store, but this program was built without that feature; \
             build it with `--features object-store` of fsdp-ckpt"
        ))),
    }
}

/// Returns the local path; `None` for an object store.
pub(crate) fn as_local(path: &Path) -> Result<Option<&Path>> {
    match PathKind::of(path)? {
        PathKind::Local(path) => Ok(Some(path)),
        PathKind::Object(_) => Ok(None),
    }
}

/// Returns the local path, or an error that `purpose` needs one.
pub(crate) fn require_local<'a>(path: &'a Path, purpose: &str) -> Result<&'a Path> {
    match PathKind::of(path)? {
        PathKind::Local(path) => Ok(path),
        PathKind::Object(url) => Err(Error::Argument(format!("{purpose} needs a directory of this host, not {url}"))),
    }
}

/// Renames a directory to an unused name in the same parent.
pub(crate) fn move_dir(from: &Path, to: &Path) -> Result<MoveOutcome> {
    let (old, new) = (PathKind::of(from)?, PathKind::of(to)?);
    if std::mem::discriminant(&old) != std::mem::discriminant(&new) {
        return Err(Error::Argument(format!("{} and {} are in different stores", from.display(), to.display())));
    }
    location(from)?.move_to(new.path())
}

/// A file that threads may read concurrently at any offset.
pub(crate) trait ReadAt: Debug + Send + Sync {
    /// Returns the path, for messages.
    fn path(&self) -> &Path;

    /// Returns the size.
    fn bytes(&self) -> u64;

    /// Returns efficient sizes of reads.
    fn read_sizes(&self) -> ReadSizes {
        ReadSizes::LOCAL
    }

    /// Fills `into` from offset `at`.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()>;
}

/// Efficient sizes of reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadSizes {
    /// Largest gap between two ranges to read in one piece.
    pub(crate) gap: usize,
    /// Bytes to read at once from several ranges.
    pub(crate) block: usize,
    /// Bytes to read at once from one range.
    pub(crate) piece: usize,
}

impl ReadSizes {
    /// A disk reads whole pages anyway. A piece stays in a core's cache until its checksum is computed.
    const LOCAL: ReadSizes = ReadSizes { gap: 4096, block: 1 << 20, piece: 256 << 10 };
}

/// A new file to append to. Dropping it before [`Append::finish`] leaves it unfinished or removes it.
pub(crate) trait Append: Send {
    /// Appends bytes.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Waits until all bytes are durable.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The files of one directory, by plain name.
pub(crate) trait Store: Debug + Send + Sync {
    /// Returns the directory's path, for messages.
    fn path(&self) -> &Path;

    /// Returns the names of the files, sorted. [`Error::NotFound`] if there is no such directory.
    fn list(&self) -> Result<Vec<String>>;

    /// Returns the names of the directories, sorted. [`Error::NotFound`] if there is no such directory.
    fn dirs(&self) -> Result<Vec<String>>;

    /// Returns the size of a file; `None` if it does not exist.
    fn size(&self, name: &str) -> Result<Option<u64>>;

    /// Returns the target of a symbolic link, canonical if it exists; `None` for other files.
    fn link(&self, _name: &str) -> Option<PathBuf> {
        None
    }

    /// Opens a file.
    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>>;

    /// Returns a name that no other writer uses, for formats with free file names.
    fn unique_name(&self, name: &str) -> String {
        name.to_string()
    }

    /// Creates a file, which must not exist, of `bytes` bytes.
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn Append>>;

    /// Reads a whole file of at most `most` bytes; `None` if it does not exist.
    fn read(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        if self.size(name)?.is_none() {
            return Ok(None);
        }
        let file = self.open(name)?;
        tracing::trace!(target: OPENED, path = %file.path().display());
        let bytes = file.bytes();
        if bytes > most {
            return Err(Error::TooLarge { path: self.path().join(name), bytes, most });
        }
        let mut contents = allocate(file.path(), bytes)?;
        file.read_exact_at(&mut contents, 0)?;
        match Placeholder::of(&contents) {
            None | Some(Placeholder::Empty) => Ok(Some(contents)),
            Some(found) => Err(found_instead(&self.path().join(name), found)),
        }
    }
}

/// Returns what an open file holds instead of its contents; `None` also if it can't be read.
pub(crate) fn placeholder_in(file: &dyn ReadAt) -> Option<Placeholder> {
    let mut start = [0; START];
    let start = &mut start[..file.bytes().min(START as u64) as usize];
    file.read_exact_at(start, 0).ok()?;
    Placeholder::of(start)
}

/// Returns the error for a file that holds something else.
pub(crate) fn found_instead(path: &Path, found: Placeholder) -> Error {
    Error::Malformed { path: path.to_path_buf(), item: None, reason: found.to_string() }
}

/// Allocates memory for a file, or returns an error: the claimed size may be larger than memory.
pub(crate) fn allocate(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let mut contents = Vec::new();
    let reserved = usize::try_from(bytes).is_ok_and(|bytes| contents.try_reserve_exact(bytes).is_ok());
    if !reserved {
        let reason = format!("not enough memory for {bytes} bytes");
        return Err(io_error("read", path)(std::io::Error::new(std::io::ErrorKind::OutOfMemory, reason)));
    }
    contents.resize(bytes as usize, 0);
    Ok(contents)
}

/// A directory in progress. Dropping it before [`Staging::commit`] removes it.
pub(crate) trait Staging: Send {
    /// Returns the name with which any rank calls [`Location::open_staging`].
    fn name(&self) -> String;

    /// Writes the manifest, and then renames the directory to its final name.
    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()>;

    /// Renames a directory that is complete without a manifest.
    fn publish(self: Box<Self>) -> Result<()>;
}

/// Outcome of [`move_dir`].
pub(crate) enum MoveOutcome {
    Moved,
    /// The new name exists.
    TargetExists,
    /// The old name does not exist.
    SourceMissing,
}

/// A path in one kind of store.
pub(crate) trait Location {
    /// Returns the store of the directory's files.
    fn store(&self) -> Result<Arc<dyn Store>>;

    /// Returns whether the path is a file.
    fn is_file(&self) -> Result<bool>;

    /// Opens the file.
    fn open(&self) -> Result<Box<dyn ReadAt>>;

    /// Creates a staging directory for the path, which must not exist. Removes what killed writers of the same path
    /// left, if that is safe.
    fn stage(&self) -> Result<Box<dyn Staging>>;

    /// Opens the staging directory of another rank by its name.
    fn open_staging(&self, name: &str) -> Result<Arc<dyn Store>>;

    /// Renames the directory to an unused name in the same parent.
    fn move_to(&self, to: &Path) -> Result<MoveOutcome>;

    /// Removes a checkpoint's directory so that it never looks like an unfinished one. Returns false if another process
    /// uses it.
    fn remove_dir(&self) -> Result<bool>;
}

/// A path by its kind of store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PathKind<'a> {
    Local(&'a Path),
    Object(&'a str),
}

impl<'a> PathKind<'a> {
    /// Classifies a path by its scheme, without I/O.
    pub(crate) fn of(path: &'a Path) -> Result<Self> {
        let Some((scheme, rest)) = path.to_str().and_then(|text| text.split_once("://")) else {
            return Ok(PathKind::Local(path));
        };
        let url = path.display();
        match scheme {
            "file" if rest.starts_with('/') => Ok(PathKind::Local(Path::new(rest))),
            "file" => Err(Error::Argument(format!("{url} is not on this host; expected file:///path"))),
            "s3" | "s3a" | "gs" | "az" | "adl" | "azure" | "abfs" | "abfss" => {
                path.to_str().map(PathKind::Object).ok_or_else(|| Error::Argument(format!("{url} is not text")))
            }
            // Names of directories may hold any text.
            _ if scheme.is_empty() || !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) => {
                Ok(PathKind::Local(path))
            }
            _ => Err(Error::Argument(format!(
                "{url} has an unknown scheme; use a directory, or a URL that begins with s3://, gs://, az:// or file://"
            ))),
        }
    }

    /// Returns the path in its store.
    pub(crate) fn path(self) -> &'a Path {
        match self {
            PathKind::Local(path) => path,
            PathKind::Object(url) => Path::new(url),
        }
    }
}

/// Splits a target into its parent directory and file name.
pub(crate) fn split(target: &Path) -> Result<(PathBuf, String)> {
    let name = target.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(Error::Argument(format!("{:?} does not end in a name", target.display().to_string())));
    };
    let parent = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_string()))
}

/// Bytes to read at once from a local file.
pub(crate) const BLOCK: usize = 1 << 20;
/// Bytes to write at once while also computing a checksum: they stay in a core's cache.
pub(crate) const CACHE_BLOCK: usize = 256 << 10;
/// Most runs in one batch.
const MOST: usize = 1 << 16;

/// Copies runs from a file to `into`. Sources count from offset `start` of the file. Reads neighbouring runs in one
/// batch. Calls `seen` with the bytes in the order of the runs.
pub(crate) fn read_runs(
    file: &dyn ReadAt,
    start: u64,
    runs: impl Iterator<Item = CopyRun>,
    into: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    let ReadSizes { gap, block, .. } = file.read_sizes();
    let mut staging = Vec::new();
    let mut batch: Vec<CopyRun> = Vec::new();
    let mut end = 0;
    for run in runs {
        if let Some(first) = batch.first()
            && (run.src < first.src
                || run.src > end + gap
                || run.src + run.len - first.src > block
                || batch.len() == MOST)
        {
            read_batch(file, start, &batch, end, &mut staging, into, seen)?;
            batch.clear();
        }
        end = if batch.is_empty() { run.src + run.len } else { end.max(run.src + run.len) };
        batch.push(run);
    }
    read_batch(file, start, &batch, end, &mut staging, into, seen)
}

fn read_batch(
    file: &dyn ReadAt,
    start: u64,
    batch: &[CopyRun],
    end: usize,
    staging: &mut Vec<u8>,
    into: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    match batch {
        [] => Ok(()),
        [run] => {
            // A single run may be long, and goes straight to its destination.
            let mut at = start + run.src as u64;
            for block in into[run.dst..run.dst + run.len].chunks_mut(file.read_sizes().piece) {
                file.read_exact_at(block, at)?;
                seen(block);
                at += block.len() as u64;
            }
            Ok(())
        }
        [first, ..] => {
            staging.resize(end - first.src, 0);
            file.read_exact_at(staging, start + first.src as u64)?;
            seen(staging);
            for run in batch {
                let at = run.src - first.src;
                into[run.dst..run.dst + run.len].copy_from_slice(&staging[at..at + run.len]);
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_stores_are_not_local() {
        assert!(
            require_local(Path::new("s3://b/r"), "this").is_err_and(|error| error.to_string().contains("this needs"))
        );
    }

    #[cfg(not(feature = "object-store"))]
    #[test]
    fn names_the_missing_feature() {
        let path = Path::new("s3://bucket/step-1");
        assert!(location(path).err().is_some_and(|error| error.to_string().contains("--features object-store")));
    }

    #[test]
    fn classifies_paths_by_scheme() {
        let local = |path: &str| match PathKind::of(Path::new(path)) {
            Ok(PathKind::Local(local)) => local.to_str().map(str::to_string),
            Ok(PathKind::Object(_)) | Err(_) => None,
        };
        for path in ["runs/step-1", "/runs", "a b://c", "://"] {
            assert_eq!(local(path).as_deref(), Some(path));
        }
        assert_eq!(local("file:///runs/step 1").as_deref(), Some("/runs/step 1"));
        for url in ["s3://bucket/run", "s3a://b/r", "gs://b/r", "az://c/r", "abfss://c@account.dfs.core.windows.net/r"]
        {
            assert!(matches!(PathKind::of(Path::new(url)), Ok(PathKind::Object(same)) if same == url));
        }
        for (url, part) in
            [("ftp://host/run", "s3://"), ("https://host/run", "s3://"), ("file://host/run", "file:///path")]
        {
            assert!(matches!(PathKind::of(Path::new(url)), Err(error) if error.to_string().contains(part)), "{url}");
        }
    }
}
