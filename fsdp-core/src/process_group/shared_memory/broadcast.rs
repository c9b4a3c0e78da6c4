//! Broadcast: the root fills slots, the others copy them.

use super::{
    super::host::{copy::Copy, packing::Stream},
    rounds::{Peers, Rounds},
    seat::Seat,
};
use crate::{Buffer, Result};

pub(super) struct Broadcast {
    seat: Seat,
    root: usize,
    pub(super) buffers: Vec<Buffer>,
    stream: Stream,
    copy: Copy,
}

impl Broadcast {
    pub(super) fn new(buffers: Vec<Buffer>, root: usize, seat: Seat) -> Self {
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let copy = Copy::for_output_of(stream.len());
        Broadcast { seat, root, buffers, stream, copy }
    }
}

impl Rounds for Broadcast {
    fn rounds(&self) -> usize {
        self.stream.chunks(self.seat.bytes)
    }

    fn source(&self) -> Option<usize> {
        Some(self.root)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        if self.seat.rank == self.root {
            for piece in self.stream.pieces(round, self.seat.bytes) {
                slot[piece.chunk].copy_from_slice(&self.buffers[piece.part].bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        if self.seat.rank != self.root {
            for piece in self.stream.pieces(round, self.seat.bytes) {
                let from = &peers.slot(self.root)[piece.chunk];
                self.copy.copy(&mut self.buffers[piece.part].bytes_mut()[piece.bytes], from);
            }
        }
        Ok(())
    }
}
