//! Saving, moving and deleting under a prefix.

use std::path::Path;
use std::sync::Arc;

use object_store::{ObjectStoreExt, PutMode};

use crate::error::chain;
use crate::file_names::MANIFEST;
use crate::store::object::dir::{ObjectDir, SAVE_TAG, TENSORS, has_save_tag};
use crate::store::object::request::{Pending, start, wait};
use crate::store::object::transfer::CLEANUP_TIMEOUT;
use crate::store::staging::unique;
use crate::store::{Location, MoveOutcome, ReadAt, Staging, Store, split};
use crate::{Error, Result};

/// URL of an object or a prefix.
pub(in crate::store) struct ObjectPath<'a>(pub(in crate::store) &'a str);

impl Location for ObjectPath<'_> {
    fn store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(ObjectDir::new(self.0)?))
    }

    fn is_file(&self) -> Result<bool> {
        ObjectDir::is_object(self.0)
    }

    fn open(&self) -> Result<Box<dyn ReadAt>> {
        let (dir, name) = split(Path::new(self.0))?;
        ObjectDir::new(&dir.to_string_lossy())?.open(&name)
    }

    fn stage(&self) -> Result<Box<dyn Staging>> {
        Ok(Box::new(ObjectStaging::create(self.0)?))
    }

    fn open_staging(&self, name: &str) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(ObjectDir::with_tag(self.0, name)?))
    }

    /// Copies the objects, then deletes the old ones. An interrupted move leaves a partial copy, or an old prefix
    /// without a manifest.
    fn move_to(&self, to: &Path) -> Result<MoveOutcome> {
        let (from, to) = (ObjectDir::new(self.0)?, ObjectDir::new(&to.to_string_lossy())?);
        let names: Vec<String> = from.listing()?.files.into_keys().collect();
        if names.is_empty() {
            return Ok(MoveOutcome::SourceMissing);
        }
        let there = to.listing()?;
        if !there.files.is_empty() || !there.dirs.is_empty() {
            return Ok(MoveOutcome::TargetExists);
        }
        for name in &names {
            let (store, old, new) = (Arc::clone(&from.store), from.key(name)?, to.key(name)?);
            wait(async move { store.copy(&old, &new).await })
                .map_err(|failure| failure.at("copy", &from.url.join(name)))?;
        }
        delete_all(&from, names)?;
        Ok(MoveOutcome::Moved)
    }

    /// Deletes the manifest first, so a partial deletion leaves no checkpoint.
    fn remove_dir(&self) -> Result<bool> {
        let dir = ObjectDir::new(self.0)?;
        let names = dir.listing()?.files.into_keys().collect();
        delete_all(&dir, names)?;
        Ok(true)
    }
}

fn delete_all(dir: &ObjectDir, mut names: Vec<String>) -> Result<()> {
    names.sort_by_key(|name| name != MANIFEST);
    for name in &names {
        let (store, key) = (Arc::clone(&dir.store), dir.key(name)?);
        wait(async move { store.delete(&key).await }).map_err(|failure| failure.at("delete", &dir.url.join(name)))?;
    }
    Ok(())
}

/// A save in progress. Dropping it before its manifest is written deletes its files.
struct ObjectStaging {
    dir: ObjectDir,
    keep: bool,
}

impl ObjectStaging {
    /// Begins a save under a prefix that is empty or holds only files of other saves.
    fn create(url: &str) -> Result<Self> {
        let tag: String = unique().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let dir = ObjectDir::with_tag(url, &tag)?;
        if dir.prefix.as_ref().is_empty() {
            return Err(Error::Argument(format!("{url} is a whole bucket; add a prefix, as in {url}/step-1")));
        }
        let there = dir.listing()?;
        if !there.dirs.is_empty() || there.files.keys().any(|name| !has_save_tag(name)) {
            return Err(Error::AlreadyExists { path: dir.url });
        }
        if !there.files.is_empty() {
            tracing::warn!(
                "{url} holds {} objects of a save that is unfinished or still running; they are deleted when this save \
                    has finished",
                there.files.len()
            );
        }
        Ok(ObjectStaging { dir, keep: false })
    }

    /// Deletes the files of this save, or of all other saves. Failures are only logged.
    fn delete(&self, own: bool) {
        let ours = format!("{SAVE_TAG}{}{TENSORS}", self.dir.tag);
        let tidy = || -> Result<usize> {
            let names = self.dir.listing()?.files.into_keys();
            let names: Vec<String> = names.filter(|name| has_save_tag(name) && name.ends_with(&ours) == own).collect();
            for name in &names {
                let (store, key) = (Arc::clone(&self.dir.store), self.dir.key(name)?);
                start(CLEANUP_TIMEOUT, async move { store.delete(&key).await })
                    .and_then(Pending::wait)
                    .map_err(|failure| failure.at("delete", &self.dir.url.join(name)))?;
            }
            Ok(names.len())
        };
        match tidy() {
            Ok(0) => {}
            Ok(count) => tracing::info!("deleted {count} objects of unfinished saves under {}", self.dir.url.display()),
            Err(error) => tracing::warn!("{}; a later save to the same prefix tries again", chain(&error)),
        }
    }
}

impl Staging for ObjectStaging {
    fn name(&self) -> String {
        self.dir.tag.clone()
    }

    fn commit(mut self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()> {
        let (store, key) = (Arc::clone(&self.dir.store), self.dir.key(manifest)?);
        let payload = contents.to_vec();
        let put = wait(async move { store.put_opts(&key, payload.into(), PutMode::Create.into()).await.map(drop) });
        if let Err(failure) = put {
            // Without an answer, the manifest may still appear.
            self.keep = !failure.is_refusal();
            // A retried request may find its own object.
            match self.dir.read(manifest, contents.len() as u64) {
                Ok(Some(found)) if found == contents => {}
                Ok(Some(_)) | Err(Error::TooLarge { .. }) => {
                    self.keep = false;
                    return Err(Error::AlreadyExists { path: self.dir.url.clone() });
                }
                Ok(None) | Err(_) => return Err(failure.at("write", Path::new(&self.dir.url.join(manifest)))),
            }
        }
        self.publish()
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        self.keep = true;
        self.delete(false);
        Ok(())
    }
}

impl Drop for ObjectStaging {
    fn drop(&mut self) {
        if !self.keep {
            self.delete(true);
        }
    }
}
