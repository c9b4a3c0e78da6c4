//! A request under way, and its errors.

use std::time::Instant;

use super::message::{Answer, Request};
use crate::{Error, Result};

/// What was asked of whom, and when.
pub(crate) struct Asked<'a> {
    pub(crate) what: String,
    pub(crate) holder: &'a str,
    pub(crate) began: Instant,
}

impl<'a> Asked<'a> {
    /// `rank` is nothing where there are none.
    pub(crate) fn of(request: &Request<'_>, rank: Option<usize>, holder: &'a str) -> Self {
        let verb = match request {
            Request::Hello => "reaching",
            Request::Get { .. } => "getting",
            Request::Set { .. } | Request::CompareSet { .. } => "setting",
        };
        let rank = rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let what = match request {
            Request::Hello => format!("{rank}{verb} the store"),
            _ => format!("{rank}{verb} {:?} in the store", request.key()),
        };
        Asked { what, holder, began: Instant::now() }
    }

    pub(crate) fn failed(&self, cause: impl Into<String>) -> Error {
        Error::Store {
            what: self.what.clone(),
            holder: self.holder.to_owned(),
            seconds: self.began.elapsed().as_secs_f64(),
            cause: cause.into(),
        }
    }

    /// Nobody has set what was waited for.
    pub(crate) fn not_set(&self) -> Error {
        self.failed("nobody has set it. See what the rank that should have does instead, or raise FSDP_TIMEOUT_S")
    }

    /// What a set or a compare-and-set comes to.
    pub(crate) fn before(&self, answer: Answer) -> Result<Option<Vec<u8>>> {
        match answer {
            Answer::Nothing => Ok(None),
            Answer::Value(value) => Ok(Some(value)),
            Answer::Refused(why) => Err(self.failed(why)),
        }
    }
}
