//! All-gather: each rank writes its part to its slots, and everybody copies it to its place in the output.

use super::{
    super::{
        host::{
            buffers::{range, read, take},
            copy::Copy,
            packing::{Piece, Stream},
        },
        parts::GatherPart,
    },
    rounds::{Peers, Rounds},
    seat::Seat,
};
use crate::{Allocator, Buffer, Result};

pub(super) struct AllGather {
    rank: usize,
    chunk: usize,
    parts: Vec<GatherPart>,
    pub(super) outputs: Vec<Buffer>,
    /// What each rank contributes, as bytes of the outputs.
    streams: Vec<Stream>,
    /// Where this rank's contribution begins in each output.
    own: Vec<usize>,
    copy: Copy,
}

impl AllGather {
    pub(super) fn new(parts: Vec<GatherPart>, seat: Seat, memory: &dyn Allocator) -> Result<Self> {
        let outputs = parts
            .iter()
            .map(|part| take(memory, part.input.dtype(), part.counts.iter().sum(), seat.rank))
            .collect::<Result<Vec<_>>>()?;
        let streams: Vec<_> = (0..seat.ranks)
            .map(|rank| Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), &p.counts[..])), rank))
            .collect();
        let own = parts.iter().map(|p| range(&p.counts, seat.rank, p.input.dtype()).start).collect();
        let copy = Copy::for_output_of(streams.iter().map(Stream::len).sum());
        Ok(AllGather { rank: seat.rank, chunk: seat.bytes, parts, outputs, streams, own, copy })
    }

    fn copy_own(&mut self, piece: &Piece, slot: &mut [u8]) -> Result<()> {
        let (start, copy) = (self.own[piece.part], self.copy);
        let to = &mut self.outputs[piece.part].bytes_mut()[piece.bytes.clone()];
        let from = piece.bytes.start - start..piece.bytes.end - start;
        read(&*self.parts[piece.part].input, from, piece.part, self.rank, |from| {
            copy.copy_to_both(&mut slot[piece.chunk.clone()], to, from);
        })
    }
}

impl Rounds for AllGather {
    fn rounds(&self) -> usize {
        self.streams.iter().map(|stream| stream.chunks(self.chunk)).max().unwrap_or(0)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        let stream = std::mem::take(&mut self.streams[self.rank]);
        let outcome = stream.pieces(round, self.chunk).try_for_each(|piece| self.copy_own(&piece, slot));
        self.streams[self.rank] = stream;
        outcome
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        for peer in (0..self.streams.len()).filter(|&peer| peer != self.rank) {
            for piece in self.streams[peer].pieces(round, self.chunk) {
                self.copy.copy(&mut self.outputs[piece.part].bytes_mut()[piece.bytes], &peers.slot(peer)[piece.chunk]);
            }
        }
        Ok(())
    }
}

/// All-gather of nothing is how a barrier is run.
impl AllGather {
    pub(super) fn barrier(seat: Seat) -> Self {
        AllGather {
            rank: seat.rank,
            chunk: seat.bytes,
            parts: Vec::new(),
            outputs: Vec::new(),
            streams: vec![Stream::default(); seat.ranks],
            own: Vec::new(),
            copy: Copy::Cached,
        }
    }
}
