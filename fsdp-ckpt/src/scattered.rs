//! Reading many short stretches of a file in few goes.

use crate::Result;
use crate::region::Run;
use crate::store::{Grain, ReadAt};

/// How many bytes are read at once where all are wanted.
pub(crate) const BLOCK: usize = 1 << 20;
/// How many bytes are written at once where they are summed as well: what stays in a core's cache between the two.
pub(crate) const CACHED: usize = 256 << 10;
/// More runs than this are not kept for one go.
const MOST: usize = 1 << 16;

/// Reads runs, whose sources count from `start` in the file, to their places in `into`. Runs that follow each other
/// closely in the file are read in one go, of a block at most. `seen` gets what is read in the order of the file, if
/// the runs are in it.
pub(crate) fn read_runs(
    file: &dyn ReadAt,
    start: u64,
    runs: impl Iterator<Item = Run>,
    into: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    let Grain { gap, block, .. } = file.grain();
    let mut staging = Vec::new();
    let mut batch: Vec<Run> = Vec::new();
    let mut end = 0;
    for run in runs {
        if let Some(first) = batch.first()
            && (run.src < first.src
                || run.src > end + gap
                || run.src + run.len - first.src > block
                || batch.len() == MOST)
        {
            read_batch(file, start, &batch, end, &mut staging, into, seen)?;
            batch.clear();
        }
        end = if batch.is_empty() { run.src + run.len } else { end.max(run.src + run.len) };
        batch.push(run);
    }
    read_batch(file, start, &batch, end, &mut staging, into, seen)
}

fn read_batch(
    file: &dyn ReadAt,
    start: u64,
    batch: &[Run],
    end: usize,
    staging: &mut Vec<u8>,
    into: &mut [u8],
    seen: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    match batch {
        [] => Ok(()),
        [run] => {
            // A single run may be of any length; it goes straight to its place.
            let mut at = start + run.src as u64;
            for block in into[run.dst..run.dst + run.len].chunks_mut(file.grain().piece) {
                file.read_exact_at(block, at)?;
                seen(block);
                at += block.len() as u64;
            }
            Ok(())
        }
        [first, ..] => {
            staging.resize(end - first.src, 0);
            file.read_exact_at(staging, start + first.src as u64)?;
            seen(staging);
            for run in batch {
                let at = run.src - first.src;
                into[run.dst..run.dst + run.len].copy_from_slice(&staging[at..at + run.len]);
            }
            Ok(())
        }
    }
}
