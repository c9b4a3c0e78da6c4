//! Streams as queues of operations, and events: points in streams that other streams wait for.
//! [`machine`](crate::machine) decides which stream continues.

use std::{
    collections::VecDeque,
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    machine::{Core, Machine, current, machine, thread},
    races::Clock,
    report,
    status::{CuResult, Fault, INVALID_CONTEXT, INVALID_HANDLE, Refusal, SUCCESS},
};

/// How an operation uses an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The operation reads.
    Read,
    /// The operation writes, and may read.
    Write,
}

/// Device memory that an operation uses. Races are detected by whole allocations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    /// Any address inside the allocation, or null for no memory.
    pub(crate) at: u64,
    pub(crate) access: Access,
}

/// The result of a call of [`Operation::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// The operation waits for other processes and must be called again. Other streams continue.
    Waits,
}

/// An operation on a stream.
pub(crate) struct Operation {
    /// Name in messages and counts: `kernel badd_f32`, `ncclAllGather`.
    pub(crate) name: String,
    pub(crate) touches: Vec<Touch>,
    /// Runs the operation when its turn comes.
    pub(crate) run: Box<dyn FnMut() -> Progress + Send>,
}

/// The end of an operation: number `number` of stream `stream`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: usize,
    pub(crate) number: u64,
}

pub(crate) type Run = Box<dyn FnMut() -> Progress + Send>;

/// An operation in a queue.
pub(crate) struct Entry {
    pub(crate) what: Arc<str>,
    /// Ends of other streams' operations that come first.
    pub(crate) after: Vec<Point>,
    /// An operation that must begin first.
    pub(crate) behind: Option<Point>,
    /// `None` while the operation runs.
    pub(crate) run: Option<Run>,
    /// Whether the operation was called.
    pub(crate) has_begun: bool,
    /// Whether the operation was called and waits for other processes.
    pub(crate) waits: bool,
    /// Memory, with its length, that is unused after this operation.
    pub(crate) retires: Option<(u64, usize)>,
}

/// The state of a stream that an event recorded.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) point: Point,
    /// Operations that come before a waiter for the event.
    pub(crate) clock: Clock,
}

pub(crate) struct Event {
    pub(crate) context: usize,
    /// `None` before the first record, which counts as reached.
    pub(crate) record: Option<Record>,
}

/// The role of a stream in its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The legacy default stream. It and the blocking streams of its context wait for each other.
    Legacy,
    Blocking,
    NonBlocking,
}

pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) role: Role,
    pub(crate) name: String,
    /// Whether the stream is not destroyed.
    pub(crate) live: bool,
    /// Operations that come before the next operation.
    pub(crate) clock: Clock,
    /// Numbers of the last queued and of the last ended operation.
    pub(crate) queued: u64,
    pub(crate) done: u64,
    pub(crate) queue: VecDeque<Entry>,
    /// Whether it is captured into a graph.
    pub(crate) is_captured: bool,
}

/// All streams ever created, by index.
#[derive(Default)]
pub(crate) struct Streams(Vec<Stream>);

impl Streams {
    pub(crate) fn create(&mut self, context: usize, role: Role, name: String) -> usize {
        let (clock, queue) = (Clock::default(), VecDeque::new());
        self.0.push(Stream { context, role, name, live: true, clock, queued: 0, done: 0, queue, is_captured: false });
        self.0.len() - 1
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, stream: usize) -> &Stream {
        &self.0[stream]
    }

    pub(crate) fn get_mut(&mut self, stream: usize) -> &mut Stream {
        &mut self.0[stream]
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.0.iter().enumerate()
    }

    /// Returns the end of the last queued operation of a stream.
    pub(crate) fn end(&self, stream: usize) -> Point {
        Point { stream, number: self.0[stream].queued }
    }

    pub(crate) fn reached(&self, point: Point) -> bool {
        self.0[point.stream].done >= point.number
    }

    /// Returns the ends of streams that a stream's next operation waits for by CUDA's rules, without an event.
    pub(crate) fn implied(&self, stream: usize) -> Vec<Point> {
        let this = &self.0[stream];
        let other = match this.role {
            Role::Legacy => Role::Blocking,
            Role::Blocking => Role::Legacy,
            Role::NonBlocking => return Vec::new(),
        };
        let of = self.all().filter(|(_, one)| one.context == this.context && one.role == other);
        of.map(|(place, _)| self.end(place)).collect()
    }

    /// Returns the streams whose first operation can run or be called again.
    pub(crate) fn ready(&self) -> Vec<usize> {
        self.all().filter(|(place, _)| self.can_begin(*place)).map(|(place, _)| place).collect()
    }

    fn can_begin(&self, stream: usize) -> bool {
        let first = self.0[stream].queue.front();
        first.is_some_and(|entry| {
            let is_next = entry.behind.is_none_or(|point| self.has_begun(point));
            entry.run.is_some() && is_next && entry.after.iter().all(|point| self.reached(*point))
        })
    }

    fn has_begun(&self, Point { stream, number }: Point) -> bool {
        let Stream { done, queue, .. } = &self.0[stream];
        *done >= number || (*done + 1 == number && queue.front().is_some_and(|entry| entry.has_begun))
    }

    /// Returns the [`ready`](Self::ready) streams that are needed to reach `goals`.
    pub(crate) fn ready_for(&self, goals: &[Point]) -> Vec<usize> {
        let mut open: Vec<Point> = goals.to_vec();
        let (mut seen, mut ready) = (Vec::new(), Vec::new());
        while let Some(point) = open.pop() {
            if self.reached(point) || seen.contains(&point.stream) {
                continue;
            }
            seen.push(point.stream);
            if self.can_begin(point.stream) {
                ready.push(point.stream);
            } else if let Some(first) = self.0[point.stream].queue.front() {
                open.extend(first.after.iter().filter(|after| !self.reached(**after)));
                open.extend(first.behind.filter(|before| !self.has_begun(*before)));
            }
        }
        ready
    }
}

/// Start of the stream handles, which are numbers in order of creation.
const HANDLES: usize = 0x5700_0000;

/// Queues an operation. Null is the legacy default stream of this thread's context, and 2 the thread's own default
/// stream.
pub(crate) fn enqueue(stream: *mut c_void, operation: Operation) -> CuResult {
    status(machine().enqueue(stream as usize, operation))
}

/// Waits until all queued operations of a stream have run. `asked` is the waiting function, which is counted.
pub(crate) fn synchronize(stream: *mut c_void, asked: &str) -> CuResult {
    status(machine().synchronize(stream as usize, asked))
}

/// Runs all queued operations of a stream. To the host, nothing has ended: its accesses still need a wait. `asked` is the
/// function that reads device memory when it is called.
pub(crate) fn run_queued(stream: *mut c_void, asked: &str) -> CuResult {
    status(machine().run_queued(stream as usize, asked))
}

/// Converts a result to a driver's status. A fault ends the process.
pub(crate) fn status<T>(result: Result<T, Refusal>) -> CuResult {
    match result {
        Ok(_) => SUCCESS,
        Err(Refusal::Status(status)) => status,
        Err(Refusal::Fault(Fault(message))) => report::fault(message),
    }
}

impl Core {
    /// Returns the stream of a handle.
    pub(crate) fn resolve(&mut self, handle: usize) -> Result<usize, Refusal> {
        if handle > 2 {
            let place = handle.checked_sub(HANDLES).filter(|place| *place < self.streams.len());
            let live = place.filter(|place| self.streams.get(*place).live);
            return live.ok_or(Refusal::Status(INVALID_HANDLE));
        }
        let context = current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let streams = &mut self.streams;
        Ok(if handle == 2 {
            let name = || format!("thread {}'s default stream", thread());
            let make = || streams.create(context, Role::Blocking, name());
            *self.per_thread.entry((thread(), context)).or_insert_with(make)
        } else {
            let make = || streams.create(context, Role::Legacy, "the default stream".into());
            *self.legacy.entry(context).or_insert_with(make)
        })
    }
}

impl Core {
    /// Returns the current ends of streams, and the clock of the operations before them.
    fn ends(&self, streams: &[usize]) -> (Vec<Point>, Clock) {
        let mut clock = Clock::default();
        streams.iter().for_each(|stream| clock.join(&self.streams.get(*stream).clock));
        (streams.iter().map(|stream| self.streams.end(*stream)).collect(), clock)
    }
}

impl Machine {
    pub(crate) fn create_stream(&self, non_blocking: bool) -> Result<usize, Refusal> {
        let context = current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let mut core = self.lock();
        let number = core.streams.all().filter(|(_, stream)| stream.name.starts_with("stream ")).count() + 1;
        let role = if non_blocking { Role::NonBlocking } else { Role::Blocking };
        Ok(HANDLES + core.streams.create(context, role, format!("stream {number}")))
    }

    /// Destroys a stream. Its queued operations still run.
    pub(crate) fn destroy_stream(&self, handle: usize) -> Result<(), Refusal> {
        let mut core = self.lock();
        let place = core.resolve(handle)?;
        if handle <= 2 {
            return Err(Refusal::Status(INVALID_HANDLE));
        }
        core.streams.get_mut(place).live = false;
        Ok(())
    }

    pub(crate) fn enqueue(&self, stream: usize, operation: Operation) -> Result<Point, Refusal> {
        let mut core = self.lock();
        let place = core.resolve(stream)?;
        Ok(core.enqueue(place, operation)?)
    }

    pub(crate) fn run_queued(&self, stream: usize, asked: &str) -> Result<(), Refusal> {
        let mut core = self.lock();
        let place = core.resolve(stream)?;
        let end = core.streams.end(place);
        drop(core);
        Ok(self.drive(&[end], asked)?)
    }

    pub(crate) fn synchronize(&self, stream: usize, asked: &str) -> Result<(), Refusal> {
        report::count(&format!("host synchronisation: {asked}"));
        let mut core = self.lock();
        let place = core.resolve(stream)?;
        let mut of = vec![place];
        if core.streams.get(place).role == Role::Legacy {
            of.extend(core.streams.implied(place).into_iter().map(|point| point.stream));
        }
        let (goals, clock) = core.ends(&of);
        drop(core);
        self.wait_for(&goals, &clock, asked)
    }

    /// Waits for all streams of this thread's context.
    pub(crate) fn synchronize_context(&self, asked: &str) -> Result<(), Refusal> {
        report::count(&format!("host synchronisation: {asked}"));
        let context = current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let core = self.lock();
        let of: Vec<_> = core.streams.all().filter(|(_, one)| one.context == context).map(|(place, _)| place).collect();
        let (goals, clock) = core.ends(&of);
        drop(core);
        self.wait_for(&goals, &clock, asked)
    }

    /// Waits for the ends of operations. The host then knows that the operations in `clock` have ended.
    pub(crate) fn wait_for(&self, goals: &[Point], clock: &Clock, asked: &str) -> Result<(), Refusal> {
        self.drive(goals, asked)?;
        let mut core = self.lock();
        core.host_joins(clock);
        // Pools release memory beyond their thresholds.
        core.accounts.iter_mut().for_each(|account| account.trim(account.threshold));
        Ok(())
    }
}

impl Core {
    /// Returns the last record of an event, if any. Without a record, nothing waits.
    fn recorded(&self, event: u64) -> Result<Option<Record>, Refusal> {
        self.events.get(&event).map(|event| event.record.clone()).ok_or(Refusal::Status(INVALID_HANDLE))
    }
}

impl Machine {
    pub(crate) fn create_event(&self) -> Result<u64, Refusal> {
        static NEXT: AtomicU64 = AtomicU64::new(0xe000_0000);
        let context = current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        self.lock().events.insert(handle, Event { context, record: None });
        Ok(handle)
    }

    /// Destroys an event. Waits for its record continue.
    pub(crate) fn destroy_event(&self, event: u64) -> Result<(), Refusal> {
        self.lock().events.remove(&event).map(|_| ()).ok_or(Refusal::Status(INVALID_HANDLE))
    }

    pub(crate) fn record(&self, event: u64, stream: usize) -> Result<(), Refusal> {
        let mut core = self.lock();
        let stream = core.resolve(stream)?;
        let context = core.events.get(&event).ok_or(Refusal::Status(INVALID_HANDLE))?.context;
        if context != core.streams.get(stream).context {
            return Err(Refusal::Status(INVALID_HANDLE));
        }
        report::count("event: cuEventRecord");
        let after = core.prepare(stream, "cuEventRecord")?;
        let point = core.push(stream, "cuEventRecord", after, Box::new(|| Progress::Done), None);
        let clock = core.streams.get(stream).clock.clone();
        let record = Some(Record { point, clock });
        core.events.entry(event).and_modify(|event| event.record = record);
        Ok(())
    }

    /// Makes operations that are queued on `stream` from now on wait for the current record of `event`.
    pub(crate) fn wait_event(&self, stream: usize, event: u64) -> Result<(), Refusal> {
        let mut core = self.lock();
        let stream = core.resolve(stream)?;
        report::count("event: cuStreamWaitEvent");
        let Some(record) = core.recorded(event)? else { return Ok(()) };
        let mut after = core.prepare(stream, "cuStreamWaitEvent")?;
        after.push(record.point);
        core.streams.get_mut(stream).clock.join(&record.clock);
        core.push(stream, "cuStreamWaitEvent", after, Box::new(|| Progress::Done), None);
        Ok(())
    }

    pub(crate) fn query_event(&self, event: u64) -> Result<bool, Refusal> {
        let Some(record) = self.lock().recorded(event)? else { return Ok(true) };
        let reached = self.query(&[record.point])?;
        if reached {
            self.lock().thread_learns(&record.clock);
        }
        Ok(reached)
    }

    pub(crate) fn synchronize_event(&self, event: u64) -> Result<(), Refusal> {
        let Some(record) = self.lock().recorded(event)? else { return Ok(()) };
        report::count("host synchronisation: cuEventSynchronize");
        self.wait_for(&[record.point], &record.clock, "cuEventSynchronize")
    }
}
