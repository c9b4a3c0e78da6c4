//! The same outcome of a step on all ranks.

use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{ProcessGroup, ReduceOp};

use crate::error::{Error, Result};

/// Returns a handle of the group whose collectives are for `purpose`. The error of a rank that calls alone names it.
pub(super) fn for_purpose(group: &ProcessGroup, purpose: &str) -> ProcessGroup {
    let advice = "Every rank calls it, with the same arguments";
    group.signed(Signature::new(&Subject::new(purpose, []), []).with_advice(advice))
}

/// Returns the outcome if it is a success on all ranks, else the first failed rank's error on every rank. Collective.
pub(super) fn agree<T>(group: &ProcessGroup, phase: &'static str, own: Result<T>) -> Result<T> {
    use fsdp_ckpt::Error as Ckpt;
    let message = match &own {
        Ok(_) => String::new(),
        // The other ranks know of these errors: their collectives fail too, or an earlier agreement has told them.
        Err(Error::Core(_) | Error::Checkpoint(Ckpt::Group(_) | Ckpt::Open { .. } | Ckpt::Save { .. })) => return own,
        Err(error) => with_causes(error),
    };
    let Some((rank, cause)) = first_message(group, message)? else { return own };
    let error = match own {
        // All ranks of the model's mesh have this one.
        Err(error @ Error::NonFinite(_)) => return Err(error),
        Err(Error::Checkpoint(error)) if rank == group.rank() => Some(Box::new(error)),
        _ => None,
    };
    Err(Ckpt::Rank { rank, phase, cause, error }.into())
}

/// Returns the first message that is not empty, with its rank. Collective.
pub(super) fn first_message(group: &ProcessGroup, message: String) -> Result<Option<(usize, String)>> {
    let own = if message.is_empty() { i64::MAX } else { group.rank() as i64 };
    let first = group.all_reduce_scalar(own, ReduceOp::Min)?;
    if first == i64::MAX {
        return Ok(None);
    }
    let text = group.broadcast_bytes(first as usize, message.into_bytes())?;
    Ok(Some((first as usize, String::from_utf8_lossy(&text).into_owned())))
}

fn with_causes(error: &Error) -> String {
    match error {
        Error::Checkpoint(error) => error.with_causes(),
        error => error.to_string(),
    }
}
