//! The handle of an issued collective.

use std::{
    fmt,
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
};

use super::backend::CollectiveOutput;
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
pub struct Work(Outcome);

enum Outcome {
    Known(Result<CollectiveOutput>),
    /// With the rank, for an error.
    Pending(Receiver<Result<CollectiveOutput>>, usize),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("done", &matches!(self.0, Outcome::Known(_))).finish_non_exhaustive()
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
        (Completion(sender), Work(Outcome::Pending(receiver, rank)))
    }

    /// Creates a handle of a finished collective.
    pub fn ready(outcome: Result<Vec<Buffer>>) -> Work {
        Work::known(outcome.map(CollectiveOutput::from))
    }

    pub(super) fn known(outcome: Result<CollectiveOutput>) -> Work {
        Work(Outcome::Known(outcome))
    }

    /// Returns whether [`Work::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        if let Outcome::Pending(receiver, rank) = &self.0 {
            let outcome = match receiver.try_recv() {
                Ok(outcome) => outcome,
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => Err(never_completed(*rank)),
            };
            self.0 = Outcome::Known(outcome);
        }
        true
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
        let outcome = match self.0 {
            Outcome::Known(outcome) => outcome,
            Outcome::Pending(receiver, rank) => receiver.recv().unwrap_or_else(|_| Err(never_completed(rank))),
        };
        let CollectiveOutput { outputs, fence } = outcome?;
        if let Some(mut fence) = fence {
            match stream {
                Stream::Host => fence.synchronize()?,
                Stream::Compute => fence.order()?,
            }
        }
        Ok(outputs)
    }
}

/// Returns the error of `rank` for a collective whose group has ended.
fn never_completed(rank: usize) -> Error {
    let what = "a collective ended without an outcome: the thread of its backend panicked and printed the reason";
    Error::Internal { rank, what: what.into() }
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
