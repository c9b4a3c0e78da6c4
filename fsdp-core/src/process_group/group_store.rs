//! A store that is replicated on the ranks of a group.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{
    backend::CollectiveOutput,
    call::Call,
    group::ProcessGroup,
    op::{GatherPart, Op},
};
use crate::{
    Buffer, Element, Error, Heap, Result,
    store::{Answer, MemoryStore, Request, RequestContext, Store},
};

/// A [`Store`] over an existing group, whatever its backend. Each rank has a copy, and each call exchanges requests.
///
/// **Every call is collective**: all ranks of the group make a call at the same time, not necessarily the same one. The
/// calls take effect in rank order, sets before gets. So `get` fails at once if no rank has set the value; its timeout
/// is ignored. The calls do not count as collectives of the group.
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
    /// Creates an empty store.
    pub fn new(group: &ProcessGroup) -> Self {
        let holder = format!("the group \"{}\"", group.name());
        GroupStore { group: group.clone(), copy: Mutex::default(), holder }
    }
}

impl Store for GroupStore {
    fn ask(&self, request: &Request<'_>) -> Result<Option<Vec<u8>>> {
        let asked = RequestContext::new(request, Some(self.group.rank()), &self.holder);
        // One call at a time. A refused request still takes part in the exchange, because the other ranks wait for it.
        let copy = self.copy.lock();
        let refusal = request.refusal();
        let own = match *request {
            _ if refusal.is_some() => Request::Ping,
            Request::Get { key, .. } => Request::Get { key, wait: Duration::ZERO },
            _ => request.clone(),
        };
        let all = messages(&self.group, own.to_bytes())?;
        let mut answer = Answer::Nothing;
        let is_get = |request: &Request<'_>| matches!(request, Request::Get { .. });
        for (rank, bytes) in all.iter().enumerate() {
            let request = Request::parse(bytes).ok_or_else(|| Error::Internal {
                rank: self.group.rank(),
                what: format!("rank {rank} sent a store {} bytes that are not a request", bytes.len()),
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
            None => asked.result(answer),
        }
    }
}

/// Gathers every rank's message, without counting a collective of the group.
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
        what: format!("group \"{}\" gathered {} bytes, fewer than its ranks announced", group.name(), all.len()),
    })
}

fn gather<T: Element>(group: &ProcessGroup, values: Vec<T>, counts: Vec<usize>) -> Result<Vec<T>> {
    let call = Call::without_parts("meet", "store");
    let part = GatherPart { input: Arc::new(Buffer::from(values)), counts };
    let gathered = group.run_uncounted(&call, |backend, collective| {
        let op = Op::AllGather { parts: vec![part], memory: Heap::shared() };
        backend.run(collective, op).map(|CollectiveOutput { outputs, .. }| outputs)
    })?;
    let output = gathered.into_iter().next().and_then(|output| output.into_vec().ok());
    output.ok_or_else(|| Error::Internal {
        rank: group.rank(),
        what: format!("group \"{}\" gathered no store request", group.name()),
    })
}
