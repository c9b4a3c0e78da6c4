//! The launcher: starts one process per rank, with the environment of `torchrun`, and watches the ranks until the last
//! one has ended.
//!
//! [`find_program`] finds the program, and builds it if it is a target of the current Cargo workspace. [`launch`]
//! starts the ranks and returns an [`Outcome`], which displays as the summary. [`Args`] is the command line of
//! `fsdp-launch`.
//!
//! The launcher guarantees:
//! - The first failed rank ends all others and is reported. With [`max_restarts`](LaunchSpec::max_restarts), all ranks
//!   start again.
//! - No process that a rank started outlives the attempt, even if the launcher is killed. Exceptions are processes that
//!   leave both their process group and their environment.
//! - Lines of different ranks do not mix.
//!
//! ```no_run
//! use fsdp_launch::{LaunchSpec, find_program, launch};
//!
//! # fn main() -> Result<(), fsdp_launch::Error> {
//! let mut spec = LaunchSpec::new(find_program("train")?, 2);
//! spec.args = vec!["--steps".into(), "10".into()];
//! let outcome = launch(&spec)?;
//! assert!(outcome.succeeded(), "{outcome}");
//! # Ok(())
//! # }
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]

mod cli;
mod error;
mod job;
mod launch;
mod output;
mod pmi;
mod program;
mod rank;
mod rendezvous;
mod report;
mod spec;
mod watch;

pub use cli::{
    args::{Action, Args, RendezvousConf},
    usage::one_line,
};
pub use error::{Error, Result};
pub use job::{
    RunInfo,
    status::{RankStatus, RunStatus, StatusArgs, status},
};
pub use launch::{dry_run::dry_run, launch};
pub use output::console::Console;
pub use program::find_program;
pub use report::{
    outcome::{Cause, Outcome},
    process::{ProcessInfo, ProcessState},
    rank::{ExitStatus, FailedAttempt, Failure, LogEnd, RankReport, StopRequest},
    rank_snapshot::RankSnapshot,
};
pub use spec::{
    LaunchSpec, LogSpec, NumaBinding, RendezvousSpec,
    output::{LinePrefix, RankFilter, StreamChoice, Streams},
    values::{Endpoint, SignalList},
};

/// Runs the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
