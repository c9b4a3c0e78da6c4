//! The backend over MPI: what each collective sends to whom.

use std::{ops::RangeInclusive, sync::Arc};

use super::{
    super::{
        backend::{Backend, Promises},
        collective::Collective,
        failure::Failure,
        host::{
            buffers::{range, read, take},
            packing::Stream,
        },
        landing::CollectiveOutput,
        membership::Membership,
        parts::{ExchangePart, GatherPart, Op, ScatterPart},
        shared_memory::shm,
    },
    exchange::{Exchange, INLINE},
    hosts::Hosts,
    phase::{Lane, Output, Phase},
    sums::Sums,
    wire::Wire,
};
use crate::{Allocator, Buffer, DType, DeviceId, Error, RankEnv, ReduceOp, Result};

/// The most bytes that a rank sends for an all-reduce in which everybody combines everything.
const WHOLE: usize = 64 << 10;
/// Bytes in which a rank adds up what goes to other hosts: enough for few goes in small steps, and not much memory in
/// large groups.
const ROOM: RangeInclusive<usize> = 64 << 10..=8 << 20;

/// One rank's end.
pub(super) struct Engine {
    wire: Wire,
    /// Where ranks are, if several hosts have them, and one of these several.
    hosts: Option<Hosts>,
    env: Arc<RankEnv>,
    chunk_bytes: usize,
    has_failed: bool,
}

impl Engine {
    pub(super) fn new(wire: Wire, env: Arc<RankEnv>, chunk_bytes: usize) -> Self {
        let hosts = Hosts::of(&wire.host_ids).filter(Hosts::are_shared);
        Engine { wire, hosts, env, chunk_bytes, has_failed: false }
    }

    /// The hosts, for a collective that moves more than what travels with announcements.
    fn hosts(&self, longest: usize) -> Option<&Hosts> {
        self.hosts.as_ref().filter(|_| longest > INLINE.min(self.wire.step))
    }

    fn exchange(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, phases: &[Phase]) -> Result<Vec<Buffer>> {
        Exchange { wire: &mut self.wire, collective: at, partials: vec![] }.run(buffers, phases)
    }

    /// A lane for each rank; nothing for this one, which sends itself nothing.
    fn lanes(&self, first: usize, of: impl Fn(usize) -> Stream) -> Vec<Lane> {
        let rank = self.wire.line.rank;
        let stream = |peer| if peer == rank { Stream::default() } else { of(peer) };
        (0..self.wire.size()).map(|peer| Lane::from(first, stream(peer))).collect()
    }

    /// The most bytes in which a rank adds up what goes to other hosts: as many as a message from each peer has,
    /// within [`ROOM`].
    fn room(&self) -> usize {
        self.wire.step.saturating_mul(self.wire.size() - 1).clamp(*ROOM.start(), *ROOM.end())
    }

    /// The phases of a reduction that moves so many bytes for a rank, and the pages that they want.
    fn sums(&self, sums: &Sums<'_>, longest: usize) -> (Vec<Phase>, Vec<usize>) {
        let rank = self.wire.line.rank;
        match self.hosts(longest) {
            Some(hosts) => sums.over(hosts, rank),
            None => (vec![sums.flat(rank, self.wire.size())], vec![]),
        }
    }

    fn all_gather(
        &mut self,
        at: &Collective<'_>,
        parts: Vec<GatherPart>,
        memory: &dyn Allocator,
    ) -> Result<Vec<Buffer>> {
        let rank = self.wire.line.rank;
        let take = |part: &GatherPart| take(memory, part.input.dtype(), part.counts.iter().sum(), rank);
        let mut outputs = parts.iter().map(take).collect::<Result<Vec<_>>>()?;
        for (index, (part, output)) in parts.iter().zip(&mut outputs).enumerate() {
            let own = range(&part.counts, rank, part.input.dtype());
            // Of an input without elements nothing is read.
            if !own.is_empty() {
                let to = &mut output.bytes_mut()[own.clone()];
                read(&*part.input, 0..own.len(), index, rank, |from| to.copy_from_slice(from))?;
            }
        }
        let stream = |of| Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), &p.counts[..])), of);
        let own = stream(rank);
        let longest = (0..self.wire.size()).map(|of| stream(of).len()).max();
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
        let rank = self.wire.line.rank;
        let take = |part: &ScatterPart| take(memory, part.input.dtype(), part.counts[rank], rank);
        let outputs = parts.iter().map(take).collect::<Result<Vec<_>>>()?;
        let stream = |of| Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), &p.counts[..])), of);
        let dtypes: Vec<DType> = parts.iter().map(|part| part.input.dtype()).collect();
        let (count, starts) = (parts.len(), parts.iter().map(|p| range(&p.counts, rank, p.input.dtype()).start));
        let output = Output::Buffers { first: count, starts: starts.collect() };
        let longest = (0..self.wire.size()).map(|of| stream(of).len()).max();
        let sums = Sums { op, dtypes: &dtypes, of: &stream, output, buffers: 2 * count, room: self.room() };
        let (phases, partials) = self.sums(&sums, longest.unwrap_or(0));
        let buffers = parts.into_iter().map(|part| part.input).chain(outputs).collect();
        let buffers = Exchange { wire: &mut self.wire, collective: at, partials }.run(buffers, &phases)?;
        Ok(give_back(buffers, count, memory))
    }

    fn all_reduce(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, op: ReduceOp) -> Result<Vec<Buffer>> {
        let (rank, size) = (self.wire.line.rank, self.wire.size());
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let dtypes: Vec<DType> = buffers.iter().map(Buffer::dtype).collect();
        let sums =
            |of| Sums { op, dtypes: &dtypes, of, output: Output::Own, buffers: buffers.len(), room: self.room() };
        if stream.len() <= INLINE.min(self.wire.step) && stream.len() * (size - 1) <= WHOLE {
            let phase = sums(&|_| stream.clone()).flat(rank, size);
            return self.exchange(at, buffers, &[phase]);
        }
        let slice = stream.shares(size);
        let (mut phases, partials) = self.sums(&sums(&slice), stream.len());
        match self.hosts(stream.len()) {
            Some(hosts) => phases.extend(hosts.gather(rank, &slice)),
            None => phases.push(Phase::placed(self.lanes(0, |_| slice(rank)), self.lanes(0, &slice))),
        }
        Exchange { wire: &mut self.wire, collective: at, partials }.run(buffers, &phases)
    }

    fn broadcast(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, root: usize) -> Result<Vec<Buffer>> {
        let (rank, size) = (self.wire.line.rank, self.wire.size());
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        if let Some(hosts) = self.hosts(stream.len()) {
            let phases = hosts.broadcast(rank, root, &stream);
            return self.exchange(at, buffers, &phases);
        }
        let slice = stream.shares(size);
        let is_root = rank == root;
        let lanes = |is_so: &dyn Fn(usize) -> Option<Stream>| self.lanes(0, |peer| is_so(peer).unwrap_or_default());
        if size == 2 || stream.len() <= INLINE.min(self.wire.step) {
            let sends = lanes(&|_| is_root.then(|| stream.clone()));
            let phase = Phase::placed(sends, lanes(&|peer| (peer == root).then(|| stream.clone())));
            return self.exchange(at, buffers, &[phase]);
        }
        // Each rank gets a slice and hands it on, so that the root sends everything once and not to everybody.
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

    fn all_to_all(
        &mut self,
        at: &Collective<'_>,
        parts: Vec<ExchangePart>,
        memory: &dyn Allocator,
    ) -> Result<Vec<Buffer>> {
        let rank = self.wire.line.rank;
        let take = |part: &ExchangePart| take(memory, part.input.dtype(), part.recv_counts.iter().sum(), rank);
        let mut outputs = parts.iter().map(take).collect::<Result<Vec<_>>>()?;
        for (part, output) in parts.iter().zip(&mut outputs) {
            let from = range(&part.send_counts, rank, part.input.dtype());
            let to = range(&part.recv_counts, rank, part.input.dtype());
            // Counts that differ here are seen when ranks compare.
            if from.len() == to.len() {
                output.bytes_mut()[to].copy_from_slice(&part.input.bytes()[from]);
            }
        }
        let of = |counts: fn(&ExchangePart) -> &[usize], peer| {
            Stream::of_counts(parts.iter().map(|p| (p.input.dtype(), counts(p))), peer)
        };
        let count = parts.len();
        let sends = self.lanes(0, |peer| of(|part| &part.send_counts, peer));
        let phase = Phase::placed(sends, self.lanes(count, |peer| of(|part| &part.recv_counts, peer)));
        let buffers = parts.into_iter().map(|part| part.input).chain(outputs).collect();
        let buffers = self.exchange(at, buffers, &[phase])?;
        Ok(give_back(buffers, count, memory))
    }
}

/// Ranks that count to one host and can't share its memory need not.
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

impl Backend for Engine {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn promises(&self) -> Promises {
        // Launchers of MPI end a job when one of its processes dies, and what survives that sees it only where the MPI
        // has ULFM.
        Promises { sees_death: false, ..Promises::ALL }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        self.wire.line.complete(collective.sequence());
        let outputs = match op {
            Op::AllGather { parts, memory } => self.all_gather(collective, parts, &*memory),
            Op::ReduceScatter { parts, op, memory } => self.reduce_scatter(collective, parts, op, &*memory),
            Op::AllReduce { buffers, op } => self.all_reduce(collective, buffers, op),
            Op::Broadcast { buffers, root } => self.broadcast(collective, buffers, root),
            Op::AllToAll { parts, memory } => self.all_to_all(collective, parts, &*memory),
            Op::Barrier => self.exchange(collective, vec![], &[]),
        };
        let landing = outputs?.into();
        self.wire.line.complete(collective.sequence() + 1);
        Ok(landing)
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        self.wire.line.complete(collective.sequence());
        let is_of_one_host = self.hosts.as_ref().is_some_and(|hosts| hosts.share_one(ranks));
        if is_of_one_host && ranks.len() <= shm::MOST_RANKS {
            let all_well = || self.wire.all_well(ranks).map_err(|trouble| trouble.into_error(collective));
            // Launchers that share a host may call the run by different names.
            let env = RankEnv { run_id: format!("{:x}", self.wire.nonce), attempt: 0, ..(*self.env).clone() };
            let end = shm::join(&env, self.chunk_bytes, group, &all_well).map_err(with_a_way_out)?;
            self.wire.line.complete(collective.sequence() + 1);
            return Ok(end);
        }
        let host = self.wire.host_ids[self.wire.line.rank];
        let met = self.wire.meet(ranks, group.rank, self.chunk_bytes, host, group.timeout);
        let wire = met.map_err(|why| Error::Rendezvous { rank: group.rank, message: why })?;
        let wire = wire.map_err(|trouble| trouble.into_error(collective))?;
        self.wire.line.complete(collective.sequence() + 1);
        Ok(Box::new(Engine::new(wire, self.env.clone(), self.chunk_bytes)))
    }

    fn fail(&mut self, why: &Failure) {
        self.has_failed = true;
        self.wire.driver.close(&self.wire.line, Some(why.clone()));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.has_failed {
            self.wire.driver.close(&self.wire.line, None);
        }
    }
}
