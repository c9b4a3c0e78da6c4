//! A rank's connection to the hub, and what has come over it.
//!
//! A thread reads the connection and sorts notes by group and rank. Threads that run collectives wait for them.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    super::{
        backend::PeerState,
        collective::Failure,
        waiting_ranks::{WaitingRanks, WarningTimer},
    },
    hub::{self, LINK_TIMEOUT},
    message::{FromHub, Gone, Note, ToHub, append, frames},
};
use crate::{
    Error, HostNames, RankEnv, Result,
    channel::{Channel, Reader, Writer},
    store::{
        Request, RequestContext,
        tcp::{Endpoint, Secret, check_address, holder},
    },
};

/// How long a rank that leaves waits until the hub has read its last notes.
const GOODBYE: Duration = Duration::from_secs(2);
/// Shortest time in which ranks meet.
const MIN_MEETING: Duration = Duration::from_secs(10);
/// Maximum wait between two checks.
const SLICE: Duration = Duration::from_millis(500);

/// One rank's connection in one world. Dropping it leaves the world.
pub(super) struct Link {
    shared: Arc<Shared>,
    /// The hub, for messages.
    pub(super) holder: String,
    /// Host names of the ranks.
    pub(super) names: HostNames,
    /// Rank 0's chunk size, so that it is the same on all ranks.
    pub(super) chunk_bytes: usize,
    reader: Option<thread::JoinHandle<()>>,
}

struct Shared {
    writer: Mutex<Writer>,
    /// How a write failed.
    broken: OnceLock<io::ErrorKind>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Everything that has come from the hub.
pub(super) struct State {
    /// Host and chunk size of each rank that has joined.
    joined: Vec<Option<(String, u32)>>,
    refused: Option<String>,
    /// The ranks that are gone.
    gone: Vec<Option<Ended>>,
    /// How the connection to the hub ended.
    pub(super) lost: Option<Gone>,
    groups: HashMap<u64, Inbox>,
    /// Groups that this rank has left.
    left: HashSet<u64>,
    /// Number of ends so far.
    ends: u64,
}

/// The end of a rank's part in a group, or in the world.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    /// Number of ends that this rank learned of before.
    order: u64,
    pub(super) state: PeerState,
}

/// Notes of one group.
#[derive(Default)]
struct Inbox {
    peers: HashMap<usize, Peer>,
    /// This rank's announcement page.
    page: Vec<u8>,
    /// When this rank asked for the peers' pages.
    asked: Option<Instant>,
}

/// Notes of one rank of a group.
#[derive(Default)]
struct Peer {
    steps: VecDeque<Step>,
    /// Number of steps so far.
    received: u64,
    ended: Option<Ended>,
    page: Option<Vec<u8>>,
}

/// A rank's part of a step, without the zeros at the ends.
#[derive(Default)]
pub(super) struct Step {
    pub(super) announcement: Vec<u8>,
    pub(super) slot: Vec<u8>,
}

impl State {
    fn end(&mut self, state: PeerState) -> Ended {
        self.ends += 1;
        Ended { order: self.ends, state }
    }

    /// Takes a frame of the hub. Returns an answer for the hub, or `None` if the frame is invalid.
    fn take(&mut self, frame: &[u8]) -> Option<Option<Vec<u8>>> {
        match FromHub::parse(frame)? {
            FromHub::Joined { rank, chunk_bytes, host } => {
                *self.joined.get_mut(rank as usize)? = Some((host.to_owned(), chunk_bytes));
            }
            FromHub::Refused(why) => self.refused = Some(why.to_owned()),
            FromHub::Gone { rank, how } => {
                let ended = self.end(how.into());
                self.gone.get_mut(rank as usize)?.get_or_insert(ended);
            }
            FromHub::Note { group, .. } if self.left.contains(&group) => {}
            FromHub::Note { from, group, note } => return self.note(from as usize, group, Note::parse(note)?),
        }
        Some(None)
    }

    fn note(&mut self, from: usize, group: u64, note: Note<'_>) -> Option<Option<Vec<u8>>> {
        let ended = match &note {
            Note::Failed(why) => Some(self.end(PeerState::Failed(Failure::from_bytes(why)))),
            Note::Left => Some(self.end(PeerState::Left)),
            _ => None,
        };
        // A peer may send notes before this rank has made the group.
        let inbox = self.groups.entry(group).or_default();
        let peer = inbox.peers.entry(from).or_default();
        match note {
            Note::Step { announcement, slot } => {
                peer.steps.push_back(Step { announcement: announcement.to_vec(), slot: slot.to_vec() });
                peer.received += 1;
            }
            Note::Failed(_) | Note::Left => peer.ended = peer.ended.take().or(ended),
            Note::Page(page) => peer.page = Some(page.to_vec()),
            Note::Ask => {
                let note = Note::Page(&inbox.page).to_bytes();
                let to = vec![u16::try_from(from).ok()?];
                return Some(Some(ToHub::Send { group, to, note: &note }.to_bytes()));
            }
        }
        Some(None)
    }

    /// Returns the number of steps that a rank has sent.
    pub(super) fn received(&self, group: u64, rank: usize) -> u64 {
        self.peer(group, rank).map_or(0, |peer| peer.received)
    }

    /// Returns whether a rank's next step is there.
    pub(super) fn has_step(&self, group: u64, rank: usize) -> bool {
        self.peer(group, rank).is_some_and(|peer| !peer.steps.is_empty())
    }

    /// Takes a rank's next step, if it is there.
    pub(super) fn next_step(&mut self, group: u64, rank: usize) -> Step {
        let peer = self.groups.get_mut(&group).and_then(|inbox| inbox.peers.get_mut(&rank));
        peer.and_then(|peer| peer.steps.pop_front()).unwrap_or_default()
    }

    /// Returns the end of a rank's part in a group, if it has ended. A failure comes before what follows from it.
    pub(super) fn ended(&self, group: u64, rank: usize) -> Option<&Ended> {
        self.peer(group, rank).and_then(|peer| peer.ended.as_ref()).or(self.gone.get(rank)?.as_ref())
    }

    fn peer(&self, group: u64, rank: usize) -> Option<&Peer> {
        self.groups.get(&group)?.peers.get(&rank)
    }

    /// Forgets a group, and ignores what comes for it.
    pub(super) fn leave(&mut self, group: u64) {
        self.groups.remove(&group);
        self.left.insert(group);
    }

    /// Sets this rank's announcement page.
    pub(super) fn set_page(&mut self, group: u64, page: &[u8]) {
        if !self.left.contains(&group) {
            self.groups.entry(group).or_default().page = page.to_vec();
        }
    }

    /// Returns this rank's announcement page, unless it is empty.
    pub(super) fn own_page(&self, group: u64) -> Option<Vec<u8>> {
        self.groups.get(&group).map(|inbox| inbox.page.clone()).filter(|page| !page.is_empty())
    }

    /// Returns the page that a rank has sent since this rank asked.
    pub(super) fn page(&self, group: u64, rank: usize) -> Option<Vec<u8>> {
        self.peer(group, rank)?.page.clone()
    }

    /// Returns whether to ask for pages, because those that are here are older than `age`. Forgets these.
    pub(super) fn begins_to_ask(&mut self, group: u64, age: Duration) -> bool {
        let Some(inbox) = self.groups.get_mut(&group) else { return false };
        let is_due = inbox.asked.is_none_or(|at| at.elapsed() >= age);
        if is_due {
            inbox.asked = Some(Instant::now());
            inbox.peers.values_mut().for_each(|peer| peer.page = None);
        }
        is_due
    }

    /// Returns how long ago this rank asked for pages.
    pub(super) fn asked_for(&self, group: u64) -> Duration {
        let asked = self.groups.get(&group).and_then(|inbox| inbox.asked);
        asked.map_or(Duration::MAX, |at| at.elapsed())
    }
}

impl Ended {
    /// Returns a key that is lower the better this end explains why a group failed.
    pub(super) fn precedence(&self) -> (u8, u64) {
        (self.state.precedence(), self.order)
    }
}

impl From<Gone> for PeerState {
    /// Returns the state of a rank whose connection has ended.
    fn from(how: Gone) -> Self {
        match how {
            Gone::Left => PeerState::Left,
            Gone::Died => PeerState::Died,
            Gone::Unreachable => PeerState::Unreachable(LINK_TIMEOUT),
        }
    }
}

impl Link {
    /// Meets the other ranks of the job in its `world`-th world.
    pub(super) fn meet(
        env: &RankEnv,
        secret: &Secret,
        world: u32,
        chunk_bytes: usize,
        host: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let holder = holder(env);
        let asked = RequestContext::new(&Request::Ping, Some(env.rank), &holder);
        check_address(env, &asked)?;
        let timeout = timeout.max(MIN_MEETING);
        let waiting = WaitingRanks::register(env, "tcp");
        let hub = if env.rank == 0 { Some(hub::Hub::get(env, secret, &asked)?) } else { None };
        let endpoint = match &hub {
            Some(hub) => Endpoint::new(&hub.own_address().ip().to_string(), hub.own_address().port(), secret),
            None => Endpoint::new(&env.master_addr, env.master_port, secret),
        };
        let open = |mut channel: Channel, _| {
            hub::limit(channel.writer.stream())?;
            let (rank, size, chunk_bytes) = (env.rank as u32, env.world_size as u32, chunk_bytes as u32);
            send(&mut channel.writer, &ToHub::Join { rank, size, world, chunk_bytes, host }.to_bytes())?;
            Ok(channel)
        };
        let Channel { reader, writer } = endpoint.dial(&asked, timeout, open, &|| waiting.backend_conflict())?;
        let state = State {
            joined: vec![None; env.world_size],
            refused: None,
            gone: vec![None; env.world_size],
            lost: None,
            groups: HashMap::new(),
            left: HashSet::new(),
            ends: 0,
        };
        let shared = Arc::new(Shared {
            writer: Mutex::new(writer),
            broken: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name(format!("fsdp link {}", env.rank));
        let reader = thread
            .spawn(move || of_thread.read(reader))
            .map_err(|source| Error::os(env.rank, "starting the thread that reads from rank 0", source))?;
        let mut link = Link { shared, holder, names: HostNames::default(), chunk_bytes, reader: Some(reader) };
        link.wait_for_all(env, timeout, &waiting)?;
        Ok(link)
    }

    /// Waits until all ranks have joined.
    fn wait_for_all(&mut self, env: &RankEnv, timeout: Duration, waiting: &WaitingRanks) -> Result<()> {
        let (rank, began, mut timer) = (env.rank, Instant::now(), WarningTimer::default());
        let mut state = self.shared.state.lock();
        let message = loop {
            if let Some(why) = &state.refused {
                break why.clone();
            }
            if state.joined.iter().all(Option::is_some) {
                let joined = || state.joined.iter().flatten();
                self.chunk_bytes = joined().next().map_or(self.chunk_bytes, |(_, bytes)| *bytes as usize);
                self.names = HostNames::of(joined().map(|(host, _)| host.as_str()));
                return Ok(());
            }
            if let Some(how) = state.lost {
                let how = if how == Gone::Unreachable { "no longer answered" } else { "died, or left" };
                break format!("rank 0 {how} while the ranks met. See the output of rank 0");
            }
            let is_gone = |rank: &usize| state.gone[*rank].is_some();
            if let Some(gone) = (0..env.world_size).find(is_gone) {
                break format!("rank {gone} died, or left, while the ranks met. See the output of rank {gone}");
            }
            if let Some(why) = waiting.backend_conflict() {
                break why;
            }
            let missing: Vec<usize> = (0..env.world_size).filter(|&rank| state.joined[rank].is_none()).collect();
            if began.elapsed() >= timeout {
                break format!(
                    "rank(s) {missing:?} did not join {} within {:.1} s: see what they do, or raise FSDP_TIMEOUT_S",
                    self.holder,
                    timeout.as_secs_f64()
                );
            }
            if let Some(waited) = timer.is_due() {
                tracing::warn!(
                    "rank {rank} has waited {:.0} s for rank(s) {missing:?} to join {}; it gives up after {:.0} s \
                     (FSDP_TIMEOUT_S)",
                    waited.as_secs_f64(),
                    self.holder,
                    timeout.as_secs_f64()
                );
            }
            self.shared.changed.wait_for(&mut state, SLICE.min(timeout));
        };
        let are_told = state.refused.is_some();
        drop(state);
        if !are_told {
            self.shared.send(&ToHub::GiveUp(&message).to_bytes());
        }
        Err(Error::Rendezvous { rank, message })
    }

    /// Sends a note to ranks of a group. An error means that the connection is about to be reported as lost.
    pub(super) fn send(&self, group: u64, to: &[u16], note: &Note<'_>) {
        let frame = ToHub::Send { group, to: to.to_vec(), note: &note.to_bytes() }.to_bytes();
        self.shared.send(&frame);
    }

    /// Returns what has come so far.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock()
    }

    /// Waits until something comes, for at most `timeout`.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, timeout: Duration) {
        self.shared.changed.wait_for(state, SLICE.min(timeout));
    }
}

impl Link {
    /// Says goodbye, and waits until the hub has read everything: closing the socket earlier could discard it.
    pub(super) fn leave(&self) {
        self.shared.send(&ToHub::Goodbye.to_bytes());
        let until = Instant::now() + GOODBYE;
        let mut state = self.shared.state.lock();
        // The hub then closes the connection.
        while state.lost.is_none() && Instant::now() < until {
            self.wait(&mut state, until.saturating_duration_since(Instant::now()));
        }
        drop(state);
        self.shared.writer.lock().close();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.leave();
        if let Some(reader) = self.reader.take() {
            // Does not panic, and ends because the connection is closed.
            reader.join().ok();
        }
    }
}

impl Shared {
    fn send(&self, frame: &[u8]) {
        if self.state.lock().lost.is_some() {
            return;
        }
        let mut writer = self.writer.lock();
        if let Err(error) = send(&mut writer, frame) {
            self.broken.set(error.kind()).ok();
            // The thread that reads first takes what the hub has sent, such as the reason of a refusal.
            writer.close();
        }
    }

    /// Reads the connection until it ends.
    fn read(&self, mut reader: Reader) {
        let lost = loop {
            let message = match reader.receive(Duration::MAX) {
                Ok(message) => message,
                // A failed write may take the error that a read would have returned.
                Err(error) => break Gone::of(*self.broken.get().unwrap_or(&error.kind())),
            };
            let Some(frames) = frames(message) else { break Gone::Died };
            let mut state = self.state.lock();
            let answers: Option<Vec<_>> = frames.into_iter().map(|frame| state.take(frame)).collect();
            drop(state);
            self.changed.notify_all();
            let Some(answers) = answers else { break Gone::Died };
            answers.into_iter().flatten().for_each(|answer| self.send(&answer));
        };
        self.writer.lock().close();
        self.state.lock().lost.get_or_insert(lost);
        self.changed.notify_all();
    }
}

/// Sends a frame in a message of its own.
fn send(writer: &mut Writer, frame: &[u8]) -> io::Result<()> {
    let mut message = vec![];
    if !append(&mut message, frame) {
        let what = format!("a frame of {} bytes does not fit into a message", frame.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    writer.send(&message)
}
