//! The thread that runs a rank's collectives in the order they were issued.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc::Receiver},
};

use super::{
    call::Call,
    failure::Failure,
    rounds::{self, Rounds},
    segment::{Port, state},
    watch::Watch,
};
use crate::{Buffer, Error, Result, heartbeat, process_group::Completion};

/// Runs a collective, given the runner and how it was announced.
type Run = Box<dyn FnOnce(&mut Runner, &Call) -> Result<Vec<Buffer>> + Send>;

/// Something for the thread to do.
pub(crate) enum Job {
    /// A collective.
    Run { call: Call, run: Run, completion: Completion },
    /// Fail the group, in turn: the collectives issued before still run.
    Fail(Error),
}

/// What the thread holds.
pub(crate) struct Runner {
    port: Port,
    watch: Arc<Watch>,
    sequence: u64,
    /// The first error, which every later collective gets.
    failed: Option<Error>,
    /// Where the launcher can read what runs here.
    told: Option<heartbeat::Collectives>,
}

impl Runner {
    pub(crate) fn new(port: Port, watch: Arc<Watch>) -> Self {
        let told = heartbeat::collectives(&watch.group, port.rank(), port.ranks());
        Runner { port, watch, sequence: 0, failed: None, told }
    }

    /// The position of the current collective in the group's order.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Runs a collective with the peers.
    pub(crate) fn run(&mut self, call: &Call, collective: &mut dyn Rounds) -> Result<()> {
        rounds::run(&mut self.port, &self.watch, call, self.sequence, collective)
    }

    /// Runs jobs until the group is dropped.
    pub(crate) fn serve(mut self, jobs: Receiver<Job>) {
        for job in jobs {
            match job {
                Job::Fail(error) => self.fail(error),
                Job::Run { call, run, completion } => {
                    let outcome = match &self.failed {
                        Some(error) => Err(error.clone()),
                        None => {
                            tracing::debug_span!("collective", op = call.name).in_scope(|| self.attempt(&call, run))
                        }
                    };
                    if let Err(error) = &outcome {
                        self.fail(error.clone());
                    }
                    self.sequence += 1;
                    completion.complete(outcome);
                }
            }
        }
    }

    fn attempt(&mut self, call: &Call, run: Run) -> Result<Vec<Buffer>> {
        let rank = self.port.rank();
        if let Some(told) = &mut self.told {
            told.begin(call.name, self.sequence);
        }
        // Inputs and allocators are the caller's code. If they panic the peers must not be left waiting.
        let outcome = catch_unwind(AssertUnwindSafe(|| run(self, call))).unwrap_or_else(|panic| {
            let text = crate::text::of_panic(&*panic);
            Err(Error::Argument { rank, message: format!("{} panicked: {text}", call.name) })
        });
        if let Some(told) = &mut self.told {
            told.end(&outcome);
        }
        outcome
    }

    fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            let control = self.port.segment().control(self.port.rank());
            Failure::of(&error).store(control);
            control.end(state::FAILED);
            self.failed = Some(error);
        }
    }
}
