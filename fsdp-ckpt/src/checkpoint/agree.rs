//! Agreement of all ranks on the outcome of a phase.
//!
//! A rank sends and receives as much in a large group as in a small one: agreement is a reduction, a text comes from one
//! rank, and only rank 0 receives a message from each rank.

use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Signature, Subject};
use serde::Serialize;
use serde::de::DeserializeOwned;

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
        Ok(_) => String::new(),
        // A failed group fails on every rank by itself, and can't carry a message.
        Err(Error::Group(_)) => return outcome,
        Err(error) => chain(error),
    };
    let Some((rank, cause)) = group.first_message(message)? else { return outcome };
    let error = if rank == group.rank() { outcome.err().map(Box::new) } else { None };
    Err(Error::Rank { rank, phase, cause, error })
}

/// Returns every rank's message, by rank, on rank 0 if all ranks have one, else the first failed rank's error on every
/// rank. [`read_messages`] reads the messages.
pub(crate) fn gather_on_rank_0<T: Serialize>(
    group: &ProcessGroup,
    phase: &'static str,
    own: Result<T>,
) -> Result<Option<Vec<Vec<u8>>>> {
    Ok(group.gather_bytes_to(0, agree(group, phase, own.and_then(|own| to_message(&own)))?)?)
}

/// Returns every rank's value, by rank, if all ranks have one, else the first failed rank's error on every rank.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    phase: &'static str,
    own: Result<T>,
) -> Result<Vec<T>> {
    read_messages(&group.gather_bytes(agree(group, phase, own.and_then(|own| to_message(&own)))?)?)
}

pub(crate) fn to_message<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::Argument(format!("can't write the message: {error}")))
}

/// Reads the messages of all ranks.
pub(crate) fn read_messages<T: DeserializeOwned>(messages: &[Vec<u8>]) -> Result<Vec<T>> {
    messages.iter().enumerate().map(|(rank, message)| read_message(rank, message)).collect()
}

/// Reads the message of a rank.
pub(crate) fn read_message<T: DeserializeOwned>(rank: usize, message: &[u8]) -> Result<T> {
    serde_json::from_slice(message).map_err(|error| {
        Error::Argument(format!(
            "rank {rank} sent a message that can't be read ({error}); do all ranks run the same program?"
        ))
    })
}

/// Runs `make` on rank 0 and returns its text, or its error, on every rank.
pub(crate) fn on_rank_0(
    group: &ProcessGroup,
    phase: &'static str,
    make: impl FnOnce() -> Result<String>,
) -> Result<String> {
    let made = if group.rank() == 0 { make() } else { Ok(String::new()) };
    let text = group.broadcast_bytes(0, agree(group, phase, made)?.into_bytes())?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
