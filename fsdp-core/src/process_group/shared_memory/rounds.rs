//! Running a collective: filling slots, reading those of the peers, and comparing at the start what everybody issued.

use super::{
    super::collective::{Collective, Traffic},
    segment::Port,
    shape::SLOTS,
    watch::{During, Goal, Watch},
};
use crate::Result;

/// A collective as a number of rounds. In each every rank may write one slot and read everybody's.
pub(super) trait Rounds {
    /// How many there are, the same on every rank. Asked again after [`Rounds::learn`].
    fn rounds(&self) -> usize;

    /// How many rounds may be written before the first of them is read.
    fn ahead(&self) -> usize {
        SLOTS as usize
    }

    /// The only rank that writes anything, if there is one.
    fn source(&self) -> Option<usize> {
        None
    }

    /// Learns from the ranks' announcements how much moves.
    fn learn(&mut self, _: &Traffic) {}

    /// Writes this rank's slot.
    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()>;

    /// Reads the peers' slots. Comes after the same round's [`Rounds::fill`].
    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()>;
}

/// The slots of the round being read.
pub(super) struct Peers<'a>(&'a Port);

impl Peers<'_> {
    /// The data of another rank.
    pub(super) fn slot(&self, peer: usize) -> &[u8] {
        self.0.peer_slot(peer).1
    }
}

/// Runs a collective to its end.
pub(super) fn run(port: &mut Port, watch: &Watch, collective: &Collective<'_>, this: &mut dyn Rounds) -> Result<()> {
    let start = port.consumed();
    let rank = port.rank();
    let source = this.source();
    // Who only listens, or needs the peers' announcements to know how long it takes, learns it after the first round.
    let is_known = !collective.is_sized_by_peers() && source.is_none_or(|source| source == rank);
    let mut rounds = if is_known { this.rounds().max(1) } else { 1 };
    let mut during = During { collective, end: start.wrapping_add(rounds as u32) };
    let (mut filled, mut drained) = (0, 0);
    while drained < rounds {
        let from = match source {
            // The first round carries everybody's announcement.
            _ if drained == 0 => Some(Goal::Published(None)),
            Some(source) if source == rank => None,
            only => Some(Goal::Published(only)),
        };
        let is_published = |port: &Port| match from {
            None => true,
            Some(Goal::Published(Some(peer))) => port.is_published(peer),
            _ => (0..port.ranks()).all(|peer| peer == rank || port.is_published(peer)),
        };
        if drained == filled || !is_published(port) {
            if filled < rounds.min(drained + this.ahead()) && (drained == filled || port.slot_is_free()) {
                watch.wait(port, during, Goal::Free)?;
                let (header, data) = port.slot();
                if filled == 0 {
                    collective.announce(header);
                }
                this.fill(filled, data)?;
                port.publish();
                filled += 1;
                continue;
            }
            if let Some(goal) = from {
                watch.wait(port, during, goal)?;
            }
        }
        if drained == 0 {
            this.learn(&collective.compare(|peer| port.peer_slot(peer).0)?);
            rounds = this.rounds().max(1);
            during.end = start.wrapping_add(rounds as u32);
            if source.is_some_and(|source| source != rank) {
                port.publish_until(during.end);
                filled = rounds;
            }
        }
        this.drain(drained, &Peers(port))?;
        port.advance();
        drained += 1;
    }
    Ok(())
}
