//! The threads that call the units of one model.
//!
//! A call unshards and reshards units that others compute with, and every rank must issue the same collectives in the
//! same order. So calls nest as in one thread. A thread may call a unit inside the running unit, whose forward waits
//! for it. Any other call from a second thread is an error. So is a call that a worker of a rayon pool runs while it
//! waits inside a layer: rayon gives a waiting worker another job of the pool.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use candle_core::Result;
use parking_lot::Mutex;

use super::param_group::FsdpParamGroup;
use crate::error::Error;

/// The running calls, the innermost last.
#[derive(Default)]
pub(super) struct Callers(Mutex<Running>);

#[derive(Default)]
struct Running {
    calls: Vec<Call>,
    begun: u64,
}

struct Call {
    /// Tells this call from others of the same unit.
    number: u64,
    unit: Arc<FsdpParamGroup>,
    thread: ThreadId,
}

/// A running call. Dropping it ends the call.
pub(super) struct Entered<'a> {
    callers: &'a Callers,
    number: u64,
}

impl Callers {
    /// Begins a call of a unit. Fails if the innermost call runs in another thread, or this thread is a worker of
    /// rayon, unless the unit is inside the unit of that call.
    pub(super) fn enter(&self, unit: &Arc<FsdpParamGroup>) -> Result<Entered<'_>> {
        let thread = thread::current().id();
        let mut running = self.0.lock();
        if let Some(call) = running.calls.last() {
            let may_be_another_job = call.thread != thread || rayon::current_thread_index().is_some();
            let is_inside = call.unit.path().contains(unit.path()) && !Arc::ptr_eq(&call.unit, unit);
            if may_be_another_job && !is_inside {
                return Err(Error::unit(
                    unit.name(),
                    format!(
                        "its forward was called while another thread, or another job of a rayon pool, runs the forward \
                         of unit `{}`. Call the units of one model one after the other: with `iter` instead of rayon's \
                         `par_iter`, for example. Forwards without a graph may run in parallel while `unshard_all` \
                         holds the model",
                        call.unit.name()
                    ),
                )
                .into());
            }
        }
        running.begun += 1;
        let number = running.begun;
        running.calls.push(Call { number, unit: unit.clone(), thread });
        Ok(Entered { callers: self, number })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.callers.0.lock().calls.retain(|call| call.number != self.number);
    }
}
