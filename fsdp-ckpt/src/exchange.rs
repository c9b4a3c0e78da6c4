//! What ranks tell each other while they save: small messages, and after each phase whether it went well.

use std::sync::Arc;

use fsdp_core::{Buffer, DType, GatherPart, Heap, ProcessGroup, Readable};

use crate::error::chain;
use crate::{Error, Result};

/// Every rank's message, in rank order.
pub(crate) fn gather(group: &dyn ProcessGroup, message: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let ranks = group.size();
    let length = i64::try_from(message.len()).unwrap_or(i64::MAX);
    let lengths = all_gather(group, Buffer::I64(vec![length]), vec![1; ranks])?;
    let counts: Vec<usize> = match &lengths {
        Buffer::I64(lengths) if lengths.len() == ranks => {
            lengths.iter().map(|&length| usize::try_from(length).unwrap_or(0)).collect()
        }
        other => return Err(unexpected(group, DType::I64, ranks, other)),
    };
    let total = counts.iter().sum();
    if total == 0 {
        return Ok(vec![Vec::new(); ranks]);
    }
    let all = all_gather(group, Buffer::U8(message), counts.clone())?;
    let mut rest = match &all {
        Buffer::U8(bytes) if bytes.len() == total => bytes.as_slice(),
        other => return Err(unexpected(group, DType::U8, total, other)),
    };
    Ok(counts
        .iter()
        .map(|&count| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head.to_vec()
        })
        .collect())
}

fn all_gather(group: &dyn ProcessGroup, input: Buffer, counts: Vec<usize>) -> Result<Buffer> {
    let (dtype, total) = (input.dtype(), counts.iter().sum());
    let input: Arc<dyn Readable> = Arc::new(input);
    let mut outputs = group.all_gather(vec![GatherPart { input, counts }], Heap::shared()).wait()?;
    match outputs.pop() {
        Some(output) => Ok(output),
        None => Err(unexpected(group, dtype, total, &Buffer::zeros(dtype, 0))),
    }
}

fn unexpected(group: &dyn ProcessGroup, dtype: DType, len: usize, got: &Buffer) -> Error {
    Error::Group(fsdp_core::Error::Argument {
        rank: group.rank(),
        message: format!(
            "the all-gather of group \"{}\" should give {len} elements of {dtype}, it gave {} of {}",
            group.name(),
            got.len(),
            got.dtype()
        ),
    })
}

/// Ends a phase that every rank has tried: its result where all ranks succeeded, else the error of the first rank that failed, on every rank.
pub(crate) fn agree<T>(group: &dyn ProcessGroup, phase: &'static str, outcome: Result<T>) -> Result<T> {
    let message = match &outcome {
        Ok(_) => Vec::new(),
        // A group that has failed fails on every rank by itself, and can carry no message.
        Err(Error::Group(_)) => return outcome,
        Err(error) => chain(error).into_bytes(),
    };
    let messages = gather(group, message)?;
    let Some((rank, cause)) = messages.iter().enumerate().find(|(_, message)| !message.is_empty()) else {
        return outcome;
    };
    let error = if rank == group.rank() { outcome.err().map(Box::new) } else { None };
    Err(Error::Rank { rank, phase, cause: String::from_utf8_lossy(cause).into_owned(), error })
}

/// What rank 0 made, on every rank, as text; or rank 0's error on every rank.
pub(crate) fn from_first(
    group: &dyn ProcessGroup,
    phase: &'static str,
    make: impl FnOnce() -> Result<String>,
) -> Result<String> {
    let made = if group.rank() == 0 { make() } else { Ok(String::new()) };
    let text = agree(group, phase, made)?;
    let mut messages = gather(group, text.into_bytes())?;
    Ok(String::from_utf8_lossy(&messages.swap_remove(0)).into_owned())
}
