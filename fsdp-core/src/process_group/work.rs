//! The handle of a collective in flight.

use std::{
    fmt,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
};

use super::backend::CollectiveOutput;
use crate::{Buffer, Error, Result, Stream};

/// Where a collective waits until somebody wants it.
pub(super) trait Deferred: Send + Sync {
    /// Runs what is queued on this thread until `is_done`, or has it run elsewhere.
    fn help(&self, is_done: &mut dyn FnMut() -> bool);

    /// Runs what is queued on this thread until `is_done`, when whoever runs jobs now has stopped.
    fn run_here(&self, is_done: &mut dyn FnMut() -> bool);

    /// Has what is queued run elsewhere.
    fn start(&self);
}

/// A collective in flight. Dropping it does not cancel the collective.
///
/// [`Work::wait`] is for what is computed next, wherever that is; [`Work::then`] says what waits.
///
/// ```
/// use fsdp_core::{Buffer, ReduceOp, Stream, process_group::local};
/// local::run(2, |group| {
///     let work = group.all_reduce(vec![Buffer::F32(vec![1.0])], ReduceOp::Sum);
///     // What this thread does from here on comes after the collective.
///     assert_eq!(work.then(Stream::Host).unwrap(), [Buffer::F32(vec![2.0])]);
/// });
/// ```
#[must_use = "a collective's outputs and errors come from wait()"]
pub struct Work {
    receiver: Receiver<Result<CollectiveOutput>>,
    arrived: Option<Result<CollectiveOutput>>,
    rank: usize,
    /// Where it is queued, if it is for who waits to run it and nobody has begun to wait.
    deferred: Option<Arc<dyn Deferred>>,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Work { arrived, rank, .. } = self;
        f.debug_struct("Work").field("rank", rank).field("arrived", &arrived.is_some()).finish_non_exhaustive()
    }
}

/// The other end of a [`Work`], held by who runs the collective: a group, or collectives
/// of a user's own.
#[derive(Debug)]
pub struct Completion(Sender<Result<CollectiveOutput>>);

impl Completion {
    /// Hands the outputs, or the error, to whoever waits. Nobody waiting is no error.
    pub fn complete(self, outcome: Result<Vec<Buffer>>) {
        self.land(outcome.map(CollectiveOutput::from));
    }

    /// The same, where a device may still be at it.
    pub(super) fn land(self, outcome: Result<CollectiveOutput>) {
        let _ = self.0.send(outcome);
    }
}

impl Work {
    /// A handle for `rank` and its other end.
    pub fn pending(rank: usize) -> (Completion, Work) {
        let (sender, receiver) = channel();
        (Completion(sender), Work { receiver, arrived: None, rank, deferred: None })
    }

    /// The handle of a job that `queue` has not started.
    pub(super) fn deferred(mut self, queue: Arc<dyn Deferred>) -> Work {
        self.deferred = Some(queue);
        self
    }

    /// A handle that is done.
    pub fn ready(outcome: Result<Vec<Buffer>>) -> Work {
        let (completion, work) = Work::pending(0);
        completion.complete(outcome);
        work
    }

    /// Runs a deferred collective on this thread, now.
    pub(super) fn run_here(mut self) -> Work {
        if let Some(queue) = self.deferred.take() {
            queue.run_here(&mut || self.has_arrived());
        }
        self
    }

    /// Whether [`Work::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        self.start();
        self.has_arrived()
    }

    fn has_arrived(&mut self) -> bool {
        if self.arrived.is_none() {
            self.arrived = match self.receiver.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err(self.abandoned())),
            };
        }
        self.arrived.is_some()
    }

    /// Waits for the collective. Returns the outputs, one a part or buffer in the order they were passed (none for a
    /// barrier).
    ///
    /// For memory of the host, this thread blocks until it is done. For a device's, what the device computes next
    /// waits, and this thread goes on at once, as in PyTorch: [`Work::then`] with [`Stream::Compute`].
    ///
    /// # Errors
    /// Those of [`crate::ProcessGroup`].
    pub fn wait(self) -> Result<Vec<Buffer>> {
        self.then(Stream::Compute)
    }

    /// Lets `stream` go on only when the collective is done, and returns the outputs as [`Work::wait`] does: for what
    /// comes next on `stream`, and for nothing else.
    ///
    /// # Errors
    /// Those of [`crate::ProcessGroup`].
    pub fn then(self, stream: Stream) -> Result<Vec<Buffer>> {
        let CollectiveOutput { outputs, fence } = self.land()?;
        if let Some(mut fence) = fence {
            match stream {
                Stream::Host => fence.block()?,
                Stream::Compute => fence.order()?,
            }
        }
        Ok(outputs)
    }

    /// Waits until the backend has handed it over.
    fn land(mut self) -> Result<CollectiveOutput> {
        if let Some(queue) = self.deferred.take() {
            queue.help(&mut || self.has_arrived());
        }
        match self.arrived.take() {
            Some(outcome) => outcome,
            None => self.receiver.recv().unwrap_or_else(|_| Err(self.abandoned())),
        }
    }

    /// Has a deferred collective run although nobody waits for it.
    fn start(&mut self) {
        if let Some(queue) = self.deferred.take() {
            queue.start();
        }
    }

    fn abandoned(&self) -> Error {
        Error::Internal {
            rank: self.rank,
            what: "the backend gave a collective up without an outcome: its thread panicked, and printed why before"
                .into(),
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.start();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_that_was_given_up_is_an_error_of_its_rank() {
        let (completion, mut work) = Work::pending(3);
        assert!(!work.is_done());
        drop(completion);
        assert!(work.is_done());
        assert!(work.wait().unwrap_err().to_string().starts_with("rank 3: the backend gave a collective up"));
    }
}
