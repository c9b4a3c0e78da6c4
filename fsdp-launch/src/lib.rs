//! The launcher: one process per rank, with the environment that `torchrun` gives a rank, watched until the last one
//! has ended.
//!
//! [`find_program`] turns what the user typed into a path, building it where it is a target of the Cargo workspace at
//! hand; [`launch`] starts the ranks and returns an [`Outcome`] that says how each of them ended and prints as the
//! summary. The `fsdp-launch` command is [`Args`] on top of that.
//!
//! What the launcher promises, however things end:
//! - the first rank that fails ends all others, and is the one that is reported; with
//!   [`max_restarts`](LaunchSpec::max_restarts) all start again;
//! - nothing that a rank started outlives the attempt, not even when the launcher itself is killed (unless it leaves
//!   its group and its environment too);
//! - a line of one rank's output is never torn apart by another rank's.
//!
//! ```no_run
//! use fsdp_launch::{LaunchSpec, find_program, launch};
//!
//! # fn main() -> Result<(), fsdp_launch::Error> {
//! let mut spec = LaunchSpec::new(find_program("train".as_ref())?, 2);
//! spec.args = vec!["--steps".into(), "10".into()];
//! let outcome = launch(&spec)?;
//! assert!(outcome.succeeded(), "{outcome}");
//! # Ok(())
//! # }
//! ```

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
pub use job::status::{RankStatus, RunStatus, StatusArgs, status};
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
