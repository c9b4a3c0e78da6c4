//! The launcher: one process per rank, with the environment that `torchrun` gives a rank, watched until the last one has ended.
//!
//! [`find_program`] turns what the user typed into a path, building it where it is a target of the Cargo workspace at hand; [`launch`] starts the
//! ranks and returns an [`Outcome`] that says how each of them ended and prints as the summary. The `fsdp-launch` command is [`Args`] on top of that.
//!
//! What the launcher promises, however things end:
//! - the first rank that fails ends all others, and is the one that is reported; with [`max_restarts`](LaunchSpec::max_restarts) all start again;
//! - nothing that a rank started outlives the attempt, not even when the launcher itself is killed (unless it leaves its group and its environment too);
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

mod args;
mod attempt;
mod console;
mod cores;
mod dry_run;
mod environment;
mod error;
mod error_file;
mod exec;
mod gpus;
mod guard;
mod help;
mod job_file;
mod launch;
mod line_prefix;
mod log_end;
mod logs;
mod nearest;
mod numa;
mod orphans;
mod output;
mod plan;
mod process;
mod program;
mod python;
mod rendezvous;
mod session;
mod signals;
mod spec;
mod status;
mod streams;
mod summary;
mod supervise;
mod temp_dir;
mod torchrun_only;
mod usage;
mod waiting;
mod watchdog;
mod whereabouts;
mod worker;

pub use args::{Action, Args};
pub use console::Console;
pub use dry_run::dry_run;
pub use error::{Error, Result};
pub use launch::launch;
pub use line_prefix::LinePrefix;
pub use log_end::LogEnd;
pub use numa::NumaBinding;
pub use process::{ProcessInfo, ProcessState};
pub use program::find_program;
pub use rendezvous::{Endpoint, options::RendezvousConf};
pub use signals::SignalList;
pub use spec::{LaunchSpec, LogSpec, RendezvousSpec};
pub use status::{RankStatus, RunStatus, StatusArgs, status};
pub use streams::{RankFilter, StreamChoice, Streams};
pub use summary::{Cause, End, Failure, Outcome, RankReport, Request, Setback};
pub use usage::one_line;
pub use whereabouts::Whereabouts;
