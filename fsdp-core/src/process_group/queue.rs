//! The thread that runs a rank's collectives in the order they were issued: it counts them, keeps the first error, and
//! tells the launcher.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::Receiver,
};

use super::{
    backend::Backend, call::Call, collective::Collective, failure::Failure, membership::Membership, work::Completion,
};
use crate::{Buffer, Error, Result, heartbeat, text};

/// What a collective does when its turn comes.
pub(super) type Run = Box<dyn FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<Vec<Buffer>> + Send>;

/// Something for the thread to do.
pub(super) enum Job {
    /// A collective.
    Run { call: Call, run: Run, completion: Completion },
    /// Fail the group, in turn: the collectives issued before still run.
    Fail(Error),
}

/// What the thread holds.
pub(super) struct Queue {
    backend: Box<dyn Backend>,
    group: Membership,
    sequence: u64,
    /// The first error, which every later collective gets.
    failed: Option<Error>,
    /// Where the launcher can read what runs here.
    told: Option<heartbeat::Collectives>,
}

impl Queue {
    pub(super) fn new(group: Membership, backend: Box<dyn Backend>) -> Self {
        let told = heartbeat::collectives(&group.name, group.rank, group.size);
        Queue { backend, group, sequence: 0, failed: None, told }
    }

    /// Does jobs until the group is dropped.
    pub(super) fn serve(mut self, jobs: Receiver<Job>) {
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
        if let Some(told) = &mut self.told {
            told.begin(call.name, self.sequence);
        }
        let collective = Collective::new(call, &self.group, self.sequence);
        // Inputs and allocators are the caller's code. If they panic the peers must not be left waiting.
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&mut *self.backend, &collective))).unwrap_or_else(|panic| {
            let text = text::of_panic(&*panic);
            Err(Error::Argument { rank: self.group.rank, message: format!("{} panicked: {text}", call.name) })
        });
        if let Some(told) = &mut self.told {
            told.end(&outcome);
        }
        outcome
    }

    fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            self.backend.fail(&Failure::of(&error));
            self.failed = Some(error);
        }
    }
}
