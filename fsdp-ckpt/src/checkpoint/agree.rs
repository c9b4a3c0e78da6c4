//! Agreement of all ranks on the outcome of a phase.

use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Signature, Subject};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::hosts::Hosts;
use crate::error::chain;
use crate::{Error, Result};

/// Returns a handle of the group whose collectives are for `purpose`, the same text on every rank. The error of a rank
/// that calls alone names it.
pub(crate) fn for_purpose(group: &ProcessGroup, purpose: &str) -> ProcessGroup {
    let advice = "Every rank calls it, also if only rank 0 prints or uploads the result";
    group.signed(Signature::new(&Subject::new(purpose, []), []).with_advice(advice))
}

/// Returns the outcome of a phase if it succeeded on all ranks, else the first failed rank's error on every rank.
pub(crate) fn agree<T>(group: &ProcessGroup, phase: &'static str, outcome: Result<T>) -> Result<T> {
    let message = match &outcome {
        Ok(_) => Vec::new(),
        // A failed group fails on every rank by itself, and can't carry a message.
        Err(Error::Group(_)) => return outcome,
        Err(error) => chain(error).into_bytes(),
    };
    let Some((rank, cause)) = first_message(group, message)? else { return outcome };
    let error = if rank == group.rank() { outcome.err().map(Box::new) } else { None };
    Err(Error::Rank { rank, phase, cause, error })
}

/// Returns the first message that is not empty, with its rank.
pub(crate) fn first_message(group: &ProcessGroup, message: Vec<u8>) -> fsdp_core::Result<Option<(usize, String)>> {
    let messages = group.gather_bytes(message)?;
    let first = messages.iter().enumerate().find(|(_, message)| !message.is_empty());
    Ok(first.map(|(rank, message)| (rank, String::from_utf8_lossy(message).into_owned())))
}

/// Returns every rank's value, by rank, if all ranks have one, else the first failed rank's error on every rank.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    phase: &'static str,
    own: Result<T>,
) -> Result<Vec<T>> {
    let message = own.and_then(|own| {
        serde_json::to_vec(&own).map_err(|error| Error::Argument(format!("can't write the message: {error}")))
    });
    let messages = group.gather_bytes(agree(group, phase, message)?)?;
    let read = |(rank, message): (usize, &Vec<u8>)| {
        serde_json::from_slice(message).map_err(|error| {
            Error::Argument(format!(
                "rank {rank} sent a message that can't be read ({error}); do all ranks run the same program?"
            ))
        })
    };
    messages.iter().enumerate().map(read).collect()
}

/// Runs `make` on rank 0 and returns its text, or its error, on every rank.
pub(crate) fn on_rank_0(
    group: &ProcessGroup,
    phase: &'static str,
    make: impl FnOnce() -> Result<String>,
) -> Result<String> {
    on_first_ranks(group, &Hosts::shared(group.size()), phase, make).map(|mut made| made.swap_remove(0))
}

/// Runs `make` on the first rank of each host. Returns the texts by rank on every rank, empty for the other ranks, or
/// the first error.
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

/// First byte of a first rank's message. The text or the error follows.
const MADE: u8 = 0;
const FAILED: u8 = 1;
