//! Where the files of a checkpoint lie: a directory of this host's file systems, or a prefix of an object store.
//!
//! Formats know files by name, read them at any place and write them from front to back; what a file is, is known here only. A path says which store it
//! is in: `s3://bucket/path` and its like are URLs, `file:///path` and everything else are directories of this host. A URL is taken as it is written,
//! without percent-encoding.

mod hidden;
mod local;
#[cfg(feature = "object-store")]
mod object;
mod staging;
mod written_back;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(feature = "object-store")]
pub(crate) use hidden::unique;
pub(crate) use hidden::{Hidden, sweep, sync_dir};
pub(crate) use local::{LocalDir, LocalFile};

use crate::error::io_error;
use crate::{Error, Result};

/// A file that several threads may read at once, at any place.
pub(crate) trait ReadAt: Debug + Send + Sync {
    /// Its name for messages.
    fn path(&self) -> &Path;

    /// Its size.
    fn bytes(&self) -> u64;

    /// How it is best read.
    fn grain(&self) -> Grain {
        Grain::LOCAL
    }

    /// Reads as many bytes as `into` has, from `at` on.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()>;
}

/// How much of a file to read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grain {
    /// Bytes between two wanted ranges that are cheaper to read and drop than to read around.
    pub(crate) gap: usize,
    /// How many bytes of scattered ranges are read at once.
    pub(crate) block: usize,
    /// How many bytes of one range are read at once.
    pub(crate) piece: usize,
}

impl Grain {
    /// A disk gives whole pages anyway; a piece stays in a core's cache until it has been summed as well.
    const LOCAL: Grain = Grain { gap: 4096, block: 1 << 20, piece: 256 << 10 };
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

    /// The name to create a file under that no other writer of the same directory uses, for formats that leave the name free.
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
        let mut contents = room(file.path(), bytes)?;
        file.read_exact_at(&mut contents, 0)?;
        Ok(Some(contents))
    }
}

/// Memory for what a file has, which may claim more than there is memory.
pub(crate) fn room(path: &Path, bytes: u64) -> Result<Vec<u8>> {
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
    /// What to pass to [`staged`], on any rank, for where its files go.
    fn name(&self) -> String;

    /// Writes the file that makes it whole, and shows it under its final name, for good.
    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()>;

    /// Shows it under its final name, for good, when it is whole as it is.
    fn publish(self: Box<Self>) -> Result<()>;
}

/// Where a path leads.
enum Place<'a> {
    Local(&'a Path),
    Object(&'a str),
}

impl<'a> Place<'a> {
    fn of(path: &'a Path) -> Result<Self> {
        let Some((scheme, rest)) = path.to_str().and_then(|text| text.split_once("://")) else {
            return Ok(Place::Local(path));
        };
        let url = path.display();
        match scheme {
            "file" if rest.starts_with('/') => Ok(Place::Local(Path::new(rest))),
            "file" => Err(Error::Argument(format!("{url} is not on this host; the form is file:///path"))),
            "s3" | "s3a" | "gs" | "az" | "adl" | "azure" | "abfs" | "abfss" => {
                path.to_str().map(Place::Object).ok_or_else(|| Error::Argument(format!("{url} is not text")))
            }
            // A directory's name may hold any text.
            _ if scheme.is_empty() || !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) => {
                Ok(Place::Local(path))
            }
            _ => Err(Error::Argument(format!(
                "{url} is of no known kind; use a directory, or a URL that begins with s3://, gs://, az:// or file://"
            ))),
        }
    }
}

/// The path of this host that `path` is, `None` for one of an object store.
pub(crate) fn on_this_host(path: &Path) -> Result<Option<&Path>> {
    match Place::of(path)? {
        Place::Local(path) => Ok(Some(path)),
        Place::Object(_) => Ok(None),
    }
}

/// Removes a checkpoint's directory, so that at no time it seems to be one that is not whole. `false` when another process is at it.
pub(crate) fn discard(dir: &Path) -> Result<bool> {
    match Place::of(dir)? {
        Place::Local(dir) => staging::discard(dir),
        #[cfg(feature = "object-store")]
        Place::Object(url) => object::discard(url),
        #[cfg(not(feature = "object-store"))]
        Place::Object(url) => Err(without_object_stores(url)),
    }
}

/// What came of [`move_dir`].
pub(crate) enum Moved {
    Done,
    /// There is something under the new name.
    Taken,
    /// There is nothing under the old one.
    Gone,
}

/// Gives a directory a new name, that nothing has, in the same parent directory.
pub(crate) fn move_dir(from: &Path, to: &Path) -> Result<Moved> {
    match (Place::of(from)?, Place::of(to)?) {
        (Place::Local(from), Place::Local(to)) => staging::move_dir(from, to),
        #[cfg(feature = "object-store")]
        (Place::Object(from), Place::Object(to)) => object::move_dir(from, to),
        #[cfg(not(feature = "object-store"))]
        (Place::Object(url), _) => Err(without_object_stores(url)),
        _ => Err(Error::Argument(format!("{} and {} are in different stores", from.display(), to.display()))),
    }
}

/// The path of this host that `path` is; an object store's is refused, as `purpose` needs files.
pub(crate) fn local_path<'a>(path: &'a Path, purpose: &str) -> Result<&'a Path> {
    match Place::of(path)? {
        Place::Local(path) => Ok(path),
        Place::Object(url) => Err(Error::Argument(format!("{purpose} needs a directory of this host, not {url}"))),
    }
}

/// The store of a directory's files.
pub(crate) fn store(dir: &Path) -> Result<Arc<dyn Store>> {
    match Place::of(dir)? {
        Place::Local(dir) => Ok(Arc::new(LocalDir::new(dir))),
        #[cfg(feature = "object-store")]
        Place::Object(url) => Ok(Arc::new(object::ObjectDir::new(url)?)),
        #[cfg(not(feature = "object-store"))]
        Place::Object(url) => Err(without_object_stores(url)),
    }
}

/// Whether a path leads to a file, not to a directory or nowhere.
pub(crate) fn is_file(path: &Path) -> Result<bool> {
    match Place::of(path)? {
        Place::Local(path) => Ok(path.is_file()),
        #[cfg(feature = "object-store")]
        Place::Object(url) => object::ObjectDir::is_object(url),
        #[cfg(not(feature = "object-store"))]
        Place::Object(url) => Err(without_object_stores(url)),
    }
}

/// Opens a file by its path.
pub(crate) fn open_file(path: &Path) -> Result<Box<dyn ReadAt>> {
    match Place::of(path)? {
        Place::Local(path) => Ok(Box::new(LocalFile::open(path)?)),
        Place::Object(_) => {
            let (dir, name) = split(path)?;
            store(&dir)?.open(&name)
        }
    }
}

/// Begins a directory that is to become `target`, which must not exist. What dead writers of the same target have left is removed, when that is safe.
pub(crate) fn stage(target: &Path) -> Result<Box<dyn Staging>> {
    match Place::of(target)? {
        Place::Local(target) => Ok(Box::new(staging::LocalStaging::create(target)?)),
        #[cfg(feature = "object-store")]
        Place::Object(url) => Ok(Box::new(object::ObjectStaging::create(url)?)),
        #[cfg(not(feature = "object-store"))]
        Place::Object(url) => Err(without_object_stores(url)),
    }
}

/// What another rank has begun for `target`, by its name.
pub(crate) fn staged(target: &Path, name: &str) -> Result<Arc<dyn Store>> {
    match Place::of(target)? {
        Place::Local(target) => Ok(Arc::new(LocalDir::new(&split(target)?.0.join(name)))),
        #[cfg(feature = "object-store")]
        Place::Object(url) => Ok(Arc::new(object::ObjectDir::with_tag(url, name)?)),
        #[cfg(not(feature = "object-store"))]
        Place::Object(url) => Err(without_object_stores(url)),
    }
}

#[cfg(not(feature = "object-store"))]
fn without_object_stores(url: &str) -> Error {
    Error::Argument(format!(
        "{url} is in an object store; this program was built without them: build it with `--features object-store` of fsdp-ckpt"
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_where_it_leads() {
        let local = |path: &str| match Place::of(Path::new(path)) {
            Ok(Place::Local(local)) => local.to_str().map(str::to_string),
            Ok(Place::Object(_)) | Err(_) => None,
        };
        for path in ["runs/step-1", "/runs", "a b://c", "://"] {
            assert_eq!(local(path).as_deref(), Some(path));
        }
        assert_eq!(local("file:///runs/step 1").as_deref(), Some("/runs/step 1"));
        for url in ["s3://bucket/run", "s3a://b/r", "gs://b/r", "az://c/r", "abfss://c@account.dfs.core.windows.net/r"]
        {
            assert!(matches!(Place::of(Path::new(url)), Ok(Place::Object(same)) if same == url));
        }
        for (url, part) in
            [("ftp://host/run", "s3://"), ("https://host/run", "s3://"), ("file://host/run", "file:///path")]
        {
            assert!(matches!(Place::of(Path::new(url)), Err(error) if error.to_string().contains(part)), "{url}");
        }
        assert!(local_path(Path::new("s3://b/r"), "this").is_err_and(|error| error.to_string().contains("this needs")));
    }

    #[cfg(not(feature = "object-store"))]
    #[test]
    fn without_the_feature_its_name_is_told() {
        let path = Path::new("s3://bucket/step-1");
        let errors = [store(path).err(), is_file(path).err(), stage(path).err(), staged(path, "x").err()];
        for error in errors {
            assert!(error.is_some_and(|error| error.to_string().contains("--features object-store")));
        }
    }
}
