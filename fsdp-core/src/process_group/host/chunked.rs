//! Collectives in steps, for backends that move data in slots. In each step a rank fills its slot and reads the slots of
//! its peers.
//!
//! Data that exceeds a slot takes several steps. A backend may let a rank fill several slots before it reads the first
//! of them ([`ChunkedCollective::lookahead`]), so that it does not wait for the slowest rank in every step.

use std::ops::Range;

use super::{
    super::op::{ExchangePart, GatherPart, Messages, Op, ScatterPart},
    memory::{Copy, Inputs, copy_cached, range, read, take_all},
    packing::{ALIGN, Piece, Stream, last_chunk},
    reduce::{Input, reduce},
};
use crate::{Allocator, Buffer, Heap, ReduceOp, Result};

/// A collective in steps. In each step every rank may write one slot and read all others.
pub(crate) trait ChunkedCollective {
    /// Returns the number of steps, equal on all ranks. Called again after [`ChunkedCollective::learn`].
    fn steps(&self) -> usize;

    /// Returns how many steps may be written before the first of them is read, if the backend has that many slots.
    fn lookahead(&self) -> usize {
        usize::MAX
    }

    /// Returns the only rank that writes, if there is one.
    fn source(&self) -> Option<usize> {
        None
    }

    /// Returns the bytes of this rank's slot that `peer` reads by [`Slots::part`]; `None` if every peer may read the whole
    /// slot.
    #[cfg_attr(not(feature = "tcp"), expect(dead_code, reason = "other backends share memory or send whole slots"))]
    fn read_by(&self, _peer: usize) -> Option<Range<usize>> {
        None
    }

    /// Receives the most bytes that one rank sends to another in an all-to-all.
    fn learn(&mut self, _longest: usize) {}

    /// Writes this rank's slot.
    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()>;

    /// Reads the peers' slots. Called after [`ChunkedCollective::fill`] of the same step.
    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()>;
}

/// The slots of the step that is read.
pub(crate) trait Slots {
    /// Returns the data of another rank.
    fn slot(&self, peer: usize) -> &[u8];

    /// Returns the part of a peer's slot that the peer lets this rank read ([`ChunkedCollective::read_by`]).
    fn part(&self, peer: usize, range: Range<usize>) -> &[u8] {
        &self.slot(peer)[range]
    }
}

/// Runs an operation whose collective `run` takes through its steps, and returns the outputs.
pub(crate) fn run(
    op: Op,
    layout: SlotLayout,
    run: impl FnOnce(&mut dyn ChunkedCollective) -> Result<()>,
) -> Result<Vec<Buffer>> {
    match op {
        Op::AllGather { parts, memory } => {
            let mut all_gather = AllGather::new(parts, layout, &*memory)?;
            run(&mut all_gather)?;
            Ok(all_gather.outputs)
        }
        Op::ReduceScatter { parts, op, memory } => {
            let mut reduce_scatter = ReduceScatter::new(parts, op, layout, &*memory)?;
            run(&mut reduce_scatter)?;
            Ok(reduce_scatter.outputs)
        }
        Op::AllReduce { buffers, op } => {
            let mut all_reduce = AllReduce::new(buffers, op, layout);
            run(&mut all_reduce)?;
            Ok(all_reduce.buffers)
        }
        Op::Broadcast { buffers, root } => {
            let mut broadcast = Broadcast::new(buffers, root, layout);
            run(&mut broadcast)?;
            Ok(broadcast.buffers)
        }
        Op::AllToAll { parts, memory } => {
            let mut all_to_all = AllToAll::new(parts, layout, &*memory)?;
            run(&mut all_to_all)?;
            Ok(all_to_all.outputs)
        }
        Op::Gather(messages) => {
            let mut gather = Gather::new(messages, layout);
            run(&mut gather)?;
            Ok(vec![Buffer::U8(gather.output)])
        }
        Op::Scatter(messages) => {
            let mut scatter = Scatter::new(messages, layout);
            run(&mut scatter)?;
            Ok(vec![Buffer::U8(scatter.output)])
        }
        Op::Barrier => {
            run(&mut AllGather::new(Vec::new(), layout, &Heap)?)?;
            Ok(Vec::new())
        }
    }
}

/// A rank's position in its group, and the size of its slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    /// This rank.
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Bytes of data in a slot.
    pub(crate) bytes: usize,
}

impl SlotLayout {
    /// Returns the least bytes of a slot, in which every rank's share holds an aligned element of the largest dtype.
    pub(crate) fn least_bytes(ranks: usize) -> usize {
        (ranks + 1) * ALIGN
    }

    /// Returns the bytes of each of `shares` equal, aligned shares of the slot.
    fn share(&self, shares: usize) -> usize {
        (self.bytes / shares.max(1)) / ALIGN * ALIGN
    }

    /// Returns the place of `to`'s share in the slot of `from`, if a slot has a share for each peer.
    fn peer_share(from: usize, to: usize, share: usize) -> Range<usize> {
        let index = if to > from { to - 1 } else { to };
        index * share..(index + 1) * share
    }
}

/// Data that this rank sends to each peer, in slots with a share for each peer.
struct Sends<'a> {
    layout: SlotLayout,
    /// Bytes of a slot for each peer.
    share: usize,
    inputs: Inputs<'a>,
    /// Bytes of the inputs for each rank.
    to: Vec<Stream>,
}

impl<'a> Sends<'a> {
    fn new(inputs: Vec<Buffer>, to: Vec<Stream>, layout: SlotLayout, memory: &'a dyn Allocator) -> Self {
        let share = layout.share(layout.ranks - 1);
        let last = (0..inputs.len()).map(|part| last_chunk(&to, part, share)).collect();
        Sends { layout, share, inputs: Inputs::new(inputs, last, memory, layout.rank), to }
    }

    /// Returns the other ranks.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let SlotLayout { rank, ranks, .. } = self.layout;
        (0..ranks).filter(move |&peer| peer != rank)
    }

    /// Writes a step's share for each peer.
    fn fill(&self, step: usize, slot: &mut [u8]) -> Result<()> {
        for to in self.peers() {
            let place = &mut slot[SlotLayout::peer_share(self.layout.rank, to, self.share)];
            for piece in self.to[to].pieces(step, self.share) {
                copy_cached(&mut place[piece.chunk], &self.inputs.get(piece.part)?.bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    /// Returns the share that a peer wrote for this rank.
    fn sent_by<'p>(&self, from: usize, peers: &'p dyn Slots) -> &'p [u8] {
        &peers.slot(from)[SlotLayout::peer_share(from, self.layout.rank, self.share)]
    }
}

/// All-gather: each rank writes its part to its slots, and all ranks copy it to their outputs.
struct AllGather {
    rank: usize,
    chunk: usize,
    parts: Vec<GatherPart>,
    outputs: Vec<Buffer>,
    /// Bytes of the outputs that each rank contributes.
    streams: Vec<Stream>,
    /// Start of this rank's contribution in each output.
    own: Vec<usize>,
    copy: Copy,
}

impl AllGather {
    fn new(parts: Vec<GatherPart>, layout: SlotLayout, memory: &dyn Allocator) -> Result<Self> {
        let sizes = parts.iter().map(|part| (part.input.dtype(), part.counts.iter().sum()));
        let outputs = take_all(memory, sizes, layout.rank)?;
        let streams = Stream::by_rank(layout.ranks, parts.iter().map(|p| (p.input.dtype(), &p.counts[..])));
        let own = parts.iter().map(|p| range(&p.counts, layout.rank, p.input.dtype()).start).collect();
        let copy = Copy::for_output_of(streams.iter().map(Stream::len).sum());
        Ok(AllGather { rank: layout.rank, chunk: layout.bytes, parts, outputs, streams, own, copy })
    }

    fn copy_own(&mut self, piece: &Piece, slot: &mut [u8]) -> Result<()> {
        let (start, copy) = (self.own[piece.part], self.copy);
        let to = &mut self.outputs[piece.part].bytes_mut()[piece.bytes.clone()];
        let from = piece.bytes.start - start..piece.bytes.end - start;
        read(&*self.parts[piece.part].input, from, piece.part, self.rank, |from| {
            copy.copy_to_both(&mut slot[piece.chunk.clone()], to, from);
        })
    }
}

impl ChunkedCollective for AllGather {
    fn steps(&self) -> usize {
        self.streams.iter().map(|stream| stream.chunks(self.chunk)).max().unwrap_or(0)
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        let stream = std::mem::take(&mut self.streams[self.rank]);
        let outcome = stream.pieces(step, self.chunk).try_for_each(|piece| self.copy_own(&piece, slot));
        self.streams[self.rank] = stream;
        outcome
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        for peer in (0..self.streams.len()).filter(|&peer| peer != self.rank) {
            for piece in self.streams[peer].pieces(step, self.chunk) {
                self.copy.copy(&mut self.outputs[piece.part].bytes_mut()[piece.bytes], &peers.slot(peer)[piece.chunk]);
            }
        }
        Ok(())
    }
}

/// Reduce-scatter: a slot has a share for each peer, which reduces all shares for it with its own.
struct ReduceScatter<'a> {
    sends: Sends<'a>,
    op: ReduceOp,
    outputs: Vec<Buffer>,
    /// Start of this rank's elements in each input.
    own: Vec<usize>,
}

impl<'a> ReduceScatter<'a> {
    fn new(parts: Vec<ScatterPart>, op: ReduceOp, layout: SlotLayout, memory: &'a dyn Allocator) -> Result<Self> {
        let sizes = parts.iter().map(|part| (part.input.dtype(), part.counts[layout.rank]));
        let outputs = take_all(memory, sizes, layout.rank)?;
        let to = Stream::by_rank(layout.ranks, parts.iter().map(|p| (p.input.dtype(), &p.counts[..])));
        let own = parts.iter().map(|p| range(&p.counts, layout.rank, p.input.dtype()).start).collect();
        let sends = Sends::new(parts.into_iter().map(|part| part.input).collect(), to, layout, memory);
        Ok(ReduceScatter { sends, op, outputs, own })
    }
}

impl ChunkedCollective for ReduceScatter<'_> {
    fn steps(&self) -> usize {
        self.sends.to.iter().map(|stream| stream.chunks(self.sends.share)).max().unwrap_or(0)
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        self.sends.fill(step, slot)
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        let SlotLayout { rank, ranks, .. } = self.sends.layout;
        for piece in self.sends.to[rank].pieces(step, self.sends.share) {
            let own = self.sends.inputs.get(piece.part)?;
            let inputs: Vec<_> = (0..ranks)
                .map(|from| {
                    Input::Bytes(if from == rank {
                        &own.bytes()[piece.bytes.clone()]
                    } else {
                        &self.sends.sent_by(from, peers)[piece.chunk.clone()]
                    })
                })
                .collect();
            let start = self.own[piece.part];
            let to = piece.bytes.start - start..piece.bytes.end - start;
            reduce(own.dtype(), self.op, &mut self.outputs[piece.part].bytes_mut()[to], &inputs);
        }
        self.sends.inputs.finish_step(step);
        Ok(())
    }
}

/// All-reduce: blocks of the buffers are reduce-scattered, and their results are gathered up to two steps later.
struct AllReduce {
    layout: SlotLayout,
    op: ReduceOp,
    buffers: Vec<Buffer>,
    stream: Stream,
    /// Bytes of a block that each rank reduces. A slot has a share for each rank: the data for that rank in this step's
    /// block, and in the rank's own share the result of an earlier block.
    share: usize,
    blocks: usize,
    /// Steps between the reduction of a block and the gathering of its result.
    delay: usize,
}

impl AllReduce {
    fn new(buffers: Vec<Buffer>, op: ReduceOp, layout: SlotLayout) -> Self {
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        // Buffers smaller than a slot are still spread over all ranks.
        let share =
            layout.share(layout.ranks).min(stream.len().div_ceil(layout.ranks).next_multiple_of(ALIGN)).max(ALIGN);
        let blocks = stream.chunks(share * layout.ranks);
        AllReduce { layout, op, buffers, stream, share, blocks, delay: blocks.min(2) }
    }

    fn place(&self, rank: usize) -> Range<usize> {
        rank * self.share..(rank + 1) * self.share
    }
}

impl ChunkedCollective for AllReduce {
    fn steps(&self) -> usize {
        self.blocks + self.delay
    }

    fn lookahead(&self) -> usize {
        // A step publishes the result of the block `delay` steps earlier, which must have been reduced.
        self.delay.max(1)
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        let (rank, ranks) = (self.layout.rank, self.layout.ranks);
        for to in 0..ranks {
            let block = if to == rank { step.checked_sub(self.delay) } else { Some(step) };
            let Some(block) = block.filter(|&block| block < self.blocks) else { continue };
            let place = &mut slot[self.place(to)];
            for piece in self.stream.pieces(block * ranks + to, self.share) {
                copy_cached(&mut place[piece.chunk], &self.buffers[piece.part].bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        let (rank, ranks) = (self.layout.rank, self.layout.ranks);
        if step < self.blocks {
            for piece in self.stream.pieces(step * ranks + rank, self.share) {
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
        if let Some(block) = step.checked_sub(self.delay) {
            for from in (0..ranks).filter(|&from| from != rank) {
                for piece in self.stream.pieces(block * ranks + from, self.share) {
                    let result = &peers.slot(from)[self.place(from)][piece.chunk];
                    copy_cached(&mut self.buffers[piece.part].bytes_mut()[piece.bytes], result);
                }
            }
        }
        Ok(())
    }
}

/// Broadcast: the root fills slots, and the others copy them.
struct Broadcast {
    layout: SlotLayout,
    root: usize,
    buffers: Vec<Buffer>,
    stream: Stream,
    copy: Copy,
}

impl Broadcast {
    fn new(buffers: Vec<Buffer>, root: usize, layout: SlotLayout) -> Self {
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let copy = Copy::for_output_of(stream.len());
        Broadcast { layout, root, buffers, stream, copy }
    }
}

impl ChunkedCollective for Broadcast {
    fn steps(&self) -> usize {
        self.stream.chunks(self.layout.bytes)
    }

    fn source(&self) -> Option<usize> {
        Some(self.root)
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        if self.layout.rank == self.root {
            for piece in self.stream.pieces(step, self.layout.bytes) {
                copy_cached(&mut slot[piece.chunk], &self.buffers[piece.part].bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        if self.layout.rank != self.root {
            for piece in self.stream.pieces(step, self.layout.bytes) {
                let from = &peers.slot(self.root)[piece.chunk];
                self.copy.copy(&mut self.buffers[piece.part].bytes_mut()[piece.bytes], from);
            }
        }
        Ok(())
    }
}

/// All-to-all: a slot has a share for each peer.
struct AllToAll<'a> {
    sends: Sends<'a>,
    outputs: Vec<Buffer>,
    /// Bytes of the outputs that come from each rank.
    from: Vec<Stream>,
    steps: usize,
    copy: Copy,
}

impl<'a> AllToAll<'a> {
    fn new(parts: Vec<ExchangePart>, layout: SlotLayout, memory: &'a dyn Allocator) -> Result<Self> {
        let sizes = parts.iter().map(|part| (part.input.dtype(), part.recv_counts.iter().sum()));
        let mut outputs = take_all(memory, sizes, layout.rank)?;
        for (part, output) in parts.iter().zip(&mut outputs) {
            let from = range(&part.send_counts, layout.rank, part.input.dtype());
            let to = range(&part.recv_counts, layout.rank, part.input.dtype());
            copy_cached(&mut output.bytes_mut()[to], &part.input.bytes()[from]);
        }
        let streams = |counts: fn(&ExchangePart) -> &[usize]| {
            let mut streams = Stream::by_rank(layout.ranks, parts.iter().map(|p| (p.input.dtype(), counts(p))));
            // Copied above.
            streams[layout.rank] = Stream::default();
            streams
        };
        let (to, from) = (streams(|part| &part.send_counts), streams(|part| &part.recv_counts));
        let sends = Sends::new(parts.into_iter().map(|part| part.input).collect(), to, layout, memory);
        let copy = Copy::for_output_of(from.iter().map(Stream::len).sum());
        Ok(AllToAll { sends, outputs, from, steps: 1, copy })
    }
}

impl ChunkedCollective for AllToAll<'_> {
    fn steps(&self) -> usize {
        self.steps
    }

    fn learn(&mut self, longest: usize) {
        self.steps = longest.div_ceil(self.sends.share).max(1);
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        self.sends.fill(step, slot)?;
        self.sends.inputs.finish_step(step);
        Ok(())
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        for from in self.sends.peers() {
            let place = self.sends.sent_by(from, peers);
            for piece in self.from[from].pieces(step, self.sends.share) {
                self.copy.copy(&mut self.outputs[piece.part].bytes_mut()[piece.bytes], &place[piece.chunk]);
            }
        }
        Ok(())
    }
}

/// Returns the bytes of a message of `len` bytes that move in a step of `step_bytes` bytes.
fn stretch(len: usize, step: usize, step_bytes: usize) -> Range<usize> {
    let start = step.saturating_mul(step_bytes).min(len);
    start..(start + step_bytes).min(len)
}

/// Gather: each rank writes its message to its slots, and the root copies it to the output.
struct Gather {
    layout: SlotLayout,
    messages: Messages,
    /// Start of each message in the output of the root.
    starts: Vec<usize>,
    output: Vec<u8>,
}

impl Gather {
    fn new(messages: Messages, layout: SlotLayout) -> Self {
        let starts = starts(&messages.counts);
        let mut output = vec![0; messages.counts.iter().sum()];
        if layout.rank == messages.root {
            output[starts[layout.rank]..][..messages.own].copy_from_slice(&messages.input);
        }
        Gather { layout, messages, starts, output }
    }
}

impl ChunkedCollective for Gather {
    fn steps(&self) -> usize {
        self.messages.longest.div_ceil(self.layout.bytes)
    }

    fn read_by(&self, peer: usize) -> Option<Range<usize>> {
        Some(if peer == self.messages.root { 0..self.layout.bytes } else { 0..0 })
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        if self.layout.rank != self.messages.root {
            let bytes = stretch(self.messages.own, step, self.layout.bytes);
            slot[..bytes.len()].copy_from_slice(&self.messages.input[bytes]);
        }
        Ok(())
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        if self.layout.rank == self.messages.root {
            for peer in (0..self.layout.ranks).filter(|&peer| peer != self.layout.rank) {
                let bytes = stretch(self.messages.counts[peer], step, self.layout.bytes);
                let to = &mut self.output[self.starts[peer]..][bytes.clone()];
                to.copy_from_slice(peers.part(peer, 0..bytes.len()));
            }
        }
        Ok(())
    }
}

/// Scatter: a slot of the root has a share for each peer.
struct Scatter {
    layout: SlotLayout,
    /// Bytes of a slot for each peer.
    share: usize,
    messages: Messages,
    /// Start of each message in the input of the root.
    starts: Vec<usize>,
    output: Vec<u8>,
}

impl Scatter {
    fn new(messages: Messages, layout: SlotLayout) -> Self {
        let starts = starts(&messages.counts);
        let mut output = vec![0; messages.own];
        if layout.rank == messages.root {
            output.copy_from_slice(&messages.input[starts[layout.rank]..][..messages.own]);
        }
        Scatter { layout, share: layout.share(layout.ranks - 1), messages, starts, output }
    }
}

impl ChunkedCollective for Scatter {
    fn steps(&self) -> usize {
        self.messages.longest.div_ceil(self.share)
    }

    fn source(&self) -> Option<usize> {
        Some(self.messages.root)
    }

    fn read_by(&self, peer: usize) -> Option<Range<usize>> {
        let is_root = self.layout.rank == self.messages.root;
        Some(if is_root { SlotLayout::peer_share(self.layout.rank, peer, self.share) } else { 0..0 })
    }

    fn fill(&mut self, step: usize, slot: &mut [u8]) -> Result<()> {
        let SlotLayout { rank, ranks, .. } = self.layout;
        if rank == self.messages.root {
            for peer in (0..ranks).filter(|&peer| peer != rank) {
                let bytes = stretch(self.messages.counts[peer], step, self.share);
                let from = &self.messages.input[self.starts[peer]..][bytes.clone()];
                slot[SlotLayout::peer_share(rank, peer, self.share)][..bytes.len()].copy_from_slice(from);
            }
        }
        Ok(())
    }

    fn drain(&mut self, step: usize, peers: &dyn Slots) -> Result<()> {
        let (rank, root) = (self.layout.rank, self.messages.root);
        if rank != root {
            let bytes = stretch(self.messages.own, step, self.share);
            let share = peers.part(root, SlotLayout::peer_share(root, rank, self.share));
            self.output[bytes.clone()].copy_from_slice(&share[..bytes.len()]);
        }
        Ok(())
    }
}

/// Returns the start of each message in their concatenation.
fn starts(counts: &[usize]) -> Vec<usize> {
    let ends = counts.iter().scan(0, |end, &count| {
        let start = *end;
        *end += count;
        Some(start)
    });
    ends.collect()
}
