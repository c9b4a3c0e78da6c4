//! What every store does.

use std::time::Duration;

use crate::Result;

/// Bytes by name, shared by ranks. A key has up to [`MOST_KEY`](super::MOST_KEY) bytes, a value up to
/// [`MOST_VALUE`](super::MOST_VALUE).
///
/// Every wait ends. The errors are [`Error::Store`](crate::Error::Store), which names the key, who holds the store, and
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
