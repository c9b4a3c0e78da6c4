//! The watchdog: a thread that follows pending collectives, aborts those that cannot end, and reports why they hang.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use cudarc::{
    driver::{
        CudaEvent, CudaStream, DriverError,
        sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode},
    },
    nccl::sys::ncclResult_t,
};
use parking_lot::{Condvar, Mutex};

use super::{
    super::{backend::PeerMonitor, call::Call, collective::Collective, options::Membership},
    communicator::{Communicator, device_error},
    communicators::Communicators,
};
use crate::{DeviceId, Error, Result, device::cuda::failed};

/// Longest interval of checks.
const PERIOD: Duration = Duration::from_millis(100);
/// How long a collective may continue after a peer is gone, which may have done its part or be about to send the
/// reason.
const GRACE: Duration = Duration::from_millis(500);

/// State shared by the thread and the engine.
struct Shared {
    communicator: Arc<Communicator>,
    /// All of this rank.
    communicators: Arc<Communicators>,
    stream: Arc<CudaStream>,
    group: Membership,
    peer_monitor: Option<Arc<dyn PeerMonitor>>,
    pending: Mutex<PendingCollectives>,
    stop: Mutex<bool>,
    wake: Condvar,
}

/// Runs until it is dropped.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to watch the collectives of a group.
    pub(super) fn start(
        communicator: Arc<Communicator>,
        communicators: Arc<Communicators>,
        stream: Arc<CudaStream>,
        group: Membership,
        peer_monitor: Option<Arc<dyn PeerMonitor>>,
    ) -> Result<Self> {
        let pending = Mutex::new(PendingCollectives::default());
        let (stop, wake) = (Mutex::new(false), Condvar::new());
        let shared = Arc::new(Shared { communicator, communicators, stream, group, peer_monitor, pending, stop, wake });
        let looks = shared.clone();
        let name = format!("nccl {}:{}", shared.group.name, shared.group.rank);
        let thread = std::thread::Builder::new().name(name).spawn(move || looks.run()).map_err(|source| {
            let what = format!("starting the thread that watches NCCL in group \"{}\"", shared.group.name);
            Error::os(shared.group.rank, what, source)
        })?;
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// Watches another collective.
    pub(super) fn watch(&self, collective: PendingCollective) {
        self.shared.pending.lock().push(collective);
    }

    /// Waits until no collective is pending.
    pub(super) fn drain(&self) {
        let mut nap = Duration::from_micros(50);
        while self.shared.communicator.check().is_ok() {
            let mut pending = self.shared.pending.lock();
            if pending.first().is_err() || pending.queue.is_empty() {
                return;
            }
            drop(pending);
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(2));
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.shared.stop.lock() = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        // CUDA would let a query of an event spoil a capture on any thread.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: it reads and writes the mode of this thread. A failure shows in the queries below.
        let _ = unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        let period = PERIOD.min(self.group.timeout / 4).max(Duration::from_millis(1));
        let mut stop = self.stop.lock();
        while !*stop {
            drop(stop);
            if self.communicator.check().is_ok()
                && let Some(error) = self.look()
            {
                // A thread that waits for the device itself gets no error, so the log is its only explanation.
                tracing::error!("NCCL is given up: {error}");
                self.communicators.abort(&self.communicator, &error);
                self.pending.lock().queue.clear();
            }
            stop = self.stop.lock();
            if !*stop {
                self.wake.wait_for(&mut stop, period);
            }
        }
    }

    /// Returns the reason to abort the communicator, if there is one.
    fn look(&self) -> Option<Error> {
        let mut pending = self.pending.lock();
        let issued = pending.issued;
        let first = match self.bound().and_then(|()| pending.first()) {
            Ok(first) => first,
            Err(error) => return Some(failed(&self.stream, "asking whether a collective has ended", &error)),
        };
        match first {
            Some(first) if first.clock.begun.is_some() => self.waits_for_peers(first, issued),
            first => self.waits_for_device(first, issued),
        }
    }

    /// Tells the peers which collective this rank waits in, if any.
    fn announce(&self, issued: u64, collective: Option<&Collective<'_>>) {
        if let Some(peer_monitor) = &self.peer_monitor {
            peer_monitor.set_announcement(&RankStatus::of(issued, collective).to_bytes());
        }
    }

    /// Returns the reason to give up before the first pending collective has begun, if there is one: NCCL reports an
    /// error, or the device computes for too long.
    fn waits_for_device(&self, first: Option<&mut PendingCollective>, issued: u64) -> Option<Error> {
        self.announce(issued, None);
        let trouble = self.communicator.trouble(&format!("group \"{}\"", self.group.name));
        match trouble {
            // NCCL also reports a peer as gone when the peer leaves.
            Some((status, error)) if status != ncclResult_t::ncclRemoteError => Some(error),
            _ => {
                let first = first?;
                let waited = first.clock.stuck(Instant::now(), self.group.timeout)?;
                Some(not_begun(&first.collective(&self.group), self.communicator.device, waited))
            }
        }
    }

    /// Returns the reason to give up the collective in which this rank waits for its peers, if there is one: a peer is
    /// gone or NCCL reports an error, and that has lasted for [`GRACE`], or the timeout has passed.
    fn waits_for_peers(&self, pending: &mut PendingCollective, issued: u64) -> Option<Error> {
        let PendingCollective { call, sequence, clock, alarm, .. } = pending;
        let collective = Collective::new(call, &self.group, *sequence, false);
        self.announce(issued, Some(&collective));
        let peer_monitor = self.peer_monitor.as_deref();
        let trouble = self.communicator.trouble(&collective.to_string());
        let gone = peer_monitor.and_then(PeerMonitor::lost_peer);
        let waited = clock.waited(Instant::now());
        let is_late = waited >= self.group.timeout;
        // The peer's reason is more specific than NCCL's, which is that the peer does not answer.
        let reason = match (gone, trouble) {
            (Some((peer, gone)), _) => gone.into_error(&collective, peer),
            (None, Some((_, error))) => error,
            (None, None) => {
                *alarm = None;
                return is_late.then(|| did_not_end(&collective, self.communicator.device, waited, peer_monitor));
            }
        };
        let has_lasted = alarm.get_or_insert_with(Instant::now).elapsed() >= GRACE;
        (has_lasted || is_late).then_some(reason)
    }

    fn bound(&self) -> Result<(), DriverError> {
        self.stream.context().bind_to_thread()
    }
}

/// How many timeouts a device may compute before it starts the first collective. If all ranks compute for long, none of
/// them waits, so one timeout would be too short.
const COMPUTE: u32 = 3;

/// Start times of a collective's two waits.
#[derive(Default)]
struct Clock {
    /// When it became the first pending collective, which only the device's own work delays.
    first: Option<Instant>,
    /// When it began to wait for the peers only: its inputs were ready.
    begun: Option<Instant>,
}

impl Clock {
    fn look(&mut self, now: Instant, has_begun: bool) {
        self.first.get_or_insert(now);
        if has_begun {
            self.begun.get_or_insert(now);
        }
    }

    /// Returns how long it has waited for the peers.
    fn waited(&self, now: Instant) -> Duration {
        self.begun.map_or(Duration::ZERO, |begun| now - begun)
    }

    /// Returns how long it has waited for the device, if that is too long.
    fn stuck(&self, now: Instant, timeout: Duration) -> Option<Duration> {
        let waited = self.first.filter(|_| self.begun.is_none()).map(|first| now - first)?;
        (waited >= timeout.saturating_mul(COMPUTE)).then_some(waited)
    }
}

/// A collective that was enqueued and has not ended.
pub(super) struct PendingCollective {
    pub(super) call: Call,
    pub(super) sequence: u64,
    /// Recorded when its inputs are ready.
    pub(super) begin: CudaEvent,
    pub(super) end: Arc<CudaEvent>,
    clock: Clock,
    /// When a peer was first seen to be gone.
    pub(super) alarm: Option<Instant>,
}

impl PendingCollective {
    pub(super) fn new(collective: &Collective<'_>, begin: CudaEvent, end: Arc<CudaEvent>) -> Self {
        let (call, sequence) = (collective.call().clone(), collective.sequence());
        PendingCollective { call, sequence, begin, end, clock: Clock::default(), alarm: None }
    }

    pub(super) fn collective<'a>(&'a self, group: &'a Membership) -> Collective<'a> {
        Collective::new(&self.call, group, self.sequence, false)
    }
}

/// Pending collectives in order.
#[derive(Default)]
struct PendingCollectives {
    queue: VecDeque<PendingCollective>,
    /// Sequence number after the last one's.
    pub(super) issued: u64,
}

impl PendingCollectives {
    pub(super) fn push(&mut self, collective: PendingCollective) {
        self.issued = collective.sequence + 1;
        self.queue.push_back(collective);
    }

    /// Removes the collectives that have ended, and returns the first that has not.
    pub(super) fn first(&mut self) -> Result<Option<&mut PendingCollective>, DriverError> {
        while let Some(first) = self.queue.front() {
            if !first.end.try_is_complete()? {
                break;
            }
            self.queue.pop_front();
        }
        let Some(first) = self.queue.front_mut() else { return Ok(None) };
        let has_begun = first.clock.begun.is_some() || first.begin.try_is_complete()?;
        first.clock.look(Instant::now(), has_begun);
        Ok(Some(first))
    }
}

/// Content of a rank's announcement page.
#[derive(Clone, Debug, PartialEq)]
struct RankStatus {
    /// Sequence number after the last enqueued collective's.
    issued: u64,
    /// Announcement of the collective that the rank waits in. Empty if it waits in none.
    announced: Vec<u8>,
}

impl RankStatus {
    pub(super) fn of(issued: u64, first: Option<&Collective<'_>>) -> Self {
        let announced = first.map_or(vec![], |collective| {
            let mut bytes = vec![0; Collective::announcement_len(collective.group().size)];
            collective.announce(&mut bytes);
            bytes
        });
        RankStatus { issued, announced }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        [&self.issued.to_le_bytes()[..], &self.announced].concat()
    }

    /// Decodes the bytes of [`RankStatus::to_bytes`] in a group of `ranks` ranks.
    fn from_bytes(bytes: &[u8], ranks: usize) -> Option<Self> {
        let (issued, announced) = bytes.split_first_chunk::<8>()?;
        let is_whole = announced.is_empty() || announced.len() == Collective::announcement_len(ranks);
        let issued = u64::from_le_bytes(*issued);
        is_whole.then(|| RankStatus { issued, announced: announced.to_vec() })
    }
}

/// Returns the error of a rank that waited for `waited` in a collective that did not end. Without a monitor, the
/// missing ranks are unknown.
fn did_not_end(
    collective: &Collective<'_>,
    device: DeviceId,
    waited: Duration,
    peer_monitor: Option<&dyn PeerMonitor>,
) -> Error {
    let group = collective.group();
    let peers = (0..group.size).filter(|peer| *peer != group.rank);
    let Some(peer_monitor) = peer_monitor else {
        return collective.timed_out(peers.collect(), waited);
    };
    let own = RankStatus::of(0, Some(collective)).announced;
    // A rank with an empty page has issued nothing.
    let statuses: Vec<RankStatus> = (0..group.size)
        .map(|rank| {
            let status = peer_monitor.announcement(rank).and_then(|bytes| RankStatus::from_bytes(&bytes, group.size));
            status.unwrap_or(RankStatus { issued: 0, announced: vec![] })
        })
        .collect();
    let number = |announced: &[u8]| announced.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let is_in_it = |rank: usize| number(&statuses[rank].announced) == Some(collective.sequence());
    let issued = |rank: usize| if is_in_it(rank) { &statuses[rank].announced[..] } else { &own[..] };
    // A rank that has not issued the collective, or waits in an earlier one.
    let is_missing = |rank: &usize| {
        statuses[*rank].issued <= collective.sequence()
            || number(&statuses[*rank].announced).is_some_and(|number| number < collective.sequence())
    };
    let missing: Vec<_> = peers.filter(is_missing).collect();
    if let Err(mut mismatch) = collective.compare(issued) {
        if let Error::Mismatch { details, .. } = &mut mismatch
            && !missing.is_empty()
        {
            details.push_str(&format!("; rank(s) {missing:?} are elsewhere, and are taken to have issued the same"));
        }
        return mismatch;
    }
    if !missing.is_empty() {
        return collective.timed_out(missing, waited);
    }
    let cause = format!(
        "it does not end although all ranks have issued it, for {:.1} s now: a link or a device does not get on, or \
         ranks issued the collectives of several groups in different orders. NCCL_DEBUG=INFO says more, and \
         FSDP_NCCL_CHECK=always compares every collective before it runs",
        waited.as_secs_f64()
    );
    device_error(device, &format!("rank {}: {collective} in group \"{}\"", group.rank, group.name), cause)
}

/// Returns the error of a first pending collective that has not begun for `waited`, because the device is busy.
fn not_begun(collective: &Collective<'_>, device: DeviceId, waited: Duration) -> Error {
    let group = collective.group();
    let cause = format!(
        "it has not begun for {:.1} s, because the device has not finished what this rank computes before it: a kernel \
         does not end, or takes longer than three times FSDP_TIMEOUT_S. `cuda-gdb --pid {}` shows which kernel runs; \
         raise FSDP_TIMEOUT_S if it may take so long",
        waited.as_secs_f64(),
        std::process::id()
    );
    device_error(device, &format!("rank {}: {collective} in group \"{}\"", group.rank, group.name), cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    use super::super::super::{backend::PeerState, call::Call, collective::Failure, options::Membership};
    use crate::DType;

    #[test]
    fn waits_for_the_device_and_for_peers_are_timed_apart() {
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

    /// Announcement pages of three ranks.
    struct Boards(Mutex<[Option<Vec<u8>>; 3]>);

    impl PeerMonitor for Boards {
        fn lost_peer(&self) -> Option<(usize, PeerState)> {
            None
        }
        fn fail(&self, _: &Failure) {}
        fn set_announcement(&self, _: &[u8]) {}
        fn announcement(&self, peer: usize) -> Option<Vec<u8>> {
            self.0.lock()[peer].clone()
        }
    }

    #[test]
    fn missing_ranks_and_different_collectives_are_named() {
        let group = Membership::world(0, 3, Duration::from_secs(1));
        let call = |name, count: usize| Call::new(name, "", [(DType::F32, &[count][..])].into_iter());
        let (sum, other) = (call("all_reduce", 8), call("broadcast", 8));
        let at = |call, sequence| RankStatus::of(sequence + 1, Some(&Collective::new(call, &group, sequence, false)));
        let idle = |issued| RankStatus { issued, announced: vec![] };
        let error = |second: Option<RankStatus>, third: Option<RankStatus>| {
            let boards =
                [Some(at(&sum, 7)), second, third].map(|statuses| statuses.map(|statuses| statuses.to_bytes()));
            let collective = Collective::new(&sum, &group, 7, false);
            did_not_end(&collective, DeviceId::Cuda(0), group.timeout, Some(&Boards(Mutex::new(boards))))
        };
        let is_missing = |error: &Error, ranks: &[usize]| match error {
            Error::Timeout { missing, what, .. } => missing == ranks && what.contains("collective 7"),
            _ => false,
        };
        for absent in [None, Some(idle(7)), Some(at(&other, 5))] {
            let error = error(Some(at(&sum, 7)), absent);
            assert!(is_missing(&error, &[2]), "{error}");
        }
        let mismatch = error(Some(at(&other, 7)), Some(idle(3))).to_string();
        let parts = ["rank(s) [1] issued broadcast(", "rank(s) [2] are elsewhere"];
        assert!(parts.iter().all(|part| mismatch.contains(part)), "{mismatch}");
        // A rank that has finished it is not missing, and an unreadable page does not count as issued.
        let stuck = error(Some(at(&sum, 7)), Some(idle(9))).to_string();
        assert!(stuck.contains("although all ranks have issued it"), "{stuck}");
        assert_eq!(RankStatus::from_bytes(&[1; 9], 3), None);
    }
}
