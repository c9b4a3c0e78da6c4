//! Sending to the members of a group and receiving from them, in order, with deadlines.
//! Making groups: what ranks tell each other when they meet.

//! What tells hosts apart.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    super::{backend::PeerState, collective::Collective, host::packing::ALIGN},
    communicator::{Batch, Held, Line, Notice, Page, Span, Transfer, Way, page},
    driver::Driver,
};
use crate::{Error, HostNames, hash::Hash};

/// How often to look whether messages are done before sleeping.
const SPINS: u32 = 3000;
/// The longest sleep.
const SLICE: Duration = Duration::from_millis(20);
/// How long messages to a peer that is gone may be on their way, as it may have received them before, and those to this
/// rank when a peer has given it up.
const GRACE: Duration = Duration::from_millis(500);
/// How many rounds whose messages use pages may be on their way at once.
pub(super) const ROUNDS: usize = 3;

/// Why a wait ended.
#[derive(Debug)]
pub(super) enum Trouble {
    /// These ranks did not come.
    Late { missing: Vec<usize>, waited: Duration },
    /// A rank takes part in nothing any more.
    PeerState { peer: usize, gone: PeerState },
    /// MPI has refused a message.
    Refused { peer: usize, text: String },
    /// MPI has ended.
    Over,
}

impl Trouble {
    /// The error of a collective that it ended.
    pub(super) fn into_error(self, collective: &Collective<'_>) -> Error {
        match self {
            Trouble::Late { missing, waited } => collective.timed_out(missing, waited),
            Trouble::PeerState { peer, gone } => gone.into_error(collective, peer),
            Trouble::Refused { peer, text } => collective.lost(peer, format!("can't be reached: {text}")),
            Trouble::Over => Error::Internal {
                rank: collective.group().rank,
                what: format!("the thread that calls MPI has ended before {collective}"),
            },
        }
    }
}

/// One rank's end of a group, for who runs its collectives.
pub(super) struct Wire {
    pub(super) driver: &'static Driver,
    pub(super) line: Arc<Line>,
    /// Bytes of a message, at most, the same on all ranks: what [`Wire::meet`] makes of the first one's choice.
    pub(super) step: usize,
    /// What tells the hosts of the members apart: 0 for all where one wants no hierarchy.
    pub(super) host_ids: Vec<u64>,
    /// What these hosts are called.
    pub(super) names: HostNames,
    /// A number that no other group has, as far as chance can tell.
    pub(super) nonce: u64,
    pub(super) timeout: Duration,
    /// How many messages were asked for from each.
    pub(super) received: Vec<u64>,
    /// Pages of `step` bytes that nobody uses.
    pages: Vec<Page>,
    /// Those of messages that begin collectives, while nobody uses them.
    pub(super) firsts: Vec<Page>,
}

impl Wire {
    /// One end, before anything is known of the others.
    pub(super) fn new(driver: &'static Driver, line: Arc<Line>, timeout: Duration, received: Vec<u64>) -> Self {
        let (host_ids, names, pages, firsts) = (vec![], HostNames::default(), vec![], vec![]);
        Wire { driver, line, step: ALIGN, host_ids, names, nonce: 0, timeout, received, pages, firsts }
    }

    pub(super) fn size(&self) -> usize {
        self.line.ranks.len()
    }

    /// A page of [`Wire::step`] bytes.
    pub(super) fn page(&mut self) -> Page {
        self.pages.pop().unwrap_or_else(|| page(self.step))
    }

    /// Keeps a page for the next who wants one.
    pub(super) fn keep(&mut self, used: Page) {
        if used.len() == self.step / size_of::<u64>() {
            self.pages.push(used);
        }
    }

    /// Starts messages. Between two ranks they are received in the order in which they are sent.
    ///
    /// # Safety
    /// Until they are done, nobody writes what they send, and nobody reads or writes what they receive.
    pub(super) unsafe fn post(&mut self, held: &Arc<Held>, transfers: Vec<Transfer>) -> Arc<Batch> {
        for Transfer { way, peer, .. } in &transfers {
            match way {
                Way::To => self.line.count(*peer),
                Way::From => self.received[*peer] += 1,
            }
        }
        self.driver.post(&self.line, held.clone(), transfers)
    }

    /// How long waits in the `index`-th phase of a collective last while nothing comes. After the first phase that is a
    /// quarter more: what a rank waits for there another one may have to get from a third, which only that one can
    /// name. It is to do so first.
    pub(super) fn patience(&self, index: usize) -> Duration {
        self.timeout.saturating_add(if index == 0 { Duration::ZERO } else { self.timeout / 4 })
    }

    /// Waits until messages are done, no longer than `patience` while nothing comes.
    pub(super) fn wait(&self, batch: &Batch, patience: Duration) -> Result<(), Trouble> {
        let began = Instant::now();
        let spins = if self.driver.is_crowded { 0 } else { SPINS };
        for _ in 0..spins {
            if batch.is_done() {
                break;
            }
            std::hint::spin_loop();
        }
        let (mut progress, mut since) = (self.line.progress(), Instant::now());
        loop {
            let is_done = batch.is_done();
            if let Some((peer, notice)) = self.line.failed() {
                let missing = self.line.awaited(batch, &notice, began);
                if missing.is_empty() {
                    return Err(Trouble::PeerState { peer, gone: notice.gone });
                }
                // What is on its way gets a moment: then it is this rank that was late.
                if notice.heard.elapsed() >= GRACE {
                    return Err(Trouble::Late { missing, waited: since.elapsed() });
                }
            }
            if let Some((peer, refused)) = batch.refused() {
                let gone = refused.gone().or_else(|| self.said(peer));
                return Err(match gone {
                    Some(gone) => Trouble::PeerState { peer, gone },
                    None => Trouble::Refused { peer, text: refused.text },
                });
            }
            if is_done {
                return Ok(());
            }
            if let Some((peer, notice)) = self.in_vain(batch) {
                return Err(Trouble::PeerState { peer, gone: notice.gone });
            }
            if self.driver.is_over() {
                return Err(Trouble::Over);
            }
            let now = self.line.progress();
            if now != progress {
                (progress, since) = (now, Instant::now());
            }
            let waited = since.elapsed();
            if waited >= patience {
                return Err(Trouble::Late { missing: batch.missing(), waited });
            }
            self.line.sleep(SLICE.min(patience - waited), || batch.is_done());
        }
    }

    /// Whether no peer has failed in the collective that this rank is in, or before: it is void then, also where all
    /// messages come.
    pub(super) fn check(&self) -> Result<(), Trouble> {
        let found = self.line.failed();
        found.map_or(Ok(()), |(peer, notice)| Err(Trouble::PeerState { peer, gone: notice.gone }))
    }

    /// What a peer has said of its end.
    fn said(&self, peer: usize) -> Option<PeerState> {
        self.line.notices().into_iter().find(|(other, _)| *other == peer).map(|(_, notice)| notice.gone)
    }

    /// A peer that is gone and whom messages wait for all the same: first one that says why.
    fn in_vain(&self, batch: &Batch) -> Option<(usize, Notice)> {
        let mut notices = self.line.notices();
        notices.sort_by_key(|(_, notice)| match notice.gone {
            PeerState::Failed(_) => 0,
            PeerState::Died => 1,
            PeerState::Left => 2,
        });
        let (to, from) = (batch.open(Way::To), batch.open(Way::From));
        notices.into_iter().find(|(peer, notice)| {
            // What it had sent before still comes.
            (from.contains(peer) && self.received[*peer] > notice.sent)
                || (to.contains(peer) && notice.heard.elapsed() >= GRACE)
        })
    }

    /// Whether none of these peers has failed or died, for waits that are not for messages.
    pub(super) fn all_well(&self, peers: &[usize]) -> Result<(), Trouble> {
        let is_lost = |(peer, notice): &(usize, Notice)| peers.contains(peer) && notice.gone != PeerState::Left;
        let found = self.line.notices().into_iter().find(is_lost);
        found.map_or(Ok(()), |(peer, notice)| Err(Trouble::PeerState { peer, gone: notice.gone }))
    }
}

/// The most bytes that pages for messages take, and the least that a message is cut to for that.
const PAGES: usize = 32 << 20;
const LEAST: usize = 64 << 10;
/// The longest message. MPI counts in `int`.
const LONGEST: usize = 1 << 30;
/// The shortest message: two places, so that half of it is a whole one.
const SHORTEST: usize = 2 * ALIGN;
/// Bytes of what ranks tell each other when they meet: a tag, a step, a host and a nonce, and the name of the host.
const MET: usize = NUMBERS + NAME;
const NUMBERS: usize = 32;
/// The longest name of a Linux host.
const NAME: usize = 64;
/// Messages are so many chunks long: the network is slower than memory, and has more to say about each.
const CHUNKS: usize = 8;

impl Wire {
    /// Makes a group of some of this one's ranks, of which this rank is the `rank`-th, on `host`. `chunk_bytes` is what
    /// it wants to move at a time; the first rank's choice counts, as a multiple of [`ALIGN`] from [`SHORTEST`] on.
    pub(super) fn meet(
        &mut self,
        ranks: &[usize],
        rank: usize,
        chunk_bytes: usize,
        host: u64,
        timeout: Duration,
    ) -> Result<Result<Wire, Trouble>, String> {
        let tag = self.driver.tag()?;
        let line = Arc::new(Line::new(tag, ranks.iter().map(|&rank| self.line.ranks[rank]).collect(), rank));
        // Before anybody knows its tag.
        self.driver.open(&line);
        let (mine, others) = (ranks[rank], line.peers().map(|peer| ranks[peer]));
        let span = |region| Span { region, bytes: 0..MET };
        let mut own = page(MET);
        let nonce = RandomState::new().build_hasher().finish();
        let numbers = [u64::from(tag), step(chunk_bytes, ranks.len()) as u64, host, nonce];
        own[..numbers.len()].copy_from_slice(&numbers);
        let (name, uname) = (bytemuck::cast_slice_mut(&mut own[numbers.len()..]), rustix::system::uname());
        name.iter_mut().zip(uname.nodename().to_bytes()).for_each(|(to, from): (&mut u8, _)| *to = *from);
        let pages = [own].into_iter().chain(ranks.iter().map(|_| page(MET))).collect();
        let held = Arc::new(Held::new(vec![], pages));
        let place = |of: usize| ranks.iter().position(|&rank| rank == of).unwrap_or_default();
        let transfers = others.flat_map(|peer| {
            let receive = Transfer { way: Way::From, peer, span: span(1 + place(peer)) };
            [receive, Transfer { way: Way::To, peer, span: span(0) }]
        });
        debug_assert_eq!(place(mine), rank);
        let transfers = transfers.collect();
        // SAFETY: the pages are used for nothing else, and read when all is done.
        let batch = unsafe { self.post(&held, transfers) };
        if let Err(trouble) = self.wait(&batch, self.timeout) {
            self.driver.close(&line, None);
            return Ok(Err(trouble));
        }
        // SAFETY: all messages are done.
        let bytes = |of: usize| unsafe { held.read(&span(if of == rank { 0 } else { 1 + of })) };
        let told = |of: usize| {
            let bytes = bytes(of);
            let number = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            [number(0), number(8), number(16), number(24)]
        };
        line.set_tags((0..ranks.len()).map(|of| told(of)[0] as u16).collect());
        let name = |of: usize| {
            let name = bytes(of)[NUMBERS..].split(|&byte| byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(name).into_owned()
        };
        let names = HostNames::of((0..ranks.len()).map(name));
        let mut wire = Wire::new(self.driver, line, timeout, vec![0; ranks.len()]);
        let [_, step, _, nonce] = told(0);
        (wire.names, wire.nonce) = (names, nonce);
        wire.step = (step as usize).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN;
        wire.host_ids = (0..ranks.len()).map(|of| told(of)[2]).collect();
        // One that wants no hierarchy turns it off for all, also in the groups that they make without it.
        if wire.host_ids.contains(&0) {
            wire.host_ids.fill(0);
        }
        Ok(Ok(wire))
    }

    /// The world of all processes that MPI knows, for groups to be made of. One at a time has it.
    pub(super) fn world<T>(driver: &'static Driver, timeout: Duration, f: impl FnOnce(&mut Wire) -> T) -> T {
        let mut received = driver.received.lock();
        let mut wire = Wire::new(driver, driver.world.clone(), timeout, std::mem::take(&mut *received));
        let outcome = f(&mut wire);
        *received = wire.received;
        outcome
    }
}

/// Bytes of a message in a group of so many ranks: so that pages for all of them don't take much memory.
fn step(chunk_bytes: usize, ranks: usize) -> usize {
    let share = (PAGES / (2 * ROUNDS * (ranks - 1).max(1))).max(LEAST);
    chunk_bytes.saturating_mul(CHUNKS).min(share).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN
}

/// The same on ranks that can share memory: those of one user on one kernel, with one network, because the abstract
/// names of Unix sockets belong to that. `name` stands for it where somebody knows better. 0 where nothing is known.
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
    fn messages_are_aligned_and_never_longer_than_mpi_counts() {
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
    fn names_tell_hosts_apart_and_a_host_is_known_without() {
        assert_eq!(host_id(Some("a")), host_id(Some("a")));
        assert!(host_id(Some("a")) != host_id(Some("b")) && host_id(Some("a")) != host_id(None));
        assert!(host_id(None) != 0 && host_id(None) == host_id(None));
    }
}
