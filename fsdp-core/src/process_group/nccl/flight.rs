//! Collectives on their way.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaEvent, DriverError};

use super::super::{call::Call, collective::Collective, membership::Membership};

/// A collective that was enqueued and is not seen to have ended.
pub(super) struct Flight {
    pub(super) call: Call,
    pub(super) sequence: u64,
    /// Its inputs are ready.
    pub(super) begin: CudaEvent,
    pub(super) end: Arc<CudaEvent>,
    /// When nothing kept it any more but the peers, as seen here.
    since: Option<Instant>,
    /// When a peer was first seen to be gone meanwhile.
    pub(super) alarm: Option<Instant>,
}

impl Flight {
    pub(super) fn new(collective: &Collective<'_>, begin: CudaEvent, end: Arc<CudaEvent>) -> Self {
        let (call, sequence) = (collective.call().clone(), collective.sequence());
        Flight { call, sequence, begin, end, since: None, alarm: None }
    }

    pub(super) fn collective<'a>(&'a self, group: &'a Membership) -> Collective<'a> {
        Collective::new(&self.call, group, self.sequence, false)
    }

    /// For how long it has waited for the peers.
    pub(super) fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// In the order in which they run.
#[derive(Default)]
pub(super) struct Flights {
    queue: VecDeque<Flight>,
    /// The number behind that of the last one.
    pub(super) issued: u64,
}

impl Flights {
    pub(super) fn push(&mut self, flight: Flight) {
        self.issued = flight.sequence + 1;
        self.queue.push_back(flight);
    }

    /// Forgets those that have ended, and returns the first that has not, if its time has come.
    pub(super) fn first(&mut self) -> Result<Option<&mut Flight>, DriverError> {
        while let Some(first) = self.queue.front() {
            if !first.end.try_is_complete()? {
                break;
            }
            self.queue.pop_front();
        }
        let Some(first) = self.queue.front_mut() else { return Ok(None) };
        if first.since.is_none() && first.begin.try_is_complete()? {
            first.since = Some(Instant::now());
        }
        Ok(first.since.is_some().then_some(first))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }
}
