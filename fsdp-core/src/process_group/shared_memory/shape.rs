//! Where the parts of a segment lie.

use super::super::{collective::Collective, host::packing::ALIGN};

/// Slots a rank. A power of two, so that slot numbers go on evenly when the counters wrap.
pub(super) const SLOTS: u32 = 4;
/// A page of memory.
pub(super) const PAGE: usize = 4096;

/// What docs/architecture.md says of announcements: those of 41 ranks fit into a page.
const _: () = assert!(Collective::announcement_len(41) <= PAGE && Collective::announcement_len(42) > PAGE);

/// How large the parts of a segment are. For each rank there are a control block, a board, and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) ranks: usize,
    pub(super) chunk: usize,
}

impl Shape {
    /// For `ranks` ranks that move at most about `chunk_bytes` at a time.
    pub(super) fn new(ranks: usize, chunk_bytes: usize) -> Self {
        // Every rank's share of a slot holds at least one element of the largest dtype, at an aligned place.
        let least = (ranks + 1) * ALIGN;
        Shape { ranks, chunk: chunk_bytes.clamp(least, 1 << 30).next_multiple_of(ALIGN) }
    }

    /// Bytes of a slot before its data: an announcement.
    pub(super) fn header(&self) -> usize {
        Collective::announcement_len(self.ranks).next_multiple_of(ALIGN)
    }

    /// Bytes of a board: an announcement, and what [`Lookout::show`](super::super::lookout::Lookout::show) adds.
    pub(super) fn board(&self) -> usize {
        (Collective::announcement_len(self.ranks) + 128).next_multiple_of(PAGE)
    }

    fn slot(&self) -> usize {
        (self.header() + self.chunk).next_multiple_of(PAGE)
    }

    fn rank(&self) -> usize {
        PAGE + self.board() + self.slot() * SLOTS as usize
    }

    /// Where the control block of a rank begins.
    pub(super) fn control_of(&self, rank: usize) -> usize {
        assert!(rank < self.ranks);
        rank * self.rank()
    }

    /// Where the board of a rank begins.
    pub(super) fn board_of(&self, rank: usize) -> usize {
        self.control_of(rank) + PAGE
    }

    /// Where the slot of a rank for `round` begins.
    pub(super) fn slot_of(&self, rank: usize, round: u32) -> usize {
        self.board_of(rank) + self.board() + self.slot() * (round % SLOTS) as usize
    }

    /// Bytes of the whole segment.
    pub(super) fn total(&self) -> usize {
        self.rank() * self.ranks
    }
}
