//! The sending half of collectives in which a slot has a share for each peer.

use super::{
    super::host::{
        buffers::Inputs,
        packing::{Stream, last_chunk},
    },
    rounds::Peers,
    seat::Seat,
};
use crate::{Allocator, Buffer, Result};

/// What this rank sends to each of the others.
pub(super) struct Sends<'a> {
    pub(super) seat: Seat,
    /// Bytes of a slot for each peer.
    pub(super) share: usize,
    pub(super) inputs: Inputs<'a>,
    /// What goes to each rank, as bytes of the inputs.
    pub(super) to: Vec<Stream>,
}

impl<'a> Sends<'a> {
    pub(super) fn new(inputs: Vec<Buffer>, to: Vec<Stream>, seat: Seat, memory: &'a dyn Allocator) -> Self {
        let share = seat.share(seat.ranks - 1);
        let last = (0..inputs.len()).map(|part| last_chunk(&to, part, share)).collect();
        Sends { seat, share, inputs: Inputs::new(inputs, last, memory, seat.rank), to }
    }

    /// The other ranks.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let Seat { rank, ranks, .. } = self.seat;
        (0..ranks).filter(move |&peer| peer != rank)
    }

    /// Writes a round's part for each peer.
    pub(super) fn fill(&self, round: usize, slot: &mut [u8]) -> Result<()> {
        for to in self.peers() {
            let place = &mut slot[Seat::peer_share(self.seat.rank, to, self.share)];
            for piece in self.to[to].pieces(round, self.share) {
                place[piece.chunk].copy_from_slice(&self.inputs.get(piece.part)?.bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    /// What a peer has written for this rank.
    pub(super) fn sent_by<'p>(&self, from: usize, peers: &'p Peers<'_>) -> &'p [u8] {
        &peers.slot(from)[Seat::peer_share(from, self.seat.rank, self.share)]
    }
}
