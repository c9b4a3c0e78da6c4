//! Activation checkpointing: a part of forward keeps nothing for backward but its inputs, or little more, and runs
//! again when backward comes to it.

mod closure;
mod kept;
mod policy;

pub(crate) use closure::checkpoints;
pub use closure::{checkpoint, selective_checkpoint};
pub use kept::{Operation, OperationCall};
pub(crate) use kept::{is_kept, operation};
pub use policy::CheckpointPolicy;
