//! Where the files of a checkpoint lie: a directory of this host's file systems, or a prefix of an object store.
//!
//! Formats know files by name, read them at any place and write them from front to back; what a file is, is known here
//! only. A path says which store it is in: `s3://bucket/path` and its like are URLs, `file:///path` and everything else
//! are directories of this host. A URL is taken as it is written, without percent-encoding.

mod files;
mod hidden;
mod local;
#[cfg(feature = "object-store")]
mod object;
mod place;
mod staging;
mod written_back;

use std::path::Path;
use std::sync::Arc;

pub(crate) use files::{Grain, Moved, ReadAt, Staging, Store, room};
pub(crate) use hidden::{Hidden, sweep, sync_dir};
#[cfg(test)]
pub(crate) use local::LocalFile;
pub(crate) use place::split;
pub(crate) use staging::rename_to_new;

use self::files::Location;
use self::place::Place;
use self::staging::LocalPath;
use crate::{Error, Result};

/// Where a path leads, in the store that it is in.
fn location(path: &Path) -> Result<Box<dyn Location + '_>> {
    match Place::of(path)? {
        Place::Local(path) => Ok(Box::new(LocalPath(path))),
        #[cfg(feature = "object-store")]
        Place::Object(url) => Ok(Box::new(object::ObjectPath(url))),
        #[cfg(not(feature = "object-store"))]
        Place::Object(url) => Err(Error::Argument(format!(
            "{url} is in an object store; this program was built without them: \
             build it with `--features object-store` of fsdp-ckpt"
        ))),
    }
}

/// The path of this host that `path` is, `None` for one of an object store.
pub(crate) fn on_this_host(path: &Path) -> Result<Option<&Path>> {
    match Place::of(path)? {
        Place::Local(path) => Ok(Some(path)),
        Place::Object(_) => Ok(None),
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
pub(crate) fn staged(target: &Path, name: &str) -> Result<Arc<dyn Store>> {
    location(target)?.staged(name)
}

/// Gives a directory a new name, that nothing has, in the same parent directory.
pub(crate) fn move_dir(from: &Path, to: &Path) -> Result<Moved> {
    let (old, new) = (Place::of(from)?, Place::of(to)?);
    if std::mem::discriminant(&old) != std::mem::discriminant(&new) {
        return Err(Error::Argument(format!("{} and {} are in different stores", from.display(), to.display())));
    }
    location(from)?.move_to(new.path())
}

/// Removes a checkpoint's directory, so that at no time it seems to be one that is not whole. `false` when another
/// process is at it.
pub(crate) fn discard(dir: &Path) -> Result<bool> {
    location(dir)?.discard()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_files_says_so() {
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
