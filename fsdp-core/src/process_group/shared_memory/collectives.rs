//! Running a collective: filling slots, reading those of the peers, and comparing at the start what everybody issued.
//! A rank's place in a segment.

//! The sending half of collectives in which a slot has a share for each peer.

//! All-gather: each rank writes its part to its slots, and everybody copies it to its place in the output.

//! Reduce-scatter: a slot has a share for each peer, who combines what it got with its own.

//! All-reduce: blocks of the buffers are reduce-scattered, and a round or two later their results are gathered.

//! Broadcast: the root fills slots, the others copy them.

//! All-to-all: a slot has a share for each peer.

use std::ops::Range;

use super::{
    super::{
        collective::{Collective, Traffic},
        host::{
            memory::{Copy, Inputs, range, read, take},
            packing::{ALIGN, Piece, Stream, last_chunk},
            reduce::{Input, reduce},
        },
        op::{ExchangePart, GatherPart, ScatterPart},
    },
    peer_monitor::{During, Goal, Watch},
    segment::{Port, SLOTS},
};
use crate::{Allocator, Buffer, ReduceOp, Result};

/// A collective as a number of rounds. In each every rank may write one slot and read everybody's.
pub(super) trait Rounds {
    /// How many there are, the same on every rank. Asked again after [`Rounds::learn`].
    fn rounds(&self) -> usize;

    /// How many rounds may be written before the first of them is read.
    fn ahead(&self) -> usize {
        SLOTS as usize
    }

    /// The only rank that writes anything, if there is one.
    fn source(&self) -> Option<usize> {
        None
    }

    /// Learns from the ranks' announcements how much moves.
    fn learn(&mut self, _: &Traffic) {}

    /// Writes this rank's slot.
    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()>;

    /// Reads the peers' slots. Comes after the same round's [`Rounds::fill`].
    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()>;
}

/// The slots of the round being read.
pub(super) struct Peers<'a>(&'a Port);

impl Peers<'_> {
    /// The data of another rank.
    pub(super) fn slot(&self, peer: usize) -> &[u8] {
        self.0.peer_slot(peer).1
    }
}

/// Runs a collective to its end.
pub(super) fn run(port: &mut Port, watch: &Watch, collective: &Collective<'_>, this: &mut dyn Rounds) -> Result<()> {
    let start = port.consumed();
    let rank = port.rank();
    let source = this.source();
    // Who only listens, or needs the peers' announcements to know how long it takes, learns it after the first round.
    let is_known = !collective.is_sized_by_peers() && source.is_none_or(|source| source == rank);
    let mut rounds = if is_known { this.rounds().max(1) } else { 1 };
    let mut during = During { collective, end: start.wrapping_add(rounds as u32) };
    let (mut filled, mut drained) = (0, 0);
    while drained < rounds {
        let from = match source {
            // The first round carries everybody's announcement.
            _ if drained == 0 => Some(Goal::Published(None)),
            Some(source) if source == rank => None,
            only => Some(Goal::Published(only)),
        };
        let is_published = |port: &Port| match from {
            None => true,
            Some(Goal::Published(Some(peer))) => port.is_published(peer),
            _ => (0..port.ranks()).all(|peer| peer == rank || port.is_published(peer)),
        };
        if drained == filled || !is_published(port) {
            if filled < rounds.min(drained + this.ahead()) && (drained == filled || port.slot_is_free()) {
                watch.wait(port, during, Goal::Free)?;
                let (header, data) = port.slot();
                if filled == 0 {
                    collective.announce(header);
                }
                this.fill(filled, data)?;
                port.publish();
                filled += 1;
                continue;
            }
            if let Some(goal) = from {
                watch.wait(port, during, goal)?;
            }
        }
        if drained == 0 {
            this.learn(&collective.compare(|peer| port.peer_slot(peer).0)?);
            rounds = this.rounds().max(1);
            during.end = start.wrapping_add(rounds as u32);
            if source.is_some_and(|source| source != rank) {
                port.publish_until(during.end);
                filled = rounds;
            }
        }
        this.drain(drained, &Peers(port))?;
        port.advance();
        drained += 1;
    }
    Ok(())
}

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
    fn peer_share(from: usize, to: usize, share: usize) -> Range<usize> {
        let index = if to > from { to - 1 } else { to };
        index * share..(index + 1) * share
    }
}

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
    fn sent_by<'p>(&self, from: usize, peers: &'p Peers<'_>) -> &'p [u8] {
        &peers.slot(from)[Seat::peer_share(from, self.seat.rank, self.share)]
    }
}

pub(super) struct AllGather {
    rank: usize,
    chunk: usize,
    parts: Vec<GatherPart>,
    pub(super) outputs: Vec<Buffer>,
    /// What each rank contributes, as bytes of the outputs.
    streams: Vec<Stream>,
    /// Where this rank's contribution begins in each output.
    own: Vec<usize>,
    copy: Copy,
}

impl AllGather {
    pub(super) fn new(parts: Vec<GatherPart>, seat: Seat, memory: &dyn Allocator) -> Result<Self> {
        let outputs = parts
            .iter()
            .map(|part| take(memory, part.input.dtype(), part.counts.iter().sum(), seat.rank))
            .collect::<Result<Vec<_>>>()?;
        let streams: Vec<_> = (0..seat.ranks)
            .map(|rank| Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), &p.counts[..])), rank))
            .collect();
        let own = parts.iter().map(|p| range(&p.counts, seat.rank, p.input.dtype()).start).collect();
        let copy = Copy::for_output_of(streams.iter().map(Stream::len).sum());
        Ok(AllGather { rank: seat.rank, chunk: seat.bytes, parts, outputs, streams, own, copy })
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

impl Rounds for AllGather {
    fn rounds(&self) -> usize {
        self.streams.iter().map(|stream| stream.chunks(self.chunk)).max().unwrap_or(0)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        let stream = std::mem::take(&mut self.streams[self.rank]);
        let outcome = stream.pieces(round, self.chunk).try_for_each(|piece| self.copy_own(&piece, slot));
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
    pub(super) fn barrier(seat: Seat) -> Self {
        AllGather {
            rank: seat.rank,
            chunk: seat.bytes,
            parts: Vec::new(),
            outputs: Vec::new(),
            streams: vec![Stream::default(); seat.ranks],
            own: Vec::new(),
            copy: Copy::Cached,
        }
    }
}

pub(super) struct ReduceScatter<'a> {
    sends: Sends<'a>,
    op: ReduceOp,
    pub(super) outputs: Vec<Buffer>,
    /// Where what stays with this rank begins in each input.
    own: Vec<usize>,
}

impl<'a> ReduceScatter<'a> {
    pub(super) fn new(parts: Vec<ScatterPart>, op: ReduceOp, seat: Seat, memory: &'a dyn Allocator) -> Result<Self> {
        let outputs = parts
            .iter()
            .map(|part| take(memory, part.input.dtype(), part.counts[seat.rank], seat.rank))
            .collect::<Result<Vec<_>>>()?;
        let to = (0..seat.ranks)
            .map(|rank| Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), &p.counts[..])), rank))
            .collect();
        let own = parts.iter().map(|p| range(&p.counts, seat.rank, p.input.dtype()).start).collect();
        let sends = Sends::new(parts.into_iter().map(|part| part.input).collect(), to, seat, memory);
        Ok(ReduceScatter { sends, op, outputs, own })
    }
}

impl Rounds for ReduceScatter<'_> {
    fn rounds(&self) -> usize {
        self.sends.to.iter().map(|stream| stream.chunks(self.sends.share)).max().unwrap_or(0)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        self.sends.fill(round, slot)
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        let Seat { rank, ranks, .. } = self.sends.seat;
        for piece in self.sends.to[rank].pieces(round, self.sends.share) {
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
        self.sends.inputs.finish_step(round);
        Ok(())
    }
}

pub(super) struct AllReduce {
    seat: Seat,
    op: ReduceOp,
    pub(super) buffers: Vec<Buffer>,
    stream: Stream,
    /// Bytes of a block that each rank reduces. A slot has one share a rank: what goes to that rank in this round's
    /// block, and in the place of its own rank the result of an earlier block.
    share: usize,
    blocks: usize,
    /// Rounds between reducing a block and gathering its result.
    delay: usize,
}

impl AllReduce {
    pub(super) fn new(buffers: Vec<Buffer>, op: ReduceOp, seat: Seat) -> Self {
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        // Less than a slot is still spread over all ranks.
        let share = seat.share(seat.ranks).min(stream.len().div_ceil(seat.ranks).next_multiple_of(ALIGN)).max(ALIGN);
        let blocks = stream.chunks(share * seat.ranks);
        AllReduce { seat, op, buffers, stream, share, blocks, delay: blocks.min(2) }
    }

    fn place(&self, rank: usize) -> std::ops::Range<usize> {
        rank * self.share..(rank + 1) * self.share
    }
}

impl Rounds for AllReduce {
    fn rounds(&self) -> usize {
        self.blocks + self.delay
    }

    fn ahead(&self) -> usize {
        // A round publishes the result of the block `delay` rounds earlier, which must have been reduced.
        self.delay.max(1)
    }

    fn fill(&mut self, round: usize, slot: &mut [u8]) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.seat.ranks);
        for to in 0..ranks {
            let block = if to == rank { round.checked_sub(self.delay) } else { Some(round) };
            let Some(block) = block.filter(|&block| block < self.blocks) else { continue };
            let place = &mut slot[self.place(to)];
            for piece in self.stream.pieces(block * ranks + to, self.share) {
                place[piece.chunk].copy_from_slice(&self.buffers[piece.part].bytes()[piece.bytes]);
            }
        }
        Ok(())
    }

    fn drain(&mut self, round: usize, peers: &Peers<'_>) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.seat.ranks);
        if round < self.blocks {
            for piece in self.stream.pieces(round * ranks + rank, self.share) {
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
        if let Some(block) = round.checked_sub(self.delay) {
            for from in (0..ranks).filter(|&from| from != rank) {
                for piece in self.stream.pieces(block * ranks + from, self.share) {
                    let result = &peers.slot(from)[self.place(from)][piece.chunk];
                    self.buffers[piece.part].bytes_mut()[piece.bytes].copy_from_slice(result);
                }
            }
        }
        Ok(())
    }
}

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
        self.sends.inputs.finish_step(round);
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
