//! All-gather: each rank writes its part to its slots, and everybody copies it to its place in the output.

use std::sync::Arc;

use super::{
    copy::Copy,
    output::{self, Slot},
    rounds::{Peers, Rounds},
    stream::{Piece, Stream},
};
use crate::{Allocator, Buffer, Error, Result, process_group::GatherPart};

pub(crate) struct AllGather {
    rank: usize,
    chunk: usize,
    parts: Vec<GatherPart>,
    pub(crate) outputs: Vec<Buffer>,
    /// What each rank contributes, as bytes of the outputs.
    streams: Vec<Stream>,
    /// Where this rank's contribution begins in each output.
    own: Vec<usize>,
    copy: Copy,
}

impl AllGather {
    pub(crate) fn new(parts: Vec<GatherPart>, slot: Slot, memory: &dyn Allocator) -> Result<Self> {
        let outputs = parts
            .iter()
            .map(|part| output::take(memory, part.input.dtype(), part.counts.iter().sum(), slot.rank))
            .collect::<Result<Vec<_>>>()?;
        let streams: Vec<_> = (0..slot.ranks)
            .map(|rank| Stream::new(parts.iter().map(|p| output::range(&p.counts, rank, p.input.dtype()))))
            .collect();
        let own = parts.iter().map(|p| output::range(&p.counts, slot.rank, p.input.dtype()).start).collect();
        let copy = Copy::for_output_of(streams.iter().map(Stream::len).sum());
        Ok(AllGather { rank: slot.rank, chunk: slot.bytes, parts, outputs, streams, own, copy })
    }

    /// Copies this rank's contribution to the outputs, for a group of one.
    pub(crate) fn alone(&mut self) -> Result<()> {
        let stream = std::mem::take(&mut self.streams[0]);
        stream.pieces(0, usize::MAX & !63).try_for_each(|piece| self.copy_own(&piece, None))
    }

    fn copy_own(&mut self, piece: &Piece, slot: Option<&mut [u8]>) -> Result<()> {
        let (start, copy) = (self.own[piece.part], self.copy);
        let to = &mut self.outputs[piece.part].bytes_mut()[piece.bytes.clone()];
        let (mut slot, mut is_read) = (slot, false);
        let outcome = self.parts[piece.part].input.read(&mut |bytes| {
            if let Some(from) = bytes.get(piece.bytes.start - start..piece.bytes.end - start) {
                if let Some(slot) = &mut slot {
                    slot[piece.chunk.clone()].copy_from_slice(from);
                }
                copy.copy(to, from);
                is_read = true;
            }
        });
        let why = match outcome {
            Ok(()) if is_read => return Ok(()),
            Ok(()) => "it holds fewer bytes than it said".to_string(),
            Err(why) => why,
        };
        Err(Error::Argument {
            rank: self.rank,
            message: format!("all_gather: part {}: the input can't be read: {why}", piece.part),
        })
    }
}

impl Rounds for AllGather {
    fn rounds(&self) -> usize {
        self.streams.iter().map(|stream| stream.chunks(self.chunk)).max().unwrap_or(0)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        let stream = std::mem::take(&mut self.streams[self.rank]);
        let outcome = stream.pieces(round, self.chunk).try_for_each(|piece| self.copy_own(&piece, Some(slot)));
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
    pub(crate) fn barrier(slot: Slot) -> Self {
        AllGather {
            rank: slot.rank,
            chunk: slot.bytes,
            parts: Vec::new(),
            outputs: Vec::new(),
            streams: vec![Stream::default(); slot.ranks],
            own: Vec::new(),
            copy: Copy::Cached,
        }
    }
}

/// The shared input of [`AllGather`] for numbers.
pub(crate) fn numbers(numbers: &[i64], ranks: usize) -> GatherPart {
    GatherPart { input: Arc::new(Buffer::I64(numbers.to_vec())), counts: vec![numbers.len(); ranks] }
}
