//! All-to-all: a slot has a share for each peer.

use super::{
    super::{
        collective::Traffic,
        host::{
            buffers::{range, take},
            copy::Copy,
            packing::Stream,
        },
        parts::ExchangePart,
    },
    rounds::{Peers, Rounds},
    seat::Seat,
    sends::Sends,
};
use crate::{Allocator, Buffer, Result};

pub(super) struct AllToAll<'a> {
    sends: Sends<'a>,
    pub(super) outputs: Vec<Buffer>,
    /// What comes from each rank, as bytes of the outputs.
    from: Vec<Stream>,
    rounds: usize,
    copy: Copy,
}

impl<'a> AllToAll<'a> {
    pub(super) fn new(parts: Vec<ExchangePart>, seat: Seat, memory: &'a dyn Allocator) -> Result<Self> {
        let mut outputs = parts
            .iter()
            .map(|part| take(memory, part.input.dtype(), part.recv_counts.iter().sum(), seat.rank))
            .collect::<Result<Vec<_>>>()?;
        for (part, output) in parts.iter().zip(&mut outputs) {
            let from = range(&part.send_counts, seat.rank, part.input.dtype());
            let to = range(&part.recv_counts, seat.rank, part.input.dtype());
            output.bytes_mut()[to].copy_from_slice(&part.input.bytes()[from]);
        }
        let streams = |counts: fn(&ExchangePart) -> &[usize]| -> Vec<Stream> {
            (0..seat.ranks)
                .map(|rank| match rank == seat.rank {
                    // Copied above.
                    true => Stream::default(),
                    false => Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), counts(p))), rank),
                })
                .collect()
        };
        let (to, from) = (streams(|part| &part.send_counts), streams(|part| &part.recv_counts));
        let sends = Sends::new(parts.into_iter().map(|part| part.input).collect(), to, seat, memory);
        let copy = Copy::for_output_of(from.iter().map(Stream::len).sum());
        Ok(AllToAll { sends, outputs, from, rounds: 1, copy })
    }
}

impl Rounds for AllToAll<'_> {
    fn rounds(&self) -> usize {
        self.rounds
    }

    fn learn(&mut self, traffic: &Traffic) {
        self.rounds = traffic.longest().div_ceil(self.sends.share).max(1);
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        self.sends.fill(round, slot)?;
        self.sends.inputs.end_of(round);
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        for from in self.sends.peers() {
            let place = self.sends.sent_by(from, peers);
            for piece in self.from[from].pieces(round, self.sends.share) {
                self.copy.copy(&mut self.outputs[piece.part].bytes_mut()[piece.bytes], &place[piece.chunk]);
            }
        }
        Ok(())
    }
}
