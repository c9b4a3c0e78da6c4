//! Sending to the members of a group and receiving from them, in order, with deadlines.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    super::{collective::Collective, host::packing::ALIGN, lookout::Gone},
    driver::Driver,
    held::{Held, Page, page},
    line::{Batch, Line, Notice, Transfer, Way},
};
use crate::{Error, HostNames};

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
                    return Err(Trouble::Gone { peer, gone: notice.gone });
                }
                // What is on its way gets a moment: then it is this rank that was late.
                if notice.heard.elapsed() >= GRACE {
                    return Err(Trouble::Late { missing, waited: since.elapsed() });
                }
            }
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
}
