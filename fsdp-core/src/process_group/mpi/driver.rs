//! The one thread of the process that calls MPI, and its handle.
//!
//! All calls come from one thread (`MPI_THREAD_FUNNELED`), so that every MPI library suffices. The thread serves all
//! groups. It polls messages in flight, because MPI makes progress only while it is called. It sleeps longer the longer
//! nothing happens.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU16, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    super::{
        backend::PeerState,
        collective::Failure,
        waiting_ranks::{WaitingRanks, WarningTimer},
    },
    communicator::{self, Batch, Communicator, Direction, InFlight, NOTIFICATION, Notification, Transfer},
    library::{self, Kind, MpiError},
    session::Mpi,
};
use crate::RankEnv;

/// Tag of messages between ranks that have no group yet.
const RENDEZVOUS_TAG: u16 = 1;
/// Largest tag that every MPI supports.
const LARGEST: u16 = 32767;
/// Shortest time limit for starting MPI and for rendezvous, which take seconds with many hosts.
pub(super) const MIN_RENDEZVOUS_TIME: Duration = Duration::from_secs(60);
/// Interval of checks while MPI starts.
const LOOK: Duration = Duration::from_millis(250);
/// The call that waits for all ranks.
const MPI_INIT: &str = "MPI_Init";

/// Handle of the thread.
pub(super) struct Driver {
    commands: Sender<Command>,
    /// This process's rank in MPI's world.
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Whether there are fewer cores than ranks and their threads.
    pub(super) is_crowded: bool,
    /// Path of the library, for messages.
    pub(super) library: PathBuf,
    tags: AtomicU16,
    is_over: Arc<AtomicBool>,
    has_failed: Arc<AtomicBool>,
    timeout: Duration,
    pub(super) world: Arc<Communicator>,
    /// Number of receives posted on [`Driver::world`] for each rank. Locked while a world is created.
    pub(super) received: Mutex<Vec<u64>>,
}

static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();

impl Driver {
    /// Returns the driver of this process, or why MPI did not start. The first call starts it.
    pub(super) fn get(env: &RankEnv, waiting: &WaitingRanks, timeout: Duration) -> Result<&'static Self, String> {
        DRIVER.get_or_init(|| start(env, waiting, timeout.max(MIN_RENDEZVOUS_TIME))).as_ref().map_err(String::clone)
    }

    fn send(&self, command: Command) {
        // Waits notice that the thread has ended.
        let _ = self.commands.send(command);
    }

    /// Returns whether the thread has ended.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns a tag that no other group of this process has had.
    pub(super) fn tag(&self) -> Result<u16, String> {
        let next = |tag: u16| (tag <= LARGEST).then(|| tag + 1);
        self.tags
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .map_err(|_| format!("this process has created {LARGEST} groups, the limit of MPI's tags: reuse groups"))
    }

    /// Starts to record notifications of the members.
    pub(super) fn open(&self, communicator: &Arc<Communicator>) {
        self.send(Command::Open(communicator.clone()));
    }

    pub(super) fn post(
        &self,
        communicator: &Arc<Communicator>,
        in_flight: Arc<InFlight>,
        transfers: Vec<Transfer>,
    ) -> Arc<Batch> {
        let batch = Arc::new(Batch::of(&transfers));
        self.send(Command::Post { communicator: communicator.clone(), in_flight, transfers, batch: batch.clone() });
        batch
    }

    pub(super) fn close(&self, communicator: &Arc<Communicator>, why: Option<Failure>) {
        self.send(Command::Close { communicator: communicator.clone(), why });
    }
}

fn start(env: &RankEnv, waiting: &WaitingRanks, timeout: Duration) -> Result<Driver, String> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let is_crowded = 2 * env.local_world_size > cores;
    let (commands, orders) = channel();
    let (tell, told) = channel();
    let (is_over, has_failed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let flags = (is_over.clone(), has_failed.clone());
    let serve = move || {
        let (is_over, has_failed) = flags;
        let _end = Over(is_over);
        let outcome = library::library(&|name| std::env::var(name).ok()).and_then(|(mut mpi, path)| {
            let name = |refused: MpiError| format!("{}: {}", path.display(), refused.text);
            let (rank, size) = mpi.start().map_err(name)?;
            mpi.separate(timeout).map_err(name)?;
            tracing::debug!("MPI: {} ({})", path.display(), mpi.version().lines().next().unwrap_or_default());
            Ok((mpi, path, rank, size))
        });
        match outcome {
            Err(why) => drop(tell.send(Err(why))),
            Ok((mpi, path, rank, size)) => {
                let thread = Thread::new(mpi, (rank, size), orders, is_crowded, has_failed);
                drop(tell.send(Ok((path, rank, size))));
                thread.serve();
            }
        }
    };
    let thread = std::thread::Builder::new().name("fsdp mpi".into()).spawn(serve);
    thread.map_err(|error| format!("starting the thread that calls MPI: {error}"))?;
    let (library, rank, size) = started(&told, env, waiting, timeout)??;
    let world = Communicator::new(RENDEZVOUS_TAG, (0..size).collect(), rank);
    world.set_tags(vec![RENDEZVOUS_TAG; size]);
    // SAFETY: the function is called once, when the process exits, and depends on nothing that ends before.
    unsafe { libc::atexit(at_exit) };
    Ok(Driver {
        commands,
        rank,
        size,
        is_crowded,
        library,
        tags: AtomicU16::new(RENDEZVOUS_TAG + 1),
        is_over,
        has_failed,
        timeout,
        world: Arc::new(world),
        received: Mutex::new(vec![0; size]),
    })
}

/// Waits until MPI has started. `MPI_Init` waits for all ranks, without a deadline or a message. This thread therefore
/// warns which ranks are missing, and stops waiting after the timeout.
fn started<T>(told: &Receiver<T>, env: &RankEnv, waiting: &WaitingRanks, timeout: Duration) -> Result<T, String> {
    let (begun, mut timer) = (Instant::now(), WarningTimer::default());
    loop {
        match told.recv_timeout(LOOK.min(timeout)) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => return Err("the thread that calls MPI has ended".into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(why) = waiting.backend_conflict() {
            return Err(why);
        }
        if begun.elapsed() >= timeout {
            return Err(format!(
                "MPI did not start within {:.1} s: {}. See what the other ranks do, or raise FSDP_TIMEOUT_S",
                timeout.as_secs_f64(),
                waiting.missing(MPI_INIT)
            ));
        }
        if let Some(waited) = timer.is_due() {
            tracing::warn!(
                "rank {} has waited {:.0} s in {MPI_INIT}: {}; it gives up after {:.0} s (FSDP_TIMEOUT_S)",
                env.rank,
                waited.as_secs_f64(),
                waiting.missing(MPI_INIT),
                timeout.as_secs_f64()
            );
        }
    }
}

/// Finalizes MPI, as launchers expect of a process that succeeds. MPI waits for all processes of the job to finalize
/// it; after a failure, this function returns sooner.
extern "C" fn at_exit() {
    let Some(Ok(driver)) = DRIVER.get() else { return };
    let (tell, told) = channel();
    driver.send(Command::End(tell));
    let started = Instant::now();
    loop {
        match told.recv_timeout(Duration::from_millis(50)) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return,
        }
        let most = if driver.has_failed.load(Ordering::Acquire) { PARTING } else { driver.timeout };
        if started.elapsed() >= most {
            return;
        }
    }
}

/// Records the end of the thread, for whichever reason.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Tag of notifications.
const NOTIFICATION_TAG: u16 = 0;
/// How often to poll before yielding, and then before sleeping.
const SPINS: u32 = 2000;
const YIELDS: u32 = 100;
/// The shortest sleep with messages in flight, how often it doubles, and the sleep without messages.
const NAP: Duration = Duration::from_micros(20);
const DOUBLES: u32 = 4;
const IDLE: Duration = Duration::from_millis(5);
/// How long a process waits for its peers at its end after a failure.
pub(super) const PARTING: Duration = Duration::from_secs(2);

/// A command for the thread. Commands run in order.
pub(super) enum Command {
    Open(Arc<Communicator>),
    /// Posts messages.
    Post {
        communicator: Arc<Communicator>,
        in_flight: Arc<InFlight>,
        transfers: Vec<Transfer>,
        batch: Arc<Batch>,
    },
    /// Notifies the peers that this rank left or failed, and cancels its receives.
    Close {
        communicator: Arc<Communicator>,
        why: Option<Failure>,
    },
    /// Finalizes MPI.
    End(Sender<()>),
}

/// The purpose of an MPI request.
enum Entry {
    /// A message of a batch, whose memory it keeps.
    Message {
        communicator: Arc<Communicator>,
        in_flight: Arc<InFlight>,
        batch: Arc<Batch>,
        index: usize,
        direction: Direction,
    },
    /// Notifies a peer that this rank left or failed.
    SendNotification { _bytes: Vec<u8> },
    /// Receives the notifications of a process.
    ReceiveNotification { from: usize, bytes: Vec<u8> },
}

struct Thread {
    mpi: Box<dyn Mpi>,
    /// This process's rank in MPI's world, and the size of the world.
    rank: usize,
    size: usize,
    orders: Receiver<Command>,
    is_crowded: bool,
    has_failed: Arc<AtomicBool>,
    communicators: HashMap<u16, Arc<Communicator>>,
    /// Communicators that this rank has left and some peers have not.
    left: HashMap<u16, Arc<Communicator>>,
    /// Indexed by the numbers of requests.
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// Number of active requests, without those that receive notifications.
    open: usize,
    /// Number of polls since something happened.
    idle: u32,
}

impl Thread {
    pub(super) fn new(
        mpi: Box<dyn Mpi>,
        (rank, size): (usize, usize),
        orders: Receiver<Command>,
        is_crowded: bool,
        has_failed: Arc<AtomicBool>,
    ) -> Self {
        let (communicators, left, entries, free) = (HashMap::new(), HashMap::new(), vec![], vec![]);
        Thread { mpi, rank, size, orders, is_crowded, has_failed, communicators, left, entries, free, open: 0, idle: 0 }
    }

    /// Executes commands until [`Command::End`].
    pub(super) fn serve(mut self) {
        let rank = self.rank;
        (0..self.size).filter(|&other| other != rank).for_each(|other| self.listen(other));
        let ended = 'serve: loop {
            while let Ok(order) = self.orders.try_recv() {
                if let Some(ended) = self.execute(order) {
                    break 'serve ended;
                }
            }
            if self.poll() {
                self.idle = 0;
                continue;
            }
            self.idle = self.idle.saturating_add(1);
            let spins = if self.is_crowded { 0 } else { SPINS };
            if self.open > 0 && self.idle < spins {
                std::hint::spin_loop();
            } else if self.open > 0 && self.idle < spins + YIELDS {
                std::thread::yield_now();
            } else {
                let naps = self.idle.saturating_sub(spins + YIELDS);
                let nap = if self.open > 0 { NAP * (1 << naps.min(DOUBLES)) } else { IDLE };
                if let Ok(order) = self.orders.recv_timeout(nap) {
                    self.idle = 0;
                    if let Some(ended) = self.execute(order) {
                        break 'serve ended;
                    }
                }
            }
        };
        self.end();
        let _ = ended.send(());
    }

    /// Executes a command. Returns the sender of [`Command::End`].
    fn execute(&mut self, order: Command) -> Option<Sender<()>> {
        match order {
            Command::Open(communicator) => drop(self.communicators.insert(communicator.tag, communicator)),
            Command::Post { communicator, in_flight, transfers, batch } => {
                for (index, transfer) in transfers.iter().enumerate() {
                    self.post(&communicator, &in_flight, transfer, &batch, index);
                }
            }
            Command::Close { communicator, why } => self.close(&communicator, why.as_ref()),
            Command::End(tell) => return Some(tell),
        }
        None
    }

    fn number(&mut self, entry: Entry) -> usize {
        self.open += 1;
        match self.free.pop() {
            Some(number) => {
                self.entries[number] = Some(entry);
                number
            }
            None => {
                self.entries.push(Some(entry));
                self.entries.len() - 1
            }
        }
    }

    fn post(
        &mut self,
        communicator: &Arc<Communicator>,
        in_flight: &Arc<InFlight>,
        transfer: &Transfer,
        batch: &Arc<Batch>,
        index: usize,
    ) {
        let Transfer { direction, peer, span } = transfer;
        let (address, len) = (in_flight.address(span), span.bytes.len());
        let entry = Entry::Message {
            communicator: communicator.clone(),
            in_flight: in_flight.clone(),
            batch: batch.clone(),
            index,
            direction: *direction,
        };
        let number = self.number(entry);
        let rank = communicator.ranks[*peer];
        let outcome = match direction {
            Direction::Send => match communicator.tag_of(*peer) {
                // SAFETY: the entry keeps the memory until the request is done, and the collective does not access it
                // meanwhile.
                Some(tag) => unsafe { self.mpi.send(number, address, len, rank, tag) },
                None => Err(MpiError::new("a message was posted before the ranks had met")),
            },
            // SAFETY: as above.
            Direction::Receive => unsafe { self.mpi.receive(number, address, len, rank, communicator.tag) },
        };
        if outcome.is_err() {
            self.done(number, outcome);
        }
    }

    /// Posts a receive for a process's notifications. One receive from any source would suffice, but MPICH 5.0.2 over
    /// UCX lost messages to it on three processes of two hosts.
    fn listen(&mut self, from: usize) {
        let mut bytes = vec![0; NOTIFICATION];
        let to = bytes.as_mut_ptr();
        let number = self.number(Entry::ReceiveNotification { from, bytes });
        // SAFETY: the entry keeps the memory, and reads it once the request is done.
        let outcome = unsafe { self.mpi.receive(number, to, NOTIFICATION, from, NOTIFICATION_TAG) };
        self.open -= 1;
        if let Err(refused) = outcome {
            self.entries[number] = None;
            self.free.push(number);
            notifications_lost(from, &refused);
        }
    }

    fn close(&mut self, communicator: &Arc<Communicator>, why: Option<&Failure>) {
        if self.communicators.remove(&communicator.tag).is_none() {
            return;
        }
        if communicator.is_met() && !communicator.is_over() {
            self.left.insert(communicator.tag, communicator.clone());
        }
        if why.is_some() {
            self.has_failed.store(true, Ordering::Release);
        }
        for peer in communicator.peers() {
            let Some(tag) = communicator.tag_of(peer) else { continue };
            let bytes = communicator::notification(tag, communicator, peer, why);
            let from = bytes.as_ptr();
            let number = self.number(Entry::SendNotification { _bytes: bytes });
            // SAFETY: the entry keeps the memory until the request is done.
            let outcome =
                unsafe { self.mpi.send(number, from, NOTIFICATION, communicator.ranks[peer], NOTIFICATION_TAG) };
            if outcome.is_err() {
                self.done(number, outcome);
            }
        }
        let is_open = |entry: &Option<Entry>| match entry {
            Some(Entry::Message { communicator: of, direction: Direction::Receive, .. }) => of.tag == communicator.tag,
            _ => false,
        };
        let open: Vec<_> = (0..self.entries.len()).filter(|&number| is_open(&self.entries[number])).collect();
        open.into_iter().for_each(|number| self.mpi.cancel(number));
    }

    fn poll(&mut self) -> bool {
        let mut ended = Vec::new();
        let outcome = self.mpi.poll(&mut |number, outcome| ended.push((number, outcome)));
        if let Err(refused) = outcome {
            // The state of all messages is unknown, so their memory is never freed.
            tracing::error!("MPI: {}", refused.text);
            self.has_failed.store(true, Ordering::Release);
            for communicator in self.communicators.values() {
                for peer in communicator.peers() {
                    let gone = PeerState::Failed(Failure::of(&crate::Error::Env(refused.text.clone())));
                    communicator.on_notification(peer, Notification::of_silent_peer(gone));
                }
            }
            std::thread::sleep(IDLE);
        }
        let any = !ended.is_empty();
        ended.into_iter().for_each(|(number, outcome)| self.done(number, outcome));
        any
    }

    fn done(&mut self, number: usize, outcome: Result<(), MpiError>) {
        let Some(entry) = self.entries[number].take() else { return };
        self.free.push(number);
        match entry {
            Entry::Message { communicator, in_flight, batch, index, .. } => {
                self.open -= 1;
                drop(in_flight);
                communicator.finish(&batch, index, outcome);
            }
            Entry::SendNotification { .. } => self.open -= 1,
            Entry::ReceiveNotification { from, bytes } => match outcome {
                Err(refused) if refused.kind == Kind::Died => self.on_peer_died(from),
                Err(refused) => notifications_lost(from, &refused),
                Ok(()) => {
                    let (tag, peer, notification) = communicator::parse_notification(&bytes);
                    if matches!(notification.gone, PeerState::Failed(_)) {
                        self.has_failed.store(true, Ordering::Release);
                    }
                    let tag = u16::try_from(tag).unwrap_or_default();
                    if let Some(communicator) = self.communicators.get(&tag).or_else(|| self.left.get(&tag)) {
                        communicator.on_notification(peer, notification);
                    }
                    self.left.retain(|_, communicator| !communicator.is_over());
                    self.listen(from);
                }
            },
        }
    }

    /// Records the death of a process, which libraries with ULFM (user-level failure mitigation) report.
    fn on_peer_died(&mut self, process: usize) {
        self.has_failed.store(true, Ordering::Release);
        for communicator in self.communicators.values() {
            if let Some(peer) = communicator.ranks.iter().position(|&other| other == process) {
                communicator.on_notification(peer, Notification::of_silent_peer(PeerState::Died));
            }
        }
    }

    /// Leaves all groups, waits for messages to end, and finalizes MPI.
    fn end(mut self) {
        let communicators: Vec<_> = self.communicators.values().cloned().collect();
        communicators.iter().for_each(|communicator| self.close(communicator, None));
        // Receives the peers' notifications unless something failed, because MPI would wait for the peers as well.
        let mut until = Instant::now() + PARTING;
        while self.open > 0 || !self.left.is_empty() {
            if !self.has_failed.load(Ordering::Acquire) && self.open == 0 {
                until = Instant::now() + PARTING;
            }
            if Instant::now() >= until {
                break;
            }
            if !self.poll() {
                std::thread::sleep(NAP);
            }
        }
        let receives = |&number: &usize| matches!(self.entries[number], Some(Entry::ReceiveNotification { .. }));
        let receiving: Vec<usize> = (0..self.entries.len()).filter(receives).collect();
        self.open += receiving.len();
        receiving.iter().for_each(|&number| self.mpi.cancel(number));
        while self.open > 0 && Instant::now() < until {
            let mut done = 0;
            if self.mpi.poll(&mut |number, _| done += usize::from(receiving.contains(&number))).is_err() {
                break;
            }
            self.open -= done;
        }
        if self.open > 0 {
            // MPI would wait for peers that have given up. The memory is kept until the process ends.
            tracing::debug!("MPI is not finalized: {} messages were never received", self.open);
            std::mem::forget(self);
            return;
        }
        if let Err(refused) = self.mpi.end() {
            tracing::warn!("MPI: {}", refused.text);
        }
    }
}

/// Warns that the notifications of a process can no longer be received.
fn notifications_lost(from: usize, error: &MpiError) {
    tracing::warn!("MPI: failures of rank {from} can no longer be detected: {}", error.text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_without_end_names_the_missing_ranks() {
        let run_id = format!("driver {}", std::process::id());
        let env = RankEnv { world_size: 3, local_world_size: 3, run_id, ..RankEnv::single() };
        let waiting = WaitingRanks::register(&env, "mpi");
        let _second = WaitingRanks::register(&RankEnv { rank: 2, ..env.clone() }, "mpi");
        let (tell, told) = channel::<()>();
        let error = started(&told, &env, &waiting, Duration::from_millis(20)).unwrap_err();
        assert!(error.starts_with("MPI did not start within 0.0 s: rank(s) [1] have not reached MPI_Init"), "{error}");
        assert!(error.contains("raise FSDP_TIMEOUT_S"), "{error}");
        drop(tell);
        assert!(started(&told, &env, &waiting, Duration::from_secs(9)).unwrap_err().contains("has ended"));
    }
}
