//! Events: points in streams that others wait for.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use crate::{
    context,
    machine::{Core, Machine},
    operation::Progress,
    queue::{Event, Record},
    report,
    status::{INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, Refusal},
};

impl Core {
    /// What an event recorded last. Nothing if nothing was recorded: then nobody waits.
    fn recorded(&self, event: u64) -> Result<Option<Record>, Refusal> {
        self.events.get(&event).map(|event| event.record.clone()).ok_or(Refusal::Status(INVALID_HANDLE))
    }
}

impl Machine {
    pub(crate) fn create_event(&self, timing: bool) -> Result<u64, Refusal> {
        static NEXT: AtomicU64 = AtomicU64::new(0xe000_0000);
        let context = context::current().ok_or(Refusal::Status(INVALID_CONTEXT))?;
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        self.lock().events.insert(handle, Event { context, timing, record: None });
        Ok(handle)
    }

    /// Waits for what it recorded go on.
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
        let time = Arc::new(OnceLock::new());
        let stamp = time.clone();
        let run = Box::new(move || {
            stamp.get_or_init(Instant::now);
            Progress::Done
        });
        let point = core.push(stream, "cuEventRecord", after, run, None);
        let clock = core.streams.get(stream).clock.clone();
        let record = Some(Record { point, clock, time });
        core.events.entry(event).and_modify(|event| event.record = record);
        Ok(())
    }

    /// What is queued on `stream` from now on begins after what `event` has recorded by now.
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

    /// Milliseconds between the runs of two records.
    pub(crate) fn elapsed(&self, start: u64, end: u64) -> Result<f32, Refusal> {
        let core = self.lock();
        let time = |event: u64| {
            let timing = core.events.get(&event).is_some_and(|event| event.timing);
            let record = core.recorded(event)?.filter(|_| timing).ok_or(Refusal::Status(INVALID_HANDLE))?;
            record.time.get().copied().ok_or(Refusal::Status(NOT_READY))
        };
        Ok(time(end)?.duration_since(time(start)?).as_secs_f32() * 1e3)
    }
}
