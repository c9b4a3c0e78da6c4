//! Watching the ranks while they run: what happens to them and to the launcher, and which rank hangs or fails first.

pub(crate) mod event;
pub(crate) mod signals;
pub(crate) mod supervise;
mod watchdog;
