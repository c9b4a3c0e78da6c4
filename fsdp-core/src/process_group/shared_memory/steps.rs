//! The steps of a collective over a segment.

use super::{
    super::{
        collective::Collective,
        host::chunked::{ChunkedCollective, Slots},
    },
    peer_monitor::{Goal, WaitContext, Waiter},
    segment::{Port, SLOTS},
};
use crate::Result;

impl Slots for Port {
    fn slot(&self, peer: usize) -> &[u8] {
        self.peer_slot(peer).1
    }
}

/// Takes a collective through its steps.
pub(super) fn run(
    port: &mut Port,
    waiter: &Waiter,
    collective: &Collective<'_>,
    chunked: &mut dyn ChunkedCollective,
) -> Result<()> {
    let start = port.consumed();
    let rank = port.rank();
    let source = chunked.source();
    // A rank that only reads, or that needs the peers' announcements, learns the number of steps after the first.
    let is_known = !collective.is_sized_by_peers() && source.is_none_or(|source| source == rank);
    let mut steps = if is_known { chunked.steps().max(1) } else { 1 };
    let mut context = WaitContext { collective, end: start.wrapping_add(steps as u32) };
    let (mut filled, mut drained) = (0, 0);
    while drained < steps {
        let from = match source {
            // The first step has the announcements of all ranks.
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
            if filled < steps.min(drained + chunked.lookahead().min(SLOTS as usize))
                && (drained == filled || port.slot_is_free())
            {
                waiter.wait(port, context, Goal::Free)?;
                let (header, data) = port.slot();
                if filled == 0 {
                    collective.announce(header);
                }
                chunked.fill(filled, data)?;
                port.publish();
                filled += 1;
                continue;
            }
            if let Some(goal) = from {
                waiter.wait(port, context, goal)?;
            }
        }
        if drained == 0 {
            chunked.learn(collective.compare(|peer| port.peer_slot(peer).0)?);
            steps = chunked.steps().max(1);
            context.end = start.wrapping_add(steps as u32);
            if source.is_some_and(|source| source != rank) {
                port.publish_until(context.end);
                filled = steps;
            }
        }
        chunked.drain(drained, port)?;
        port.advance();
        drained += 1;
    }
    Ok(())
}
