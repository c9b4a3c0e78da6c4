//! What a trial is given, and what it says.

use super::super::{group::ProcessGroup, options::Options};
use crate::Result;

/// Joins a new world of the ranks that take part, who all do so one world after the other.
pub type Join<'a> = &'a dyn Fn(Options) -> Result<ProcessGroup>;

/// What a trial finds wrong.
pub type Wrong = Box<dyn std::error::Error>;

/// Fails the trial unless something is so.
macro_rules! ensure {
    ($so:expr, $($what:tt)+) => {
        if !$so {
            return Err(format!($($what)+).into());
        }
    };
}
pub(super) use ensure;
