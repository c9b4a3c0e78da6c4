//! All-to-all: a slot has a share for each peer.

use super::{
    copy::Copy,
    output::{self, Inputs, Slot},
    reduce_scatter::last_round,
    rounds::{Peers, Rounds},
    stream::Stream,
};
use crate::{Allocator, Buffer, Result, hash::Hash, process_group::ExchangePart};

pub(crate) struct AllToAll<'a> {
    slot: Slot,
    share: usize,
    inputs: Inputs<'a>,
    pub(crate) outputs: Vec<Buffer>,
    /// What goes to each rank, as bytes of the inputs.
    to: Vec<Stream>,
    /// What comes from each rank, as bytes of the outputs.
    from: Vec<Stream>,
    rounds: usize,
    copy: Copy,
}

/// Numbers a rank in a row: a hash of what is sent to it, a hash of what is expected of it, and the rounds that sending to it takes.
const ROW: usize = 3;

/// What a rank announces: only sender and receiver know how much travels between them.
pub(crate) fn row(parts: &[ExchangePart], slot: Slot) -> Vec<u64> {
    let share = slot.share(slot.ranks - 1);
    let hash = |counts: &dyn Fn(&ExchangePart) -> usize| {
        let mut hash = Hash::default();
        hash.counts(parts.iter().map(counts));
        hash.0
    };
    (0..slot.ranks)
        .flat_map(|peer| {
            let stream = Stream::new(parts.iter().map(|p| output::range(&p.send_counts, peer, p.input.dtype())));
            [
                hash(&|part| part.send_counts[peer]),
                hash(&|part| part.recv_counts[peer]),
                if peer == slot.rank { 0 } else { stream.chunks(share) as u64 },
            ]
        })
        .collect()
}

impl<'a> AllToAll<'a> {
    pub(crate) fn new(parts: Vec<ExchangePart>, slot: Slot, memory: &'a dyn Allocator) -> Result<Self> {
        let mut outputs = parts
            .iter()
            .map(|part| output::take(memory, part.input.dtype(), part.recv_counts.iter().sum(), slot.rank))
            .collect::<Result<Vec<_>>>()?;
        for (part, output) in parts.iter().zip(&mut outputs) {
            let from = output::range(&part.send_counts, slot.rank, part.input.dtype());
            let to = output::range(&part.recv_counts, slot.rank, part.input.dtype());
            output.bytes_mut()[to].copy_from_slice(&part.input.bytes()[from]);
        }
        let streams = |counts: fn(&ExchangePart) -> &[usize]| -> Vec<Stream> {
            (0..slot.ranks)
                .map(|rank| match rank == slot.rank {
                    // Copied above.
                    true => Stream::default(),
                    false => Stream::new(parts.iter().map(|p| output::range(counts(p), rank, p.input.dtype()))),
                })
                .collect()
        };
        let (to, from) = (streams(|part| &part.send_counts), streams(|part| &part.recv_counts));
        let share = slot.share(slot.ranks - 1);
        let last = (0..parts.len()).map(|part| last_round(&to, part, share)).collect();
        let inputs = Inputs::new(parts.into_iter().map(|part| part.input).collect(), last, memory);
        let copy = Copy::for_output_of(from.iter().map(Stream::len).sum());
        Ok(AllToAll { slot, share, inputs, outputs, to, from, rounds: 1, copy })
    }
}

impl Rounds for AllToAll<'_> {
    fn rounds(&self) -> usize {
        self.rounds
    }

    fn agree(&mut self, rows: &[Vec<u64>]) -> Result<(), String> {
        for from in 0..self.slot.ranks {
            for to in 0..self.slot.ranks {
                if rows[from][ROW * to] != rows[to][ROW * from + 1] {
                    return Err(format!(
                        "what rank {from} sends to rank {to} is not as many elements as rank {to} expects from it"
                    ));
                }
                self.rounds = self.rounds.max(rows[from][ROW * to + 2] as usize);
            }
        }
        Ok(())
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        for to in (0..self.slot.ranks).filter(|&to| to != self.slot.rank) {
            let place = &mut slot[Slot::peer_share(self.slot.rank, to, self.share)];
            for piece in self.to[to].pieces(round, self.share) {
                place[piece.chunk].copy_from_slice(&self.inputs.bytes(piece.part)[piece.bytes]);
            }
        }
        self.inputs.end_of(round);
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        for from in (0..self.slot.ranks).filter(|&from| from != self.slot.rank) {
            let place = &peers.slot(from)[Slot::peer_share(from, self.slot.rank, self.share)];
            for piece in self.from[from].pieces(round, self.share) {
                self.copy.copy(&mut self.outputs[piece.part].bytes_mut()[piece.bytes], &place[piece.chunk]);
            }
        }
        Ok(())
    }
}
