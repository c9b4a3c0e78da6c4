//! TODO

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::io_error;
use crate::region::CopyRun;
use crate::{Error, Result};

mod local;
#[cfg(feature = "object-store")]
mod object;
mod staging;

#[cfg(test)]
pub(crate) use local::LocalFile;
use staging::LocalPath;
pub(crate) use staging::{TempEntry, remove_stale, rename_noreplace, sync_dir};

/// Where a path leads, in the store that it is in.
fn location(path: &Path) -> Result<Box<dyn Location + '_>> {
    match PathKind::of(path)? {
        PathKind::Local(path) => Ok(Box::new(LocalPath(path))),
        #[cfg(feature = "object-store")]
        PathKind::Object(url) => Ok(Box::new(object::ObjectPath(url))),
        #[cfg(not(feature = "object-store"))]
        PathKind::Object(url) => Err(Error::Argument(format!(
            "{url} is in an object store; this program was built without them: \
             build it with `--features object-store` of fsdp-ckpt"
        ))),
    }
}

/// The path of this host that `path` is, `None` for one of an object store.
pub(crate) fn as_local(path: &Path) -> Result<Option<&Path>> {
    match PathKind::of(path)? {
        PathKind::Local(path) => Ok(Some(path)),
        PathKind::Object(_) => Ok(None),
    }
}

/// The path of this host that `path` is; an object store's is refused, as `purpose` needs files.
pub(crate) fn require_local<'a>(path: &'a Path, purpose: &str) -> Result<&'a Path> {
    match PathKind::of(path)? {
        PathKind::Local(path) => Ok(path),
        PathKind::Object(url) => Err(Error::Argument(format!("{purpose} needs a directory of this host, not {url}"))),
    }
}

/// The store of a directory's files.
pub(crate) fn store(dir: &Path) -> Result<Arc<dyn Store>> {
    location(dir)?.store()
}

/// Whether a path leads to a file, not to a directory or nowhere.
pub(crate) fn is_file(path: &Path) -> Result<bool> {
    location(path)?.is_file()
}

/// Opens a file by its path.
pub(crate) fn open_file(path: &Path) -> Result<Box<dyn ReadAt>> {
    location(path)?.open()
}

/// Begins a directory that is to become `target`, which must not exist. What dead writers of the same target have left
/// is removed, when that is safe.
pub(crate) fn stage(target: &Path) -> Result<Box<dyn Staging>> {
    location(target)?.stage()
}

/// What another rank has begun for `target`, by its name.
pub(crate) fn open_staging(target: &Path, name: &str) -> Result<Arc<dyn Store>> {
    location(target)?.open_staging(name)
}

/// Gives a directory a new name, that nothing has, in the same parent directory.
pub(crate) fn move_dir(from: &Path, to: &Path) -> Result<MoveOutcome> {
    let (old, new) = (PathKind::of(from)?, PathKind::of(to)?);
    if std::mem::discriminant(&old) != std::mem::discriminant(&new) {
        return Err(Error::Argument(format!("{} and {} are in different stores", from.display(), to.display())));
    }
    location(from)?.move_to(new.path())
}

/// Removes a checkpoint's directory, so that at no time it seems to be one that is not whole. `false` when another
/// process is at it.
pub(crate) fn remove_dir(dir: &Path) -> Result<bool> {
    location(dir)?.remove_dir()
}

/// A file that several threads may read at once, at any place.
pub(crate) trait ReadAt: Debug + Send + Sync {
    /// Its name for messages.
    fn path(&self) -> &Path;

    /// Its size.
    fn bytes(&self) -> u64;

    /// How it is best read.
    fn read_sizes(&self) -> ReadSizes {
        ReadSizes::LOCAL
    }

    /// Reads as many bytes as `into` has, from `at` on.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()>;
}

/// How much of a file to read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadSizes {
    /// Bytes between two wanted ranges that are cheaper to read and drop than to read around.
    pub(crate) gap: usize,
    /// How many bytes of scattered ranges are read at once.
    pub(crate) block: usize,
    /// How many bytes of one range are read at once.
    pub(crate) piece: usize,
}

impl ReadSizes {
    /// A disk gives whole pages anyway; a piece stays in a core's cache until it has been summed as well.
    const LOCAL: ReadSizes = ReadSizes { gap: 4096, block: 1 << 20, piece: 256 << 10 };
}

/// A new file that grows at its end. Dropped before [`Append::finish`], it is unfinished, or not there.
pub(crate) trait Append: Send {
    /// Adds bytes at the end.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Waits until everything is safe.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The files of one directory. Names are plain: without separators.
pub(crate) trait Store: Debug + Send + Sync {
    /// The directory's name, for messages.
    fn path(&self) -> &Path;

    /// The names of its files, sorted. [`Error::NotFound`] when there is no such directory.
    fn list(&self) -> Result<Vec<String>>;

    /// The names of the directories in it, sorted. [`Error::NotFound`] as for [`Store::list`].
    fn dirs(&self) -> Result<Vec<String>>;

    /// The size of a file, `None` when there is none of this name.
    fn size(&self, name: &str) -> Result<Option<u64>>;

    /// Where what has this name leads if it is a link, with nothing left to resolve as far as there is something.
    fn link(&self, _name: &str) -> Option<PathBuf> {
        None
    }

    /// Opens a file.
    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>>;

    /// The name to create a file under that no other writer of the same directory uses, for formats that leave the name
    /// free.
    fn unique_name(&self, name: &str) -> String {
        name.to_string()
    }

    /// Creates a file, which must not exist, that will have `bytes` bytes.
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn Append>>;

    /// A whole file of at most `most` bytes, `None` when there is none of this name.
    fn read(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        if self.size(name)?.is_none() {
            return Ok(None);
        }
        let file = self.open(name)?;
        let bytes = file.bytes();
        if bytes > most {
            return Err(Error::TooLarge { path: self.path().join(name), bytes, most });
        }
        let mut contents = allocate(file.path(), bytes)?;
        file.read_exact_at(&mut contents, 0)?;
        Ok(Some(contents))
    }
}

/// Memory for what a file has, which may claim more than there is memory.
pub(crate) fn allocate(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let mut contents = Vec::new();
    let reserved = usize::try_from(bytes).is_ok_and(|bytes| contents.try_reserve_exact(bytes).is_ok());
    if !reserved {
        let reason = format!("there is no memory for the {bytes} bytes to be read at once");
        return Err(io_error("read", path)(std::io::Error::new(std::io::ErrorKind::OutOfMemory, reason)));
    }
    contents.resize(bytes as usize, 0);
    Ok(contents)
}

/// A directory that grows out of sight until it is whole. Dropped before [`Staging::commit`], it is removed.
pub(crate) trait Staging: Send {
    /// What to pass to [`staged`](crate::store::staged), on any rank, for where its files go.
    fn name(&self) -> String;

    /// Writes the file that makes it whole, and shows it under its final name, for good.
    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()>;

    /// Shows it under its final name, for good, when it is whole as it is.
    fn publish(self: Box<Self>) -> Result<()>;
}

/// What came of [`move_dir`](crate::store::move_dir).
pub(crate) enum MoveOutcome {
    Moved,
    /// There is something under the new name.
    TargetExists,
    /// There is nothing under the old one.
    SourceMissing,
}

/// Where a path leads in one kind of store. Each kind has one type that does this.
pub(crate) trait Location {
    /// The files of the directory there.
    fn store(&self) -> Result<Arc<dyn Store>>;

    /// Whether there is a file, not a directory or nothing.
    fn is_file(&self) -> Result<bool>;

    /// Opens the file there.
    fn open(&self) -> Result<Box<dyn ReadAt>>;

    /// Begins a directory that is to appear there.
    fn stage(&self) -> Result<Box<dyn Staging>>;

    /// What another rank has begun to appear there, by its name.
    fn open_staging(&self, name: &str) -> Result<Arc<dyn Store>>;

    /// Gives the directory there a new name, that nothing has, in the same parent directory of the same store.
    fn move_to(&self, to: &Path) -> Result<MoveOutcome>;

    /// Removes the directory there. `false` when another process is at it.
    fn remove_dir(&self) -> Result<bool>;
}

/// Where a path leads.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PathKind<'a> {
    Local(&'a Path),
    Object(&'a str),
}

impl<'a> PathKind<'a> {
    /// What a path says of itself. Nothing is looked up.
    pub(crate) fn of(path: &'a Path) -> Result<Self> {
        let Some((scheme, rest)) = path.to_str().and_then(|text| text.split_once("://")) else {
            return Ok(PathKind::Local(path));
        };
        let url = path.display();
        match scheme {
            "file" if rest.starts_with('/') => Ok(PathKind::Local(Path::new(rest))),
            "file" => Err(Error::Argument(format!("{url} is not on this host; the form is file:///path"))),
            "s3" | "s3a" | "gs" | "az" | "adl" | "azure" | "abfs" | "abfss" => {
                path.to_str().map(PathKind::Object).ok_or_else(|| Error::Argument(format!("{url} is not text")))
            }
            // A directory's name may hold any text.
            _ if scheme.is_empty() || !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) => {
                Ok(PathKind::Local(path))
            }
            _ => Err(Error::Argument(format!(
                "{url} is of no known kind; use a directory, or a URL that begins with s3://, gs://, az:// or file://"
            ))),
        }
    }

    /// The path in its store.
    pub(crate) fn path(self) -> &'a Path {
        match self {
            PathKind::Local(path) => path,
            PathKind::Object(url) => Path::new(url),
        }
    }
}

/// A target's parent directory and file name.
pub(crate) fn split(target: &Path) -> Result<(PathBuf, String)> {
    let name = target.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(Error::Argument(format!(
            "{:?} does not end in a name for a checkpoint",
            target.display().to_string()
        )));
    };
    let parent = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_string()))
}

/// How many bytes are read at once where all are wanted.
pub(crate) const BLOCK: usize = 1 << 20;
/// How many bytes are written at once where they are summed as well: what stays in a core's cache between the two.
pub(crate) const CACHE_BLOCK: usize = 256 << 10;
/// More runs than this are not kept for one go.
const MOST: usize = 1 << 16;

/// Reads runs, whose sources count from `start` in the file, to their places in `into`. Runs that follow each other
/// closely in the file are read in one go, of a block at most. `seen` gets what is read in the order of the file, if
/// the runs are in it.
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
            // A single run may be of any length; it goes straight to its place.
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
    fn what_needs_files_says_so() {
        assert!(
            require_local(Path::new("s3://b/r"), "this").is_err_and(|error| error.to_string().contains("this needs"))
        );
    }

    #[cfg(not(feature = "object-store"))]
    #[test]
    fn without_the_feature_its_name_is_told() {
        let path = Path::new("s3://bucket/step-1");
        let errors = [store(path).err(), is_file(path).err(), stage(path).err(), open_staging(path, "x").err()];
        for error in errors {
            assert!(error.is_some_and(|error| error.to_string().contains("--features object-store")));
        }
    }

    #[test]
    fn a_path_says_where_it_leads() {
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
