//! The handle of a collective in flight.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use crate::{Buffer, Error, Result};

/// A collective in flight. Dropping it does not cancel the collective.
#[must_use = "a collective's outputs and errors come from wait()"]
#[derive(Debug)]
pub struct Work {
    receiver: Receiver<Result<Vec<Buffer>>>,
    arrived: Option<Result<Vec<Buffer>>>,
}

/// The other end of a [`Work`], held by the backend that runs the collective.
#[derive(Debug)]
pub struct Completion(Sender<Result<Vec<Buffer>>>);

impl Completion {
    /// Hands the outputs, or the error, to whoever waits. Nobody waiting is no error.
    pub fn complete(self, outcome: Result<Vec<Buffer>>) {
        let _ = self.0.send(outcome);
    }
}

impl Work {
    /// A handle and its other end.
    pub fn pending() -> (Completion, Work) {
        let (sender, receiver) = channel();
        (Completion(sender), Work { receiver, arrived: None })
    }

    /// A handle that is done.
    pub fn ready(outcome: Result<Vec<Buffer>>) -> Work {
        let (completion, work) = Work::pending();
        completion.complete(outcome);
        work
    }

    /// Whether [`Work::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        if self.arrived.is_none() {
            self.arrived = match self.receiver.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err(abandoned())),
            };
        }
        self.arrived.is_some()
    }

    /// The outputs, one a part or buffer in the order they were passed (none for a barrier).
    ///
    /// # Errors
    /// Those of [`crate::ProcessGroup`].
    pub fn wait(self) -> Result<Vec<Buffer>> {
        match self.arrived {
            Some(outcome) => outcome,
            None => self.receiver.recv().unwrap_or_else(|_| Err(abandoned())),
        }
    }
}

fn abandoned() -> Error {
    Error::Rendezvous {
        rank: 0,
        message: "the process group was dropped with a collective in flight; keep it until the work is done".into(),
    }
}
