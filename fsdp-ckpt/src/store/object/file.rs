//! Reading ranges of an object.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};

use super::runtime::{limit_or_default, start};
use crate::store::files::{Grain, ReadAt};
use crate::{Error, Result};

/// The bytes of one request.
const PART: usize = 8 << 20;
/// Requests under way at once for one read.
const IN_FLIGHT: usize = 6;

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

    fn grain(&self) -> Grain {
        Grain { gap: 1 << 20, block: 32 << 20, piece: PART * IN_FLIGHT }
    }

    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()> {
        let fail = |reason: String| Error::Object { action: "read", path: self.url.clone(), reason, source: None };
        if at.checked_add(into.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(fail(format!("{} bytes from {at} on are more than its {}", into.len(), self.bytes)));
        }
        let mut start_of_next = at;
        let mut rest = into.chunks_mut(PART);
        let mut pending = VecDeque::with_capacity(IN_FLIGHT);
        loop {
            while pending.len() < IN_FLIGHT {
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
                return Err(fail(format!("{} bytes were asked for, {} came", part.len(), bytes.len())));
            }
            part.copy_from_slice(&bytes);
        }
    }
}
