//! A rank's place in a segment.

use std::ops::Range;

use super::super::host::packing::ALIGN;

/// What a collective needs to know of its group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    /// This rank.
    pub(super) rank: usize,
    /// The number of ranks.
    pub(super) ranks: usize,
    /// Bytes of data in a slot.
    pub(super) bytes: usize,
}

impl Seat {
    /// Bytes for each of `shares` equal shares of the slot, so that elements in each are aligned.
    pub(super) fn share(&self, shares: usize) -> usize {
        (self.bytes / shares.max(1)) / ALIGN * ALIGN
    }

    /// Where in this rank's slot is what it sends to `to`, when a slot has a share for each peer.
    pub(super) fn peer_share(from: usize, to: usize, share: usize) -> Range<usize> {
        let index = if to > from { to - 1 } else { to };
        index * share..(index + 1) * share
    }
}
