//! Collectives on their way.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaEvent, DriverError};

use super::super::{call::Call, collective::Collective, membership::Membership};

/// How many timeouts a device may compute before it begins with a collective that is first in line. Ranks that all
/// compute for long keep nobody waiting, so that the group's timeout alone would be too short.
const COMPUTE: u32 = 3;

/// Start times of a collective's two waits.
#[derive(Default)]
struct Clock {
    /// Since when it is the first that has not ended: nothing but the device's own work keeps it from beginning.
    first: Option<Instant>,
    /// Since when nothing keeps it but the peers.
    begun: Option<Instant>,
}

impl Clock {
    fn look(&mut self, now: Instant, has_begun: bool) {
        self.first.get_or_insert(now);
        if has_begun {
            self.begun.get_or_insert(now);
        }
    }

    /// For how long it has waited for the peers.
    fn waited(&self, now: Instant) -> Duration {
        self.begun.map_or(Duration::ZERO, |begun| now - begun)
    }

    /// For how long it has waited for the device, where that is too long.
    fn stuck(&self, now: Instant, timeout: Duration) -> Option<Duration> {
        let waited = self.first.filter(|_| self.begun.is_none()).map(|first| now - first)?;
        (waited >= timeout.saturating_mul(COMPUTE)).then_some(waited)
    }
}

/// A collective that was enqueued and is not seen to have ended.
pub(super) struct Flight {
    pub(super) call: Call,
    pub(super) sequence: u64,
    /// Its inputs are ready.
    pub(super) begin: CudaEvent,
    pub(super) end: Arc<CudaEvent>,
    clock: Clock,
    /// When a peer was first seen to be gone meanwhile.
    pub(super) alarm: Option<Instant>,
}

impl Flight {
    pub(super) fn new(collective: &Collective<'_>, begin: CudaEvent, end: Arc<CudaEvent>) -> Self {
        let (call, sequence) = (collective.call().clone(), collective.sequence());
        Flight { call, sequence, begin, end, clock: Clock::default(), alarm: None }
    }

    pub(super) fn collective<'a>(&'a self, group: &'a Membership) -> Collective<'a> {
        Collective::new(&self.call, group, self.sequence, false)
    }

    /// For how long it has waited for the peers.
    pub(super) fn waited(&self) -> Duration {
        self.clock.waited(Instant::now())
    }

    /// Whether its inputs are ready, so that it waits for the peers alone.
    pub(super) fn has_begun(&self) -> bool {
        self.clock.begun.is_some()
    }

    /// Returns the time that the device has kept the collective from beginning, where that is too long.
    pub(super) fn stuck(&self, timeout: Duration) -> Option<Duration> {
        self.clock.stuck(Instant::now(), timeout)
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

    /// Forgets those that have ended, and returns the first that has not.
    pub(super) fn first(&mut self) -> Result<Option<&mut Flight>, DriverError> {
        while let Some(first) = self.queue.front() {
            if !first.end.try_is_complete()? {
                break;
            }
            self.queue.pop_front();
        }
        let Some(first) = self.queue.front_mut() else { return Ok(None) };
        let has_begun = first.has_begun() || first.begin.try_is_complete()?;
        first.clock.look(Instant::now(), has_begun);
        Ok(Some(first))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flight_waits_for_the_device_and_then_for_the_peers() {
        let timeout = Duration::from_secs(10);
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut clock = Clock::default();
        assert_eq!(
            (clock.waited(at(99)), clock.stuck(at(99), timeout)),
            (Duration::ZERO, None),
            "others are before it"
        );
        clock.look(at(100), false);
        clock.look(at(129), false);
        assert_eq!((clock.waited(at(129)), clock.stuck(at(129), timeout)), (Duration::ZERO, None));
        assert_eq!(clock.stuck(at(130), timeout), Some(Duration::from_secs(30)));
        assert_eq!(clock.stuck(at(130), Duration::MAX), None);
        clock.look(at(131), true);
        clock.look(at(135), true);
        assert_eq!((clock.waited(at(140)), clock.stuck(at(140), timeout)), (Duration::from_secs(9), None));
    }
}
