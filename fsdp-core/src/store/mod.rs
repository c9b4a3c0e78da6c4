//! A few bytes by name that all ranks see: where something listens, who is on which host, who was first. Ranks exchange
//! them before any engine stands.
//!
//! A [`Store`] is [`MemoryStore`] for threads of a process, [`TcpStore`] for processes of any hosts, which rank 0 holds
//! at `MASTER_ADDR:MASTER_PORT`, and [`GroupStore`](crate::process_group::GroupStore) for the ranks of a group that
//! stands, whatever its backend.
//!
//! From the bottom up: `limits`, `interface` (the trait), `message` (what clients and the holder say), `asked` (a
//! request and its errors), `memory`, `secret` (what lets ranks in), `client` and `server` (the two sides of a
//! connection), `tcp`.

mod memory;
mod message;
mod tcp;

use std::time::{Duration, Instant};

pub use memory::MemoryStore;
pub(crate) use message::{Answer, Request};
pub use tcp::{Secret, TcpStore};

use crate::{Error, Result};

/// Bytes of the longest key.
pub const MAX_KEY_LEN: usize = 1024;
/// Bytes of the longest value.
pub const MAX_VALUE_LEN: usize = 24 << 10;
/// Bytes of all keys and values of a store.
pub const MAX_TOTAL_LEN: usize = 64 << 20;

/// Why a store does not take this key, or this value, if it does not.
fn refusal(key: &str, values: [Option<&[u8]>; 2]) -> Option<String> {
    let longest = values.into_iter().flatten().map(<[u8]>::len).max().unwrap_or(0);
    if key.len() > MAX_KEY_LEN {
        return Some(format!("the key has {} bytes, but a store takes at most {MAX_KEY_LEN}", key.len()));
    }
    (longest > MAX_VALUE_LEN)
        .then(|| format!("the value has {longest} bytes, but a store takes at most {MAX_VALUE_LEN}"))
}

/// Bytes by name, shared by ranks. A key has up to [`MAX_KEY_LEN`] bytes, a value up to
/// [`MAX_VALUE_LEN`].
///
/// Every wait ends. The errors are [`Error::Store`], which names the key, who holds the store, and
/// the seconds.
pub trait Store: Send + Sync {
    /// Puts `value` in the place of whatever was there.
    ///
    /// # Errors
    /// When the store can't be reached, or has no room.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value, which is waited for up to `timeout`.
    ///
    /// # Errors
    /// When nobody has set it in time, or the store can't be reached.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Puts `value` there if `expected` is there now, or nothing for `None`. Returns what was there before: of all that
    /// do the same at once, one gets back what it expected.
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
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<Option<Vec<u8>>>;
}

/// What was asked of whom, and when.
pub(crate) struct RequestContext<'a> {
    what: String,
    holder: &'a str,
    pub(crate) began: Instant,
}

impl<'a> RequestContext<'a> {
    /// `rank` is nothing where there are none.
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
        RequestContext { what, holder, began: Instant::now() }
    }

    pub(crate) fn failed(&self, cause: impl Into<String>) -> Error {
        Error::Store {
            what: self.what.clone(),
            holder: self.holder.to_owned(),
            seconds: self.began.elapsed().as_secs_f64(),
            cause: cause.into(),
        }
    }

    /// Nobody has set what was waited for.
    pub(crate) fn not_set(&self) -> Error {
        self.failed("no rank has set it. Check the rank that should set it, or raise FSDP_TIMEOUT_S")
    }

    /// What a set or a compare-and-set comes to.
    pub(crate) fn result(&self, answer: Answer) -> Result<Option<Vec<u8>>> {
        match answer {
            Answer::Nothing => Ok(None),
            Answer::Value(value) => Ok(Some(value)),
            Answer::Refused(why) => Err(self.failed(why)),
        }
    }
}
