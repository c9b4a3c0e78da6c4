//! The one thread that calls MPI, for all groups of the process.
//! What the thread that calls MPI does.

use parking_lot::Mutex;
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

use super::{
    super::{
        backend::PeerState,
        collective::Failure,
        waiting_ranks::{Patience, Roll},
    },
    communicator::{self, Batch, Held, Line, NOTICE, Notice, Transfer, Way},
    library::{self, Kind, Refused},
    session::Mpi,
};
use crate::RankEnv;

/// Marks what is sent before there is a group.
const MEETING: u16 = 1;
/// The largest tag that every MPI has.
const LARGEST: u16 = 32767;
/// How long processes get at the least to start MPI, and ranks to meet: with many hosts that takes seconds.
pub(super) const MEETING_TIME: Duration = Duration::from_secs(60);
/// How often a rank that waits for MPI to start looks whether it waits in vain.
const LOOK: Duration = Duration::from_millis(250);
/// The call that waits for all ranks.
const MPI_INIT: &str = "MPI_Init";

/// The thread's handle.
pub(super) struct Driver {
    commands: Sender<Command>,
    /// This process in MPI's world.
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Whether ranks and their threads have to share cores.
    pub(super) is_crowded: bool,
    /// The library, for messages.
    pub(super) library: PathBuf,
    tags: AtomicU16,
    is_over: Arc<AtomicBool>,
    has_failed: Arc<AtomicBool>,
    timeout: Duration,
    /// Where worlds meet, one after the other.
    pub(super) meeting: Mutex<()>,
    pub(super) world: Arc<Line>,
    /// How many messages have come on [`Driver::world`] from each.
    pub(super) received: Mutex<Vec<u64>>,
}

static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();

impl Driver {
    /// That of this process, which is started when it is first asked for.
    ///
    /// # Errors
    /// Says what keeps MPI from starting.
    pub(super) fn get(env: &RankEnv, roll: &Roll, timeout: Duration) -> Result<&'static Self, String> {
        DRIVER.get_or_init(|| start(env, roll, timeout.max(MEETING_TIME))).as_ref().map_err(String::clone)
    }

    fn tell(&self, command: Command) {
        // Who waits for something sees that the thread has ended.
        let _ = self.commands.send(command);
    }

    /// Whether it does nothing any more.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// A tag that no other group of this process has, nor ever had.
    pub(super) fn tag(&self) -> Result<u16, String> {
        let next = |tag: u16| (tag <= LARGEST).then(|| tag + 1);
        self.tags.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|_| {
            format!(
                "this process has made {LARGEST} groups, the most that MPI's tags tell apart: keep groups and use them \
                 again"
            )
        })
    }

    /// Hears from now on what becomes of the members.
    pub(super) fn open(&self, line: &Arc<Line>) {
        self.tell(Command::Open(line.clone()));
    }

    pub(super) fn post(&self, line: &Arc<Line>, held: Arc<Held>, transfers: Vec<Transfer>) -> Arc<Batch> {
        let batch = Arc::new(Batch::of(&transfers));
        self.tell(Command::Post { line: line.clone(), held, transfers, batch: batch.clone() });
        batch
    }

    pub(super) fn close(&self, line: &Arc<Line>, why: Option<Failure>) {
        self.tell(Command::Close { line: line.clone(), why });
    }
}

fn start(env: &RankEnv, roll: &Roll, timeout: Duration) -> Result<Driver, String> {
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
            let name = |refused: Refused| format!("{}: {}", path.display(), refused.text);
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
    let (library, rank, size) = started(&told, env, roll, timeout)??;
    let world = Line::new(MEETING, (0..size).collect(), rank);
    world.set_tags(vec![MEETING; size]);
    // SAFETY: what is registered is called once, when the process exits, and needs nothing that exits before.
    unsafe { libc::atexit(at_exit) };
    Ok(Driver {
        commands,
        rank,
        size,
        is_crowded,
        library,
        tags: AtomicU16::new(MEETING + 1),
        is_over,
        has_failed,
        timeout,
        meeting: Mutex::new(()),
        world: Arc::new(world),
        received: Mutex::new(vec![0; size]),
    })
}

/// Waits for the thread to say that MPI has started. `MPI_Init` itself waits for all ranks, without a deadline and
/// without a word: so this thread tells which are missing, at doubling intervals and when the time is over.
fn started<T>(told: &Receiver<T>, env: &RankEnv, roll: &Roll, timeout: Duration) -> Result<T, String> {
    let (begun, mut patience) = (Instant::now(), Patience::default());
    loop {
        match told.recv_timeout(LOOK.min(timeout)) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => return Err("the thread that calls MPI has ended".into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(why) = roll.in_vain() {
            return Err(why);
        }
        if begun.elapsed() >= timeout {
            return Err(format!(
                "MPI did not start within {:.1} s: {}. See what the other ranks do instead, or raise FSDP_TIMEOUT_S",
                timeout.as_secs_f64(),
                roll.missing(MPI_INIT)
            ));
        }
        if let Some(waited) = patience.is_due() {
            tracing::warn!(
                "rank {} waits in {MPI_INIT}, for {:.0} s now: {}; it gives up after {:.0} s (FSDP_TIMEOUT_S)",
                env.rank,
                waited.as_secs_f64(),
                roll.missing(MPI_INIT),
                timeout.as_secs_f64()
            );
        }
    }
}

/// Ends MPI, as launchers want it of a process that ends well. MPI then waits until all processes of the job do so;
/// after a failure, not for long.
extern "C" fn at_exit() {
    let Some(Ok(driver)) = DRIVER.get() else { return };
    let (tell, told) = channel();
    driver.tell(Command::End(tell));
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

/// Says that the thread has ended, however it did.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Marks notices.
const NOTICES: u16 = 0;
/// How often to look for messages before letting others run, and then before sleeping.
const SPINS: u32 = 2000;
const YIELDS: u32 = 100;
/// The shortest sleep while messages are on their way, how often it doubles, and how long it is otherwise.
const NAP: Duration = Duration::from_micros(20);
const DOUBLES: u32 = 4;
const IDLE: Duration = Duration::from_millis(5);
/// How long a process that has seen a failure waits for the others when it ends.
pub(super) const PARTING: Duration = Duration::from_secs(2);

/// Something for the thread to do, in order.
pub(super) enum Command {
    Open(Arc<Line>),
    /// Start these messages.
    Post {
        line: Arc<Line>,
        held: Arc<Held>,
        transfers: Vec<Transfer>,
        batch: Arc<Batch>,
    },
    /// Tell the peers that this rank has left, or why it has failed, and receive nothing more.
    Close {
        line: Arc<Line>,
        why: Option<Failure>,
    },
    /// End MPI.
    End(Sender<()>),
}

/// What a request of MPI's is for.
enum Entry {
    /// One message of a batch, whose memory it keeps.
    Message { line: Arc<Line>, held: Arc<Held>, batch: Arc<Batch>, index: usize, way: Way },
    /// Tells a peer that this rank is gone.
    Tells { _bytes: Vec<u8> },
    /// Hears that a process is gone, or has left a group.
    Hears { from: usize, bytes: Vec<u8> },
}

struct Thread {
    mpi: Box<dyn Mpi>,
    /// This process's rank in MPI's world, and the size of that.
    rank: usize,
    size: usize,
    orders: Receiver<Command>,
    is_crowded: bool,
    has_failed: Arc<AtomicBool>,
    lines: HashMap<u16, Arc<Line>>,
    /// Those that this rank has left and others have not, as far as is known.
    left: HashMap<u16, Arc<Line>>,
    /// By the numbers of requests.
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// How many there are, without those that hear.
    open: usize,
    /// How often nothing has happened.
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
        let (lines, left, entries, free) = (HashMap::new(), HashMap::new(), vec![], vec![]);
        Thread { mpi, rank, size, orders, is_crowded, has_failed, lines, left, entries, free, open: 0, idle: 0 }
    }

    /// Carries out orders until the last one.
    pub(super) fn serve(mut self) {
        let rank = self.rank;
        (0..self.size).filter(|&other| other != rank).for_each(|other| self.listen(other));
        let ended = 'serve: loop {
            while let Ok(order) = self.orders.try_recv() {
                if let Some(ended) = self.obey(order) {
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
                    if let Some(ended) = self.obey(order) {
                        break 'serve ended;
                    }
                }
            }
        };
        self.end();
        let _ = ended.send(());
    }

    /// Carries out an order; the last one says whom to tell.
    fn obey(&mut self, order: Command) -> Option<Sender<()>> {
        match order {
            Command::Open(line) => drop(self.lines.insert(line.tag, line)),
            Command::Post { line, held, transfers, batch } => {
                for (index, transfer) in transfers.iter().enumerate() {
                    self.post(&line, &held, transfer, &batch, index);
                }
            }
            Command::Close { line, why } => self.close(&line, why.as_ref()),
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

    fn post(&mut self, line: &Arc<Line>, held: &Arc<Held>, transfer: &Transfer, batch: &Arc<Batch>, index: usize) {
        let Transfer { way, peer, span } = transfer;
        let (address, len) = (held.address(span), span.bytes.len());
        let entry = Entry::Message { line: line.clone(), held: held.clone(), batch: batch.clone(), index, way: *way };
        let number = self.number(entry);
        let rank = line.ranks[*peer];
        let outcome = match way {
            Way::To => match line.tag_of(*peer) {
                // SAFETY: the entry keeps the memory until the request is done, and the collective that issued it
                // leaves it alone meanwhile.
                Some(tag) => unsafe { self.mpi.send(number, address, len, rank, tag) },
                None => Err(Refused::new("a message was sent before the ranks had met")),
            },
            // SAFETY: as above.
            Way::From => unsafe { self.mpi.receive(number, address, len, rank, line.tag) },
        };
        if outcome.is_err() {
            self.done(number, outcome);
        }
    }

    /// Waits for what a process has to say. One receive from anybody would be less, but MPICH over UCX loses messages
    /// to it: seen with 5.0.2 on three processes of two hosts.
    fn listen(&mut self, from: usize) {
        let mut bytes = vec![0; NOTICE];
        let to = bytes.as_mut_ptr();
        let number = self.number(Entry::Hears { from, bytes });
        // SAFETY: the entry keeps the memory, and reads it when the request is done.
        let outcome = unsafe { self.mpi.receive(number, to, NOTICE, from, NOTICES) };
        self.open -= 1;
        if let Err(refused) = outcome {
            self.entries[number] = None;
            self.free.push(number);
            deaf(from, &refused);
        }
    }

    fn close(&mut self, line: &Arc<Line>, why: Option<&Failure>) {
        if self.lines.remove(&line.tag).is_none() {
            return;
        }
        if line.is_met() && !line.is_over() {
            self.left.insert(line.tag, line.clone());
        }
        if why.is_some() {
            self.has_failed.store(true, Ordering::Release);
        }
        for peer in line.peers() {
            let Some(tag) = line.tag_of(peer) else { continue };
            let bytes = communicator::notice(tag, line, peer, why);
            let from = bytes.as_ptr();
            let number = self.number(Entry::Tells { _bytes: bytes });
            // SAFETY: the entry keeps the memory until the request is done.
            let outcome = unsafe { self.mpi.send(number, from, NOTICE, line.ranks[peer], NOTICES) };
            if outcome.is_err() {
                self.done(number, outcome);
            }
        }
        let is_open = |entry: &Option<Entry>| match entry {
            Some(Entry::Message { line: of, way: Way::From, .. }) => of.tag == line.tag,
            _ => false,
        };
        let open: Vec<_> = (0..self.entries.len()).filter(|&number| is_open(&self.entries[number])).collect();
        open.into_iter().for_each(|number| self.mpi.cancel(number));
    }

    fn poll(&mut self) -> bool {
        let mut ended = Vec::new();
        let outcome = self.mpi.poll(&mut |number, outcome| ended.push((number, outcome)));
        if let Err(refused) = outcome {
            // Nothing is known of any message any more, so what they use is kept for ever.
            tracing::error!("MPI: {}", refused.text);
            self.has_failed.store(true, Ordering::Release);
            for line in self.lines.values() {
                let gone = || PeerState::Failed(Failure::of(&crate::Error::Env(refused.text.clone())));
                line.peers().for_each(|peer| {
                    line.hear(peer, Notice { sent: 0, completed: 0, gone: gone(), heard: Instant::now() })
                });
            }
            std::thread::sleep(IDLE);
        }
        let any = !ended.is_empty();
        ended.into_iter().for_each(|(number, outcome)| self.done(number, outcome));
        any
    }

    fn done(&mut self, number: usize, outcome: Result<(), Refused>) {
        let Some(entry) = self.entries[number].take() else { return };
        self.free.push(number);
        match entry {
            Entry::Message { line, held, batch, index, .. } => {
                self.open -= 1;
                drop(held);
                line.finish(&batch, index, outcome);
            }
            Entry::Tells { .. } => self.open -= 1,
            Entry::Hears { from, bytes } => match outcome {
                Err(refused) if refused.kind == Kind::Died => self.mourn(from),
                Err(refused) => deaf(from, &refused),
                Ok(()) => {
                    let (tag, peer, notice) = communicator::read(&bytes);
                    if matches!(notice.gone, PeerState::Failed(_)) {
                        self.has_failed.store(true, Ordering::Release);
                    }
                    let tag = u16::try_from(tag).unwrap_or_default();
                    if let Some(line) = self.lines.get(&tag).or_else(|| self.left.get(&tag)) {
                        line.hear(peer, notice);
                    }
                    self.left.retain(|_, line| !line.is_over());
                    self.listen(from);
                }
            },
        }
    }

    /// A process has ended, as libraries with ULFM ("user-level failure mitigation") tell.
    fn mourn(&mut self, process: usize) {
        self.has_failed.store(true, Ordering::Release);
        for line in self.lines.values() {
            if let Some(peer) = line.ranks.iter().position(|&other| other == process) {
                line.hear(peer, Notice { sent: 0, completed: 0, gone: PeerState::Died, heard: Instant::now() });
            }
        }
    }

    /// Leaves what was not left, lets messages end, and ends MPI.
    fn end(mut self) {
        let lines: Vec<_> = self.lines.values().cloned().collect();
        lines.iter().for_each(|line| self.close(line, None));
        // What others have still to say is heard, as long as all goes well: MPI would wait for them as well.
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
        let hears = |&number: &usize| matches!(self.entries[number], Some(Entry::Hears { .. }));
        let hearing: Vec<usize> = (0..self.entries.len()).filter(hears).collect();
        self.open += hearing.len();
        hearing.iter().for_each(|&number| self.mpi.cancel(number));
        while self.open > 0 && Instant::now() < until {
            let mut done = 0;
            if self.mpi.poll(&mut |number, _| done += usize::from(hearing.contains(&number))).is_err() {
                break;
            }
            self.open -= done;
        }
        if self.open > 0 {
            // Their peers have given up, and MPI would wait for them. What they use is kept until the process is gone.
            tracing::debug!("MPI is not finalized: {} messages that nobody receives are on their way", self.open);
            std::mem::forget(self);
            return;
        }
        if let Err(refused) = self.mpi.end() {
            tracing::warn!("MPI: {}", refused.text);
        }
    }
}

/// Nothing is received any more that would say what became of a process.
fn deaf(from: usize, refused: &Refused) {
    tracing::warn!("MPI: a failure of rank {from} will not be heard of: {}", refused.text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_does_not_end_names_the_ranks_that_have_not_come() {
        let run_id = format!("driver {}", std::process::id());
        let env = RankEnv { world_size: 3, local_world_size: 3, run_id, ..RankEnv::single() };
        let roll = Roll::enter(&env, "mpi");
        let _second = Roll::enter(&RankEnv { rank: 2, ..env.clone() }, "mpi");
        let (tell, told) = channel::<()>();
        let error = started(&told, &env, &roll, Duration::from_millis(20)).unwrap_err();
        assert!(error.starts_with("MPI did not start within 0.0 s: rank(s) [1] have not come to MPI_Init"), "{error}");
        assert!(error.contains("raise FSDP_TIMEOUT_S"), "{error}");
        drop(tell);
        assert!(started(&told, &env, &roll, Duration::from_secs(9)).unwrap_err().contains("has ended"));
    }
}
