//! A store that the ranks of a group keep together.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{
    call::Call,
    group::ProcessGroup,
    landing::Landing,
    parts::{GatherPart, Op},
};
use crate::{
    Buffer, Element, Error, Heap, Result,
    store::{Answer, Asked, MemoryStore, Request, Store},
};

/// A [`Store`] over a group that stands, whatever its backend: each rank has a copy, and each call is an exchange.
///
/// **Every call is collective**: all ranks of the group make one at the same time, each the one that it likes, and all
/// of them count, in rank order, sets before gets. So a value that no rank has set by then will not come, and `get`
/// fails at once; its timeout is the group's. The calls are no collectives of the group's own: its later ones keep
/// their numbers.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::{process_group::{GroupStore, local}, store::Store};
/// local::run(3, |group| {
///     let store = GroupStore::new(&group);
///     match group.rank() {
///         2 => store.set("port", b"4000").unwrap(),
///         _ => assert_eq!(store.get("port", Duration::ZERO).unwrap(), b"4000"),
///     }
///     let before = store.compare_set("leader", None, &[group.rank() as u8]).unwrap();
///     assert_eq!(before, (group.rank() > 0).then(|| vec![0]));
/// });
/// ```
pub struct GroupStore {
    group: ProcessGroup,
    copy: Mutex<MemoryStore>,
    holder: String,
}

impl GroupStore {
    /// An empty store of the ranks of `group`.
    pub fn new(group: &ProcessGroup) -> Self {
        let holder = format!("the group \"{}\"", group.name());
        GroupStore { group: group.clone(), copy: Mutex::default(), holder }
    }

    fn ask(&self, request: &Request<'_>) -> Result<Option<Vec<u8>>> {
        let asked = Asked::of(request, Some(self.group.rank()), &self.holder);
        // One call at a time. Asked of all ranks even where it is refused, because they wait for it.
        let copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        let refusal = request.refusal();
        let own = if refusal.is_none() { request.clone() } else { Request::Hello };
        let all = messages(&self.group, own.to_bytes())?;
        let mut answer = Answer::Nothing;
        let is_get = |request: &Request<'_>| matches!(request, Request::Get { .. });
        for (rank, bytes) in all.iter().enumerate() {
            let request = Request::parse(bytes).ok_or_else(|| Error::Internal {
                rank: self.group.rank(),
                what: format!("rank {rank} sent a store {} bytes that are no request", bytes.len()),
            })?;
            if !is_get(&request) {
                let done = copy.answer(&request);
                if rank == self.group.rank() {
                    answer = done;
                }
            }
        }
        if is_get(&own) {
            answer = copy.answer(&own);
        }
        match refusal {
            Some(why) => Err(asked.failed(why)),
            None => asked.before(answer),
        }
    }
}

impl Store for GroupStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(&Request::Set { key, value }).map(drop)
    }

    fn get(&self, key: &str, _timeout: Duration) -> Result<Vec<u8>> {
        let request = Request::Get { key, wait: Duration::ZERO };
        let asked = Asked::of(&request, Some(self.group.rank()), &self.holder);
        self.ask(&request)?.ok_or_else(|| asked.not_set())
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<Option<Vec<u8>>> {
        self.ask(&Request::CompareSet { key, expected, value })
    }
}

/// Every rank's message, without a collective of the group's own.
fn messages(group: &ProcessGroup, message: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    if group.size() == 1 {
        return Ok(vec![message]);
    }
    let lengths: Vec<i64> = gather(group, vec![message.len() as i64], vec![1; group.size()])?;
    let counts: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let all: Vec<u8> = gather(group, message, counts.clone())?;
    let mut rest = &all[..];
    let messages = counts.into_iter().map(|count| {
        let (message, others) = rest.split_at_checked(count)?;
        rest = others;
        Some(message.to_vec())
    });
    messages.collect::<Option<_>>().ok_or_else(|| Error::Internal {
        rank: group.rank(),
        what: format!("group \"{}\" gathered {} bytes, fewer than its ranks have said", group.name(), all.len()),
    })
}

fn gather<T: Element>(group: &ProcessGroup, values: Vec<T>, counts: Vec<usize>) -> Result<Vec<T>> {
    let call = Call::new("meet", "store", std::iter::empty());
    let part = GatherPart { input: Arc::new(Buffer::from(values)), counts };
    let gathered = group.aside(call, |backend, collective| {
        let op = Op::AllGather { parts: vec![part], memory: Heap::shared() };
        backend.run(collective, op).map(|Landing { outputs, .. }| outputs)
    })?;
    let output = gathered.into_iter().next().and_then(|output| output.into_vec().ok());
    output.ok_or_else(|| Error::Internal {
        rank: group.rank(),
        what: format!("group \"{}\" gathered nothing of a store's", group.name()),
    })
}

#[cfg(test)]
mod tests {
    use super::{super::shared_memory::local, *};

    #[test]
    fn all_calls_of_a_round_count_in_rank_order() {
        local::run(4, |group| {
            let store = GroupStore::new(&group);
            let own = group.rank().to_string();
            store.set("same", own.as_bytes()).unwrap();
            store.set(&own, own.as_bytes()).unwrap();
            assert_eq!(store.get("same", Duration::ZERO).unwrap(), b"3");
            assert_eq!(store.get(&((group.rank() + 1) % 4).to_string(), Duration::ZERO).unwrap().len(), 1);
            // Of those that want to be first, one is.
            let before = store.compare_set("first", None, own.as_bytes()).unwrap();
            assert_eq!(before.as_deref(), (group.rank() > 0).then_some(&b"0"[..]));
            let before = store.compare_set("first", Some(b"0"), own.as_bytes()).unwrap().unwrap();
            assert_eq!(before, if group.rank() < 2 { b"0" } else { b"1" });
            assert_eq!(group.agree(&store.get("first", Duration::ZERO).unwrap()).unwrap(), Vec::<usize>::new());
        });
    }

    #[test]
    fn what_nobody_has_set_and_what_is_too_long_fail_on_their_rank_alone() {
        local::run(2, |group| {
            let store = GroupStore::new(&group);
            let error = store.get("never", Duration::from_secs(1000)).unwrap_err().to_string();
            let told = format!("rank {}: getting \"never\" in the store of the group \"world\"", group.rank());
            assert!(error.starts_with(&told) && error.contains("nobody has set it"), "{error}");
            let long = vec![0; crate::store::MOST_VALUE * group.rank() + 1];
            assert_eq!(store.set("long", &long).is_err(), group.rank() == 1);
            assert_eq!(store.get("long", Duration::ZERO).unwrap().len(), 1);
            // The group is as it was.
            group.barrier().wait().unwrap();
        });
    }

    #[test]
    fn a_group_of_one_has_a_store_as_well() {
        let store = GroupStore::new(&ProcessGroup::alone(Duration::from_secs(60)).unwrap());
        store.set("a", b"b").unwrap();
        assert_eq!(store.get("a", Duration::ZERO).unwrap(), b"b");
    }
}
