//! Key-value stores that ranks share before any collective backend exists: where a rank listens, which host it is on,
//! which rank was first.
//!
//! A [`Store`] is one of: [`MemoryStore`] for threads of one process; `TcpStore` (feature `tcp`) for processes on any
//! hosts, served by rank 0 at `MASTER_ADDR:MASTER_PORT`; [`GroupStore`](crate::process_group::GroupStore) for the ranks
//! of a process group with any backend.

mod memory;
mod message;
#[cfg(feature = "tcp")]
pub(crate) mod tcp;

use std::time::{Duration, Instant};

pub use memory::MemoryStore;
pub(crate) use message::{Answer, Request};
#[cfg(feature = "tcp")]
pub use tcp::{Secret, TcpStore};

use crate::{Error, Result};

/// Maximum length of a key in bytes.
pub const MAX_KEY_LEN: usize = 1024;
/// Maximum length of a value in bytes.
pub const MAX_VALUE_LEN: usize = 24 << 10;
/// Maximum length of all keys and values of a store together.
pub const MAX_TOTAL_LEN: usize = 64 << 20;

/// Returns why a store refuses this key or these values, if so.
fn refusal(key: &str, values: [Option<&[u8]>; 2]) -> Option<String> {
    let longest = values.into_iter().flatten().map(<[u8]>::len).max().unwrap_or(0);
    if key.len() > MAX_KEY_LEN {
        return Some(format!("the key has {} bytes, but a store takes at most {MAX_KEY_LEN}", key.len()));
    }
    (longest > MAX_VALUE_LEN)
        .then(|| format!("the value has {longest} bytes, but a store takes at most {MAX_VALUE_LEN}"))
}

/// A key-value store that ranks share. A key has up to [`MAX_KEY_LEN`] bytes, a value up to [`MAX_VALUE_LEN`].
///
/// No call waits forever. Errors are [`Error::Store`] and name the key, the holder of the store, and the seconds.
pub trait Store: Send + Sync {
    /// Sets a value, and replaces the previous one.
    ///
    /// # Errors
    /// When the store is unreachable or full.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(&Request::Set { key, value }).map(drop)
    }

    /// Returns the value of `key`, and waits for it up to `timeout`.
    ///
    /// # Errors
    /// When no rank sets the key in time, or the store is unreachable.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        // Without a value, it is an error.
        self.ask(&Request::Get { key, wait: timeout }).map(Option::unwrap_or_default)
    }

    /// Sets `value` if the current value is `expected` (`None`: not set). Returns the previous value. If several ranks
    /// do this at once, exactly one gets back what it expected.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    ///
    /// ```
    /// use fsdp_core::store::{MemoryStore, Store};
    /// let store = MemoryStore::default();
    /// assert_eq!(store.compare_set("leader", None, b"rank 3")?, None);
    /// assert_eq!(store.compare_set("leader", None, b"rank 5")?, Some(b"rank 3".to_vec()));
    /// # Ok::<(), fsdp_core::Error>(())
    /// ```
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<Option<Vec<u8>>> {
        self.ask(&Request::CompareSet { key, expected, value })
    }

    /// Executes a request. Returns the value of a get, or the previous value of a compare-and-set.
    #[doc(hidden)]
    fn ask(&self, request: &Request<'_>) -> Result<Option<Vec<u8>>>;
}

/// A request in progress, for its error messages.
pub(crate) struct RequestContext<'a> {
    what: String,
    is_get: bool,
    holder: &'a str,
    pub(crate) began: Instant,
}

impl<'a> RequestContext<'a> {
    /// `rank` is `None` for a store without ranks.
    pub(crate) fn new(request: &Request<'_>, rank: Option<usize>, holder: &'a str) -> Self {
        let verb = match request {
            Request::Ping => "reaching",
            Request::Get { .. } => "getting",
            Request::Set { .. } | Request::CompareSet { .. } => "setting",
        };
        let rank = rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let what = match request {
            Request::Ping => format!("{rank}{verb} the store"),
            _ => format!("{rank}{verb} {:?} in the store", request.key()),
        };
        let is_get = matches!(request, Request::Get { .. });
        RequestContext { what, is_get, holder, began: Instant::now() }
    }

    pub(crate) fn failed(&self, cause: impl Into<String>) -> Error {
        Error::Store {
            what: self.what.clone(),
            holder: self.holder.to_owned(),
            seconds: self.began.elapsed().as_secs_f64(),
            cause: cause.into(),
        }
    }

    /// Returns the error of a get whose key was not set in time.
    pub(crate) fn not_set(&self) -> Error {
        self.failed("no rank has set it. Check the rank that should set it, or raise FSDP_TIMEOUT_S")
    }

    /// Converts the answer to a request.
    pub(crate) fn result(&self, answer: Answer) -> Result<Option<Vec<u8>>> {
        match answer {
            Answer::Nothing if self.is_get => Err(self.not_set()),
            Answer::Nothing => Ok(None),
            Answer::Value(value) => Ok(Some(value)),
            Answer::Refused(why) => Err(self.failed(why)),
        }
    }
}
