//! All-reduce: blocks of the buffers are reduce-scattered, and a round or two later their results are gathered.

use super::{
    super::host::{
        packing::{ALIGN, Stream},
        reduce::{Input, reduce},
    },
    rounds::{Peers, Rounds},
    seat::Seat,
};
use crate::{Buffer, ReduceOp, Result};

pub(super) struct AllReduce {
    seat: Seat,
    op: ReduceOp,
    pub(super) buffers: Vec<Buffer>,
    stream: Stream,
    /// Bytes of a block that each rank reduces. A slot has one share a rank: what goes to that rank in this round's
    /// block, and in the place of its own rank the result of an earlier block.
    share: usize,
    blocks: usize,
    /// Rounds between reducing a block and gathering its result.
    delay: usize,
}

impl AllReduce {
    pub(super) fn new(buffers: Vec<Buffer>, op: ReduceOp, seat: Seat) -> Self {
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        // Less than a slot is still spread over all ranks.
        let share = seat.share(seat.ranks).min(stream.len().div_ceil(seat.ranks).next_multiple_of(ALIGN)).max(ALIGN);
        let blocks = stream.chunks(share * seat.ranks);
        AllReduce { seat, op, buffers, stream, share, blocks, delay: blocks.min(2) }
    }

    fn place(&self, rank: usize) -> std::ops::Range<usize> {
        rank * self.share..(rank + 1) * self.share
    }
}

impl Rounds for AllReduce {
    fn rounds(&self) -> usize {
        self.blocks + self.delay
    }

    fn ahead(&self) -> usize {
        // A round publishes the result of the block `delay` rounds earlier, which must have been reduced.
        self.delay.max(1)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.seat.ranks);
        for to in 0..ranks {
            let block = if to == rank { round.checked_sub(self.delay) } else { Some(round) };
            let Some(block) = block.filter(|&block| block < self.blocks) else { continue };
            let place = &mut slot[self.place(to)];
            for piece in self.stream.pieces(block * ranks + to, self.share) {
                place[piece.chunk].copy_from_slice(&self.buffers[piece.part].bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.seat.ranks);
        if round < self.blocks {
            for piece in self.stream.pieces(round * ranks + rank, self.share) {
                let inputs: Vec<_> = (0..ranks)
                    .map(|from| match from == rank {
                        true => Input::Output,
                        false => Input::Bytes(&peers.slot(from)[self.place(rank)][piece.chunk.clone()]),
                    })
                    .collect();
                let buffer = &mut self.buffers[piece.part];
                reduce(buffer.dtype(), self.op, &mut buffer.bytes_mut()[piece.bytes], &inputs);
            }
        }
        if let Some(block) = round.checked_sub(self.delay) {
            for from in (0..ranks).filter(|&from| from != rank) {
                for piece in self.stream.pieces(block * ranks + from, self.share) {
                    let result = &peers.slot(from)[self.place(from)][piece.chunk];
                    self.buffers[piece.part].bytes_mut()[piece.bytes].copy_from_slice(result);
                }
            }
        }
        Ok(())
    }
}
