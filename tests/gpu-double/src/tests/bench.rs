//! A machine with helpers for tests.

use std::time::Duration;

use crate::{
    machine::{Machine, Settings, TOOLKIT, set_current},
    status::{Fault, Refusal},
    streams::{Access, Operation, Progress, Touch},
};

/// A machine with a schedule, used from this thread.
pub(super) struct Bench(pub(super) Machine);

/// Device memory of four floats.
pub(super) type Floats = u64;
pub(super) const LEN: usize = 16;

pub(super) fn fault<T: std::fmt::Debug>(result: Result<T, Refusal>) -> String {
    match result {
        Err(Refusal::Fault(Fault(message))) => message,
        other => panic!("{other:?} is no fault"),
    }
}

impl Bench {
    pub(super) fn new(seed: u64) -> Self {
        Self::with_queues(seed, false)
    }

    pub(super) fn with_queues(seed: u64, one_queue: bool) -> Self {
        set_current(Some(0));
        let settings = Settings {
            devices: 2,
            memory: 1 << 20,
            segment: 4096,
            seed,
            stall: Duration::from_millis(50),
            driver: TOOLKIT,
            capability: 90,
            one_queue,
        };
        Self(Machine::new(settings))
    }

    pub(super) fn stream(&self) -> usize {
        self.0.create_stream(true).unwrap()
    }

    pub(super) fn floats(&self, stream: usize) -> Floats {
        self.0.allocate(LEN, Some(stream), "cuMemAllocAsync").unwrap()
    }

    /// Returns an operation that sets `to` to `f` of `from`, element by element.
    pub(super) fn map(
        &self,
        stream: usize,
        name: &str,
        from: Floats,
        to: Floats,
        f: fn(f32) -> f32,
    ) -> Result<(), Refusal> {
        let touches = vec![Touch { at: from, access: Access::Read }, Touch { at: to, access: Access::Write }];
        self.hidden(stream, name, touches, move || write(to, read(from).map(f)))
    }

    pub(super) fn set(&self, stream: usize, name: &str, to: Floats, value: f32) -> Result<(), Refusal> {
        let touches = vec![Touch { at: to, access: Access::Write }];
        self.hidden(stream, name, touches, move || write(to, [value; 4]))
    }

    /// Returns an operation that declares its memory in `touches`, or does not.
    pub(super) fn hidden(
        &self,
        stream: usize,
        name: &str,
        touches: Vec<Touch>,
        mut run: impl FnMut() + Send + 'static,
    ) -> Result<(), Refusal> {
        let run = Box::new(move || {
            run();
            Progress::Done
        });
        self.0.enqueue(stream, Operation { name: name.into(), touches, run }).map(|_| ())
    }

    pub(super) fn record(&self, stream: usize) -> u64 {
        let event = self.0.create_event().unwrap();
        self.0.record(event, stream).unwrap();
        event
    }

    /// Makes `later` wait for the operations on `earlier` so far.
    pub(super) fn join(&self, later: usize, earlier: usize) {
        let event = self.record(earlier);
        self.0.wait_event(later, event).unwrap();
        self.0.destroy_event(event).unwrap();
    }

    pub(super) fn synchronize(&self, stream: usize) {
        self.0.synchronize(stream, "cuStreamSynchronize").unwrap();
    }
}

pub(super) fn read(at: Floats) -> [f32; 4] {
    // SAFETY: `Bench::floats` allocated it.
    unsafe { (at as *const [f32; 4]).read_unaligned() }
}

pub(super) fn write(at: Floats, values: [f32; 4]) {
    // SAFETY: `Bench::floats` allocated it.
    unsafe { (at as *mut [f32; 4]).write_unaligned(values) }
}
