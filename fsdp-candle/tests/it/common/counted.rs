//! Ranks as threads whose collectives are recorded.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fsdp_candle::World;
use fsdp_core::process_group::{
    Backend, Collective, CollectiveOutput, Failure, Guarantees, Membership, Op, Options, PeerMonitor, local,
};
use fsdp_core::{Buffer, DeviceId, ProcessGroup, Result};

/// The collectives of a rank in order, with the bytes of its input, and the number of groups that it has made.
#[derive(Clone, Default)]
pub(crate) struct Counts(Arc<Mutex<Vec<(&'static str, usize)>>>, Arc<AtomicUsize>);

impl Counts {
    /// The collectives since the last call.
    pub(crate) fn take(&self) -> Vec<(&'static str, usize)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// The names of these collectives.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.take().into_iter().map(|(name, _)| name).collect()
    }

    /// The number of groups that were split off so far.
    pub(crate) fn groups(&self) -> usize {
        self.1.load(Ordering::Relaxed)
    }
}

struct Counted {
    backend: Box<dyn Backend>,
    counts: Counts,
}

fn bytes(buffers: &[Buffer]) -> usize {
    buffers.iter().map(|buffer| buffer.len() * buffer.dtype().size()).sum()
}

impl Backend for Counted {
    fn device(&self) -> DeviceId {
        self.backend.device()
    }

    fn guarantees(&self) -> Guarantees {
        self.backend.guarantees()
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let one = |buffer: &Buffer| bytes(std::slice::from_ref(buffer));
        let count = match &op {
            Op::AllGather { parts, .. } => {
                ("all_gather", parts.iter().map(|part| part.input.len() * part.input.dtype().size()).sum())
            }
            Op::ReduceScatter { parts, .. } => ("reduce_scatter", parts.iter().map(|part| one(&part.input)).sum()),
            Op::AllReduce { buffers, .. } => ("all_reduce", bytes(buffers)),
            Op::Broadcast { buffers, .. } => ("broadcast", bytes(buffers)),
            Op::AllToAll { parts, .. } => ("all_to_all", parts.iter().map(|part| one(&part.input)).sum()),
            _ => ("other", 0),
        };
        self.counts.0.lock().unwrap().push(count);
        self.backend.run(collective, op)
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let backend = self.backend.split(collective, ranks, group)?;
        self.counts.1.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Counted { backend, counts: self.counts.clone() }))
    }

    fn fail(&mut self, why: &Failure) {
        self.backend.fail(why);
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        self.backend.peer_monitor()
    }
}

/// Runs a closure on each of several ranks as threads on the host, with the rank's recorded collectives.
pub(crate) fn counted<T: Send>(size: usize, f: impl Fn(World, Counts) -> T + Sync) -> Vec<T> {
    let timeout = Duration::from_secs(60);
    let backends = local::backends(size, &Options::default().with_timeout(timeout)).unwrap();
    std::thread::scope(|scope| {
        let start = |(rank, backend)| {
            let f = &f;
            scope.spawn(move || {
                let counts = Counts::default();
                let backend = Box::new(Counted { backend, counts: counts.clone() });
                f(World::of(ProcessGroup::new(Membership::world(rank, size, timeout), backend).unwrap()), counts)
            })
        };
        let threads: Vec<_> = backends.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
