//! Writing an object in parts.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt};

use super::failure::Failure;
use super::runtime::{Pending, limit_or_default, start, wait};
use crate::Result;
use crate::store::files::Append;

/// The bytes of a part, unless the object needs larger ones.
const PART: u64 = 8 << 20;
/// No store takes more parts.
const MOST_PARTS: u64 = 10_000;
/// Parts under way at once.
const IN_FLIGHT: usize = 4;
/// How long to wait for what only tidies up.
pub(super) const TIDY_UP: Duration = Duration::from_secs(10);

/// An object that appears when it is whole. One of a part at most is put in one request.
pub(super) struct Upload {
    store: Arc<dyn ObjectStore>,
    key: Key,
    url: PathBuf,
    part: usize,
    buffer: Vec<u8>,
    parts: Option<Parts>,
}

struct Parts {
    upload: Box<dyn MultipartUpload>,
    pending: VecDeque<Pending<()>>,
}

impl Upload {
    /// Nothing is asked of the store yet.
    pub(super) fn new(store: Arc<dyn ObjectStore>, key: Key, url: PathBuf, bytes: u64) -> Self {
        let part = bytes.div_ceil(MOST_PARTS).next_multiple_of(1 << 20).max(PART);
        let buffer = Vec::with_capacity(bytes.min(part) as usize);
        Upload { store, key, url, part: part as usize, buffer, parts: None }
    }

    /// Sends what is in the buffer as the next part.
    fn send(&mut self) -> Result<(), Failure> {
        let parts = match &mut self.parts {
            Some(parts) => parts,
            None => {
                let (store, key) = (Arc::clone(&self.store), self.key.clone());
                let upload = wait(async move { store.put_multipart(&key).await })?;
                self.parts.insert(Parts { upload, pending: VecDeque::with_capacity(IN_FLIGHT) })
            }
        };
        if parts.pending.len() >= IN_FLIGHT
            && let Some(oldest) = parts.pending.pop_front()
        {
            oldest.wait()?;
        }
        let part = std::mem::replace(&mut self.buffer, Vec::with_capacity(self.part));
        parts.pending.push_back(start(limit_or_default(), parts.upload.put_part(part.into()))?);
        Ok(())
    }

    fn complete(&mut self) -> Result<(), Failure> {
        if self.parts.is_none() {
            let (store, key, whole) = (Arc::clone(&self.store), self.key.clone(), std::mem::take(&mut self.buffer));
            return wait(async move { store.put(&key, whole.into()).await.map(drop) });
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        let Some(parts) = &mut self.parts else { return Ok(()) };
        while let Some(oldest) = parts.pending.pop_front() {
            oldest.wait()?;
        }
        let Some(Parts { mut upload, .. }) = self.parts.take() else { return Ok(()) };
        let (mut upload, outcome) = wait(async move {
            let outcome = upload.complete().await;
            Ok((upload, outcome))
        })?;
        outcome.map(drop).map_err(|error| {
            // What has failed for good leaves no parts; what only seems to is not aborted in the middle.
            let failure = Failure::from(error);
            if failure.is_refusal() {
                let _ = start(TIDY_UP, async move { upload.abort().await }).map(Pending::wait);
            }
            failure
        })
    }
}

impl Append for Upload {
    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.buffer.len() == self.part {
                self.send().map_err(|failure| failure.at("write", &self.url))?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.part - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.complete().map_err(|failure| failure.at("write", &self.url))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(Parts { mut upload, pending }) = self.parts.take() else { return };
        drop(pending);
        let aborted = start(TIDY_UP, async move { upload.abort().await }).and_then(Pending::wait);
        if let Err(failure) = aborted {
            let error = failure.at("give up the upload of", &self.url);
            tracing::warn!(
                "{error}; parts of it may stay in the store until its rule for unfinished uploads removes them"
            );
        }
    }
}
