//! The handle of an issued collective.

use std::{
    fmt,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
};

use super::{backend::CollectiveOutput, queue::Queue};
use crate::{Buffer, Error, Result, Stream};

/// An issued collective. Dropping the handle does not cancel the collective.
///
/// [`Work::wait`] orders the next computation, on whichever device, after the collective. [`Work::then`] orders a
/// chosen stream.
///
/// ```
/// use fsdp_core::{Buffer, ReduceOp, Stream, process_group::local};
/// local::run(2, |group| {
///     let work = group.all_reduce(vec![Buffer::F32(vec![1.0])], ReduceOp::Sum);
///     // Everything that this thread does from here on happens after the collective.
///     assert_eq!(work.then(Stream::Host).unwrap(), [Buffer::F32(vec![2.0])]);
/// });
/// ```
#[must_use = "a collective's outputs and errors come from wait()"]
pub struct Work {
    receiver: Receiver<Result<CollectiveOutput>>,
    outcome: Option<Result<CollectiveOutput>>,
    rank: usize,
    /// The queue of a deferred collective, until somebody waits for it.
    deferred: Option<Arc<Queue>>,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Work { outcome, rank, .. } = self;
        f.debug_struct("Work").field("rank", rank).field("done", &outcome.is_some()).finish_non_exhaustive()
    }
}

/// The sending end of a [`Work`], held by the runner of the collective: a group, or a user's own collectives.
#[derive(Debug)]
pub struct Completion(SyncSender<Result<CollectiveOutput>>);

impl Completion {
    /// Passes the outputs or the error to the [`Work`], if it still exists.
    pub fn complete(self, outcome: Result<Vec<Buffer>>) {
        self.complete_with(outcome.map(CollectiveOutput::from));
    }

    /// Passes outputs that a device may still write.
    pub(super) fn complete_with(self, outcome: Result<CollectiveOutput>) {
        let _ = self.0.send(outcome);
    }
}

impl Work {
    /// Creates a handle for `rank` and its sending end.
    pub fn pending(rank: usize) -> (Completion, Work) {
        // The channel's place for the outcome is free, so sending never waits.
        let (sender, receiver) = sync_channel(1);
        (Completion(sender), Work { receiver, outcome: None, rank, deferred: None })
    }

    /// Marks the collective as queued in `queue` and not started.
    pub(super) fn deferred(mut self, queue: Arc<Queue>) -> Work {
        self.deferred = Some(queue);
        self
    }

    /// Creates a handle of a finished collective.
    pub fn ready(outcome: Result<Vec<Buffer>>) -> Work {
        let (completion, work) = Work::pending(0);
        completion.complete(outcome);
        work
    }

    /// Runs a deferred collective on this thread, now.
    pub(super) fn run_here(mut self) -> Work {
        if let Some(queue) = self.deferred.take() {
            queue.run_here(&mut || self.poll());
        }
        self
    }

    /// Returns whether [`Work::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        self.start();
        self.poll()
    }

    fn poll(&mut self) -> bool {
        if self.outcome.is_none() {
            self.outcome = match self.receiver.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err(self.never_completed())),
            };
        }
        self.outcome.is_some()
    }

    /// Waits for the collective and returns one output for each part or buffer, none for a barrier.
    ///
    /// For host memory, the calling thread blocks. For device memory, the device's compute stream waits and the thread
    /// goes on, as in PyTorch: this is [`Work::then`] with [`Stream::Compute`].
    ///
    /// # Errors
    /// Errors of the collective (see [`crate::ProcessGroup`]).
    pub fn wait(self) -> Result<Vec<Buffer>> {
        self.then(Stream::Compute)
    }

    /// Makes `stream` wait for the collective and returns the outputs as [`Work::wait`] does. Only `stream` may use
    /// them.
    ///
    /// # Errors
    /// Errors of the collective (see [`crate::ProcessGroup`]).
    pub fn then(self, stream: Stream) -> Result<Vec<Buffer>> {
        let CollectiveOutput { outputs, fence } = self.output()?;
        if let Some(mut fence) = fence {
            match stream {
                Stream::Host => fence.synchronize()?,
                Stream::Compute => fence.order()?,
            }
        }
        Ok(outputs)
    }

    /// Waits until the backend has returned.
    fn output(mut self) -> Result<CollectiveOutput> {
        if let Some(queue) = self.deferred.take() {
            queue.help(&mut || self.poll());
        }
        match self.outcome.take() {
            Some(outcome) => outcome,
            None => self.receiver.recv().unwrap_or_else(|_| Err(self.never_completed())),
        }
    }

    /// Starts a deferred collective that nobody waits for.
    fn start(&mut self) {
        if let Some(queue) = self.deferred.take() {
            queue.start();
        }
    }

    fn never_completed(&self) -> Error {
        Error::Internal {
            rank: self.rank,
            what: "a collective ended without an outcome: the thread of its backend panicked and printed the reason"
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
    fn a_collective_without_an_outcome_is_an_error() {
        let (completion, mut work) = Work::pending(3);
        assert!(!work.is_done());
        drop(completion);
        assert!(work.is_done());
        assert!(work.wait().unwrap_err().to_string().starts_with("rank 3: a collective ended without an outcome"));
    }
}
