//! Streams as the rest of the double sees them.

use std::ffi::c_void;

use crate::{
    clock::Clock,
    context,
    machine::{Core, Machine, machine, thread},
    operation::Operation,
    queue::{Point, Role},
    report,
    status::{CuResult, Fault, INVALID_CONTEXT, INVALID_HANDLE, Refusal, SUCCESS},
};

/// Handles are numbers from here on, in order of creation.
const HANDLES: usize = 0x5700_0000;

/// Queues an operation. Null is the legacy default stream of this thread's context, 2 the thread's own default stream.
pub(crate) fn enqueue(stream: *mut c_void, operation: Operation) -> CuResult {
    status(machine().enqueue(stream as usize, operation))
}

/// Waits until all is done that is queued on a stream now. `asked` is the function that waits: it is counted.
pub(crate) fn synchronize(stream: *mut c_void, asked: &str) -> CuResult {
    status(machine().synchronize(stream as usize, asked))
}

/// What a driver answers. A fault does not come back.
pub(crate) fn status<T>(result: Result<T, Refusal>) -> CuResult {
    match result {
        Ok(_) => SUCCESS,
        Err(Refusal::Status(status)) => status,
        Err(Refusal::Fault(Fault(message))) => report::fault(message),
    }
}

impl Core {
    /// The stream of a handle.
    pub(crate) fn resolve(&mut self, handle: usize) -> Result<usize, Refusal> {
        if handle > 2 {
            let place = handle.checked_sub(HANDLES).filter(|place| *place < self.streams.len());
            let live = place.filter(|place| self.streams.get(*place).live);
            return live.ok_or(Refusal::Status(INVALID_HANDLE));
        }
        let context = context::current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
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
    /// The ends of streams as they are now, and what comes before those.
    fn ends(&self, streams: &[usize]) -> (Vec<Point>, Clock) {
        let mut clock = Clock::default();
        streams.iter().for_each(|stream| clock.join(&self.streams.get(*stream).clock));
        (streams.iter().map(|stream| self.streams.end(*stream)).collect(), clock)
    }
}

impl Machine {
    pub(crate) fn create_stream(&self, non_blocking: bool, priority: i32) -> Result<usize, Refusal> {
        let context = context::current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let mut core = self.lock();
        let number = core.streams.all().filter(|(_, stream)| stream.name.starts_with("stream ")).count() + 1;
        let role = if non_blocking { Role::NonBlocking } else { Role::Blocking };
        let place = core.streams.create(context, role, format!("stream {number}"));
        core.streams.get_mut(place).priority = priority;
        Ok(HANDLES + place)
    }

    /// What is queued still runs.
    pub(crate) fn destroy_stream(&self, handle: usize) -> Result<(), Refusal> {
        let mut core = self.lock();
        let place = core.resolve(handle)?;
        if handle <= 2 {
            return Err(Refusal::Status(INVALID_HANDLE));
        }
        core.streams.get_mut(place).live = false;
        Ok(())
    }

    /// Messages call a stream by this name as well.
    pub(crate) fn name_stream(&self, handle: usize, name: &str) -> Result<(), Refusal> {
        let mut core = self.lock();
        let place = core.resolve(handle)?;
        let stream = core.streams.get_mut(place);
        let number = stream.name.split(" (").next().unwrap_or_default();
        stream.name = format!("{number} ({name})");
        Ok(())
    }

    pub(crate) fn enqueue(&self, stream: usize, operation: Operation) -> Result<Point, Refusal> {
        let mut core = self.lock();
        let place = core.resolve(stream)?;
        Ok(core.enqueue(place, operation)?)
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
        let context = context::current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let core = self.lock();
        let of: Vec<_> = core.streams.all().filter(|(_, one)| one.context == context).map(|(place, _)| place).collect();
        let (goals, clock) = core.ends(&of);
        drop(core);
        self.wait_for(&goals, &clock, asked)
    }

    /// Waits for the ends of operations. What `clock` covers comes before them, and so the host knows that it is done.
    pub(crate) fn wait_for(&self, goals: &[Point], clock: &Clock, asked: &str) -> Result<(), Refusal> {
        self.drive(goals, asked)?;
        let mut core = self.lock();
        core.host_joins(clock);
        // Pools give back what they need not keep.
        core.accounts.iter_mut().for_each(|account| account.trim(account.threshold));
        Ok(())
    }

    pub(crate) fn query_stream(&self, handle: usize) -> Result<bool, Refusal> {
        let mut core = self.lock();
        let place = core.resolve(handle)?;
        let (goals, clock) = core.ends(&[place]);
        drop(core);
        let reached = self.query(&goals)?;
        if reached {
            self.lock().thread_learns(&clock);
        }
        Ok(reached)
    }
}
