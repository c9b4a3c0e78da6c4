//! Reductions in flight, and how many there may be.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Result;

use crate::fsdp::unit::Reduction;

/// A reduction in flight: over the shard ranks, then over the replicas, then over the tensor-parallel ranks, as far as
/// there are some.
pub(super) trait InFlight: Sized {
    /// Which of these it is over now: 0, 1 or 2.
    fn hop(&self) -> usize;

    /// Waits, and goes on: to the next ranks, or to the end. That may issue another collective, which must happen in
    /// the same order on every rank.
    fn advance(self) -> Result<Option<Self>>;

    /// Waits and forgets the outcome.
    fn abandon(self);
}

impl InFlight for Reduction {
    fn hop(&self) -> usize {
        Reduction::hop(self)
    }

    fn advance(self) -> Result<Option<Self>> {
        Reduction::advance(self)
    }

    fn abandon(self) {
        Reduction::abandon(self);
    }
}

/// The queue of those that wait for their end, the oldest first.
pub(super) struct Reductions<R>(Mutex<VecDeque<R>>);

impl<R: InFlight> Reductions<R> {
    pub(super) fn new() -> Self {
        Reductions(Mutex::new(VecDeque::new()))
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the oldest until there are fewer than `max` on each hop, but for those that went on to it now. Which
    /// go on depends on their number alone, never on their speed: all ranks issue their collectives in the same order.
    pub(super) fn make_room(&self, max: usize) -> Result<()> {
        let mut waiting = std::mem::take(&mut *self.queue());
        let mut in_flight = [0; 3];
        waiting.iter().for_each(|reduction| in_flight[reduction.hop()] += 1);
        let mut kept = VecDeque::with_capacity(waiting.len());
        let mut outcome = Ok(());
        while let Some(reduction) = waiting.pop_front() {
            let count = &mut in_flight[reduction.hop()];
            if *count < max {
                kept.push_back(reduction);
                continue;
            }
            *count -= 1;
            match reduction.advance() {
                Ok(next) => kept.extend(next),
                Err(error) => {
                    // The others are still in flight, and are waited for when the step is forgotten.
                    kept.append(&mut waiting);
                    outcome = Err(error);
                }
            }
        }
        *self.queue() = kept;
        outcome
    }

    pub(super) fn add(&self, started: Vec<R>) {
        self.queue().extend(started);
    }

    /// Waits for all to the end.
    pub(super) fn finish(&self) -> Result<()> {
        loop {
            let oldest = self.queue().pop_front();
            let Some(mut reduction) = oldest else { return Ok(()) };
            while let Some(next) = reduction.advance()? {
                reduction = next;
            }
        }
    }

    /// Waits for all and forgets the outcome.
    pub(super) fn abandon(&self) {
        let all = std::mem::take(&mut *self.queue());
        all.into_iter().for_each(R::abandon);
    }
}
