//! The same outcome of a step on all ranks.

use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Signature, Subject};

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
    let Some((rank, cause)) = group.first_message(message)? else { return own };
    let error = match own {
        // All ranks of the model's mesh have this one.
        Err(error @ Error::NonFinite(_)) => return Err(error),
        Err(Error::Checkpoint(error)) if rank == group.rank() => Some(Box::new(error)),
        _ => None,
    };
    Err(Ckpt::Rank { rank, phase, cause, error }.into())
}

fn with_causes(error: &Error) -> String {
    match error {
        Error::Checkpoint(error) => error.with_causes(),
        error => error.to_string(),
    }
}
