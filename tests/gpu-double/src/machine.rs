//! The machine: all streams and all memory of a process, and how streams come forward.
//!
//! No operation runs when it is queued. Operations run on a thread that waits for a stream, an event or the bytes of a
//! copy, one at a time and without the lock, so that other threads can queue operations. If the host has called nothing
//! for a while, a thread of the double continues the streams. On a GPU they would continue too, and other processes may
//! wait for them.
//!
//! A stream waits only for operations that were queued before, so streams of one process cannot wait in a circle. A
//! deadlock is a wait for other processes that never ends, or an operation that waits for its own stream. Both are
//! reported.
//!
//! # Known waits
//! Uses of memory are compared when they are queued, so the results do not depend on the schedule. A stream's next
//! operation comes after the stream's earlier operations, after the events that the stream waits for, and after
//! everything that the host has waited for. The double cannot see how host threads wait for each other. A
//! synchronisation of one thread therefore counts for all threads. A query counts only for the thread that made it, so
//! a polling watchdog hides no missing wait.
//!
//! # Schedule
//! Any stream that may continue can be chosen, in the order that is worst for the program. `GPU_DOUBLE_SEED` selects a
//! schedule (default: 0). With seed 0, only operations run for which the host waits, and streams that were created
//! earlier come first. With any other seed, streams have priorities that change occasionally, a stream sometimes runs
//! out of turn, and operations run before anything waits for them. A program without races has the same results with
//! all seeds. Ranks have different schedules with the same seed.

use std::{
    cell::Cell,
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    bytes,
    memory::Allocations,
    pool::Account,
    races::{Clock, Use},
    report,
    status::Fault,
    streams::{Access, Entry, Event, Operation, Point, Progress, Run, Streams, Touch},
};

/// The double's settings, with their environment variables and defaults.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Number of devices (`GPU_DOUBLE_DEVICES`, 8).
    pub(crate) devices: usize,
    /// Bytes of each device (`GPU_DOUBLE_MEMORY`, 80 GiB).
    pub(crate) memory: u64,
    /// Bytes of a segment of a device's pool (`GPU_DOUBLE_SEGMENT`, 2 MiB).
    pub(crate) segment: u64,
    /// The schedule (`GPU_DOUBLE_SEED`, 0).
    pub(crate) seed: u64,
    /// Time after which a wait for other processes is a deadlock (`GPU_DOUBLE_STALL`, 300 seconds).
    pub(crate) stall: Duration,
    /// Version of CUDA that the driver says (`GPU_DOUBLE_DRIVER`, 13000 for 13.0).
    pub(crate) driver: u64,
    /// Compute capability of the devices (`GPU_DOUBLE_CAPABILITY`, 90 for 9.0).
    pub(crate) capability: u64,
    /// Whether a device has one queue for all streams (`CUDA_DEVICE_MAX_CONNECTIONS=1`). An operation then begins only
    /// after all that were queued before it have begun.
    pub(crate) one_queue: bool,
}

impl Settings {
    /// Reads the settings. The error names an invalid variable.
    pub(crate) fn from_env() -> Result<Self, String> {
        Ok(Self {
            devices: number("GPU_DOUBLE_DEVICES", 8)? as usize,
            memory: number("GPU_DOUBLE_MEMORY", 80 << 30)?,
            segment: number("GPU_DOUBLE_SEGMENT", 2 << 20)?.max(1),
            seed: number("GPU_DOUBLE_SEED", 0)?,
            stall: Duration::from_secs(number("GPU_DOUBLE_STALL", 300)?),
            driver: number("GPU_DOUBLE_DRIVER", TOOLKIT)?,
            capability: number("GPU_DOUBLE_CAPABILITY", 90)?,
            one_queue: number("CUDA_DEVICE_MAX_CONNECTIONS", 8)? == 1,
        })
    }
}

/// Version of CUDA of the stand-in `nvcc`, and of NVRTC: 13.0.
pub(crate) const TOOLKIT: u64 = 13000;

fn number(name: &str, default: u64) -> Result<u64, String> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{name} is {text:?}, and has to be a whole number")),
    }
}

/// Time without a call of the host after which streams continue by the double's own thread.
const IDLE: Duration = Duration::from_millis(100);
/// Pause before operations that wait for other processes are called again.
const PAUSE: Duration = Duration::from_micros(300);

thread_local! {
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static IN_OPERATION: Cell<bool> = const { Cell::new(false) };
}

/// Returns a number for this thread.
pub(crate) fn thread() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    THREAD.with(|mine| {
        if mine.get() == 0 {
            mine.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        }
        mine.get()
    })
}

pub(crate) struct Core {
    pub(crate) settings: Settings,
    pub(crate) streams: Streams,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) allocations: Allocations,
    /// Account of each device.
    pub(crate) accounts: Vec<Account>,
    /// Default streams by context, and by thread and context.
    pub(crate) legacy: HashMap<usize, usize>,
    pub(crate) per_thread: HashMap<(u64, usize), usize>,
    pub(crate) schedule: Schedule,
    /// Ends of the operations that were queued last, by context.
    last: HashMap<usize, Point>,
    /// Operations that the host has waited for, and that a thread learned by queries.
    host: Clock,
    learnt: HashMap<u64, Clock>,
    /// Whether an operation is running.
    executing: bool,
    /// Whether a thread runs the operations that it and others wait for.
    is_driven: bool,
    /// Goals of the other waiting threads.
    waiters: HashMap<u64, Vec<Point>>,
    /// Number of calls of the host that queue or wait.
    calls: u64,
    /// Time when the last operation ended.
    progressed: Instant,
}

impl Core {
    /// Returns the operations that this thread knows to have ended.
    pub(crate) fn known(&self) -> Clock {
        let mut clock = self.host.clone();
        if let Some(learnt) = self.learnt.get(&thread()) {
            clock.join(learnt);
        }
        clock
    }

    /// Records that the host has waited for the operations in `clock`.
    pub(crate) fn host_joins(&mut self, clock: &Clock) {
        self.host.join(clock);
    }

    /// Records that this thread knows the operations in `clock` to have ended.
    pub(crate) fn thread_learns(&mut self, clock: &Clock) {
        self.learnt.entry(thread()).or_default().join(clock);
    }

    pub(crate) fn name(&self, stream: usize) -> String {
        self.streams.get(stream).name.clone()
    }

    /// Checks and records a use of memory by the next operation of a stream, after `prepare`.
    pub(crate) fn touch(&mut self, stream: usize, what: &str, touch: Touch, verb: &str) -> Result<(), Fault> {
        if touch.at == 0 {
            return Ok(());
        }
        let streams = &self.streams;
        let this = streams.get(stream);
        let one = Use { stream, number: this.queued + 1, what: what.into(), access: touch.access };
        let name = |stream: usize| streams.get(stream).name.clone();
        self.allocations.touch(touch.at, one, &this.clock, verb, &name)
    }

    /// Prepares a stream for the next operation, `what`. Returns the ends of other streams' operations that come first.
    pub(crate) fn prepare(&mut self, stream: usize, what: &str) -> Result<Vec<Point>, Fault> {
        if IN_OPERATION.get() {
            return Err(Fault(format!(
                "`{what}` was called from inside an operation of a stream, where CUDA forbids it"
            )));
        }
        self.calls += 1;
        let mut clock = self.known();
        let implied = self.streams.implied(stream);
        implied.iter().for_each(|point| clock.join(&self.streams.get(point.stream).clock));
        self.streams.get_mut(stream).clock.join(&clock);
        Ok(implied.into_iter().filter(|point| !self.streams.reached(*point)).collect())
    }

    /// Appends an operation to a stream.
    pub(crate) fn push(
        &mut self,
        stream: usize,
        what: &str,
        after: Vec<Point>,
        run: Run,
        retires: Option<(u64, usize)>,
    ) -> Point {
        let this = self.streams.get_mut(stream);
        this.queued += 1;
        this.clock.advance(stream, this.queued);
        let point = Point { stream, number: this.queued };
        let behind = if self.settings.one_queue { self.last.insert(this.context, point) } else { None };
        let run = Some(run);
        let entry = Entry { what: what.into(), after, behind, run, has_begun: false, waits: false, retires };
        this.queue.push_back(entry);
        point
    }

    pub(crate) fn enqueue(&mut self, stream: usize, operation: Operation) -> Result<Point, Fault> {
        let Operation { name, touches, run } = operation;
        report::count(&format!("operation: {name}"));
        let after = self.prepare(stream, &name)?;
        for touch in touches {
            let verb = if touch.access == Access::Read { "reads" } else { "writes" };
            self.touch(stream, &name, touch, verb)?;
        }
        Ok(self.push(stream, &name, after, run, None))
    }

    fn reached(&self, goals: &[Point]) -> bool {
        goals.iter().all(|goal| self.streams.reached(*goal))
    }

    /// Returns the stream that continues next, or `None` if all ready streams wait for other processes.
    fn pick(&mut self, goals: &[Point]) -> Option<usize> {
        let asked = |streams: &Streams, stream: &usize| streams.get(*stream).queue[0].waits;
        let mut ready = self.streams.ready_for(goals);
        ready.retain(|stream| !asked(&self.streams, stream));
        if ready.is_empty() || self.schedule.runs_ahead() {
            ready = self.streams.ready();
            ready.retain(|stream| !asked(&self.streams, stream));
        }
        (!ready.is_empty()).then(|| self.schedule.choose(&ready))
    }

    /// Lets operations that wait for other processes be called again.
    fn call_again(&mut self) {
        for stream in self.streams.ready() {
            self.streams.get_mut(stream).queue[0].waits = false;
        }
    }

    /// Describes the state of each stream, for messages.
    fn state(&self) -> String {
        let busy = self.streams.all().filter_map(|(_, stream)| Some((stream, stream.queue.front()?)));
        let lines = busy.map(|(stream, first)| {
            let more = stream.queue.len() - 1;
            let for_whom = match first.after.iter().find(|point| !self.streams.reached(**point)) {
                Some(point) => format!("waits for {}", self.name(point.stream)),
                None if first.run.is_none() => "is running".into(),
                None => "waits for other processes, or for its turn".into(),
            };
            format!("{}: `{}` {for_whom}, and {more} more", stream.name, first.what)
        });
        lines.collect::<Vec<_>>().join("; ")
    }
}

pub(crate) struct Machine {
    core: Mutex<Core>,
    /// An operation has ended.
    ended: Condvar,
    /// A waiting thread's goals are reached, or no thread drives.
    reached: Condvar,
}

impl Machine {
    pub(crate) fn new(settings: Settings) -> Self {
        let core = Core {
            streams: Streams::default(),
            events: HashMap::new(),
            allocations: Allocations::default(),
            accounts: (0..settings.devices).map(|_| Account::new(settings.memory, settings.segment)).collect(),
            legacy: HashMap::new(),
            per_thread: HashMap::new(),
            schedule: Schedule::new(settings.seed, report::rank()),
            last: HashMap::new(),
            host: Clock::default(),
            learnt: HashMap::new(),
            executing: false,
            is_driven: false,
            waiters: HashMap::new(),
            calls: 0,
            progressed: Instant::now(),
            settings,
        };
        Self { core: Mutex::new(core), ended: Condvar::new(), reached: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs operations until `goals` are reached. `asked` is the waiting function, for messages.
    pub(crate) fn drive(&self, goals: &[Point], asked: &str) -> Result<(), Fault> {
        if IN_OPERATION.get() {
            return Err(Fault(format!(
                "deadlock: `{asked}` was called from inside an operation of a stream, which it waits for"
            )));
        }
        let mut core = self.lock();
        core.calls += 1;
        let waiter = core.calls;
        while !core.reached(goals) && core.is_driven {
            core.waiters.insert(waiter, goals.to_vec());
            core = self.reached.wait_timeout(core, IDLE).unwrap_or_else(PoisonError::into_inner).0;
        }
        core.waiters.remove(&waiter);
        if core.reached(goals) {
            return Ok(());
        }
        core.is_driven = true;
        let driven = self.drive_alone(core, goals, asked).map(drop);
        self.lock().is_driven = false;
        // One of the others drives now.
        self.reached.notify_all();
        driven
    }

    /// [`Self::drive`] of the one thread that runs operations while others wait. Several would wake each other with each
    /// operation.
    fn drive_alone<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        goals: &[Point],
        asked: &str,
    ) -> Result<MutexGuard<'a, Core>, Fault> {
        let begun = Instant::now();
        while !core.reached(goals) {
            let next = if core.executing { None } else { core.pick(goals) };
            if let Some(stream) = next {
                core = self.step(core, stream)?;
                continue;
            }
            if core.progressed.max(begun).elapsed() > core.settings.stall {
                let (stall, state) = (core.settings.stall, core.state());
                return Err(Fault(format!("deadlock: `{asked}` has waited {stall:?}, and nothing ended. {state}")));
            }
            core = self.pause(core);
        }
        Ok(core)
    }

    /// Pauses while another thread's operation runs, or while all ready streams wait for other processes. These are
    /// called again afterwards.
    fn pause<'a>(&'a self, core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        let mut core = self.ended.wait_timeout(core, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
        core.call_again();
        core
    }

    /// Returns whether `goals` are reached. Sometimes runs an operation, so that a polling loop ends.
    pub(crate) fn query(&self, goals: &[Point]) -> Result<bool, Fault> {
        let mut core = self.lock();
        if !core.reached(goals) && !core.executing && !IN_OPERATION.get() && core.schedule.one_in(2) {
            match core.pick(goals) {
                Some(stream) => core = self.step(core, stream)?,
                None => core.call_again(),
            }
        }
        Ok(core.reached(goals))
    }

    /// Runs the first operation of a stream, or calls it again.
    fn step<'a>(&'a self, mut core: MutexGuard<'a, Core>, stream: usize) -> Result<MutexGuard<'a, Core>, Fault> {
        let entry = &mut core.streams.get_mut(stream).queue[0];
        let mut run = entry.run.take().expect("one operation runs at a time");
        entry.has_begun = true;
        core.executing = true;
        drop(core);
        IN_OPERATION.set(true);
        let progress = std::panic::catch_unwind(AssertUnwindSafe(&mut run));
        IN_OPERATION.set(false);
        let mut core = self.lock();
        core.executing = false;
        let this = core.streams.get_mut(stream);
        match progress {
            Err(_) => {
                return Err(Fault(format!("`{}` on {} panicked", this.queue[0].what, this.name)));
            }
            Ok(Progress::Waits) => {
                this.queue[0].run = Some(run);
                this.queue[0].waits = true;
            }
            Ok(Progress::Done) => {
                let retires = this.queue.pop_front().and_then(|entry| entry.retires);
                this.done += 1;
                core.progressed = Instant::now();
                if let Some((base, len)) = retires {
                    core.retire(base, len)?;
                }
            }
        }
        if core.waiters.values().any(|goals| core.reached(goals)) {
            self.reached.notify_all();
        }
        self.ended.notify_all();
        Ok(core)
    }

    /// Waits for all streams of this thread's context. The host learns nothing.
    pub(crate) fn wait_for_context(&self, asked: &str) -> Result<(), Fault> {
        let Some(context) = current() else { return Ok(()) };
        let core = self.lock();
        let of_context = core.streams.all().filter(|(_, stream)| stream.context == context);
        let goals: Vec<_> = of_context.map(|(place, _)| core.streams.end(place)).collect();
        drop(core);
        self.drive(&goals, asked)
    }

    /// Waits for all streams of this thread's context in some schedules. For calls in which CUDA may wait for the
    /// device. The host can't rely on the wait, so it learns nothing.
    pub(crate) fn may_synchronize(&self, asked: &str) -> Result<(), Fault> {
        let mut core = self.lock();
        if core.settings.seed == 0 || !core.schedule.one_in(2) {
            return Ok(());
        }
        drop(core);
        self.wait_for_context(asked)
    }

    /// Continues streams while the host calls nothing. Never returns.
    pub(crate) fn run_in_background(&self) -> ! {
        let mut seen = 0;
        loop {
            std::thread::sleep(IDLE);
            let mut core = self.lock();
            while core.calls == seen && !core.is_driven && !core.executing && !core.streams.ready().is_empty() {
                if let Some(stream) = core.pick(&[]) {
                    core = self.step(core, stream).unwrap_or_else(|fault| report::fault(fault.0));
                } else {
                    core = self.pause(core);
                }
            }
            seen = core.calls;
        }
    }
}

impl Core {
    /// Moves freed memory to the quarantine after its streams have reached the free.
    pub(crate) fn retire(&mut self, base: u64, len: usize) -> Result<(), Fault> {
        // SAFETY: the memory is freed, but not released.
        if !unsafe { bytes::guard_is_whole(base, len) } {
            return Err(Fault(format!("something wrote beyond the end of {len} bytes of memory at {base:#x}")));
        }
        for (base, len) in self.allocations.retire(base, len) {
            // SAFETY: the memory was freed, the operations that used it have run, and the registry has forgotten it.
            unsafe { bytes::release(base, len) };
        }
        Ok(())
    }
}

/// Returns the process's machine.
pub(crate) fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let settings = Settings::from_env().unwrap_or_else(|wrong| report::fault(wrong));
        // SAFETY: the function belongs to this library, which is not unloaded before the process ends.
        unsafe { libc::atexit(at_exit) };
        std::thread::spawn(|| machine().run_in_background());
        Machine::new(settings)
    })
}

extern "C" fn at_exit() {
    let seed = Settings::from_env().map_or(0, |settings| settings.seed);
    report::write(seed);
}

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the device of this thread's context. There is one context for each device, the primary one, and it is never
/// reset.
pub(crate) fn current() -> Option<usize> {
    CURRENT.get()
}

pub(crate) fn set_current(device: Option<usize>) {
    CURRENT.set(device);
}

/// A seeded choice of streams.
#[derive(Debug)]
pub(crate) struct Schedule {
    seed: u64,
    state: u64,
    /// Number of times that the priorities have changed.
    epoch: u64,
}

impl Schedule {
    pub(crate) fn new(seed: u64, rank: u64) -> Self {
        let seed = if seed == 0 { 0 } else { mix(seed).wrapping_add(rank) };
        Self { seed, state: mix(seed), epoch: 0 }
    }

    /// Returns true for about one in `of` calls.
    pub(crate) fn one_in(&mut self, of: u64) -> bool {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state).is_multiple_of(of)
    }

    /// Returns whether an operation should run before anything waits for it.
    pub(crate) fn runs_ahead(&mut self) -> bool {
        self.seed != 0 && self.one_in(4)
    }

    /// Chooses one of `streams`, which must not be empty.
    pub(crate) fn choose(&mut self, streams: &[usize]) -> usize {
        let first = streams.iter().copied().min().expect("there is one at least");
        if self.seed == 0 {
            return first;
        }
        if self.one_in(64) {
            self.epoch += 1;
        }
        if self.one_in(8) {
            let place = mix(self.state ^ self.seed) % streams.len() as u64;
            return streams[place as usize];
        }
        let priority = |stream: &usize| mix(mix(self.seed ^ mix(self.epoch)) ^ *stream as u64);
        streams.iter().copied().max_by_key(priority).unwrap_or(first)
    }
}

/// Mixes bits as SplitMix64 does.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_selects_a_schedule() {
        let run = |seed, rank| {
            let mut schedule = Schedule::new(seed, rank);
            (0..200).map(|_| schedule.choose(&[3, 1, 2])).collect::<Vec<_>>()
        };
        assert_eq!(run(7, 0), run(7, 0));
        assert_ne!(run(7, 0), run(8, 0));
        assert_ne!(run(7, 0), run(7, 1));
        assert!(run(0, 1).iter().all(|stream| *stream == 1));
        for stream in 1..=3 {
            assert!((1..20).all(|seed| run(seed, 0).contains(&stream)), "each stream has its turn");
        }
    }
}
