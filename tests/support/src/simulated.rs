//! Groups of thousands of ranks as threads, whose backend moves data by a table in memory and counts it.
//!
//! The ranks of [`local`](fsdp_core::process_group::local) share a segment with slots and announcements for each rank,
//! which thousands of ranks of one process have no memory for. Here the last rank that issues a collective hands the
//! contributions of all ranks to each of them. Nothing compares what the ranks issue.
//!
//! [`Traffic`] counts a collective as a network would carry it: a gather to all, a reduction and a barrier take a
//! message for each bit of the number of ranks, a broadcast as many at most, a gather to one rank or a scatter from one
//! a message for each other rank at the root and one elsewhere. Bytes are those that a rank receives, or those that it
//! sends if they are more.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use fsdp_core::{
    Buffer, DType, DeviceId, Element, Error, GatherPart, ProcessGroup, ReduceOp, Result, ScatterPart,
    process_group::{Backend, Collective, CollectiveOutput, Failure, Guarantees, Membership, Messages, Op},
};
use parking_lot::{Condvar, Mutex};

/// How long a rank waits for the others.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Messages and bytes of a rank's collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of collectives.
    pub collectives: usize,
    /// Number of messages.
    pub messages: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// The [`Traffic`] of a rank so far.
#[derive(Clone, Default)]
pub struct Counter(Arc<Mutex<Traffic>>);

impl Counter {
    /// Returns the traffic since the last call.
    pub fn take(&self) -> Traffic {
        std::mem::take(&mut self.0.lock())
    }

    fn add_bytes(&self, bytes: usize) {
        self.0.lock().bytes += bytes;
    }

    fn add(&self, messages: usize, bytes: usize) {
        let mut traffic = self.0.lock();
        traffic.collectives += 1;
        traffic.messages += messages;
        traffic.bytes += bytes;
    }
}

/// Runs `rank` on a thread for each of `size` ranks, with the rank's counter, and returns the results in rank order.
///
/// # Panics
/// If a rank panics, or the system refuses threads.
pub fn run<T: Send>(size: usize, rank: impl Fn(ProcessGroup, Counter) -> T + Sync) -> Vec<T> {
    let rooms = Arc::new(Rooms::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|number| {
                let (rank, rooms) = (&rank, rooms.clone());
                let body = move || {
                    let world = Membership::world(number, size, TIMEOUT);
                    let counter = Counter::default();
                    let backend = Simulated { room: rooms.join(&world), rooms, counter: counter.clone() };
                    let group = ProcessGroup::new(world, Box::new(backend)).expect("a thread for the group");
                    rank(group, counter)
                };
                std::thread::Builder::new().spawn_scoped(scope, body).expect("a thread for the rank")
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("the rank's result")).collect()
    })
}

/// Returns the world of one rank whose peers issue what it issues, with the same values, and the rank's counter. A
/// gather has this rank's elements in its own place only, if the ranks have different numbers of elements.
///
/// # Panics
/// If the system refuses a thread.
pub fn mirrored(rank: usize, size: usize) -> (ProcessGroup, Counter) {
    let counter = Counter::default();
    let backend = Mirrored { counter: counter.clone() };
    let group = ProcessGroup::new(Membership::world(rank, size, TIMEOUT), Box::new(backend));
    (group.expect("a thread for the group"), counter)
}

/// The groups that some member has yet to join, by name, with the number of these members.
#[derive(Default)]
struct Rooms(Mutex<HashMap<String, (Arc<Room>, usize)>>);

impl Rooms {
    fn join(&self, group: &Membership) -> Arc<Room> {
        let mut rooms = self.0.lock();
        let (room, missing) =
            rooms.remove(&group.name).unwrap_or_else(|| (Arc::new(Room::new(group.size)), group.size));
        if missing > 1 {
            rooms.insert(group.name.clone(), (room.clone(), missing - 1));
        }
        room
    }
}

/// What the ranks of a group contribute to its current collective.
struct Room {
    state: Mutex<State>,
    complete: Condvar,
}

struct State {
    given: Vec<Vec<Vec<u8>>>,
    missing: usize,
    /// Contributions of the last complete collective, and its number.
    all: Arc<Vec<Vec<Vec<u8>>>>,
    number: u64,
    has_failed: bool,
}

impl Room {
    fn new(ranks: usize) -> Self {
        let state =
            State { given: vec![Vec::new(); ranks], missing: ranks, all: Arc::default(), number: 0, has_failed: false };
        Room { state: Mutex::new(state), complete: Condvar::new() }
    }

    /// Adds this rank's parts and returns the parts of all ranks.
    fn exchange(&self, collective: &Collective<'_>, own: Vec<Vec<u8>>) -> Result<Arc<Vec<Vec<Vec<u8>>>>> {
        self.combine(collective, own, |all| all)
    }

    /// Adds this rank's parts and returns what `combine` makes of the parts of all ranks. One rank calls it.
    fn combine(
        &self,
        collective: &Collective<'_>,
        own: Vec<Vec<u8>>,
        combine: impl FnOnce(Vec<Vec<Vec<u8>>>) -> Vec<Vec<Vec<u8>>>,
    ) -> Result<Arc<Vec<Vec<Vec<u8>>>>> {
        let Membership { rank, size, .. } = *collective.group();
        let mut state = self.state.lock();
        let number = state.number;
        state.given[rank] = own;
        state.missing -= 1;
        if state.missing == 0 {
            state.all = Arc::new(combine(std::mem::replace(&mut state.given, vec![Vec::new(); size])));
            (state.missing, state.number) = (size, number + 1);
            self.complete.notify_all();
        }
        let until = Instant::now() + TIMEOUT;
        while state.number == number && !state.has_failed {
            if self.complete.wait_until(&mut state, until).timed_out() {
                return Err(collective.timed_out(Vec::new(), TIMEOUT));
            }
        }
        if state.number == number { Err(collective.lost(rank, "failed")) } else { Ok(state.all.clone()) }
    }
}

struct Simulated {
    room: Arc<Room>,
    rooms: Arc<Rooms>,
    counter: Counter,
}

fn bytes(buffers: &[Buffer]) -> Vec<Vec<u8>> {
    buffers.iter().map(|buffer| buffer.bytes().to_vec()).collect()
}

fn total(parts: &[Vec<u8>]) -> usize {
    parts.iter().map(Vec::len).sum()
}

fn buffer(dtype: DType, bytes: &[u8]) -> Buffer {
    let mut buffer = Buffer::zeros(dtype, bytes.len() / dtype.size());
    buffer.bytes_mut().copy_from_slice(bytes);
    buffer
}

impl Backend for Simulated {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { fixed_order: false, f32_accumulation: false, detects_death: false }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let Membership { rank, size, .. } = *collective.group();
        let hops = hops(size);
        let outputs = match op {
            Op::AllGather { parts, .. } => {
                let mut own = vec![Vec::new(); parts.len()];
                for (own, part) in own.iter_mut().zip(&parts) {
                    part.input
                        .read(&mut |bytes| own.extend(bytes))
                        .map_err(|message| Error::Argument { rank, message })?;
                }
                let all = self.room.exchange(collective, own)?;
                let of = |index: usize| all.iter().map(|parts| &parts[index][..]).collect::<Vec<_>>().concat();
                let outputs: Vec<Buffer> =
                    parts.iter().enumerate().map(|(index, part)| buffer(part.input.dtype(), &of(index))).collect();
                self.counter.add(hops, total(&bytes(&outputs)) - total(&all[rank]));
                outputs
            }
            Op::AllReduce { mut buffers, op } => {
                let own = bytes(&buffers);
                self.counter.add(2 * hops, 2 * total(&own));
                let dtypes: Vec<DType> = buffers.iter().map(Buffer::dtype).collect();
                let sum = |(index, dtype): (usize, &DType), all: &[Vec<Vec<u8>>]| {
                    reduced(*dtype, op, all.iter().map(|parts| &parts[index][..])).bytes().to_vec()
                };
                let all = self.room.combine(collective, own, |all| {
                    vec![dtypes.iter().enumerate().map(|dtype| sum(dtype, &all)).collect()]
                })?;
                for (to, from) in buffers.iter_mut().zip(&all[0]) {
                    to.bytes_mut().copy_from_slice(from);
                }
                buffers
            }
            Op::Broadcast { buffers, root } => {
                let own = if rank == root { bytes(&buffers) } else { Vec::new() };
                let all = self.room.exchange(collective, own)?;
                self.counter.add(hops, total(&all[root]));
                buffers.iter().zip(&all[root]).map(|(to, from)| buffer(to.dtype(), from)).collect()
            }
            Op::Gather(messages) => {
                let Messages { input, root, own, .. } = messages;
                let all = self.room.exchange(collective, vec![input])?;
                if rank == root {
                    let gathered = all.iter().map(|parts| &parts[0][..]).collect::<Vec<_>>().concat();
                    self.counter.add(size - 1, gathered.len() - own);
                    vec![Buffer::U8(gathered)]
                } else {
                    self.counter.add(1, own);
                    vec![Buffer::U8(Vec::new())]
                }
            }
            Op::Scatter(messages) => {
                let Messages { input, counts, root, own, .. } = messages;
                let starts = counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count)));
                let cut = if rank == root {
                    starts.zip(&counts).map(|(start, count)| input[start..start + count].to_vec()).collect()
                } else {
                    Vec::new()
                };
                let all = self.room.exchange(collective, cut)?;
                let (messages, bytes) = if rank == root { (size - 1, input.len() - own) } else { (1, own) };
                self.counter.add(messages, bytes);
                vec![Buffer::U8(all[root][rank].clone())]
            }
            Op::Barrier => {
                self.counter.add(hops, 0);
                self.room.exchange(collective, Vec::new())?;
                Vec::new()
            }
            _ => {
                let message = format!("{collective} is not simulated");
                return Err(Error::Argument { rank, message });
            }
        };
        Ok(outputs.into())
    }

    fn split(&mut self, _: &Collective<'_>, _: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let (room, rooms) = (self.rooms.join(group), self.rooms.clone());
        Ok(Box::new(Simulated { room, rooms, counter: self.counter.clone() }))
    }

    fn fail(&mut self, _: &Failure) {
        self.room.state.lock().has_failed = true;
        self.room.complete.notify_all();
    }
}

/// The backend of [`mirrored`].
struct Mirrored {
    counter: Counter,
}

impl Backend for Mirrored {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { fixed_order: false, f32_accumulation: false, detects_death: false }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let Membership { rank, size, .. } = *collective.group();
        let hops = hops(size);
        let outputs: Vec<Buffer> = match op {
            Op::AllGather { parts, memory } => {
                let mut outputs = Vec::with_capacity(parts.len());
                for GatherPart { input, counts } in parts {
                    let (dtype, own) = (input.dtype(), counts[rank] * input.dtype().size());
                    let mut output = memory.take(dtype, counts.iter().sum())?;
                    let bytes = output.bytes_mut();
                    self.counter.add_bytes(bytes.len() - own);
                    let start = counts[..rank].iter().sum::<usize>() * dtype.size();
                    let is_equal = counts.iter().all(|count| *count == counts[rank]);
                    let copied = input.read(&mut |from| match is_equal && own > 0 {
                        true => bytes.chunks_exact_mut(own).for_each(|to| to.copy_from_slice(from)),
                        false => bytes[start..start + own].copy_from_slice(from),
                    });
                    copied.map_err(|message| Error::Argument { rank, message })?;
                    outputs.push(output);
                }
                self.counter.add(hops, 0);
                outputs
            }
            Op::ReduceScatter { parts, memory, .. } => {
                let mut outputs = Vec::with_capacity(parts.len());
                for ScatterPart { input, counts } in parts {
                    let dtype = input.dtype();
                    let start = counts[..rank].iter().sum::<usize>() * dtype.size();
                    let mut output = memory.take(dtype, counts[rank])?;
                    let own = output.bytes().len();
                    self.counter.add_bytes(input.bytes().len() - own);
                    output.bytes_mut().copy_from_slice(&input.bytes()[start..start + own]);
                    memory.give(input);
                    outputs.push(output);
                }
                self.counter.add(hops, 0);
                outputs
            }
            Op::AllReduce { buffers, .. } => {
                self.counter.add(2 * hops, 2 * total(&bytes(&buffers)));
                buffers
            }
            Op::Broadcast { buffers, .. } => {
                self.counter.add(hops, total(&bytes(&buffers)));
                buffers
            }
            Op::Barrier => {
                self.counter.add(hops, 0);
                Vec::new()
            }
            _ => {
                let message = format!("{collective} is not simulated");
                return Err(Error::Argument { rank, message });
            }
        };
        Ok(outputs.into())
    }

    fn split(&mut self, _: &Collective<'_>, _: &[usize], _: &Membership) -> Result<Box<dyn Backend>> {
        Ok(Box::new(Mirrored { counter: self.counter.clone() }))
    }

    fn fail(&mut self, _: &Failure) {}
}

/// Returns the number of messages by which a rank reaches, or hears of, all ranks of a group.
fn hops(ranks: usize) -> usize {
    ranks.next_power_of_two().trailing_zeros() as usize
}

/// Returns the reduction of the inputs of all ranks, in rank order.
fn reduced<'a>(dtype: DType, op: ReduceOp, inputs: impl Iterator<Item = &'a [u8]>) -> Buffer {
    fn fold<'a, T: Element + bytemuck::Pod>(inputs: impl Iterator<Item = &'a [u8]>, f: impl Fn(T, T) -> T) -> Buffer {
        let vectors = inputs.map(|bytes| bytemuck::pod_collect_to_vec::<u8, T>(bytes));
        let sum = vectors.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| f(a, b)).collect());
        Buffer::from(sum.unwrap_or_default())
    }
    macro_rules! by_op {
        ($t:ty) => {
            match op {
                ReduceOp::Min => fold::<$t>(inputs, |a, b| if b < a { b } else { a }),
                ReduceOp::Max => fold::<$t>(inputs, |a, b| if b > a { b } else { a }),
                ReduceOp::Product => fold::<$t>(inputs, |a, b| a * b),
                _ => fold::<$t>(inputs, |a, b| a + b),
            }
        };
    }
    match dtype {
        DType::U8 => by_op!(u8),
        DType::U32 => by_op!(u32),
        DType::I64 => by_op!(i64),
        DType::F64 => by_op!(f64),
        DType::F32 => by_op!(f32),
        other => panic!("reductions of {other} are not simulated"),
    }
}
