//! The one thread that calls MPI, for all groups of the process.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU16, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use super::{
    super::{failure::Failure, lookout::Gone},
    find,
    held::Held,
    line::{self, Batch, Line, NOTICE, Notice, Transfer, Way},
    session::{Kind, Mpi, Refused},
};

/// Marks notices.
const NOTICES: u16 = 0;
/// Marks what is sent before there is a group.
const MEETING: u16 = 1;
/// The largest tag that every MPI has.
const LARGEST: u16 = 32767;
/// How often to look for messages before letting others run, and then before sleeping.
const SPINS: u32 = 2000;
const YIELDS: u32 = 100;
/// The longest sleep while messages are on their way, and otherwise.
const NAP: Duration = Duration::from_micros(200);
const IDLE: Duration = Duration::from_millis(5);
/// How long a process that has seen a failure waits for the others when it ends.
const PARTING: Duration = Duration::from_secs(2);

/// Something for the thread to do, in order.
enum Command {
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
    pub(super) fn get(local_ranks: usize, timeout: Duration) -> Result<&'static Self, String> {
        DRIVER.get_or_init(|| start(local_ranks, timeout)).as_ref().map_err(String::clone)
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
            format!("this process has made {LARGEST} groups, the most that MPI's tags tell apart: keep groups and use them again")
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

fn start(local_ranks: usize, timeout: Duration) -> Result<Driver, String> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let is_crowded = 2 * local_ranks > cores;
    let (commands, orders) = channel();
    let (tell, told) = channel();
    let (is_over, has_failed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let flags = (is_over.clone(), has_failed.clone());
    let serve = move || {
        let (is_over, has_failed) = flags;
        let _end = Over(is_over);
        let outcome = find::library(&|name| std::env::var(name).ok()).and_then(|(mut mpi, path)| {
            let name = |refused: Refused| format!("{}: {}", path.display(), refused.text);
            let (rank, size) = mpi.start().map_err(name)?;
            mpi.separate(timeout).map_err(name)?;
            tracing::debug!("MPI: {} ({})", path.display(), mpi.version().lines().next().unwrap_or_default());
            Ok((mpi, path, rank, size))
        });
        match outcome {
            Err(why) => drop(tell.send(Err(why))),
            Ok((mpi, path, rank, size)) => {
                let lines = HashMap::new();
                let thread = Thread {
                    mpi,
                    orders,
                    is_crowded,
                    has_failed,
                    lines,
                    entries: vec![],
                    free: vec![],
                    open: 0,
                    idle: 0,
                };
                drop(tell.send(Ok((path, rank, size))));
                thread.serve();
            }
        }
    };
    let thread = std::thread::Builder::new().name("fsdp mpi".into()).spawn(serve);
    thread.map_err(|error| format!("starting the thread that calls MPI: {error}"))?;
    let (library, rank, size) = told.recv_timeout(timeout).map_err(|_| {
        format!("MPI did not start within {:.1} s: not all processes of the job have come", timeout.as_secs_f64())
    })??;
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
        let most = if driver.has_failed.load(Ordering::Acquire) { PARTING } else { driver.timeout.max(PARTING) };
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

/// What a request of MPI's is for.
enum Entry {
    /// One message of a batch, whose memory it keeps.
    Message { line: Arc<Line>, held: Arc<Held>, batch: Arc<Batch>, index: usize, way: Way },
    /// Tells a peer that this rank is gone.
    Tells { _bytes: Vec<u8> },
    /// Hears of any peer that is gone.
    Hears { bytes: Vec<u8> },
}

struct Thread {
    mpi: Box<dyn Mpi>,
    orders: Receiver<Command>,
    is_crowded: bool,
    has_failed: Arc<AtomicBool>,
    lines: HashMap<u16, Arc<Line>>,
    /// By the numbers of requests.
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// How many there are, without the one that hears.
    open: usize,
    /// How often nothing has happened.
    idle: u32,
}

impl Thread {
    fn serve(mut self) {
        self.listen();
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
                let nap = if self.open > 0 { NAP } else { IDLE };
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
            Way::From => unsafe { self.mpi.receive(number, address, len, Some(rank), line.tag) },
        };
        if outcome.is_err() {
            self.done(number, outcome);
        }
    }

    /// Waits for whoever has something to say.
    fn listen(&mut self) {
        let mut bytes = vec![0; NOTICE];
        let to = bytes.as_mut_ptr();
        let number = self.number(Entry::Hears { bytes });
        // SAFETY: the entry keeps the memory, and reads it when the request is done.
        let outcome = unsafe { self.mpi.receive(number, to, NOTICE, None, NOTICES) };
        self.open -= 1;
        if let Err(refused) = outcome {
            self.entries[number] = None;
            tracing::warn!("MPI: failures of other ranks will not be heard of: {}", refused.text);
        }
    }

    fn close(&mut self, line: &Arc<Line>, why: Option<&Failure>) {
        let is_new = self.lines.remove(&line.tag).is_some();
        if !is_new {
            return;
        }
        if why.is_some() {
            self.has_failed.store(true, Ordering::Release);
        }
        for peer in line.peers() {
            let Some(tag) = line.tag_of(peer) else { continue };
            let bytes = line::notice(tag, line, peer, why);
            let from = bytes.as_ptr();
            let number = self.number(Entry::Tells { _bytes: bytes });
            // SAFETY: the entry keeps the memory until the request is done.
            let outcome = unsafe { self.mpi.send(number, from, NOTICE, line.ranks[peer], NOTICES) };
            if outcome.is_err() {
                self.done(number, outcome);
            }
        }
        let is_open = |entry: &Option<Entry>| matches!(entry, Some(Entry::Message { line: of, way: Way::From, .. }) if of.tag == line.tag);
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
                let gone = || Gone::Failed(Failure::of(&crate::Error::Env(refused.text.clone())));
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
        if outcome.as_ref().is_err_and(|refused| refused.kind == Kind::SomebodyDied) && self.mpi.acknowledge() {
            // The receive goes on.
            return;
        }
        let Some(entry) = self.entries[number].take() else { return };
        self.free.push(number);
        match entry {
            Entry::Message { line, held, batch, index, .. } => {
                self.open -= 1;
                drop(held);
                line.finish(&batch, index, outcome);
            }
            Entry::Tells { .. } => self.open -= 1,
            Entry::Hears { bytes } => {
                if outcome.is_ok() {
                    let (tag, peer, notice) = line::read(&bytes);
                    if matches!(notice.gone, Gone::Failed(_)) {
                        self.has_failed.store(true, Ordering::Release);
                    }
                    if let Some(line) = u16::try_from(tag).ok().and_then(|tag| self.lines.get(&tag)) {
                        line.hear(peer, notice);
                    }
                    self.listen();
                }
            }
        }
    }

    /// Leaves what was not left, lets messages end, and ends MPI.
    fn end(mut self) {
        let lines: Vec<_> = self.lines.values().cloned().collect();
        lines.iter().for_each(|line| self.close(line, None));
        let until = Instant::now() + PARTING;
        while self.open > 0 && Instant::now() < until {
            if !self.poll() {
                std::thread::yield_now();
            }
        }
        let hears = |entry: &Option<Entry>| matches!(entry, Some(Entry::Hears { .. }));
        if let Some(number) = self.entries.iter().position(hears) {
            self.open += 1;
            self.mpi.cancel(number);
            while self.open > 0 && Instant::now() < until {
                let mut is_done = false;
                if self.mpi.poll(&mut |done, _| is_done |= done == number).is_err() {
                    break;
                }
                self.open -= usize::from(is_done);
            }
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

/// The lock of something that stays whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
