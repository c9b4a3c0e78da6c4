//! The one thread that calls MPI, for all groups of the process.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU16, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use super::{
    super::{failure::Failure, patience::Patience, roll::Roll},
    find,
    functions::Refused,
    held::Held,
    line::{Batch, Line, Transfer},
    thread::{Command, PARTING, Thread},
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

/// The lock of something that stays whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
