//! TODO

use fsdp_core::ProcessGroup;

use crate::checkpoint::hosts::Hosts;
use crate::error::chain;
use crate::{Error, Result};

/// Ends a phase that every rank has tried: its result where all ranks succeeded, else the error of the first rank that
/// failed, on every rank.
pub(crate) fn agree<T>(group: &ProcessGroup, phase: &'static str, outcome: Result<T>) -> Result<T> {
    let message = match &outcome {
        Ok(_) => Vec::new(),
        // A group that has failed fails on every rank by itself, and can carry no message.
        Err(Error::Group(_)) => return outcome,
        Err(error) => chain(error).into_bytes(),
    };
    let messages = group.gather_bytes(message)?;
    let Some((rank, cause)) = messages.iter().enumerate().find(|(_, message)| !message.is_empty()) else {
        return outcome;
    };
    let error = if rank == group.rank() { outcome.err().map(Box::new) } else { None };
    Err(Error::Rank { rank, phase, cause: String::from_utf8_lossy(cause).into_owned(), error })
}

/// What rank 0 made, on every rank, as text; or rank 0's error on every rank.
pub(crate) fn on_rank_0(
    group: &ProcessGroup,
    phase: &'static str,
    make: impl FnOnce() -> Result<String>,
) -> Result<String> {
    on_first_ranks(group, &Hosts::shared(group.size()), phase, make).map(|mut made| made.swap_remove(0))
}

/// What the first rank of each host made, by rank and on every rank, as text: nothing for the other ranks. Or the error
/// of the first of them that has one, on every rank.
pub(crate) fn on_first_ranks(
    group: &ProcessGroup,
    hosts: &Hosts,
    phase: &'static str,
    make: impl FnOnce() -> Result<String>,
) -> Result<Vec<String>> {
    let (made, message) = match hosts.is_first(group.rank()).then(make) {
        None => (None, Vec::new()),
        Some(Ok(text)) => (None, [&[MADE], text.as_bytes()].concat()),
        Some(Err(error @ Error::Group(_))) => return Err(error),
        Some(Err(error)) => {
            let message = [&[FAILED], chain(&error).as_bytes()].concat();
            (Some(Box::new(error)), message)
        }
    };
    let messages = group.gather_bytes(message)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let failed = messages.iter().enumerate().find(|(_, message)| message.first() == Some(&FAILED));
    if let Some((rank, why)) = failed {
        let error = made.filter(|_| rank == group.rank());
        return Err(Error::Rank { rank, phase, cause: text(&why[1..]), error });
    }
    Ok(messages.iter().map(|message| text(message.get(1..).unwrap_or_default())).collect())
}

/// What a first rank's message begins with: then comes what it made, or why it made nothing.
const MADE: u8 = 0;
const FAILED: u8 = 1;
