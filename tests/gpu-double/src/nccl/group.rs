//! Calls between a group's start and its end, of which each thread has its own.

use std::{cell::RefCell, sync::Arc};

use super::{
    communicator::Communicator,
    status::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, Status},
    transfer::Transfer,
};

/// Calls for one stream of a communicator.
struct Calls {
    communicator: Arc<Communicator>,
    stream: usize,
    transfers: Vec<Transfer>,
}

#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<Calls>,
    /// The first call that was refused.
    refused: Option<Status>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn start() -> Status {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

pub(crate) fn end() -> Status {
    let ended = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { Group::default() })
    });
    let Some(Group { calls, refused, .. }) = ended else { return INVALID_USAGE };
    if let Some(refused) = refused {
        return refused;
    }
    let mut status = SUCCESS;
    for Calls { communicator, stream, transfers } in calls {
        if communicator.take(stream, transfers) == IN_PROGRESS {
            status = IN_PROGRESS;
        }
    }
    status
}

/// A call, in this thread's group or by itself.
pub(crate) fn call(communicator: Option<Arc<Communicator>>, stream: usize, transfer: Option<Transfer>) -> Status {
    let checked = communicator.zip(transfer).filter(|(communicator, transfer)| {
        let seat = communicator.seat;
        let named = transfer.named().is_none_or(|rank| rank < seat.ranks);
        let (read, written) = transfer.ranges(seat);
        let has_memory = [read, written].iter().flatten().all(|(at, len)| *len == 0 || *at != 0);
        named && has_memory && !transfer.overlaps(seat) && communicator.is_ready()
    });
    let status = if checked.is_some() { SUCCESS } else { INVALID_ARGUMENT };
    start();
    GROUP.with_borrow_mut(|group| {
        let Some((communicator, transfer)) = checked else {
            group.refused.get_or_insert(status);
            return;
        };
        if transfer.count == 0 {
            return;
        }
        let same = |calls: &&mut Calls| Arc::ptr_eq(&calls.communicator, &communicator) && calls.stream == stream;
        match group.calls.iter_mut().find(same) {
            Some(calls) => calls.transfers.push(transfer),
            None => group.calls.push(Calls { communicator, stream, transfers: vec![transfer] }),
        }
    });
    match end() {
        SUCCESS => status,
        ended => ended,
    }
}
