//! The conformance suite: what every [`Backend`](fsdp_core::process_group::Backend) must do.
//!
//! [`run`] goes through the [`Trial`]s. For each trial it asks for a world of some ranks, which are threads, processes
//! or hosts. Each rank calls [`take_part`] with the trial's name and returns the resulting string. Ranks compare their
//! results with a reference that one thread computes ([`Case`]), and their errors with the expected errors.
//! `fsdp-core/tests/it/conformance.rs` shows how to run it over threads and processes.

mod case;
mod fails;
mod works;

pub use case::{Case, input};

use fsdp_core::{
    ProcessGroup,
    process_group::{Guarantees, Options},
};

/// Joins a new world of the trial's ranks. All ranks join the same worlds in the same order.
pub type Join<'a> = &'a dyn Fn(Options) -> fsdp_core::Result<ProcessGroup>;

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

/// The string that a rank returns from a part without failures.
const DONE: &str = "done";

/// Parts of the suite, for a world of a given size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Names of the parts with `+` between them, which each rank passes to [`take_part`].
    pub name: String,
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
    // One start of the ranks for each size, because some launchers take seconds.
    let sizes: [(usize, &[&str]); 4] =
        [(1, &[WORKS]), (2, &[GUARANTEES, WORKS, FAILS]), (3, &[WORKS, FAILS]), (4, &[WORKS, LATE])];
    for (size, parts) in sizes {
        let name = parts.join("+");
        let expected: Vec<String> = parts
            .iter()
            .map(|part| if *part == GUARANTEES { format!("{guarantees:?}") } else { DONE.into() })
            .collect();
        let said = world(&Trial { name: name.clone(), size });
        assert_eq!(said, vec![expected.join("; "); size], "{size} ranks, trial {name:?}");
    }
    if guarantees.detects_death {
        for size in [2, 4] {
            let mut said = world(&Trial { name: DIES.into(), size });
            said.remove(1);
            assert_eq!(said, vec![DONE; size - 1], "{size} ranks, trial {DIES:?}: all but rank 1");
        }
    }
}

/// Runs a rank's part of a [`Trial`] and returns the string that [`run`] expects from `world`.
///
/// The first failure ends the trial: the other ranks may have failed too, and would not meet again.
pub fn take_part(trial: &str, join: Join<'_>) -> String {
    let mut said = Vec::new();
    for part in trial.split('+') {
        match take_part_in(part, join) {
            Ok(done) => said.push(done),
            Err(wrong) => {
                said.push(format!("{part} failed: {wrong}"));
                break;
            }
        }
    }
    said.join("; ")
}

fn take_part_in(part: &str, join: Join<'_>) -> Result<String, Wrong> {
    match part {
        WORKS => works::all(join)?,
        FAILS => fails::all(join)?,
        LATE => fails::late(join)?,
        GUARANTEES => return Ok(format!("{:?}", join(Options::default())?.guarantees())),
        DIES => fails::dies(join)?,
        other => return Err(format!("unknown trial {other:?}: run the same build everywhere").into()),
    }
    Ok(DONE.into())
}
