//! Broadcast: the root fills slots, the others copy them.

use super::{
    copy::Copy,
    output::Slot,
    rounds::{Peers, Rounds},
    stream::Stream,
};
use crate::{Buffer, Result};

pub(crate) struct Broadcast {
    slot: Slot,
    root: usize,
    pub(crate) buffers: Vec<Buffer>,
    stream: Stream,
    copy: Copy,
}

impl Broadcast {
    pub(crate) fn new(buffers: Vec<Buffer>, root: usize, slot: Slot) -> Self {
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let copy = Copy::for_output_of(stream.len());
        Broadcast { slot, root, buffers, stream, copy }
    }
}

impl Rounds for Broadcast {
    fn rounds(&self) -> usize {
        self.stream.chunks(self.slot.bytes)
    }

    fn source(&self) -> Option<usize> {
        Some(self.root)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        if self.slot.rank == self.root {
            for piece in self.stream.pieces(round, self.slot.bytes) {
                slot[piece.chunk].copy_from_slice(&self.buffers[piece.part].bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        if self.slot.rank != self.root {
            for piece in self.stream.pieces(round, self.slot.bytes) {
                let from = &peers.slot(self.root)[piece.chunk];
                self.copy.copy(&mut self.buffers[piece.part].bytes_mut()[piece.bytes], from);
            }
        }
        Ok(())
    }
}
