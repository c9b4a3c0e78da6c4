//! What each rank sends to each, and what becomes of what arrives.

use super::{
    super::host::packing::{ALIGN, Piece, Stream},
    held::Span,
};
use crate::{DType, ReduceOp};

/// Bytes that go to a rank, or come from it.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) stream: Stream,
    /// The buffer or page that is part 0 of the stream.
    pub(super) first: usize,
    /// How many times as long its messages are as those of a lane of width 1: sums of halves are twice as long as
    /// halves, because they are accumulators.
    pub(super) width: usize,
}

impl Lane {
    /// Bytes of the buffers from the `first` on.
    pub(super) fn from(first: usize, stream: Stream) -> Self {
        Lane { stream, first, width: 1 }
    }

    /// Nothing, for each of so many ranks.
    pub(super) fn none(ranks: usize) -> Vec<Self> {
        vec![Lane::from(0, Stream::default()); ranks]
    }

    /// Where a piece is.
    pub(super) fn span(&self, piece: &Piece) -> Span {
        Span { region: self.first + piece.part, bytes: piece.bytes.clone() }
    }
}

/// What is combined, and how.
#[derive(Clone, Debug)]
pub(super) struct Combined {
    pub(super) op: ReduceOp,
    pub(super) dtypes: Vec<DType>,
    /// What comes from each rank, and what this one has: bytes of the first buffers.
    pub(super) stream: Stream,
    /// From whom, and of how many ranks: all that are combined, in their order.
    pub(super) inputs: Vec<(usize, usize)>,
    pub(super) output: Output,
}

/// Where results go.
#[derive(Clone, Debug)]
pub(super) enum Output {
    /// In the place of what this rank has.
    Own,
    /// Buffers from the `first` on. Each begins at one of these bytes of this rank's part.
    Buffers { first: usize, starts: Vec<usize> },
    /// A page, one behind the other as accumulators: it is a part of the result.
    Partial { region: usize },
}

/// Messages of each rank to each other.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// By the ranks to which they go.
    pub(super) sends: Vec<Lane>,
    /// By the ranks from which they come. They have their places in buffers, unless they are combined.
    pub(super) arrives: Vec<Lane>,
    pub(super) combined: Option<Combined>,
    /// The largest [`Lane::width`] of any rank.
    pub(super) width: usize,
}

impl Phase {
    /// What arrives is placed.
    pub(super) fn placed(sends: Vec<Lane>, arrives: Vec<Lane>) -> Self {
        Phase { sends, arrives, combined: None, width: 1 }
    }

    /// Nothing moves.
    pub(super) fn nothing(ranks: usize) -> Self {
        Phase::placed(Lane::none(ranks), Lane::none(ranks))
    }

    /// Bytes of a message in a lane of width 1, where none has more than `longest`.
    pub(super) fn step(&self, longest: usize) -> usize {
        longest / self.width / ALIGN * ALIGN
    }
}
