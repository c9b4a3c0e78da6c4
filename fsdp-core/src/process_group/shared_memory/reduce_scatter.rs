//! Reduce-scatter: a slot has a share for each peer, who combines what it got with its own.

use super::{
    super::{
        host::{
            buffers::{range, take},
            packing::Stream,
            reduce::{Input, reduce},
        },
        parts::ScatterPart,
    },
    rounds::{Peers, Rounds},
    seat::Seat,
    sends::Sends,
};
use crate::{Allocator, Buffer, ReduceOp, Result};

pub(super) struct ReduceScatter<'a> {
    sends: Sends<'a>,
    op: ReduceOp,
    pub(super) outputs: Vec<Buffer>,
    /// Where what stays with this rank begins in each input.
    own: Vec<usize>,
}

impl<'a> ReduceScatter<'a> {
    pub(super) fn new(parts: Vec<ScatterPart>, op: ReduceOp, seat: Seat, memory: &'a dyn Allocator) -> Result<Self> {
        let outputs = parts
            .iter()
            .map(|part| take(memory, part.input.dtype(), part.counts[seat.rank], seat.rank))
            .collect::<Result<Vec<_>>>()?;
        let to = (0..seat.ranks)
            .map(|rank| Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), &p.counts[..])), rank))
            .collect();
        let own = parts.iter().map(|p| range(&p.counts, seat.rank, p.input.dtype()).start).collect();
        let sends = Sends::new(parts.into_iter().map(|part| part.input).collect(), to, seat, memory);
        Ok(ReduceScatter { sends, op, outputs, own })
    }
}

impl Rounds for ReduceScatter<'_> {
    fn rounds(&self) -> usize {
        self.sends.to.iter().map(|stream| stream.chunks(self.sends.share)).max().unwrap_or(0)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        self.sends.fill(round, slot)
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        let Seat { rank, ranks, .. } = self.sends.seat;
        for piece in self.sends.to[rank].pieces(round, self.sends.share) {
            let own = self.sends.inputs.get(piece.part)?;
            let inputs: Vec<_> = (0..ranks)
                .map(|from| {
                    Input::Bytes(if from == rank {
                        &own.bytes()[piece.bytes.clone()]
                    } else {
                        &self.sends.sent_by(from, peers)[piece.chunk.clone()]
                    })
                })
                .collect();
            let start = self.own[piece.part];
            let to = piece.bytes.start - start..piece.bytes.end - start;
            reduce(own.dtype(), self.op, &mut self.outputs[piece.part].bytes_mut()[to], &inputs);
        }
        self.sends.inputs.end_of(round);
        Ok(())
    }
}
