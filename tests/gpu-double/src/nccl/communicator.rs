//! One rank's communicators, and the calls between a group's start and its end. Each thread has its own group.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{CString, c_void},
    hash::{DefaultHasher, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR, Status,
    exchange::{self, Directions, Link, Pending},
    registered::Registrations,
    transfer::{Seat, Transfer, touches},
};
use crate::{
    machine::{current, machine, set_current},
    report,
    status::Fault,
    streams::{Operation, Progress, enqueue},
};

/// A communicator.
pub(crate) struct Communicator {
    pub(crate) seat: Seat,
    device: usize,
    name: String,
    seed: u64,
    main: Link,
    is_aborted: AtomicBool,
    pub(super) registrations: Registrations,
    inner: Mutex<Inner>,
}

struct Inner {
    stage: Stage,
    status: Status,
    /// Text of the last error.
    said: &'static std::ffi::CStr,
    /// Number of further calls that return `ncclInProgress`.
    delay: u64,
    /// Groups of calls that are not on their streams yet.
    held: Vec<(usize, Vec<Transfer>)>,
    directions: Directions,
    /// State from which the first rank of sums is drawn.
    ring: u64,
}

enum Stage {
    /// The ranks connect.
    Meets,
    /// The ranks exchange their devices.
    Introduces(Pending),
    Ready,
    /// The ranks disconnect.
    Parts(Pending),
}

/// Mixes bits as SplitMix64 does.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Returns an id of this host, by `NCCL_HOSTID` or the host's name.
fn host() -> u64 {
    let mut hasher = DefaultHasher::new();
    match std::env::var("NCCL_HOSTID") {
        Ok(id) => hasher.write(id.as_bytes()),
        Err(_) => hasher.write(rustix::system::uname().nodename().to_bytes()),
    }
    hasher.finish()
}

/// Draws a number from a seed, a different one each time.
fn draw(seed: u64) -> u64 {
    static DRAWN: AtomicU64 = AtomicU64::new(1);
    mix(seed ^ mix(DRAWN.fetch_add(1, Ordering::Relaxed)))
}

impl Communicator {
    /// Starts to connect the ranks of a named communicator.
    pub(crate) fn begin(name: &str, seat: Seat, device: usize, seed: u64) -> Self {
        let inner = Inner {
            stage: Stage::Meets,
            status: IN_PROGRESS,
            said: c"",
            delay: draw(seed) % 4,
            held: vec![],
            directions: Directions::default(),
            ring: 0,
        };
        let (main, name) = (Link::begin(name.into(), seat), name.into());
        let (is_aborted, inner) = (AtomicBool::new(false), Mutex::new(inner));
        let registrations = Registrations::default();
        Communicator { seat, device, name, seed, main, is_aborted, registrations, inner }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current status, and continues pending work.
    pub(crate) fn state(self: &Arc<Self>) -> Status {
        let mut inner = self.inner();
        if inner.status == IN_PROGRESS
            && let Err((status, why)) = self.go_on(&mut inner)
        {
            inner.fail(status, why);
        }
        let held = if inner.status == SUCCESS { std::mem::take(&mut inner.held) } else { vec![] };
        let status = inner.status;
        drop(inner);
        held.into_iter().for_each(|(stream, transfers)| self.enqueue(stream, transfers));
        status
    }

    fn go_on(&self, inner: &mut Inner) -> Result<(), (Status, String)> {
        let system = |error: fsdp_core::Error| (SYSTEM_ERROR, error.to_string());
        match &mut inner.stage {
            Stage::Meets => {
                if self.main.world().is_some() {
                    let own = [self.device as u64, host(), self.seed].map(u64::to_ne_bytes).concat();
                    let Seat { ranks, .. } = self.seat;
                    let sent = (own.repeat(ranks), vec![own.len(); ranks]);
                    let all = Pending::exchange(&self.main, "introduction".into(), sent, vec![own.len(); ranks]);
                    inner.stage = Stage::Introduces(all);
                }
            }
            Stage::Introduces(all) => {
                if let Some(all) = all.poll() {
                    let all = all.map_err(system)?;
                    let numbers: Vec<u64> = all.as_chunks().0.iter().copied().map(u64::from_ne_bytes).collect();
                    let ranks = numbers.as_chunks::<3>().0;
                    let accepts = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
                    for (rank, [device, host, _]) in ranks.iter().enumerate().filter(|_| !accepts) {
                        let is_it = |other: &[u64; 3]| other[..2] == [*device, *host];
                        if let Some(other) = ranks[..rank].iter().position(is_it) {
                            let why = format!(
                                "Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {device}"
                            );
                            return Err((INVALID_USAGE, why));
                        }
                    }
                    inner.ring = ranks.first().map_or(0, |[.., seed]| *seed);
                    inner.stage = Stage::Ready;
                }
            }
            Stage::Ready => match inner.delay {
                0 => inner.status = SUCCESS,
                _ => inner.delay -= 1,
            },
            Stage::Parts(all) => {
                if let Some(all) = all.poll() {
                    all.map_err(system)?;
                    inner.status = SUCCESS;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn said(&self) -> &'static std::ffi::CStr {
        self.inner().said
    }

    /// Returns whether calls are allowed.
    pub(crate) fn is_ready(&self) -> bool {
        let inner = self.inner();
        matches!(inner.stage, Stage::Ready) && inner.status == SUCCESS
    }

    /// Accepts a group of calls for a stream. The group is on the stream once the communicator returns success.
    pub(crate) fn take(self: &Arc<Self>, stream: usize, transfers: Vec<Transfer>) -> Status {
        transfers.iter().for_each(|transfer| report::count(&format!("nccl: {}", transfer.name())));
        let delay = draw(self.seed) % 4;
        if delay == 0 {
            self.enqueue(stream, transfers);
            return SUCCESS;
        }
        let mut inner = self.inner();
        inner.held.push((stream, transfers));
        inner.delay = inner.delay.max(delay);
        inner.status = IN_PROGRESS;
        IN_PROGRESS
    }

    fn enqueue(self: &Arc<Self>, stream: usize, transfers: Vec<Transfer>) {
        let touches = touches(&transfers, self.seat).unwrap_or_else(|Fault(message)| report::fault(message));
        let mut names: Vec<_> = transfers.iter().map(Transfer::name).collect();
        names.dedup();
        let name = names.join(" + ");
        // Equal calls start with the same rank, as NCCL sums in the same order each time.
        let mut hasher = DefaultHasher::new();
        hasher.write(alike(&collectives(&transfers)).as_bytes());
        let first = (mix(self.inner().ring ^ hasher.finish()) % self.seat.ranks as u64) as usize;
        let mut turn = Turn::Waits(self.clone(), transfers, first);
        let run = Box::new(move || turn.go_on());
        if enqueue(stream as *mut c_void, Operation { name: name.clone(), touches, run }) != 0 {
            report::fault(format!("`{name}` was called with an invalid stream"));
        }
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Acquire)
    }

    /// Aborts pending operations, which end without writing. Peers are not notified.
    pub(crate) fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
        self.registrations.clear();
        // A process group waits for its last collective when it is dropped.
        std::mem::forget(self.main.clone());
        let directions = std::mem::take(&mut self.inner().directions);
        std::mem::forget(directions);
    }

    /// Starts to disconnect. With some seeds it waits for all ranks, as NCCL may.
    pub(crate) fn finalize(&self) -> Status {
        self.registrations.must_be_empty("ncclCommFinalize");
        let mut inner = self.inner();
        if inner.status != SUCCESS {
            return inner.status;
        }
        if self.seed % 2 == 1 {
            inner.stage = Stage::Parts(Pending::barrier(&self.main));
            inner.status = IN_PROGRESS;
        }
        inner.status
    }

    /// Reports a failed exchange. Waiters continue to wait.
    fn broke(&self, name: &str, error: &fsdp_core::Error) {
        let Seat { rank, .. } = self.seat;
        eprintln!("gpu double: `{name}` of rank {rank} of a communicator waits until it is aborted: {error}");
        if let fsdp_core::Error::PeerLost { .. } = error {
            self.inner().fail(REMOTE_ERROR, error.to_string());
        }
    }
}

impl Inner {
    fn fail(&mut self, status: Status, why: String) {
        self.status = status;
        let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
        // The caller may keep the pointer.
        self.said = Box::leak(why.into_boxed_c_str());
    }
}

/// The state of an operation on its stream.
enum Turn {
    Waits(Arc<Communicator>, Vec<Transfer>, usize),
    Runs(Arc<Communicator>, Vec<Transfer>, usize, Vec<Part>),
    /// All bytes were received. No rank ends before all ranks are ready. A rank that is aborted meanwhile leaves the
    /// others waiting, as a kernel that ends early does.
    Confirms(Arc<Communicator>, Vec<Transfer>, usize, Vec<Part>, Pending),
    /// The operation cannot end by itself.
    Hangs(Arc<Communicator>),
    Over,
}

/// An exchange of an operation: all of its collectives, or one transfer between two ranks.
struct Part {
    of: Option<Transfer>,
    pending: Pending,
    came: Option<Vec<u8>>,
}

impl Turn {
    fn go_on(&mut self) -> Progress {
        let communicator = match self {
            Turn::Over => return Progress::Done,
            Turn::Waits(communicator, ..)
            | Turn::Runs(communicator, ..)
            | Turn::Confirms(communicator, ..)
            | Turn::Hangs(communicator) => communicator.clone(),
        };
        if communicator.is_aborted() {
            *self = Turn::Over;
            return Progress::Done;
        }
        match self.next(&communicator) {
            Ok(next) => *self = next,
            Err((name, error)) => {
                communicator.broke(name, &error);
                *self = Turn::Hangs(communicator);
            }
        }
        if matches!(self, Turn::Over) { Progress::Done } else { Progress::Waits }
    }

    fn next(&mut self, communicator: &Communicator) -> Result<Turn, (&'static str, fsdp_core::Error)> {
        let mut turn = std::mem::replace(self, Turn::Over);
        loop {
            turn = match turn {
                Turn::Waits(own, transfers, first) => {
                    let parts = communicator.parts(&transfers);
                    Turn::Runs(own, transfers, first, parts)
                }
                Turn::Runs(own, transfers, first, mut parts) => {
                    // In order, because two transfers in the same direction must not overtake each other.
                    let _ = parts.iter_mut().all(|part| part.pending.is_issued());
                    for part in parts.iter_mut().filter(|part| part.came.is_none()) {
                        part.came = part.pending.result().transpose().map_err(|error| (transfers[0].name(), error))?;
                    }
                    if parts.iter().any(|part| part.came.is_none()) {
                        return Ok(Turn::Runs(own, transfers, first, parts));
                    }
                    match parts.iter().any(|part| part.of.is_none()) {
                        true => Turn::Confirms(own, transfers, first, parts, Pending::barrier(&communicator.main)),
                        false => communicator.write(&transfers, first, &parts),
                    }
                }
                Turn::Confirms(own, transfers, first, parts, mut all) => match all.poll() {
                    None => return Ok(Turn::Confirms(own, transfers, first, parts, all)),
                    Some(Ok(_)) => communicator.write(&transfers, first, &parts),
                    Some(Err(error)) => return Err((transfers[0].name(), error)),
                },
                turn => return Ok(turn),
            }
        }
    }
}

/// Returns a description of the calls that must be equal on all ranks.
fn alike(collectives: &[Transfer]) -> String {
    collectives.iter().map(Transfer::alike).collect::<Vec<_>>().join(", ")
}

fn collectives(transfers: &[Transfer]) -> Vec<Transfer> {
    transfers.iter().filter(|transfer| transfer.peer().is_none()).copied().collect()
}

impl Communicator {
    fn write(&self, transfers: &[Transfer], first: usize, parts: &[Part]) -> Turn {
        let collectives = collectives(transfers);
        for Part { of, came, .. } in parts {
            match (of, came) {
                (Some(transfer), Some(bytes)) => exchange::deliver(transfer, bytes),
                (None, Some(bytes)) => exchange::finish(&collectives, self.seat, bytes, first),
                _ => {}
            }
        }
        Turn::Over
    }

    fn parts(&self, transfers: &[Transfer]) -> Vec<Part> {
        let (seat, rank) = (self.seat, self.seat.rank);
        let mut parts = vec![];
        let collectives = collectives(transfers);
        if !collectives.is_empty() {
            let registered = collectives.iter().filter(|transfer| transfer.is_registered).count();
            let alike = format!("{}, {registered} of them with registered memory", alike(&collectives));
            let sent = exchange::sent(&collectives, seat);
            let pending = Pending::exchange(&self.main, alike, sent, exchange::expected(&collectives, seat));
            parts.push(Part { of: None, pending, came: None });
        }
        let with = |send: bool, peer: usize| {
            let to_self = move |transfer: &&Transfer| {
                transfer.peer() == Some(peer) && matches!(transfer.kind, super::transfer::Kind::Send { .. }) == send
            };
            transfers.iter().filter(to_self)
        };
        for (send, receive) in with(true, rank).zip(with(false, rank)) {
            exchange::deliver(receive, &exchange::payload(send));
        }
        for transfer in transfers {
            let Some(peer) = transfer.peer().filter(|peer| *peer != rank) else { continue };
            let is_send = matches!(transfer.kind, super::transfer::Kind::Send { .. });
            let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
            let link = self.inner().directions.link(&self.name, from, to, rank);
            let pending = Pending::send(&link, exchange::payload(transfer));
            parts.push(Part { of: Some(*transfer), pending, came: None });
        }
        parts
    }
}

/// Start of the communicator handles, which are never reused.
const HANDLES: u64 = 0x6e63_0000;

static LIVE: Mutex<Option<HashMap<u64, Arc<Communicator>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(HANDLES);

fn live() -> MutexGuard<'static, Option<HashMap<u64, Arc<Communicator>>>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a handle for a communicator.
pub(crate) fn register(communicator: Communicator) -> u64 {
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    live().get_or_insert_default().insert(handle, Arc::new(communicator));
    handle
}

/// Returns the communicator of a handle, if it is valid. The handle of a destroyed communicator is a fault.
pub(crate) fn find(handle: u64, asked: &str) -> Option<Arc<Communicator>> {
    if !(HANDLES..NEXT.load(Ordering::Relaxed)).contains(&handle) {
        return None;
    }
    let found = live().as_ref().and_then(|live| live.get(&handle).cloned());
    Some(found.unwrap_or_else(|| report::fault(format!("`{asked}` uses a communicator that was destroyed or aborted"))))
}

/// Returns all communicators of this process.
pub(super) fn communicators() -> Vec<Arc<Communicator>> {
    live().iter().flat_map(HashMap::values).cloned().collect()
}

/// Removes a handle.
pub(crate) fn forget(handle: u64) {
    let gone = live().as_mut().and_then(|live| live.remove(&handle));
    // Dropped without the lock, because its ranks disconnect.
    drop(gone);
}

/// Calls for one stream of a communicator.
struct Calls {
    communicator: Arc<Communicator>,
    stream: usize,
    transfers: Vec<Transfer>,
}

#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<Calls>,
    /// Status of the first refused call.
    refused: Option<Status>,
    /// Communicators that were aborted.
    aborted: Vec<Arc<Communicator>>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn start() -> Status {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

pub(crate) fn end() -> Status {
    let ended = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { Group::default() })
    });
    let Some(Group { calls, refused, aborted, .. }) = ended else { return INVALID_USAGE };
    aborted.iter().for_each(|communicator| communicator.abort());
    free_memory_of(&aborted);
    if let Some(refused) = refused {
        return refused;
    }
    let mut status = SUCCESS;
    for Calls { communicator, stream, transfers } in calls {
        if communicator.take(stream, transfers) == IN_PROGRESS {
            status = IN_PROGRESS;
        }
    }
    status
}

/// Aborts a communicator, at the end of this thread's group or at once.
pub(crate) fn abort(communicator: Arc<Communicator>) {
    start();
    GROUP.with_borrow_mut(|group| group.aborted.push(communicator));
    end();
}

/// Waits, as CUDA does when memory is freed, until the devices of communicators have done their work.
fn free_memory_of(aborted: &[Arc<Communicator>]) {
    if aborted.is_empty() {
        return;
    }
    while std::env::var_os("GPU_DOUBLE_ABORT").is_some_and(|how| how == "hangs") {
        std::thread::park();
    }
    let before = current();
    for communicator in aborted {
        set_current(Some(communicator.device));
        if let Err(fault) = machine().wait_for_context("ncclCommAbort") {
            report::fault(fault.0);
        }
    }
    set_current(before);
}

/// Makes a call, in this thread's group or alone.
pub(crate) fn call(communicator: Option<Arc<Communicator>>, stream: usize, transfer: Option<Transfer>) -> Status {
    let checked = communicator.zip(transfer).filter(|(communicator, transfer)| {
        let seat = communicator.seat;
        let named = transfer.named().is_none_or(|rank| rank < seat.ranks);
        let (read, written) = transfer.ranges(seat);
        let has_memory = [read, written].iter().flatten().all(|(at, len)| *len == 0 || *at != 0);
        named && has_memory && !transfer.overlaps(seat) && communicator.is_ready()
    });
    let status = if checked.is_some() { SUCCESS } else { INVALID_ARGUMENT };
    start();
    GROUP.with_borrow_mut(|group| {
        let Some((communicator, mut transfer)) = checked else {
            group.refused.get_or_insert(status);
            return;
        };
        if transfer.count == 0 {
            return;
        }
        let (read, written) = transfer.ranges(communicator.seat);
        transfer.is_registered = communicator.registrations.serve(transfer.name(), read, written);
        let same = |calls: &&mut Calls| Arc::ptr_eq(&calls.communicator, &communicator) && calls.stream == stream;
        match group.calls.iter_mut().find(same) {
            Some(calls) => calls.transfers.push(transfer),
            None => group.calls.push(Calls { communicator, stream, transfers: vec![transfer] }),
        }
    });
    match end() {
        SUCCESS => status,
        ended => ended,
    }
}
