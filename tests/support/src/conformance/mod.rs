//! The conformance suite: what every [`Backend`](fsdp_core::process_group::Backend) must do.
//!
//! [`run`] goes through the [`Trial`]s. For each trial it asks for a world of some ranks, which are threads, processes
//! or hosts. Each rank calls [`take_part`] with the trial's name and returns the resulting string. Ranks compare their
//! results with a reference that one thread computes ([`Case`]), and their errors with the expected errors.
//! `fsdp-core/tests/it/conformance.rs` shows how to run it over threads and processes.

mod case;
mod fails;
mod works;

pub use case::Case;

use fsdp_core::{
    ProcessGroup, Result,
    process_group::{Guarantees, Options},
};

/// Joins a new world of the trial's ranks. All ranks join the same worlds in the same order.
pub type Join<'a> = &'a dyn Fn(Options) -> Result<ProcessGroup>;

/// A failed trial.
pub type Wrong = Box<dyn std::error::Error>;

/// Returns an error with the formatted message unless the condition holds.
macro_rules! ensure {
    ($so:expr, $($what:tt)+) => {
        if !$so {
            return Err(format!($($what)+).into());
        }
    };
}
use ensure;

/// The string that a rank returns from a trial without failures.
const DONE: &str = "done";

/// One part of the suite, for a world of a given size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Name that each rank passes to [`take_part`].
    pub name: &'static str,
    /// Number of ranks.
    pub size: usize,
}

const WORKS: &str = "works";
const FAILS: &str = "fails";
const LATE: &str = "late";
const GUARANTEES: &str = "guarantees";
const DIES: &str = "dies";

/// Runs the suite on a backend with the given guarantees.
///
/// `world` starts the ranks of a trial, each of which calls [`take_part`]. It returns the ranks' strings in rank order,
/// and any other string for a rank that failed to return one.
///
/// # Panics
/// If the backend does not conform. The message has the failures of each rank.
pub fn run(guarantees: Guarantees, world: &dyn Fn(&Trial) -> Vec<String>) {
    for (name, sizes) in [(WORKS, &[1, 2, 3, 4][..]), (FAILS, &[2, 3]), (LATE, &[4])] {
        for &size in sizes {
            let said = world(&Trial { name, size });
            assert_eq!(said, vec![DONE; size], "{size} ranks, trial {name:?}");
        }
    }
    let said = world(&Trial { name: GUARANTEES, size: 2 });
    assert_eq!(said, vec![format!("{guarantees:?}"); 2], "trial {GUARANTEES:?}");
    if guarantees.detects_death {
        for size in [2, 4] {
            let mut said = world(&Trial { name: DIES, size });
            said.remove(1);
            assert_eq!(said, vec![DONE; size - 1], "{size} ranks, trial {DIES:?}: all but rank 1");
        }
    }
}

/// Runs a rank's part of a [`Trial`] and returns the string that [`run`] expects from `world`.
pub fn take_part(trial: &str, join: Join<'_>) -> String {
    let outcome = match trial {
        WORKS => works::all(join),
        FAILS => fails::all(join),
        LATE => fails::late(join),
        GUARANTEES => {
            return join(Options::default()).map_or_else(|it| it.to_string(), |it| format!("{:?}", it.guarantees()));
        }
        DIES => fails::dies(join),
        other => Err(format!("unknown trial {other:?}: run the same build everywhere").into()),
    };
    match outcome {
        Ok(()) => DONE.into(),
        Err(wrong) => format!("failed: {wrong}"),
    }
}
