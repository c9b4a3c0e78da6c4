//! What every backend passes: one suite, run over worlds that a backend's own tests know how to make. For tests.
//!
//! [`run`] goes through the [`Trial`]s. For each it asks for a world of some ranks, be they threads, processes or
//! hosts; each rank calls [`take_part`] with the trial's name and hands back what that says. Ranks compare what they
//! get with what one thread computes ([`Case`]), and errors with those that they should get.
//!
//! From the bottom up: `verdict` (what a trial says), `reference` (what one thread computes), `case` (all collectives
//! on one list of parts), `works` and `fails` (the rest), and here the suite. The engine of a device is held to it by
//! `over_host`.
//!
//! ```
//! use std::sync::Mutex;
//! use fsdp_core::process_group::{conformance::{self, Trial}, local};
//!
//! /// Threads that make worlds one after the other: the first rank to ask for one makes it.
//! fn threads(trial: &Trial) -> Vec<String> {
//!     let worlds = Mutex::new(Vec::new());
//!     local::run(trial.size, |first| {
//!         let joined = std::cell::Cell::new(0);
//!         conformance::take_part(trial.name, &|options| {
//!             let (mut worlds, at) = (worlds.lock().unwrap(), joined.replace(joined.get() + 1));
//!             if worlds.len() == at {
//!                 worlds.push(local::world(trial.size, options)?);
//!             }
//!             Ok(worlds[at][first.rank()].clone())
//!         })
//!     })
//! }
//!
//! let promises = local::run(2, |group| group.promises())[0];
//! conformance::run(promises, &threads);
//! ```

mod case;
mod fails;
#[cfg(feature = "cuda")]
mod over_host;
mod reference;
mod verdict;
mod works;

pub use case::Case;
#[cfg(feature = "cuda")]
pub use over_host::over_host;
pub use verdict::{Join, Wrong};

use super::{backend::Promises, options::Options};

/// What ranks say that found nothing wrong.
const DONE: &str = "done";

/// A world of ranks with something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// What each rank passes to [`take_part`].
    pub name: &'static str,
    /// The number of ranks.
    pub size: usize,
}

const WORKS: &str = "works";
const FAILS: &str = "fails";
const LATE: &str = "late";
const PROMISES: &str = "promises";
const DIES: &str = "dies";

/// Holds a backend that promises this to what every backend must do. `world` starts the ranks of a trial, each of which
/// calls [`take_part`], and returns what that returned, in rank order; of a rank that ended otherwise, anything.
///
/// # Panics
/// When the backend does something else, with what each rank found.
pub fn run(promises: Promises, world: &dyn Fn(&Trial) -> Vec<String>) {
    for (name, sizes) in [(WORKS, &[1, 2, 3, 4][..]), (FAILS, &[2, 3]), (LATE, &[4])] {
        for &size in sizes {
            let said = world(&Trial { name, size });
            assert_eq!(said, vec![DONE; size], "{size} ranks, trial {name:?}");
        }
    }
    let said = world(&Trial { name: PROMISES, size: 2 });
    assert_eq!(said, vec![format!("{promises:?}"); 2], "trial {PROMISES:?}");
    if promises.sees_death {
        for size in [2, 4] {
            let mut said = world(&Trial { name: DIES, size });
            said.remove(1);
            assert_eq!(said, vec![DONE; size - 1], "{size} ranks, trial {DIES:?}: all but rank 1");
        }
    }
}

/// A rank's part in a [`Trial`], which it joins worlds for. Returns what [`run`] wants to hear.
pub fn take_part(trial: &str, join: Join<'_>) -> String {
    let outcome = match trial {
        WORKS => works::all(join),
        FAILS => fails::all(join),
        LATE => fails::late(join),
        PROMISES => {
            return join(Options::default()).map_or_else(|it| it.to_string(), |it| format!("{:?}", it.promises()));
        }
        DIES => fails::dies(join),
        other => Err(format!("there is no trial {other:?}: run the same build everywhere").into()),
    };
    match outcome {
        Ok(()) => DONE.into(),
        Err(wrong) => format!("not so: {wrong}"),
    }
}
