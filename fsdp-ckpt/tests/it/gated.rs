//! A process group whose subgroups block until a gate opens.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fsdp_core::process_group::{
    Backend, Collective, CollectiveOutput, Failure, Guarantees, Membership, Op, Options, local,
};
use fsdp_core::{DeviceId, ProcessGroup, Result};

pub(crate) type Gate = Arc<(Mutex<bool>, Condvar)>;

/// A backend of the rank that blocks.
struct Gated {
    inner: Box<dyn Backend>,
    gate: Gate,
    /// Whether this is a subgroup.
    behind: bool,
}

/// Creates a world of two ranks. Rank 1 blocks in every subgroup.
pub(crate) fn world(gate: &Gate) -> Vec<ProcessGroup> {
    let (options, member) = (Options::default(), |rank| Membership::world(rank, 2, Duration::from_secs(60)));
    let backends = local::backends(2, &options).unwrap().into_iter().enumerate();
    let gated = backends.map(|(rank, inner)| match rank {
        1 => Box::new(Gated { inner, gate: Arc::clone(gate), behind: false }),
        _ => inner,
    });
    gated.enumerate().map(|(rank, backend)| ProcessGroup::new(member(rank), backend).unwrap()).collect()
}

impl Gated {
    fn pass(&mut self) -> &mut dyn Backend {
        if self.behind {
            let (open, opened) = &*self.gate;
            let limit = Duration::from_secs(60);
            let (_open, waited) = opened.wait_timeout_while(open.lock().unwrap(), limit, |open| !*open).unwrap();
            assert!(!waited.timed_out(), "nobody opened the gate");
        }
        &mut *self.inner
    }
}

impl Backend for Gated {
    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    fn guarantees(&self) -> Guarantees {
        self.inner.guarantees()
    }
    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        self.pass().run(collective, op)
    }
    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let inner = self.pass().split(collective, ranks, group)?;
        Ok(Box::new(Gated { inner, gate: Arc::clone(&self.gate), behind: true }))
    }
    fn fail(&mut self, why: &Failure) {
        self.inner.fail(why);
    }
}
