//! Reads blocks of a file ahead of their use, and writes them back behind it.
//!
//! Each block in memory has a thread. While the caller computes on one block, the threads of the other blocks write
//! them back and read their next contents. A step thus takes the longer of its computation and its disk transfers.

use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, scope};

use super::direct::{AlignedBuffer, Disk};
use crate::error::Error;

/// Number of blocks in memory. With two, the disk has one request while the caller computes, and one request at a time
/// does not use all of its bandwidth.
pub(crate) const BLOCKS: usize = 4;

/// Why a stream stopped.
pub(super) enum Failure {
    Read(io::Error),
    Write(io::Error),
    Thread(io::Error),
    /// The caller's function failed.
    Caller(Error),
}

/// Calls `f` with the index and the bytes of each range of the file, in order. Ranges are aligned, disjoint, and at
/// most as long as a block. There is at least one block. Writes the bytes back if `write` is set. Returns after the
/// last write, or after a failure when all threads have ended.
pub(super) fn stream(
    disk: &dyn Disk,
    blocks: &mut [AlignedBuffer],
    ranges: &[Range<u64>],
    write: bool,
    mut f: impl FnMut(usize, &mut [u8]) -> Result<(), Error>,
) -> Result<(), Failure> {
    let count = blocks.len();
    scope(|scope| {
        let mut lanes = vec![];
        for (first, block) in blocks.iter_mut().enumerate().take(ranges.len()) {
            let (to_caller, read) = sync_channel(1);
            let (to_disk, used) = sync_channel(1);
            let own = ranges.iter().skip(first).step_by(count);
            let run = move || transfer(disk, block.bytes_mut(), own, write, &to_caller, &used);
            let thread = Builder::new().name("state-on-disk".into()).spawn_scoped(scope, run);
            lanes.push((read, to_disk, thread.map_err(Failure::Thread)?));
        }
        let mut outcome = Ok(());
        for (at, range) in ranges.iter().enumerate() {
            let (read, to_disk, _) = &lanes[at % count];
            // A thread that failed has closed its channels. Its result has the error.
            let Ok(block) = read.recv() else { break };
            outcome = f(at, &mut block[..bytes(range)]).map_err(Failure::Caller);
            if outcome.is_err() || to_disk.send(block).is_err() {
                break;
            }
        }
        for (read, to_disk, thread) in lanes {
            // Ends a thread that waits for the caller.
            drop((read, to_disk));
            let transferred = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(transferred);
        }
        outcome
    })
}

/// Reads each range into the block, passes the block to the caller, and writes it back. Ends early if the caller stops.
fn transfer<'a>(
    disk: &dyn Disk,
    mut block: &'a mut [u8],
    ranges: impl Iterator<Item = &'a Range<u64>>,
    write: bool,
    to_caller: &SyncSender<&'a mut [u8]>,
    used: &Receiver<&'a mut [u8]>,
) -> Result<(), Failure> {
    for range in ranges {
        disk.read(&mut block[..bytes(range)], range.start).map_err(Failure::Read)?;
        if to_caller.send(block).is_err() {
            return Ok(());
        }
        let Ok(back) = used.recv() else { return Ok(()) };
        block = back;
        if write {
            disk.write(&block[..bytes(range)], range.start).map_err(Failure::Write)?;
        }
    }
    Ok(())
}

fn bytes(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}
