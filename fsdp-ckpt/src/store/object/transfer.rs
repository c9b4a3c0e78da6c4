//! Reading ranges of objects and uploading objects in parts.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt};

use crate::store::object::request::{Failure, Pending, limit_or_default, start, wait};
use crate::store::{Append, ReadAt, ReadSizes};
use crate::{Error, Result};

/// Bytes of one request.
const READ_PART: usize = 8 << 20;
/// Concurrent requests of one read.
const READS_IN_FLIGHT: usize = 6;

/// An object.
#[derive(Debug)]
pub(super) struct ObjectFile {
    store: Arc<dyn ObjectStore>,
    key: Key,
    url: PathBuf,
    bytes: u64,
}

impl ObjectFile {
    pub(super) fn new(store: Arc<dyn ObjectStore>, key: Key, url: PathBuf, bytes: u64) -> Self {
        ObjectFile { store, key, url, bytes }
    }
}

impl ReadAt for ObjectFile {
    fn path(&self) -> &Path {
        &self.url
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_sizes(&self) -> ReadSizes {
        ReadSizes { gap: 1 << 20, block: 32 << 20, piece: READ_PART * READS_IN_FLIGHT }
    }

    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()> {
        let fail = |reason: String| Error::Object { action: "read", path: self.url.clone(), reason, source: None };
        if at.checked_add(into.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(fail(format!("{} bytes from {at} on exceed its {} bytes", into.len(), self.bytes)));
        }
        let mut start_of_next = at;
        let mut rest = into.chunks_mut(READ_PART);
        let mut pending = VecDeque::with_capacity(READS_IN_FLIGHT);
        loop {
            while pending.len() < READS_IN_FLIGHT {
                let Some(part) = rest.next() else { break };
                let range = start_of_next..start_of_next + part.len() as u64;
                start_of_next = range.end;
                let (store, key) = (Arc::clone(&self.store), self.key.clone());
                let request = start(limit_or_default(), async move { store.get_range(&key, range).await });
                pending.push_back((part, request.map_err(|failure| failure.at("read", &self.url))?));
            }
            let Some((part, request)) = pending.pop_front() else { return Ok(()) };
            let bytes = request.wait().map_err(|failure| failure.at("read", &self.url))?;
            if bytes.len() != part.len() {
                return Err(fail(format!("requested {} bytes, got {}", part.len(), bytes.len())));
            }
            part.copy_from_slice(&bytes);
        }
    }
}

/// Bytes of a part, unless the object needs larger parts.
const WRITE_PART: u64 = 8 << 20;
/// Largest number of parts that all stores accept.
const MOST_PARTS: u64 = 10_000;
/// Concurrent uploads of parts.
const WRITES_IN_FLIGHT: usize = 4;
/// Timeout of cleanup requests.
pub(super) const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// An object to upload. Small objects are one request; larger ones appear when all parts are complete.
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
    /// Creates the upload, without a request.
    pub(super) fn new(store: Arc<dyn ObjectStore>, key: Key, url: PathBuf, bytes: u64) -> Self {
        let part = bytes.div_ceil(MOST_PARTS).next_multiple_of(1 << 20).max(WRITE_PART);
        let buffer = Vec::with_capacity(bytes.min(part) as usize);
        Upload { store, key, url, part: part as usize, buffer, parts: None }
    }

    /// Uploads the buffer as the next part.
    fn send(&mut self) -> Result<(), Failure> {
        let parts = match &mut self.parts {
            Some(parts) => parts,
            None => {
                let (store, key) = (Arc::clone(&self.store), self.key.clone());
                let upload = wait(async move { store.put_multipart(&key).await })?;
                self.parts.insert(Parts { upload, pending: VecDeque::with_capacity(WRITES_IN_FLIGHT) })
            }
        };
        if parts.pending.len() >= WRITES_IN_FLIGHT
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
            // A refused upload leaves parts to abort. Any other may still complete.
            let failure = Failure::from(error);
            if failure.is_refusal() {
                let _ = start(CLEANUP_TIMEOUT, async move { upload.abort().await }).map(Pending::wait);
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
        let aborted = start(CLEANUP_TIMEOUT, async move { upload.abort().await }).and_then(Pending::wait);
        if let Err(failure) = aborted {
            let error = failure.at("give up the upload of", &self.url);
            tracing::warn!("{error}; its parts may stay in the store until a lifecycle rule removes them");
        }
    }
}
