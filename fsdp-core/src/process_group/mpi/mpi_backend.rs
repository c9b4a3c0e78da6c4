//! The MPI backend: plans a collective as phases of messages between ranks, and runs them.
//!
//! The first messages of a collective have the announcements that ranks compare, and short data. A short collective
//! thus takes one exchange. Rounds of messages move longer data. Several rounds are in flight, so that a rank adds up
//! one round while the next ones arrive.

use std::{
    collections::VecDeque,
    ops::{Range, RangeInclusive},
    sync::Arc,
};

use super::{
    super::{
        backend::{Backend, CollectiveOutput, Guarantees},
        call::{FIXED, HEAD},
        collective::{Collective, Failure},
        host::{
            memory::{range, read, take_all},
            packing::{ALIGN, Piece, Stream},
            reduce::{Input, partial, reduce, widening},
        },
        op::{ExchangePart, GatherPart, Messages, Op, ScatterPart},
        options::Membership,
        shared_memory::shm,
    },
    communicator::{Batch, Direction, InFlight, Page, Span, Transfer, page},
    hierarchy::{Hosts, Reduction},
    transport::{ROUNDS, Transport, WaitError},
};
use crate::{Allocator, Buffer, DType, DeviceId, Error, RankEnv, ReduceOp, Result};

/// Largest data for which each rank sends its whole all-reduce input to all others.
const WHOLE: usize = 64 << 10;
/// Bytes for partial sums to other hosts: enough for few steps, and little memory in large groups.
const ROOM: RangeInclusive<usize> = 64 << 10..=8 << 20;

/// One rank's end of a group.
pub(super) struct MpiBackend {
    transport: Transport,
    /// The ranks of each host, if there are several hosts and one of them has several ranks.
    hosts: Option<Hosts>,
    env: Arc<RankEnv>,
    chunk_bytes: usize,
    has_failed: bool,
}

impl MpiBackend {
    pub(super) fn new(transport: Transport, env: Arc<RankEnv>, chunk_bytes: usize) -> Self {
        let hosts = Hosts::of(&transport.host_ids).filter(Hosts::are_shared);
        MpiBackend { transport, hosts, env, chunk_bytes, has_failed: false }
    }

    /// Returns the hosts, for a collective that moves more than its first messages hold.
    fn hosts(&self, longest: usize) -> Option<&Hosts> {
        self.hosts.as_ref().filter(|_| longest > INLINE.min(self.transport.step))
    }

    fn exchange(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, phases: &[Phase]) -> Result<Vec<Buffer>> {
        Exchange { transport: &mut self.transport, collective: at, partials: vec![] }.run(buffers, phases)
    }

    /// Returns a lane for each rank, empty for this one.
    fn lanes(&self, first: usize, of: impl Fn(usize) -> Stream) -> Vec<Lane> {
        let rank = self.transport.communicator.rank;
        let stream = |peer| if peer == rank { Stream::default() } else { of(peer) };
        (0..self.transport.size()).map(|peer| Lane::from(first, stream(peer))).collect()
    }

    /// Returns the bytes for partial sums to other hosts: a message from each peer, within [`ROOM`].
    fn room(&self) -> usize {
        self.transport.step.saturating_mul(self.transport.size() - 1).clamp(*ROOM.start(), *ROOM.end())
    }

    /// Returns the phases of a reduction of at most `longest` bytes for a rank, and the sizes of their pages.
    fn sums(&self, sums: &Reduction<'_>, longest: usize) -> (Vec<Phase>, Vec<usize>) {
        let rank = self.transport.communicator.rank;
        match self.hosts(longest) {
            Some(hosts) => sums.over(hosts, rank),
            None => (vec![sums.flat(rank, self.transport.size())], vec![]),
        }
    }

    fn all_gather(
        &mut self,
        at: &Collective<'_>,
        parts: Vec<GatherPart>,
        memory: &dyn Allocator,
    ) -> Result<Vec<Buffer>> {
        let rank = self.transport.communicator.rank;
        let sizes = parts.iter().map(|part| (part.input.dtype(), part.counts.iter().sum()));
        let mut outputs = take_all(memory, sizes, rank)?;
        for (index, (part, output)) in parts.iter().zip(&mut outputs).enumerate() {
            let own = range(&part.counts, rank, part.input.dtype());
            // An input without elements is not read.
            if !own.is_empty() {
                let to = &mut output.bytes_mut()[own.clone()];
                read(&*part.input, 0..own.len(), index, rank, |from| to.copy_from_slice(from))?;
            }
        }
        let size = self.transport.size();
        let streams = Stream::by_rank(size, parts.iter().map(|p| (p.input.dtype(), &p.counts[..])));
        let stream = |of: usize| streams[of].clone();
        let own = stream(rank);
        let longest = streams.iter().map(Stream::len).max();
        if let Some(hosts) = self.hosts(longest.unwrap_or(0)) {
            let phases = hosts.gather(rank, &stream);
            return self.exchange(at, outputs, &phases);
        }
        let phase = Phase::placed(self.lanes(0, |_| own.clone()), self.lanes(0, stream));
        self.exchange(at, outputs, &[phase])
    }

    fn reduce_scatter(
        &mut self,
        at: &Collective<'_>,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: &dyn Allocator,
    ) -> Result<Vec<Buffer>> {
        let rank = self.transport.communicator.rank;
        let sizes = parts.iter().map(|part| (part.input.dtype(), part.counts[rank]));
        let outputs = take_all(memory, sizes, rank)?;
        let size = self.transport.size();
        let streams = Stream::by_rank(size, parts.iter().map(|p| (p.input.dtype(), &p.counts[..])));
        let stream = |of: usize| streams[of].clone();
        let dtypes: Vec<DType> = parts.iter().map(|part| part.input.dtype()).collect();
        let (count, starts) = (parts.len(), parts.iter().map(|p| range(&p.counts, rank, p.input.dtype()).start));
        let output = Output::Buffers { first: count, starts: starts.collect() };
        let longest = streams.iter().map(Stream::len).max();
        let sums = Reduction { op, dtypes: &dtypes, of: &stream, output, buffers: 2 * count, room: self.room() };
        let (phases, partials) = self.sums(&sums, longest.unwrap_or(0));
        let buffers = parts.into_iter().map(|part| part.input).chain(outputs).collect();
        let buffers = Exchange { transport: &mut self.transport, collective: at, partials }.run(buffers, &phases)?;
        Ok(give_back(buffers, count, memory))
    }

    fn all_reduce(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, op: ReduceOp) -> Result<Vec<Buffer>> {
        let (rank, size) = (self.transport.communicator.rank, self.transport.size());
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let dtypes: Vec<DType> = buffers.iter().map(Buffer::dtype).collect();
        let sums =
            |of| Reduction { op, dtypes: &dtypes, of, output: Output::Own, buffers: buffers.len(), room: self.room() };
        if stream.len() <= INLINE.min(self.transport.step) && stream.len() * (size - 1) <= WHOLE {
            let phase = sums(&|_| stream.clone()).flat(rank, size);
            return self.exchange(at, buffers, &[phase]);
        }
        let slice = stream.shares(size);
        let (mut phases, partials) = self.sums(&sums(&slice), stream.len());
        match self.hosts(stream.len()) {
            Some(hosts) => phases.extend(hosts.gather(rank, &slice)),
            None => phases.push(Phase::placed(self.lanes(0, |_| slice(rank)), self.lanes(0, &slice))),
        }
        Exchange { transport: &mut self.transport, collective: at, partials }.run(buffers, &phases)
    }

    fn broadcast(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, root: usize) -> Result<Vec<Buffer>> {
        let (rank, size) = (self.transport.communicator.rank, self.transport.size());
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        if let Some(hosts) = self.hosts(stream.len()) {
            let phases = hosts.broadcast(rank, root, &stream);
            return self.exchange(at, buffers, &phases);
        }
        let slice = stream.shares(size);
        let is_root = rank == root;
        let lanes = |is_so: &dyn Fn(usize) -> Option<Stream>| self.lanes(0, |peer| is_so(peer).unwrap_or_default());
        if size == 2 || stream.len() <= INLINE.min(self.transport.step) {
            let sends = lanes(&|_| is_root.then(|| stream.clone()));
            let phase = Phase::placed(sends, lanes(&|peer| (peer == root).then(|| stream.clone())));
            return self.exchange(at, buffers, &[phase]);
        }
        // Each rank gets a slice and sends it to the others, so that the root sends the data once.
        let phases = [
            Phase::placed(
                lanes(&|peer| is_root.then(|| slice(peer))),
                lanes(&|peer| (peer == root).then(|| slice(rank))),
            ),
            Phase::placed(
                lanes(&|peer| (peer != root).then(|| slice(rank))),
                lanes(&|peer| (!is_root).then(|| slice(peer))),
            ),
        ];
        self.exchange(at, buffers, &phases)
    }

    fn gather(&mut self, at: &Collective<'_>, messages: Messages) -> Result<Vec<Buffer>> {
        let Messages { input, counts, own, root, .. } = messages;
        if self.transport.communicator.rank != root {
            let phase = Phase::placed(self.lane_of(root, 0..own), Lane::none(self.transport.size()));
            self.exchange(at, vec![Buffer::U8(input)], &[phase])?;
            return Ok(vec![Buffer::U8(Vec::new())]);
        }
        let mut output = vec![0; counts.iter().sum()];
        output[range(&counts, root, DType::U8)].copy_from_slice(&input);
        let streams = Stream::by_rank(counts.len(), [(DType::U8, &counts[..])]);
        let receives = self.lanes(0, |peer| streams[peer].clone());
        let phase = Phase::placed(Lane::none(self.transport.size()), receives);
        self.exchange(at, vec![Buffer::U8(output)], &[phase])
    }

    fn scatter(&mut self, at: &Collective<'_>, messages: Messages) -> Result<Vec<Buffer>> {
        let Messages { input, counts, own, root, .. } = messages;
        if self.transport.communicator.rank != root {
            let phase = Phase::placed(Lane::none(self.transport.size()), self.lane_of(root, 0..own));
            return self.exchange(at, vec![Buffer::U8(vec![0; own])], &[phase]);
        }
        let output = input[range(&counts, root, DType::U8)].to_vec();
        let streams = Stream::by_rank(counts.len(), [(DType::U8, &counts[..])]);
        let sends = self.lanes(0, |peer| streams[peer].clone());
        let phase = Phase::placed(sends, Lane::none(self.transport.size()));
        self.exchange(at, vec![Buffer::U8(input)], &[phase])?;
        Ok(vec![Buffer::U8(output)])
    }

    /// Returns lanes with these bytes of the first buffer for one peer.
    fn lane_of(&self, peer: usize, bytes: Range<usize>) -> Vec<Lane> {
        self.lanes(0, |other| if other == peer { Stream::new([bytes.clone()]) } else { Stream::default() })
    }

    fn all_to_all(
        &mut self,
        at: &Collective<'_>,
        parts: Vec<ExchangePart>,
        memory: &dyn Allocator,
    ) -> Result<Vec<Buffer>> {
        let rank = self.transport.communicator.rank;
        let sizes = parts.iter().map(|part| (part.input.dtype(), part.recv_counts.iter().sum()));
        let mut outputs = take_all(memory, sizes, rank)?;
        for (part, output) in parts.iter().zip(&mut outputs) {
            let from = range(&part.send_counts, rank, part.input.dtype());
            let to = range(&part.recv_counts, rank, part.input.dtype());
            // The comparison of announcements detects different counts.
            if from.len() == to.len() {
                output.bytes_mut()[to].copy_from_slice(&part.input.bytes()[from]);
            }
        }
        let size = self.transport.size();
        let of = |counts: fn(&ExchangePart) -> &[usize]| {
            Stream::by_rank(size, parts.iter().map(|part| (part.input.dtype(), counts(part))))
        };
        let count = parts.len();
        let (sent, received) = (of(|part| &part.send_counts), of(|part| &part.recv_counts));
        let sends = self.lanes(0, |peer| sent[peer].clone());
        let phase = Phase::placed(sends, self.lanes(count, |peer| received[peer].clone()));
        let buffers = parts.into_iter().map(|part| part.input).chain(outputs).collect();
        let buffers = self.exchange(at, buffers, &[phase])?;
        Ok(give_back(buffers, count, memory))
    }
}

/// Adds advice for ranks that are on one host and cannot share its memory.
fn with_a_way_out(error: Error) -> Error {
    const WAY: &str = "FSDP_HIERARCHY=0 makes groups of a host's ranks without shared memory";
    match error {
        Error::Rendezvous { rank, message } => Error::Rendezvous { rank, message: format!("{message} ({WAY})") },
        Error::Os { rank, what, source } => Error::Os { rank, what: format!("{what} ({WAY})"), source },
        other => other,
    }
}

/// Gives the first `count` buffers back, and returns the others.
fn give_back(mut buffers: Vec<Buffer>, count: usize, memory: &dyn Allocator) -> Vec<Buffer> {
    let outputs = buffers.split_off(count);
    buffers.into_iter().for_each(|buffer| memory.give(buffer));
    outputs
}

impl Backend for MpiBackend {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        // MPI launchers end a job when one of its processes dies. Surviving processes detect a death only if the MPI
        // has ULFM.
        Guarantees { detects_death: false, ..Guarantees::ALL }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        self.transport.communicator.complete(collective.sequence());
        let outputs = match op {
            Op::AllGather { parts, memory } => self.all_gather(collective, parts, &*memory),
            Op::ReduceScatter { parts, op, memory } => self.reduce_scatter(collective, parts, op, &*memory),
            Op::AllReduce { buffers, op } => self.all_reduce(collective, buffers, op),
            Op::Broadcast { buffers, root } => self.broadcast(collective, buffers, root),
            Op::AllToAll { parts, memory } => self.all_to_all(collective, parts, &*memory),
            Op::Gather(messages) => self.gather(collective, messages),
            Op::Scatter(messages) => self.scatter(collective, messages),
            Op::Barrier => self.exchange(collective, vec![], &[]),
        };
        let output = outputs?.into();
        self.transport.communicator.complete(collective.sequence() + 1);
        Ok(output)
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        self.transport.communicator.complete(collective.sequence());
        let is_of_one_host = self.hosts.as_ref().is_some_and(|hosts| hosts.share_one(ranks));
        if is_of_one_host && ranks.len() <= shm::MOST_RANKS {
            let check_peers = || self.transport.check_peers(ranks).map_err(|error| error.into_error(collective));
            // Launchers that share a host may use different run ids.
            let env = RankEnv { run_id: format!("{:x}", self.transport.nonce), attempt: 0, ..(*self.env).clone() };
            let end = shm::join(&env, self.chunk_bytes, group, &check_peers).map_err(with_a_way_out)?;
            self.transport.communicator.complete(collective.sequence() + 1);
            return Ok(end);
        }
        let host = self.transport.host_ids[self.transport.communicator.rank];
        let met = self.transport.meet(ranks, group.rank, self.chunk_bytes, host, group.timeout);
        let transport = met.map_err(|why| Error::Rendezvous { rank: group.rank, message: why })?;
        let transport = transport.map_err(|error| error.into_error(collective))?;
        self.transport.communicator.complete(collective.sequence() + 1);
        Ok(Box::new(MpiBackend::new(transport, self.env.clone(), self.chunk_bytes)))
    }

    fn fail(&mut self, why: &Failure) {
        self.has_failed = true;
        self.transport.driver.close(&self.transport.communicator, Some(why.clone()));
    }
}

impl Drop for MpiBackend {
    fn drop(&mut self) {
        if !self.has_failed {
            self.transport.driver.close(&self.transport.communicator, None);
        }
    }
}

/// Bytes to or from a rank.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) stream: Stream,
    /// Region of the stream's part 0.
    pub(super) first: usize,
    /// Length of its messages in units of a lane of width 1. Partial sums of half-precision elements have width 2,
    /// because they are f32.
    pub(super) width: usize,
}

impl Lane {
    /// Creates a lane of the regions from `first` on.
    pub(super) fn from(first: usize, stream: Stream) -> Self {
        Lane { stream, first, width: 1 }
    }

    /// Creates empty lanes for `ranks` ranks.
    pub(super) fn none(ranks: usize) -> Vec<Self> {
        vec![Lane::from(0, Stream::default()); ranks]
    }

    /// Returns the location of a piece.
    pub(super) fn span(&self, piece: &Piece) -> Span {
        Span { region: self.first + piece.part, bytes: piece.bytes.clone() }
    }
}

/// A reduction of received data.
#[derive(Clone, Debug)]
pub(super) struct Combined {
    pub(super) op: ReduceOp,
    pub(super) dtypes: Vec<DType>,
    /// Bytes of the first buffers: this rank's data, and the layout of the data from each rank.
    pub(super) stream: Stream,
    /// The inputs in rank order: the sending rank, and the number of ranks that the input combines.
    pub(super) inputs: Vec<(usize, usize)>,
    pub(super) output: Output,
}

/// Destination of results.
#[derive(Clone, Debug)]
pub(super) enum Output {
    /// In place of this rank's data.
    Own,
    /// In the buffers from `first` on, which start at these bytes of this rank's parts.
    Buffers { first: usize, starts: Vec<usize> },
    /// In a page of concatenated accumulators: a partial sum.
    Partial { region: usize },
}

/// Messages between all ranks.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// By receiving rank.
    pub(super) sends: Vec<Lane>,
    /// By sending rank. Received data goes to the lane's regions, unless it is combined.
    pub(super) receives: Vec<Lane>,
    pub(super) combined: Option<Combined>,
    /// Largest [`Lane::width`] of any rank.
    pub(super) width: usize,
}

impl Phase {
    /// Creates a phase whose received data goes to the lanes' regions.
    pub(super) fn placed(sends: Vec<Lane>, receives: Vec<Lane>) -> Self {
        Phase { sends, receives, combined: None, width: 1 }
    }

    /// Creates a phase without messages.
    pub(super) fn nothing(ranks: usize) -> Self {
        Phase::placed(Lane::none(ranks), Lane::none(ranks))
    }

    /// Returns the bytes of a message in a lane of width 1, at most `longest` in any lane.
    pub(super) fn step(&self, longest: usize) -> usize {
        longest / self.width / ALIGN * ALIGN
    }
}

/// Most bytes that an announcement's message holds beside the announcement.
const INLINE: usize = 4096;

/// This rank's announcement of a collective, at the start of its first page to each peer.
struct Announcement {
    bytes: Vec<u8>,
    /// Number of bytes that follow the head: this rank's row of sizes, where peers size the collective.
    row: usize,
}

impl Announcement {
    fn new(collective: &Collective<'_>) -> Self {
        let mut bytes = vec![0; Collective::announcement_len(collective.group().size)];
        collective.announce(&mut bytes);
        let row = if collective.is_sized_by_peers() { bytes.len() - FIXED } else { 0 };
        Announcement { bytes, row }
    }

    /// Returns where the short data begins in the page.
    fn data(&self) -> usize {
        (HEAD + self.row).next_multiple_of(ALIGN)
    }
}

/// Returns the location in a page of the bytes that begin at `start`.
fn within(page: usize, start: usize, bytes: &Range<usize>) -> Span {
    Span { region: page, bytes: start + bytes.start..start + bytes.end }
}

/// Returns the piece of a chunk with a single piece, which needs no copy in a page.
fn only(stream: &Stream, round: usize, step: usize) -> Option<Piece> {
    let mut pieces = stream.pieces(round, step);
    pieces.next().filter(|_| pieces.next().is_none())
}

/// Messages that are in flight together.
struct Round {
    /// Index of the chunks of the streams.
    number: usize,
    /// Index of the set of pages, if a message needs a page.
    pages: Option<usize>,
}

/// A collective that is running.
struct Exchange<'a> {
    pub(super) transport: &'a mut Transport,
    pub(super) collective: &'a Collective<'a>,
    /// Sizes of pages for partial sums, which follow the buffers.
    pub(super) partials: Vec<usize>,
}

impl Exchange<'_> {
    /// Runs phases over buffers and returns the buffers. Short streams of the first phase are sent with the
    /// announcements.
    pub(super) fn run(mut self, buffers: Vec<Buffer>, phases: &[Phase]) -> Result<Vec<Buffer>> {
        let size = self.transport.size();
        // For each round in flight with pages: one page to and one from each rank that needs it.
        let mut is_needed = vec![false; 2 * size];
        let inline = self.inline();
        for (index, phase) in phases.iter().enumerate() {
            for peer in self.transport.communicator.peers() {
                let is_short = |lane: &Lane| index == 0 && lane.stream.len() <= inline;
                let is_scattered = |lane: &Lane| {
                    let step = self.step(phase, lane);
                    (0..lane.stream.chunks(step)).any(|round| only(&lane.stream, round, step).is_none())
                };
                let (sent, arriving) = (&phase.sends[peer], &phase.receives[peer]);
                let is_combined = phase.combined.is_some() && arriving.stream.len() > 0;
                is_needed[peer] |= !is_short(sent) && is_scattered(sent);
                is_needed[size + peer] |= !is_short(arriving) && (is_combined || is_scattered(arriving));
            }
        }
        let partials = self.partials.iter().map(|&bytes| page(bytes));
        let of_rounds = (0..ROUNDS).flat_map(|_| is_needed.clone());
        let of_rounds = of_rounds.map(|is_needed| if is_needed { self.transport.page() } else { Page::new() });
        let pages: Vec<Page> = partials.chain(of_rounds).collect();
        let in_flight = Arc::new(InFlight::new(buffers, pages));
        let nothing = Phase::nothing(size);
        self.first(&in_flight, phases.first().unwrap_or(&nothing))?;
        for (index, phase) in phases.iter().enumerate() {
            self.rounds(&in_flight, phase, index)?;
        }
        let (buffers, pages) = self.take_buffers(in_flight)?;
        pages.into_iter().skip(self.partials.len()).for_each(|page| self.transport.keep(page));
        Ok(buffers)
    }

    fn inline(&self) -> usize {
        INLINE.min(self.transport.step)
    }

    /// Returns the length from which streams of the `index`-th phase move in rounds.
    fn least(&self, index: usize) -> usize {
        if index == 0 { self.inline() } else { 0 }
    }

    /// Returns the bytes of a message in a lane.
    fn step(&self, phase: &Phase, lane: &Lane) -> usize {
        phase.step(self.transport.step) * lane.width
    }

    fn error(&self, error: WaitError) -> Error {
        error.into_error(self.collective)
    }

    /// Returns the memory after all messages have ended.
    fn take_buffers(&self, in_flight: Arc<InFlight>) -> Result<(Vec<Buffer>, Vec<Page>)> {
        Arc::try_unwrap(in_flight).map(InFlight::into_parts).map_err(|_| Error::Internal {
            rank: self.collective.group().rank,
            what: format!("the memory of {} is in use after its end", self.collective),
        })
    }

    /// Waits in the `index`-th phase.
    fn wait(&self, batch: &Batch, index: usize) -> Result<()> {
        self.transport.wait(batch, self.transport.patience(index)).map_err(|error| self.error(error))
    }

    /// Sends this rank's announcement to all others, with short data, and compares all announcements.
    fn first(&mut self, in_flight: &InFlight, phase: &Phase) -> Result<()> {
        self.transport.check().map_err(|error| self.error(error))?;
        let own = Announcement::new(self.collective);
        let size = self.transport.size();
        // One page to each rank and one from each. The next collective reuses them, so they have space for a
        // `Call::row`. Receives have the largest length, because a rank may have issued another, longer collective.
        let len = (Collective::announcement_len(size) - FIXED + HEAD).next_multiple_of(ALIGN) + self.inline();
        let mut pages = std::mem::take(&mut self.transport.first_pages);
        if pages.is_empty() {
            pages = (0..2 * size).map(|_| page(len)).collect();
        }
        let pages = Arc::new(InFlight::new(vec![], pages));
        let mut transfers = Vec::with_capacity(2 * size);
        for peer in self.transport.communicator.peers() {
            transfers.push(Transfer { direction: Direction::Receive, peer, span: within(size + peer, 0, &(0..len)) });
        }
        for peer in self.transport.communicator.peers() {
            // SAFETY: nothing is in flight yet, and nobody else uses the pages.
            let end = unsafe { self.write_first_page(&own, peer, in_flight, phase, &pages) };
            transfers.push(Transfer { direction: Direction::Send, peer, span: within(peer, 0, &(0..end)) });
        }
        // SAFETY: the pages are accessed again once all messages have ended, below.
        let batch = unsafe { self.transport.post(&pages, transfers) };
        self.wait(&batch, 0)?;
        // SAFETY: all of these messages have ended.
        if !unsafe { self.is_announced_by_all(&own, &pages) } {
            return Err(self.differ(own.bytes)?);
        }
        // SAFETY: these messages have ended, and others have not begun.
        unsafe { self.take_short_data(&own, in_flight, phase, &pages) };
        self.transport.first_pages = self.take_buffers(pages)?.1;
        Ok(())
    }

    /// Returns whether a stream is sent with the announcement.
    fn is_short(&self, stream: &Stream) -> bool {
        (1..=self.inline()).contains(&stream.len())
    }

    /// Returns the pieces of a stream that is sent with the announcement.
    fn short_pieces<'a>(&self, stream: &'a Stream) -> impl Iterator<Item = Piece> + use<'a> {
        let is_short = self.is_short(stream);
        stream.pieces(0, self.inline().next_multiple_of(ALIGN)).filter(move |_| is_short)
    }

    /// Writes the announcement and the short data of the page to `peer`. Returns the page's length.
    ///
    /// # Safety
    /// No message of these pages and this memory is in flight, and nobody else uses them.
    unsafe fn write_first_page(
        &self,
        own: &Announcement,
        peer: usize,
        in_flight: &InFlight,
        phase: &Phase,
        pages: &InFlight,
    ) -> usize {
        // SAFETY: as the caller promises.
        unsafe {
            pages.write(&within(peer, 0, &(0..HEAD))).copy_from_slice(&own.bytes[..HEAD]);
            pages.write(&within(peer, HEAD, &(0..own.row))).copy_from_slice(&own.bytes[FIXED..][..own.row]);
        }
        let (lane, data) = (&phase.sends[peer], own.data());
        let mut end = data;
        for piece in self.short_pieces(&lane.stream) {
            // SAFETY: as the caller promises.
            unsafe {
                let from = in_flight.read(&lane.span(&piece));
                pages.write(&within(peer, data, &piece.chunk)).copy_from_slice(from);
            }
            end = data + piece.chunk.end;
        }
        end
    }

    /// Returns whether all ranks have announced the same collective.
    ///
    /// # Safety
    /// All messages of these pages have ended.
    unsafe fn is_announced_by_all(&self, own: &Announcement, pages: &InFlight) -> bool {
        let Transport { communicator, .. } = &self.transport;
        let size = self.transport.size();
        // SAFETY: as the caller promises.
        let told = |peer: usize| unsafe { pages.read(&within(size + peer, 0, &(0..HEAD + own.row))) };
        if own.row == 0 && communicator.peers().all(|peer| told(peer)[..HEAD] == own.bytes[..HEAD]) {
            return true;
        }
        let announced = |peer: usize| {
            let mut announced = own.bytes.clone();
            if peer != communicator.rank {
                let (head, row) = told(peer).split_at(HEAD);
                announced[..HEAD].copy_from_slice(head);
                announced[FIXED..][..own.row].copy_from_slice(row);
            }
            announced
        };
        let announced: Vec<_> = (0..size).map(announced).collect();
        self.collective.compare(|peer| &announced[peer]).is_ok()
    }

    /// Copies the short data of the peers' pages into the outputs, or adds it up.
    ///
    /// # Safety
    /// All messages of these pages have ended, and nobody else uses the memory of the collective.
    unsafe fn take_short_data(&self, own: &Announcement, in_flight: &InFlight, phase: &Phase, pages: &InFlight) {
        let (size, data) = (self.transport.size(), own.data());
        let Some(combined) = &phase.combined else {
            for peer in self.transport.communicator.peers() {
                let lane = &phase.receives[peer];
                for piece in self.short_pieces(&lane.stream) {
                    // SAFETY: as the caller promises.
                    unsafe {
                        let from = pages.read(&within(size + peer, data, &piece.chunk));
                        in_flight.write(&lane.span(&piece)).copy_from_slice(from);
                    }
                }
            }
            return;
        };
        for piece in self.short_pieces(&combined.stream) {
            // SAFETY: as the caller promises.
            unsafe { self.combine(in_flight, combined, &piece, 0, pages, |from| (size + from, data)) };
        }
    }

    /// Returns the error of ranks that issued different collectives. All of them exchange their whole announcements.
    fn differ(&mut self, own: Vec<u8>) -> Result<Error> {
        let (size, rank, len) = (self.transport.size(), self.transport.communicator.rank, own.len());
        let all = Arc::new(InFlight::new(vec![Buffer::U8(own.clone())], (0..size).map(|_| page(len)).collect()));
        let of = |region: usize| Span { region, bytes: 0..len };
        let transfers = self.transport.communicator.peers().flat_map(|peer| {
            let receive = Transfer { direction: Direction::Receive, peer, span: of(1 + peer) };
            [receive, Transfer { direction: Direction::Send, peer, span: of(0) }]
        });
        let transfers = transfers.collect();
        // SAFETY: the pages are read once all messages have ended.
        let batch = unsafe { self.transport.post(&all, transfers) };
        self.wait(&batch, 0)?;
        // SAFETY: all messages have ended.
        let announced = |peer: usize| if peer == rank { &own[..] } else { unsafe { all.read(&of(1 + peer)) } };
        match self.collective.compare(announced) {
            Err(error) => Ok(error),
            Ok(_) => Err(Error::Internal {
                rank: self.collective.group().rank,
                what: format!("{} differed between ranks, and then no more", self.collective),
            }),
        }
    }

    /// Moves the data that was not sent with announcements, in rounds. Rounds without pages are all in flight at once.
    fn rounds(&mut self, in_flight: &Arc<InFlight>, phase: &Phase, index: usize) -> Result<()> {
        let least = self.least(index);
        let peers: Vec<_> = self.transport.communicator.peers().collect();
        let step = phase.step(self.transport.step);
        let chunks = |lane: &Lane| match lane.stream.len() > least {
            true => lane.stream.chunks(step * lane.width),
            false => 0,
        };
        let (sent, arriving) = (|peer: usize| &phase.sends[peer], |peer: usize| &phase.receives[peer]);
        let longest = peers.iter().map(|&peer| chunks(sent(peer)).max(chunks(arriving(peer)))).max();
        let mut running: VecDeque<(Round, Arc<Batch>)> = VecDeque::new();
        let mut paged = 0;
        for number in 0..longest.unwrap_or(0) {
            let is_sent = |peer: &&usize| number < chunks(sent(**peer));
            let is_arriving = |peer: &&usize| number < chunks(arriving(**peer));
            let is_packed = |lane: &Lane| only(&lane.stream, number, step * lane.width).is_none();
            let is_combined = phase.combined.is_some();
            let needs_pages = peers.iter().filter(is_sent).any(|&peer| is_packed(sent(peer)))
                || peers.iter().filter(is_arriving).any(|&peer| is_combined || is_packed(arriving(peer)));
            let round = Round { number, pages: needs_pages.then_some(paged % ROUNDS) };
            paged += usize::from(needs_pages);
            // The round that used these pages before must have ended.
            while let Some(at) = running.iter().position(|(before, _)| needs_pages && before.pages == round.pages) {
                running
                    .drain(..=at)
                    .try_for_each(|(before, batch)| self.finish_round(in_flight, phase, &before, &batch, index))?;
            }
            let mut transfers = Vec::with_capacity(2 * peers.len());
            // Posts receives first, so that data has a destination.
            for &peer in peers.iter().rev().filter(is_arriving) {
                transfers.push(Transfer {
                    direction: Direction::Receive,
                    peer,
                    span: self.place(in_flight, phase, &round, peer),
                });
            }
            for &peer in peers.iter().filter(is_sent) {
                transfers.push(Transfer {
                    direction: Direction::Send,
                    peer,
                    span: self.source(in_flight, phase, &round, peer),
                });
            }
            // SAFETY: each round has its own pages and pieces until it is drained. A phase neither receives into nor
            // combines the data that it sends.
            running.push_back((round, unsafe { self.transport.post(in_flight, transfers) }));
        }
        running.into_iter().try_for_each(|(round, batch)| self.finish_round(in_flight, phase, &round, &batch, index))
    }

    /// Waits for a round and processes its data.
    fn finish_round(
        &self,
        in_flight: &InFlight,
        phase: &Phase,
        round: &Round,
        batch: &Batch,
        index: usize,
    ) -> Result<()> {
        self.wait(batch, index)?;
        self.drain(in_flight, phase, round, self.least(index));
        Ok(())
    }

    /// Returns the page of a round to or from a rank.
    fn page(&self, in_flight: &InFlight, round: &Round, direction: Direction, peer: usize) -> usize {
        let size = self.transport.size();
        let place = if direction == Direction::Send { peer } else { size + peer };
        in_flight.first_page() + self.partials.len() + round.pages.unwrap_or(0) * 2 * size + place
    }

    /// Returns the destination of a rank's message in a round.
    fn place(&self, in_flight: &InFlight, phase: &Phase, round: &Round, peer: usize) -> Span {
        let lane = &phase.receives[peer];
        let step = self.step(phase, lane);
        match only(&lane.stream, round.number, step).filter(|_| phase.combined.is_none()) {
            Some(piece) => lane.span(&piece),
            None => {
                let end = lane.stream.pieces(round.number, step).map(|piece| piece.chunk.end).max().unwrap_or(0);
                within(self.page(in_flight, round, Direction::Receive, peer), 0, &(0..end))
            }
        }
    }

    /// Returns the source of a message to a rank in a round, packed in a page if it has several pieces.
    fn source(&self, in_flight: &InFlight, phase: &Phase, round: &Round, peer: usize) -> Span {
        let lane = &phase.sends[peer];
        let step = self.step(phase, lane);
        if let Some(piece) = only(&lane.stream, round.number, step) {
            return lane.span(&piece);
        }
        let page = self.page(in_flight, round, Direction::Send, peer);
        let mut end = 0;
        for piece in lane.stream.pieces(round.number, step) {
            // SAFETY: the page is free, because its previous round has ended, and nobody writes the data that a phase
            // sends.
            unsafe {
                let from = in_flight.read(&lane.span(&piece));
                in_flight.write(&within(page, 0, &piece.chunk)).copy_from_slice(from);
            }
            end = piece.chunk.end;
        }
        within(page, 0, &(0..end))
    }

    /// Processes the data received in a round.
    fn drain(&self, in_flight: &InFlight, phase: &Phase, round: &Round, least: usize) {
        match &phase.combined {
            None => {
                for peer in self.transport.communicator.peers() {
                    let lane = &phase.receives[peer];
                    let step = self.step(phase, lane);
                    if lane.stream.len() <= least || only(&lane.stream, round.number, step).is_some() {
                        continue;
                    }
                    let page = self.page(in_flight, round, Direction::Receive, peer);
                    for piece in lane.stream.pieces(round.number, step) {
                        // SAFETY: the round has ended, and no other round has these pieces.
                        unsafe {
                            let from = in_flight.read(&within(page, 0, &piece.chunk));
                            in_flight.write(&lane.span(&piece)).copy_from_slice(from);
                        }
                    }
                }
            }
            Some(combined) if combined.stream.len() > least => {
                let step = phase.step(self.transport.step);
                for piece in combined.stream.pieces(round.number, step) {
                    let page = |from| (self.page(in_flight, round, Direction::Receive, from), 0);
                    // SAFETY: as above. This rank sends its own data of the pieces to nobody.
                    unsafe { self.combine(in_flight, combined, &piece, round.number * step, in_flight, page) };
                }
            }
            Some(_) => {}
        }
    }

    /// Combines a piece of a chunk, which begins at the byte `chunk` of the stream. `page` has the page and offset of
    /// each input.
    ///
    /// # Safety
    /// No message receives into the bytes that are read, or uses the bytes that are written, and nobody else does.
    unsafe fn combine(
        &self,
        in_flight: &InFlight,
        combined: &Combined,
        piece: &Piece,
        chunk: usize,
        pages: &InFlight,
        page: impl Fn(usize) -> (usize, usize),
    ) {
        let rank = self.transport.communicator.rank;
        let own = Span { region: piece.part, bytes: piece.bytes.clone() };
        let dtype = combined.dtypes[piece.part];
        let width = widening(dtype);
        let accumulators = |bytes: &Range<usize>, start| width * (start + bytes.start)..width * (start + bytes.end);
        // SAFETY: as the caller promises. Without other outputs, this rank's data is only read as the output.
        let (inputs, output): (Vec<Input<'_>>, &mut [u8]) = unsafe {
            let input = |&(from, ranks): &(usize, usize)| {
                if from != rank {
                    let (page, start) = page(from);
                    match ranks {
                        1 => Input::Bytes(pages.read(&within(page, start, &piece.chunk))),
                        _ => Input::Partial(pages.read(&within(page, start, &accumulators(&piece.chunk, 0))), ranks),
                    }
                } else if let Output::Own = combined.output {
                    Input::Output
                } else {
                    Input::Bytes(in_flight.read(&own))
                }
            };
            let output = match &combined.output {
                Output::Own => own.clone(),
                Output::Buffers { first, starts } => {
                    let start = starts[piece.part];
                    let bytes = piece.bytes.start - start..piece.bytes.end - start;
                    Span { region: first + piece.part, bytes }
                }
                Output::Partial { region } => Span { region: *region, bytes: accumulators(&piece.chunk, chunk) },
            };
            (combined.inputs.iter().map(input).collect(), in_flight.write(&output))
        };
        match combined.output {
            Output::Partial { .. } => partial(dtype, combined.op, output, &inputs),
            _ => reduce(dtype, combined.op, output, &inputs),
        }
    }
}
