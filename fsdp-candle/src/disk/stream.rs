//! Reads parts of files ahead of their use, and writes them back behind it.
//!
//! Each block in memory has a thread. While the caller computes on one block, the threads of the other blocks write
//! them back and read their next contents. A step thus takes the longer of its computation and its disk transfers.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, scope};

use super::StateFile;
use crate::error::Error;

/// Number of blocks in memory. With two, the disk has one request while the caller computes, and one request at a time
/// does not use all of its bandwidth.
pub(crate) const BLOCKS: usize = 4;

/// Bytes of a file, with aligned ends.
pub(crate) struct FileRange<'a> {
    pub(crate) file: &'a StateFile,
    pub(crate) bytes: Range<u64>,
}

impl FileRange<'_> {
    pub(crate) fn len(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }
}

/// Transfers of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// Writes what the caller makes of any bytes.
    Write,
    /// Reads, and writes what the caller makes of it.
    Update,
}

/// Why a stream stopped.
pub(super) enum Failure<'a> {
    Read(&'a StateFile, io::Error),
    Write(&'a StateFile, io::Error),
    Thread(io::Error),
    Panic(Box<dyn Any + Send>),
    /// The caller's function failed.
    Caller(Error),
}

/// An item in a block, from the thread of a lane.
struct Ready<'block> {
    lane: usize,
    item: usize,
    block: &'block mut [u8],
}

/// Calls `f` with the index and the bytes of each item: in order if items are only read, and else in the order in which
/// the disk is done. An item is ranges of files, which lie one after the other in a block, and fit. All ranges are
/// disjoint. There is at least one block. Returns after the last write, or after a failure when all threads have ended.
pub(super) fn stream<'a>(
    blocks: impl Iterator<Item = &'a mut [u8]>,
    items: &'a [Vec<FileRange<'a>>],
    access: Access,
    mut f: impl FnMut(usize, &mut [u8]) -> Result<(), Error>,
) -> Result<(), Failure<'a>> {
    let next = AtomicUsize::new(0);
    scope(|scope| {
        let (to_caller, ready) = channel();
        let mut lanes = vec![];
        for (lane, block) in blocks.enumerate().take(items.len()) {
            let (to_lane, used) = channel();
            let (to_caller, next) = (to_caller.clone(), &next);
            let run = move || {
                let transfers = || {
                    let block = block; // not a borrow of it
                    transfer(lane, block, (items, next), access, &to_caller, &used)
                };
                let done = catch_unwind(AssertUnwindSafe(transfers)).unwrap_or_else(|panic| Err(Failure::Panic(panic)));
                // The caller reads the channel to its end.
                done.map_or_else(|failure| drop(to_caller.send(Err(failure))), |()| ());
            };
            Builder::new().name("state-on-disk".into()).spawn_scoped(scope, run).map_err(Failure::Thread)?;
            lanes.push(to_lane);
        }
        drop(to_caller);
        let mut early: Vec<Ready<'_>> = vec![];
        let mut outcome = Ok(());
        for at in 0..items.len() {
            let is_next = |ready: &Ready<'_>| access != Access::Read || ready.item == at;
            let found = loop {
                if let Some(found) = early.iter().position(is_next) {
                    break Ok(early.swap_remove(found));
                }
                match ready.recv() {
                    Ok(Ok(ready)) => early.push(ready),
                    Ok(Err(failure)) => break Err(failure),
                    Err(_) => unreachable!("a lane that ends before its last item has failed"),
                }
            };
            outcome = found.and_then(|Ready { lane, item, block }| {
                f(item, &mut block[..bytes(&items[item])]).map_err(Failure::Caller)?;
                let _ = lanes[lane].send(block); // a lane waits for its block
                Ok(())
            });
            if outcome.is_err() {
                break;
            }
        }
        // Ends lanes that wait for the caller.
        drop((early, lanes));
        ready.into_iter().fold(outcome, |outcome, ready| outcome.and(ready.map(drop)))
    })
}

/// Reads items into the block, passes the block to the caller, and writes it back, until none is left. Ends early if the
/// caller stops.
fn transfer<'block, 'a>(
    lane: usize,
    mut block: &'block mut [u8],
    (items, next): (&'a [Vec<FileRange<'a>>], &AtomicUsize),
    access: Access,
    to_caller: &Sender<Result<Ready<'block>, Failure<'a>>>,
    used: &Receiver<&'block mut [u8]>,
) -> Result<(), Failure<'a>> {
    loop {
        let item = next.fetch_add(1, Ordering::Relaxed);
        let Some(ranges) = items.get(item) else { return Ok(()) };
        if access != Access::Write {
            each_range(ranges, block, |range, bytes| {
                range.file.read(bytes, range.bytes.start).map_err(|error| Failure::Read(range.file, error))
            })?;
        }
        if to_caller.send(Ok(Ready { lane, item, block })).is_err() {
            return Ok(());
        }
        let Ok(back) = used.recv() else { return Ok(()) };
        block = back;
        if access != Access::Read {
            each_range(ranges, block, |range, bytes| {
                range.file.write(bytes, range.bytes.start).map_err(|error| Failure::Write(range.file, error))
            })?;
        }
    }
}

/// Calls `f` with each range of an item and its part of the block.
fn each_range<'a, E>(
    item: &'a [FileRange<'a>],
    block: &mut [u8],
    mut f: impl FnMut(&'a FileRange<'a>, &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut rest = block;
    for range in item {
        let (bytes, more) = rest.split_at_mut(range.len());
        f(range, bytes)?;
        rest = more;
    }
    Ok(())
}

fn bytes(item: &[FileRange<'_>]) -> usize {
    item.iter().map(FileRange::len).sum()
}
