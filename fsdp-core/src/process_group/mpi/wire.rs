//! Sending to the members of a group and receiving from them, in order, with deadlines.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    super::{collective::Collective, host::packing::ALIGN, lookout::Gone},
    driver::{Driver, lock},
    held::{Held, Page, Span, page},
    line::{Batch, Line, Notice, Transfer, Way},
};
use crate::{Error, HostNames, Result};

/// How often to look whether messages are done before sleeping.
const SPINS: u32 = 3000;
/// The longest sleep.
const SLICE: Duration = Duration::from_millis(20);
/// How long messages to a peer that is gone may be on their way: it may have received them before.
const GRACE: Duration = Duration::from_millis(500);
/// How many rounds whose messages use pages may be on their way at once.
pub(super) const ROUNDS: usize = 3;
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

/// Why a wait ended.
#[derive(Debug)]
pub(super) enum Trouble {
    /// These ranks did not come.
    Late { missing: Vec<usize>, waited: Duration },
    /// A rank takes part in nothing any more.
    Gone { peer: usize, gone: Gone },
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
            Trouble::Gone { peer, gone } => gone.into_error(collective, peer),
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
    /// Bytes of a message, at most: a multiple of [`ALIGN`], from [`SHORTEST`] on, and the same on all ranks.
    pub(super) step: usize,
    /// What tells the hosts of the members apart: 0 for one that takes no part in a hierarchy.
    pub(super) hosts: Vec<u64>,
    /// What these hosts are called.
    pub(super) names: HostNames,
    /// A number that no other group has, as far as chance can tell.
    pub(super) nonce: u64,
    timeout: Duration,
    /// How many messages were asked for from each.
    received: Vec<u64>,
    /// Pages of `step` bytes that nobody uses.
    pages: Vec<Page>,
    /// Those of messages that begin collectives, while nobody uses them.
    pub(super) firsts: Vec<Page>,
}

impl Wire {
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

    /// Waits until messages are done.
    pub(super) fn wait(&self, batch: &Batch) -> Result<(), Trouble> {
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
            self.check()?;
            if let Some((peer, refused)) = batch.refused() {
                let gone = refused.gone().or_else(|| self.said(peer));
                return Err(match gone {
                    Some(gone) => Trouble::Gone { peer, gone },
                    None => Trouble::Refused { peer, text: refused.text },
                });
            }
            if is_done {
                return Ok(());
            }
            if let Some((peer, notice)) = self.in_vain(batch) {
                return Err(Trouble::Gone { peer, gone: notice.gone });
            }
            if self.driver.is_over() {
                return Err(Trouble::Over);
            }
            let now = self.line.progress();
            if now != progress {
                (progress, since) = (now, Instant::now());
            }
            let waited = since.elapsed();
            if waited >= self.timeout {
                let mut missing = batch.open(Way::From);
                if missing.is_empty() {
                    missing = batch.open(Way::To);
                }
                return Err(Trouble::Late { missing, waited });
            }
            self.line.sleep(SLICE.min(self.timeout - waited), || batch.is_done());
        }
    }

    /// Whether no peer has failed in the collective that this rank is in, or before: it is void then, also where all
    /// messages come.
    pub(super) fn check(&self) -> Result<(), Trouble> {
        let is_void = |(_, notice): &(usize, Notice)| {
            matches!(notice.gone, Gone::Failed(_)) && notice.completed <= self.line.completed()
        };
        let found = self.line.notices().into_iter().find(is_void);
        found.map_or(Ok(()), |(peer, notice)| Err(Trouble::Gone { peer, gone: notice.gone }))
    }

    /// What a peer has said of its end.
    fn said(&self, peer: usize) -> Option<Gone> {
        self.line.notices().into_iter().find(|(other, _)| *other == peer).map(|(_, notice)| notice.gone)
    }

    /// A peer that is gone and whom messages wait for all the same: first one that says why.
    fn in_vain(&self, batch: &Batch) -> Option<(usize, Notice)> {
        let mut notices = self.line.notices();
        notices.sort_by_key(|(_, notice)| match notice.gone {
            Gone::Failed(_) => 0,
            Gone::Died => 1,
            Gone::Left => 2,
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
        let is_lost = |(peer, notice): &(usize, Notice)| peers.contains(peer) && notice.gone != Gone::Left;
        let found = self.line.notices().into_iter().find(is_lost);
        found.map_or(Ok(()), |(peer, notice)| Err(Trouble::Gone { peer, gone: notice.gone }))
    }

    /// Makes a group of some of this one's ranks, of which this rank is the `rank`-th, on `host`. `chunk_bytes` is what
    /// it wants to move at a time; the first rank's choice counts.
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
        if let Err(trouble) = self.wait(&batch) {
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
        let hosts = (0..ranks.len()).map(|of| told(of)[2]).collect();
        let [_, step, _, nonce] = told(0);
        let step = (step as usize).clamp(SHORTEST, LONGEST) / ALIGN * ALIGN;
        let received = vec![0; ranks.len()];
        let (pages, firsts) = (vec![], vec![]);
        Ok(Ok(Wire { driver: self.driver, line, step, hosts, names, nonce, timeout, received, pages, firsts }))
    }

    /// The world of all processes that MPI knows, for groups to be made of. One at a time has it.
    pub(super) fn world<T>(driver: &'static Driver, timeout: Duration, f: impl FnOnce(&mut Wire) -> T) -> T {
        let mut received = lock(&driver.received);
        let line = driver.world.clone();
        let mut wire = Wire {
            driver,
            line,
            step: ALIGN,
            hosts: vec![],
            names: HostNames::default(),
            nonce: 0,
            timeout,
            received: std::mem::take(&mut *received),
            pages: vec![],
            firsts: vec![],
        };
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
}
