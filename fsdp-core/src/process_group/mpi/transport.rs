//! Sending and receiving with deadlines, creating groups, and identifying hosts.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    super::{backend::PeerState, collective::Collective, host::packing::ALIGN},
    communicator::{Batch, Communicator, Direction, InFlight, Notification, Page, Span, Transfer, page},
    driver::Driver,
};
use crate::{Error, HostNames, hash::Hash};

/// How often to check for finished messages before sleeping.
const SPINS: u32 = 3000;
/// The longest sleep.
const SLICE: Duration = Duration::from_millis(20);
/// How long messages may stay in flight after the peer has gone, which may have received them, or after a peer has
/// timed out waiting for this rank.
const GRACE: Duration = Duration::from_millis(500);
/// Largest number of rounds in flight whose messages use pages.
pub(super) const ROUNDS: usize = 3;

/// Why a wait ended.
#[derive(Debug)]
pub(super) enum WaitError {
    /// These ranks did not send or receive in time.
    Late { missing: Vec<usize>, waited: Duration },
    /// A peer left, died or failed.
    PeerLost { peer: usize, gone: PeerState },
    /// MPI returned an error for a message.
    MpiError { peer: usize, text: String },
    /// The thread that calls MPI has ended.
    Over,
}

impl WaitError {
    /// Returns the error of a collective that this ended.
    pub(super) fn into_error(self, collective: &Collective<'_>) -> Error {
        match self {
            WaitError::Late { missing, waited } => collective.timed_out(missing, waited),
            WaitError::PeerLost { peer, gone } => gone.into_error(collective, peer),
            WaitError::MpiError { peer, text } => collective.lost(peer, format!("can't be reached: {text}")),
            WaitError::Over => Error::Internal {
                rank: collective.group().rank,
                what: format!("the thread that calls MPI ended before {collective}"),
            },
        }
    }
}

/// One rank's end of a group, for the thread that runs its collectives.
pub(super) struct Transport {
    pub(super) driver: &'static Driver,
    pub(super) communicator: Arc<Communicator>,
    /// Largest number of bytes of a message, equal on all ranks: rank 0's choice, adjusted by [`Transport::meet`].
    pub(super) step: usize,
    /// Identifiers of the members' hosts. All are 0 if one member wants no hierarchy.
    pub(super) host_ids: Vec<u64>,
    /// Names of the hosts.
    pub(super) names: HostNames,
    /// A random number that identifies the group.
    pub(super) nonce: u64,
    pub(super) timeout: Duration,
    /// Number of receives posted for each member.
    pub(super) received: Vec<u64>,
    /// Unused pages of `step` bytes.
    pages: Vec<Page>,
    /// Unused pages of the first messages of collectives.
    pub(super) first_pages: Vec<Page>,
}

impl Transport {
    /// Creates an end that knows nothing of the other members yet.
    pub(super) fn new(
        driver: &'static Driver,
        communicator: Arc<Communicator>,
        timeout: Duration,
        received: Vec<u64>,
    ) -> Self {
        Transport {
            driver,
            communicator,
            step: ALIGN,
            host_ids: vec![],
            names: HostNames::default(),
            nonce: 0,
            timeout,
            received,
            pages: vec![],
            first_pages: vec![],
        }
    }

    pub(super) fn size(&self) -> usize {
        self.communicator.ranks.len()
    }

    /// Returns a page of [`Transport::step`] bytes.
    pub(super) fn page(&mut self) -> Page {
        self.pages.pop().unwrap_or_else(|| page(self.step))
    }

    /// Keeps a page for reuse.
    pub(super) fn keep(&mut self, used: Page) {
        if used.len() == self.step / size_of::<u64>() {
            self.pages.push(used);
        }
    }

    /// Posts messages. Messages between two ranks are received in the order in which they were sent.
    ///
    /// # Safety
    /// Until the messages end, nobody writes the spans that they send or accesses those that they receive.
    pub(super) unsafe fn post(&mut self, in_flight: &Arc<InFlight>, transfers: Vec<Transfer>) -> Arc<Batch> {
        for Transfer { direction, peer, .. } in &transfers {
            match direction {
                Direction::Send => self.communicator.count(*peer),
                Direction::Receive => self.received[*peer] += 1,
            }
        }
        self.driver.post(&self.communicator, in_flight.clone(), transfers)
    }

    /// Returns how long waits in the `index`-th phase of a collective last without progress.
    ///
    /// Waits after the first phase last a quarter longer. There a peer may itself wait for a third rank, which only the
    /// peer can name, so the peer should time out first.
    pub(super) fn patience(&self, index: usize) -> Duration {
        self.timeout.saturating_add(if index == 0 { Duration::ZERO } else { self.timeout / 4 })
    }

    /// Waits for messages, at most `patience` without progress.
    pub(super) fn wait(&self, batch: &Batch, patience: Duration) -> Result<(), WaitError> {
        let began = Instant::now();
        let spins = if self.driver.is_crowded { 0 } else { SPINS };
        for _ in 0..spins {
            if batch.is_done() {
                break;
            }
            std::hint::spin_loop();
        }
        let (mut progress, mut since) = (self.communicator.progress(), Instant::now());
        loop {
            let is_done = batch.is_done();
            if let Some((peer, notification)) = self.communicator.failed() {
                let missing = self.communicator.awaited(batch, &notification, began);
                if missing.is_empty() {
                    return Err(WaitError::PeerLost { peer, gone: notification.gone });
                }
                // Gives messages in flight a moment: if they arrive, this rank was the late one.
                if notification.received_at.elapsed() >= GRACE {
                    return Err(WaitError::Late { missing, waited: since.elapsed() });
                }
            }
            if let Some((peer, refused)) = batch.refused() {
                let gone = refused.peer_state().or_else(|| self.peer_state(peer));
                return Err(match gone {
                    Some(gone) => WaitError::PeerLost { peer, gone },
                    None => WaitError::MpiError { peer, text: refused.text },
                });
            }
            if is_done {
                return Ok(());
            }
            if let Some((peer, notification)) = self.lost_peer(batch) {
                return Err(WaitError::PeerLost { peer, gone: notification.gone });
            }
            if self.driver.is_over() {
                return Err(WaitError::Over);
            }
            let now = self.communicator.progress();
            if now != progress {
                (progress, since) = (now, Instant::now());
            }
            let waited = since.elapsed();
            if waited >= patience {
                return Err(WaitError::Late { missing: batch.missing(), waited });
            }
            self.communicator.sleep(SLICE.min(patience - waited), || batch.is_done());
        }
    }

    /// Fails if a peer failed in the current collective or before, which is then void even if all messages arrive.
    pub(super) fn check(&self) -> Result<(), WaitError> {
        let found = self.communicator.failed();
        found.map_or(Ok(()), |(peer, notification)| Err(WaitError::PeerLost { peer, gone: notification.gone }))
    }

    /// Returns the end of a peer's part, if it is known.
    fn peer_state(&self, peer: usize) -> Option<PeerState> {
        self.communicator
            .notifications()
            .into_iter()
            .find(|(other, _)| *other == peer)
            .map(|(_, notification)| notification.gone)
    }

    /// Returns a peer that has gone and that messages still wait for. Peers that sent a reason come first.
    fn lost_peer(&self, batch: &Batch) -> Option<(usize, Notification)> {
        let mut notifications = self.communicator.notifications();
        notifications.sort_by_key(|(_, notification)| notification.gone.precedence());
        let (to, from) = (batch.open(Direction::Send), batch.open(Direction::Receive));
        notifications.into_iter().find(|(peer, notification)| {
            // Messages that the peer sent before still arrive.
            (from.contains(peer) && self.received[*peer] > notification.sent)
                || (to.contains(peer) && notification.received_at.elapsed() >= GRACE)
        })
    }

    /// Fails if one of these peers has failed or died, for waits without messages.
    pub(super) fn check_peers(&self, peers: &[usize]) -> Result<(), WaitError> {
        let is_lost =
            |(peer, notification): &(usize, Notification)| peers.contains(peer) && notification.gone != PeerState::Left;
        let found = self.communicator.notifications().into_iter().find(is_lost);
        found.map_or(Ok(()), |(peer, notification)| Err(WaitError::PeerLost { peer, gone: notification.gone }))
    }
}

/// Memory for the pages of messages, and the length that messages are not shortened below for it.
const PAGES: usize = 32 << 20;
const LEAST: usize = 64 << 10;
/// Longest message: MPI's counts are `int`.
const LONGEST: usize = 1 << 30;
/// Shortest message: two aligned places, so that half a message has one.
const SHORTEST: usize = 2 * ALIGN;
/// Bytes that ranks exchange when they create a group: tag, message length, host and nonce, and the host's name.
const MET: usize = NUMBERS + NAME;
const NUMBERS: usize = 32;
/// Longest name of a Linux host.
const NAME: usize = 64;
/// Chunks in a message: the network is slower than memory, with more overhead for each message.
const CHUNKS: usize = 8;

impl Transport {
    /// Creates a group of some of this group's ranks, in which this rank has the index `rank` and is on `host`.
    ///
    /// `chunk_bytes` is the wanted chunk. The first rank's choice counts, rounded to a multiple of [`ALIGN`].
    pub(super) fn meet(
        &mut self,
        ranks: &[usize],
        rank: usize,
        chunk_bytes: usize,
        host: u64,
        timeout: Duration,
    ) -> Result<Result<Transport, WaitError>, String> {
        let tag = self.driver.tag()?;
        let communicator =
            Arc::new(Communicator::new(tag, ranks.iter().map(|&rank| self.communicator.ranks[rank]).collect(), rank));
        // Opened before any peer knows its tag.
        self.driver.open(&communicator);
        let (mine, others) = (ranks[rank], communicator.peers().map(|peer| ranks[peer]));
        let span = |region| Span { region, bytes: 0..MET };
        let mut own = page(MET);
        let nonce = RandomState::new().build_hasher().finish();
        let numbers = [u64::from(tag), step(chunk_bytes, ranks.len()) as u64, host, nonce];
        own[..numbers.len()].copy_from_slice(&numbers);
        let (name, uname) = (bytemuck::cast_slice_mut(&mut own[numbers.len()..]), rustix::system::uname());
        name.iter_mut().zip(uname.nodename().to_bytes()).for_each(|(to, from): (&mut u8, _)| *to = *from);
        let pages = [own].into_iter().chain(ranks.iter().map(|_| page(MET))).collect();
        let in_flight = Arc::new(InFlight::new(vec![], pages));
        let place = |of: usize| ranks.iter().position(|&rank| rank == of).unwrap_or_default();
        let transfers = others.flat_map(|peer| {
            let receive = Transfer { direction: Direction::Receive, peer, span: span(1 + place(peer)) };
            [receive, Transfer { direction: Direction::Send, peer, span: span(0) }]
        });
        debug_assert_eq!(place(mine), rank);
        let transfers = transfers.collect();
        // SAFETY: the pages are used by these messages only, and read once all have ended.
        let batch = unsafe { self.post(&in_flight, transfers) };
        if let Err(error) = self.wait(&batch, self.timeout) {
            self.driver.close(&communicator, None);
            return Ok(Err(error));
        }
        // SAFETY: all messages have ended.
        let bytes = |of: usize| unsafe { in_flight.read(&span(if of == rank { 0 } else { 1 + of })) };
        let told = |of: usize| {
            let bytes = bytes(of);
            let number = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            [number(0), number(8), number(16), number(24)]
        };
        communicator.set_tags((0..ranks.len()).map(|of| told(of)[0] as u16).collect());
        let name = |of: usize| {
            let name = bytes(of)[NUMBERS..].split(|&byte| byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(name).into_owned()
        };
        let names = HostNames::of((0..ranks.len()).map(name));
        let [_, step, _, nonce] = told(0);
        let step = (step as usize).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN;
        let mut host_ids: Vec<_> = (0..ranks.len()).map(|of| told(of)[2]).collect();
        // One rank without a hierarchy turns it off for all, and for groups split from this one.
        if host_ids.contains(&0) {
            host_ids.fill(0);
        }
        let unmet = Transport::new(self.driver, communicator, timeout, vec![0; ranks.len()]);
        Ok(Ok(Transport { step, host_ids, names, nonce, ..unmet }))
    }

    /// Calls `f` with the world of all MPI processes, for one caller at a time.
    pub(super) fn world<T>(driver: &'static Driver, timeout: Duration, f: impl FnOnce(&mut Transport) -> T) -> T {
        let mut received = driver.received.lock();
        let mut transport = Transport::new(driver, driver.world.clone(), timeout, std::mem::take(&mut *received));
        let outcome = f(&mut transport);
        *received = transport.received;
        outcome
    }
}

/// Returns the bytes of a message in a group of `ranks` ranks, limited by the memory for pages.
fn step(chunk_bytes: usize, ranks: usize) -> usize {
    let share = (PAGES / (2 * ROUNDS * (ranks - 1).max(1))).max(LEAST);
    chunk_bytes.saturating_mul(CHUNKS).min(share).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN
}

/// Returns an identifier that is equal on ranks that can share memory, or 0 if it cannot be determined.
///
/// Such ranks have the same user, kernel and network namespace, to which abstract Unix sockets belong. `name` replaces
/// the detected host.
pub(super) fn host_id(name: Option<&str>) -> u64 {
    let found = || {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let network = std::fs::read_link("/proc/self/ns/net").ok()?;
        let user = rustix::process::geteuid().as_raw();
        Some(format!("{}\n{}\n{user}", boot.trim(), network.display()))
    };
    let Some(identity) = name.map(str::to_string).or_else(found) else { return 0 };
    let mut hash = Hash::default();
    hash.bytes(identity.as_bytes());
    hash.value().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_aligned_and_within_mpi_counts() {
        for (chunk_bytes, ranks, expected) in [
            (128 << 10, 2, 1 << 20),
            (128 << 10, 64, 88768),
            (128 << 10, 1000, LEAST),
            (0, 2, SHORTEST),
            (100, 2, 768),
            (usize::MAX, 2, 5592384),
        ] {
            assert_eq!(step(chunk_bytes, ranks), expected);
        }
    }

    #[test]
    fn hosts_are_identified_by_name_or_detected() {
        assert_eq!(host_id(Some("a")), host_id(Some("a")));
        assert!(host_id(Some("a")) != host_id(Some("b")) && host_id(Some("a")) != host_id(None));
        assert!(host_id(None) != 0 && host_id(None) == host_id(None));
    }
}
