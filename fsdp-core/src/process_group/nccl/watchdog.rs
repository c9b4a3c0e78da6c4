//! Ends what can't end by itself: a thread that looks at the collectives on their way.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use cudarc::{
    driver::{CudaStream, DriverError},
    nccl::sys::ncclResult_t,
};

use super::{
    super::{failure::Failure, lookout::Lookout, membership::Membership},
    communicator::Communicator,
    diagnosis::{self, Shown},
    flight::{Flight, Flights},
};
use crate::{Error, Result, device::cuda::failed};

/// How often it looks, at the least.
const PERIOD: Duration = Duration::from_millis(100);
/// How long a collective may go on when a peer is gone: it may have done its part, or is about to say why it went.
const GRACE: Duration = Duration::from_millis(500);

/// What the thread and the engine share.
struct Shared {
    communicator: Arc<Communicator>,
    stream: Arc<CudaStream>,
    group: Membership,
    lookout: Option<Arc<dyn Lookout>>,
    flights: Mutex<Flights>,
    stop: Mutex<bool>,
    wake: Condvar,
}

/// Looks as long as it lives.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Begins to look after the collectives of a group.
    pub(super) fn start(
        communicator: Arc<Communicator>,
        stream: Arc<CudaStream>,
        group: Membership,
        lookout: Option<Arc<dyn Lookout>>,
    ) -> Result<Self> {
        let flights = Mutex::new(Flights::default());
        let (stop, wake) = (Mutex::new(false), Condvar::new());
        let shared = Arc::new(Shared { communicator, stream, group, lookout, flights, stop, wake });
        let looks = shared.clone();
        let name = format!("nccl {}:{}", shared.group.name, shared.group.rank);
        let thread = std::thread::Builder::new().name(name).spawn(move || looks.look_out()).map_err(|source| {
            let what = format!("starting the thread that watches NCCL in group \"{}\"", shared.group.name);
            Error::Os { rank: shared.group.rank, what, source: Arc::new(source) }
        })?;
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// Looks after one more.
    pub(super) fn watch(&self, flight: Flight) {
        self.shared.flights().push(flight);
    }

    /// Waits until nothing is on its way: all has ended, or was given up.
    pub(super) fn drain(&self) {
        let mut nap = Duration::from_micros(50);
        while self.shared.communicator.check().is_ok() {
            let mut flights = self.shared.flights();
            if flights.first().is_err() || flights.is_empty() {
                return;
            }
            drop(flights);
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(2));
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.shared.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics nowhere.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_out(&self) {
        let period = PERIOD.min(self.group.timeout / 4).max(Duration::from_millis(1));
        let mut stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        while !*stop {
            drop(stop);
            if self.communicator.check().is_ok()
                && let Some(error) = self.look()
            {
                // A thread that waits for the device itself gets no error: the log is all that says why.
                tracing::error!("NCCL is given up: {error}");
                if let Some(lookout) = &self.lookout {
                    lookout.fail(&Failure::of(&error));
                }
                self.communicator.abort(error);
                self.flights().clear();
            }
            stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
            if !*stop {
                stop = self.wake.wait_timeout(stop, period).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Why the communicator is to be given up, if it is.
    fn look(&self) -> Option<Error> {
        let lookout = self.lookout.as_deref();
        let mut flights = self.flights();
        let issued = flights.issued;
        let (first, before) = match self.bound().and_then(|()| flights.first()) {
            Ok(Some(first)) if !first.has_begun() => (None, Some(first)),
            Ok(first) => (first, None),
            Err(error) => return Some(failed(&self.stream, "asking whether a collective has ended", &error)),
        };
        let at = first.as_deref().map(|flight| flight.collective(&self.group));
        if let Some(lookout) = lookout {
            lookout.show(&Shown::of(issued, at.as_ref()).to_bytes());
        }
        let what = at.map_or_else(|| format!("group \"{}\"", self.group.name), |at| at.to_string());
        let trouble = self.communicator.trouble(&what);
        let Some(flight) = first else {
            // NCCL's word that a peer is gone comes when that peer leaves, too.
            let trouble = trouble.filter(|(status, _)| *status != ncclResult_t::ncclRemoteError);
            let stuck = || {
                let (flight, waited) = before.and_then(|flight| Some((&*flight, flight.stuck(self.group.timeout)?)))?;
                Some(diagnosis::not_begun(&flight.collective(&self.group), self.communicator.device, waited))
            };
            return trouble.map(|(_, error)| error).or_else(stuck);
        };
        let is_alarm = trouble.is_some();
        let gone = lookout.and_then(Lookout::gone);
        let is_late = flight.waited() >= self.group.timeout;
        if gone.is_none() && !is_alarm {
            flight.alarm = None;
        } else if flight.alarm.get_or_insert_with(Instant::now).elapsed() >= GRACE || is_late {
            let at = flight.collective(&self.group);
            return Some(match (gone, trouble) {
                // It says more than NCCL, which sees but that somebody does not answer.
                (Some((peer, gone)), _) => gone.into_error(&at, peer),
                (None, Some((_, error))) => error,
                (None, None) => at.timed_out(vec![], flight.waited()),
            });
        }
        is_late.then(|| {
            let at = flight.collective(&self.group);
            diagnosis::of(&at, self.communicator.device, flight.waited(), lookout)
        })
    }

    fn bound(&self) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()
    }
}
