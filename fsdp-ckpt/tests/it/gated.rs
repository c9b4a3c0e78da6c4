//! A process group whose subgroups do nothing until a gate is open.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fsdp_core::process_group::Signature;
use fsdp_core::{Allocator, Buffer, ExchangePart, GatherPart, ProcessGroup, ReduceOp, Result, ScatterPart, Work};

pub(crate) type Gate = Arc<(Mutex<bool>, Condvar)>;

pub(crate) struct Gated {
    inner: Arc<dyn ProcessGroup>,
    gate: Gate,
    behind: bool,
}

impl Gated {
    pub(crate) fn around(inner: Arc<dyn ProcessGroup>, gate: &Gate) -> Arc<dyn ProcessGroup> {
        Arc::new(Gated { inner, gate: Arc::clone(gate), behind: false })
    }

    fn pass(&self) -> &dyn ProcessGroup {
        if self.behind {
            let (open, opened) = &*self.gate;
            let limit = Duration::from_secs(60);
            let (_open, waited) = opened.wait_timeout_while(open.lock().unwrap(), limit, |open| !*open).unwrap();
            assert!(!waited.timed_out(), "nobody opened the gate");
        }
        &*self.inner
    }
}

impl ProcessGroup for Gated {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
    fn signed(&self, signature: Signature) -> Arc<dyn ProcessGroup> {
        let inner = self.inner.signed(signature);
        Arc::new(Gated { inner, gate: Arc::clone(&self.gate), behind: self.behind })
    }
    fn all_gather(&self, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        self.pass().all_gather(parts, memory)
    }
    fn reduce_scatter(&self, parts: Vec<ScatterPart>, op: ReduceOp, memory: Arc<dyn Allocator>) -> Work {
        self.pass().reduce_scatter(parts, op, memory)
    }
    fn all_reduce(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Work {
        self.pass().all_reduce(buffers, op)
    }
    fn broadcast(&self, buffers: Vec<Buffer>, root: usize) -> Work {
        self.pass().broadcast(buffers, root)
    }
    fn all_to_all(&self, parts: Vec<ExchangePart>, memory: Arc<dyn Allocator>) -> Work {
        self.pass().all_to_all(parts, memory)
    }
    fn barrier(&self) -> Work {
        self.pass().barrier()
    }
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn ProcessGroup>> {
        let inner = self.pass().split(color, key)?;
        Ok(Arc::new(Gated { inner, gate: Arc::clone(&self.gate), behind: true }))
    }
}
