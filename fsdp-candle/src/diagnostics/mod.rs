//! What is said of a model that does not train as it should.

mod cut;
mod evidence;
mod norm;
mod poison;
mod report;
mod watch;

pub use cut::{Cut, GraphCut};
pub(crate) use poison::is_freed_storage_error;
pub(crate) use report::Diagnostics;
