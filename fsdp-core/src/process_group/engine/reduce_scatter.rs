//! Reduce-scatter: a slot has a share for each peer, who combines what it got with its own in rank order.

use super::{
    output::{self, Inputs, Slot},
    reduce::{Input, reduce},
    rounds::{Peers, Rounds},
    stream::Stream,
};
use crate::{
    Allocator, Buffer, Result,
    process_group::{ReduceOp, ScatterPart},
};

pub(crate) struct ReduceScatter<'a> {
    slot: Slot,
    share: usize,
    op: ReduceOp,
    inputs: Inputs<'a>,
    pub(crate) outputs: Vec<Buffer>,
    /// What goes to each rank, as bytes of the inputs.
    streams: Vec<Stream>,
    /// Where what stays with this rank begins in each input.
    own: Vec<usize>,
}

impl<'a> ReduceScatter<'a> {
    pub(crate) fn new(parts: Vec<ScatterPart>, op: ReduceOp, slot: Slot, memory: &'a dyn Allocator) -> Result<Self> {
        let outputs = parts
            .iter()
            .map(|part| output::take(memory, part.input.dtype(), part.counts[slot.rank], slot.rank))
            .collect::<Result<Vec<_>>>()?;
        let streams: Vec<_> = (0..slot.ranks)
            .map(|rank| Stream::new(parts.iter().map(|p| output::range(&p.counts, rank, p.input.dtype()))))
            .collect();
        let own = parts.iter().map(|p| output::range(&p.counts, slot.rank, p.input.dtype()).start).collect();
        let share = slot.share(slot.ranks - 1);
        let last = (0..parts.len()).map(|part| last_round(&streams, part, share)).collect();
        let inputs = Inputs::new(parts.into_iter().map(|part| part.input).collect(), last, memory);
        Ok(ReduceScatter { slot, share, op, inputs, outputs, streams, own })
    }
}

/// The last round that touches a part in any of the streams.
pub(crate) fn last_round(streams: &[Stream], part: usize, share: usize) -> usize {
    streams.iter().filter_map(|stream| stream.last_chunk(part, share)).max().unwrap_or(0)
}

impl Rounds for ReduceScatter<'_> {
    fn rounds(&self) -> usize {
        self.streams.iter().map(|stream| stream.chunks(self.share)).max().unwrap_or(0)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        for to in (0..self.slot.ranks).filter(|&to| to != self.slot.rank) {
            let place = &mut slot[Slot::peer_share(self.slot.rank, to, self.share)];
            for piece in self.streams[to].pieces(round, self.share) {
                place[piece.chunk].copy_from_slice(&self.inputs.bytes(piece.part)[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        let rank = self.slot.rank;
        for piece in self.streams[rank].pieces(round, self.share) {
            let inputs: Vec<_> = (0..self.slot.ranks)
                .map(|from| {
                    Input::Bytes(if from == rank {
                        &self.inputs.bytes(piece.part)[piece.bytes.clone()]
                    } else {
                        &peers.slot(from)[Slot::peer_share(from, rank, self.share)][piece.chunk.clone()]
                    })
                })
                .collect();
            let start = self.own[piece.part];
            let to = piece.bytes.start - start..piece.bytes.end - start;
            reduce(self.inputs.dtype(piece.part), self.op, &mut self.outputs[piece.part].bytes_mut()[to], &inputs);
        }
        self.inputs.end_of(round);
        Ok(())
    }
}
