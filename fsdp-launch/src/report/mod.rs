//! What became of ranks, and of the launch: read from the kernel and from what ranks left, and put into words.

pub(crate) mod end;
pub(crate) mod error_file;
pub(crate) mod failure;
pub(crate) mod log_end;
pub(crate) mod outcome;
pub(crate) mod process;
mod shorten;
pub(crate) mod whereabouts;
