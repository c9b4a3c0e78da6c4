//! Running a collective: filling slots, reading those of the peers, and comparing at the start what everybody issued.

use super::{
    call::{self, Announcement, Call},
    mismatch,
    segment::{Port, SLOTS},
    watch::{During, Goal, Watch},
};
use crate::{Result, process_group::Signature};

/// A collective as a number of rounds. In each every rank may write one slot and read everybody's.
pub(crate) trait Rounds {
    /// How many there are, the same on every rank. Asked again after [`Rounds::agree`].
    fn rounds(&self) -> usize;

    /// How many rounds may be written before the first of them is read.
    fn ahead(&self) -> usize {
        SLOTS as usize
    }

    /// The only rank that writes anything, if there is one.
    fn source(&self) -> Option<usize> {
        None
    }

    /// Looks at what the ranks announced in their rows.
    ///
    /// # Errors
    /// What they disagree about.
    fn agree(&mut self, _rows: &[Vec<u64>]) -> Result<(), String> {
        Ok(())
    }

    /// Writes this rank's slot.
    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()>;

    /// Reads the peers' slots. Comes after the same round's [`Rounds::fill`].
    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()>;
}

/// The slots of the round being read.
pub(crate) struct Peers<'a>(&'a Port);

impl Peers<'_> {
    /// The data of another rank.
    pub(crate) fn slot(&self, peer: usize) -> &[u8] {
        self.0.peer_slot(peer).1
    }
}

/// Runs a collective to its end.
pub(crate) fn run(
    port: &mut Port,
    watch: &Watch,
    call: &Call,
    sequence: u64,
    collective: &mut dyn Rounds,
) -> Result<()> {
    let start = port.consumed();
    let rank = port.rank();
    let source = collective.source();
    // Who only listens, or needs the peers' rows to know how long it will take, learns it after the first round.
    let is_known = call.row.is_empty() && source.is_none_or(|source| source == rank);
    let mut rounds = if is_known { collective.rounds().max(1) } else { 1 };
    let mut during = During { name: call.name, sequence, end: start.wrapping_add(rounds as u32) };
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
            if filled < rounds.min(drained + collective.ahead()) && (drained == filled || port.slot_is_free()) {
                watch.wait(port, during, Goal::Free)?;
                let (header, data) = port.slot();
                if filled == 0 {
                    call.write(sequence, header);
                }
                collective.fill(filled, data)?;
                port.publish();
                filled += 1;
                continue;
            }
            if let Some(goal) = from {
                watch.wait(port, during, goal)?;
            }
        }
        if drained == 0 {
            compare(port, watch, call, sequence, collective)?;
            rounds = collective.rounds().max(1);
            during.end = start.wrapping_add(rounds as u32);
            if source.is_some_and(|source| source != rank) {
                port.publish_until(during.end);
                filled = rounds;
            }
        }
        collective.drain(drained, &Peers(port))?;
        port.advance();
        drained += 1;
    }
    Ok(())
}

/// Compares the announcements of all ranks, which have arrived.
fn compare(port: &Port, watch: &Watch, call: &Call, sequence: u64, collective: &mut dyn Rounds) -> Result<()> {
    let rank = port.rank();
    let announcement = |peer| Announcement::new(port.peer_slot(peer).0);
    let peers = || (0..port.ranks()).filter(|&peer| peer != rank);
    let disagreement = if peers().all(|peer| announcement(peer).is(sequence, call)) {
        if call.row.is_empty() {
            return Ok(());
        }
        let rows: Vec<_> = (0..port.ranks())
            .map(|peer| if peer == rank { call.row.clone() } else { announcement(peer).row(call.row.len()) })
            .collect();
        match collective.agree(&rows) {
            Ok(()) => return Ok(()),
            Err(disagreement) => Some(disagreement),
        }
    } else {
        None
    };
    let mut own = vec![0; call::FIXED + 8 * call.row.len()];
    call.write(sequence, &mut own);
    let issued: Vec<_> =
        (0..port.ranks()).map(|peer| if peer == rank { Announcement::new(&own) } else { announcement(peer) }).collect();
    let subject = call.signature().map(Signature::subject);
    Err(mismatch::error(rank, &watch.group, sequence, &issued, subject, disagreement))
}
