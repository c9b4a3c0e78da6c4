//! What the tests on devices share: runs of the programs there, and what the device double counted of them.

mod counts;
mod run;

pub use counts::Counts;
pub use run::{Way, Which, number};
