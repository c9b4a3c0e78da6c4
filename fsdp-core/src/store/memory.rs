//! A store in the memory of one process.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{
    MAX_TOTAL_LEN, RequestContext, Store,
    message::{Answer, Request},
};
use crate::Result;

/// Maximum wait of one system call.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// Name of the holder in messages.
const HOLDER: &str = "this process";

/// A store for threads of one process. Clones share the values.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::store::{MemoryStore, Store};
/// let store = MemoryStore::default();
/// let other = store.clone();
/// let setting = std::thread::spawn(move || other.set("port", b"4000"));
/// assert_eq!(store.get("port", Duration::from_secs(60))?, b"4000");
/// # setting.join().unwrap()?;
/// # Ok::<(), fsdp_core::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    values: BTreeMap<String, Vec<u8>>,
    /// Total length of all keys and values.
    bytes: usize,
    /// Whether waits end at once.
    is_closed: bool,
}

impl MemoryStore {
    /// Executes a request, which may be invalid.
    pub(crate) fn answer(&self, request: &Request<'_>) -> Answer {
        if let Some(why) = request.refusal() {
            return Answer::Refused(why);
        }
        match *request {
            Request::Ping => Answer::Nothing,
            Request::Get { key, wait } => self.wait_for(key, wait).map_or(Answer::Nothing, Answer::Value),
            Request::Set { key, value } => match self.0.state.lock().put(key, value) {
                Ok(_) => self.changed(Answer::Nothing),
                Err(full) => Answer::Refused(full),
            },
            Request::CompareSet { key, expected, value } => {
                let mut state = self.0.state.lock();
                let there = state.values.get(key).cloned();
                if there.as_deref() == expected
                    && let Err(full) = state.put(key, value)
                {
                    return Answer::Refused(full);
                }
                drop(state);
                self.changed(there.map_or(Answer::Nothing, Answer::Value))
            }
        }
    }

    /// Ends all current and future waits.
    #[cfg(any(test, feature = "tcp"))]
    pub(super) fn close(&self) {
        self.0.state.lock().is_closed = true;
        self.0.changed.notify_all();
    }

    fn wait_for(&self, key: &str, timeout: Duration) -> Option<Vec<u8>> {
        let began = Instant::now();
        let mut state = self.0.state.lock();
        loop {
            if let Some(value) = state.values.get(key) {
                return Some(value.clone());
            }
            let left = timeout.saturating_sub(began.elapsed()).min(MAX_WAIT);
            if left.is_zero() || state.is_closed {
                return None;
            }
            self.0.changed.wait_for(&mut state, left);
        }
    }

    fn changed(&self, answer: Answer) -> Answer {
        self.0.changed.notify_all();
        answer
    }
}

impl State {
    fn put(&mut self, key: &str, value: &[u8]) -> std::result::Result<(), String> {
        let before = self.values.get(key).map_or(0, |before| key.len() + before.len());
        let bytes = self.bytes - before + key.len() + value.len();
        if bytes > MAX_TOTAL_LEN {
            return Err(format!("the store is full: it takes {MAX_TOTAL_LEN} bytes"));
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value.to_owned());
        Ok(())
    }
}

impl Store for MemoryStore {
    fn ask(&self, request: &Request<'_>) -> Result<Option<Vec<u8>>> {
        // A get may wait, so its time begins before.
        let asked = RequestContext::new(request, None, HOLDER);
        asked.result(self.answer(request))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{MAX_KEY_LEN, MAX_VALUE_LEN},
        *,
    };

    #[test]
    fn a_full_store_refuses_values_until_room_is_freed() {
        let store = MemoryStore::default();
        let value = vec![0; MAX_VALUE_LEN];
        let mut count = 0;
        let error = loop {
            match store.set(&format!("{count:04}"), &value) {
                Ok(()) => count += 1,
                Err(error) => break error.to_string(),
            }
        };
        assert_eq!(count, MAX_TOTAL_LEN / (MAX_VALUE_LEN + 4));
        assert!(error.contains("setting \"2730\" in the store of this process") && error.contains("full"), "{error}");
        store.set("0000", b"").unwrap();
        store.set("again", &value[..1000]).unwrap();
    }

    #[test]
    fn refuses_long_keys_and_values() {
        let store = MemoryStore::default();
        let (key, value) = ("k".repeat(MAX_KEY_LEN + 1), vec![0; MAX_VALUE_LEN + 1]);
        assert!(store.get(&key, Duration::ZERO).unwrap_err().to_string().contains("1025 bytes"));
        assert!(store.set("k", &value).unwrap_err().to_string().contains("24577 bytes"));
        assert!(store.compare_set("k", None, &value).is_err());
    }

    #[test]
    fn closing_ends_waits() {
        let store = MemoryStore::default();
        let waiting = store.clone();
        let waiting = std::thread::spawn(move || waiting.get("never", Duration::MAX));
        std::thread::sleep(Duration::from_millis(20));
        store.close();
        assert!(waiting.join().unwrap().is_err());
    }
}
