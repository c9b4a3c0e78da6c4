//! The backend over MPI: what each collective sends to whom.

use super::{
    super::{
        backend::{Backend, Promises},
        collective::Collective,
        failure::Failure,
        host::{
            buffers::{range, read, take},
            packing::{ALIGN, Stream},
        },
        landing::Landing,
        membership::Membership,
        parts::{ExchangePart, GatherPart, Op, ScatterPart},
    },
    exchange::{Arrival, Combined, Exchange, INLINE, Phase, Side},
    wire::Wire,
};
use crate::{Allocator, Buffer, DType, DeviceId, Error, ReduceOp, Result};

/// The most bytes that a rank sends for an all-reduce in which everybody combines everything.
const WHOLE: usize = 64 << 10;

/// One rank's end.
pub(super) struct Engine {
    wire: Wire,
    chunk_bytes: usize,
    has_failed: bool,
}

impl Engine {
    pub(super) fn new(wire: Wire, chunk_bytes: usize) -> Self {
        Engine { wire, chunk_bytes, has_failed: false }
    }

    fn exchange(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, phases: &[Phase]) -> Result<Vec<Buffer>> {
        Exchange { wire: &mut self.wire, collective: at }.run(buffers, phases)
    }

    /// A stream for each rank; nothing for this one, which sends itself nothing.
    fn streams(&self, of: impl Fn(usize) -> Stream) -> Vec<Stream> {
        let rank = self.wire.line.rank;
        (0..self.wire.size()).map(|peer| if peer == rank { Stream::default() } else { of(peer) }).collect()
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
        let sends = Side { streams: self.streams(|_| own.clone()), first: 0 };
        let arrival = Arrival::Placed(Side { streams: self.streams(stream), first: 0 });
        self.exchange(at, outputs, &[Phase { sends, arrival }])
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
        let sends = Side { streams: self.streams(stream), first: 0 };
        let starts = parts.iter().map(|p| range(&p.counts, rank, p.input.dtype()).start).collect();
        let dtypes = parts.iter().map(|part| part.input.dtype()).collect();
        let outputs_at = Some((parts.len(), starts));
        let arrival = Arrival::Combined(Combined { op, dtypes, stream: stream(rank), outputs: outputs_at });
        let count = parts.len();
        let buffers = parts.into_iter().map(|part| part.input).chain(outputs).collect();
        let buffers = self.exchange(at, buffers, &[Phase { sends, arrival }])?;
        Ok(give_back(buffers, count, memory))
    }

    fn all_reduce(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, op: ReduceOp) -> Result<Vec<Buffer>> {
        let (rank, size) = (self.wire.line.rank, self.wire.size());
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let dtypes: Vec<DType> = buffers.iter().map(Buffer::dtype).collect();
        let combined = |stream| Arrival::Combined(Combined { op, dtypes: dtypes.clone(), stream, outputs: None });
        if stream.len() <= INLINE.min(self.wire.step) && stream.len() * (size - 1) <= WHOLE {
            let sends = Side { streams: self.streams(|_| stream.clone()), first: 0 };
            return self.exchange(at, buffers, &[Phase { sends, arrival: combined(stream) }]);
        }
        let slice = slices(&stream, size);
        let scatter = Side { streams: self.streams(&slice), first: 0 };
        let gather = Side { streams: self.streams(|_| slice(rank)), first: 0 };
        let phases = [
            Phase { sends: scatter.clone(), arrival: combined(slice(rank)) },
            Phase { sends: gather, arrival: Arrival::Placed(scatter) },
        ];
        self.exchange(at, buffers, &phases)
    }

    fn broadcast(&mut self, at: &Collective<'_>, buffers: Vec<Buffer>, root: usize) -> Result<Vec<Buffer>> {
        let (rank, size) = (self.wire.line.rank, self.wire.size());
        let stream = Stream::new(buffers.iter().map(|buffer| 0..buffer.bytes().len()));
        let slice = slices(&stream, size);
        let is_root = rank == root;
        let side = |is_so: &dyn Fn(usize) -> Option<Stream>| {
            let streams = self.streams(|peer| is_so(peer).unwrap_or_default());
            Side { streams, first: 0 }
        };
        if size == 2 || stream.len() <= INLINE.min(self.wire.step) {
            let sends = side(&|_| is_root.then(|| stream.clone()));
            let arrival = Arrival::Placed(side(&|peer| (peer == root).then(|| stream.clone())));
            return self.exchange(at, buffers, &[Phase { sends, arrival }]);
        }
        // Each rank gets a slice and hands it on, so that the root sends everything once and not to everybody.
        let phases = [
            Phase {
                sends: side(&|peer| is_root.then(|| slice(peer))),
                arrival: Arrival::Placed(side(&|peer| (peer == root).then(|| slice(rank)))),
            },
            Phase {
                sends: side(&|peer| (peer != root).then(|| slice(rank))),
                arrival: Arrival::Placed(side(&|peer| (!is_root).then(|| slice(peer)))),
            },
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
        let sends = Side { streams: self.streams(|peer| of(|part| &part.send_counts, peer)), first: 0 };
        let streams = self.streams(|peer| of(|part| &part.recv_counts, peer));
        let arrival = Arrival::Placed(Side { streams, first: parts.len() });
        let count = parts.len();
        let buffers = parts.into_iter().map(|part| part.input).chain(outputs).collect();
        let buffers = self.exchange(at, buffers, &[Phase { sends, arrival }])?;
        Ok(give_back(buffers, count, memory))
    }
}

/// Gives the first `count` buffers back, and returns the others.
fn give_back(mut buffers: Vec<Buffer>, count: usize, memory: &dyn Allocator) -> Vec<Buffer> {
    let outputs = buffers.split_off(count);
    buffers.into_iter().for_each(|buffer| memory.give(buffer));
    outputs
}

/// What each rank has of a stream that all of them share.
fn slices(stream: &Stream, ranks: usize) -> impl Fn(usize) -> Stream + use<'_> {
    let chunk = stream.len().div_ceil(ranks).next_multiple_of(ALIGN).max(ALIGN);
    move |rank| stream.slice(rank, chunk)
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

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<Landing> {
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
        let met = self.wire.meet(ranks, group.rank, self.chunk_bytes, group.timeout);
        let wire = met.map_err(|why| Error::Rendezvous { rank: group.rank, message: why })?;
        let wire = wire.map_err(|trouble| trouble.into_error(collective))?;
        self.wire.line.complete(collective.sequence() + 1);
        Ok(Box::new(Engine::new(wire, self.chunk_bytes)))
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
