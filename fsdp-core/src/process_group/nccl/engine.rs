//! The engine: collectives enqueued on a stream of their own.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, result};

use super::{
    super::{
        backend::Promises, collective::Collective, device_memory::read, failure::Failure, fence::Running,
        group::ProcessGroup, group_store::GroupStore, landing::CollectiveOutput, on_device::DeviceEngine, parts::Op,
    },
    communicator::Communicator,
    flight::Flight,
    meet,
    plan::Plan,
    transfer::ask_all,
    watchdog::Watchdog,
};
use crate::{
    DeviceId, Error, Result,
    device::cuda::{failed, id},
};

/// When ranks compare what they issue.
const CHECK: &str = "FSDP_NCCL_CHECK";

/// The engine that moves a CUDA device's memory by NCCL, one process a device. See
/// [`ProcessGroup::on_device`].
///
/// A collective costs the host no wait: it is enqueued on a stream of the group by the thread that issues it.
/// [`Work::wait`](crate::Work::wait) lets the device's compute stream wait for it, and not the host. Ranks compare what
/// they issue only where `FSDP_NCCL_CHECK=always` says so, and when the group's timeout is over.
///
/// After an error the outputs of what was in flight have unspecified values, and every later collective of the group
/// gets the error.
pub struct Nccl {
    // Before the communicator, which it looks after.
    watchdog: Watchdog,
    communicator: Arc<Communicator>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    checks: bool,
    has_failed: bool,
}

impl Nccl {
    /// The engine of a device, which computes on `compute`, for the ranks of `host`, each of which has a device of its
    /// own ([`ranks_sharing_devices`](super::super::ranks_sharing_devices)). Collective over the group; blocks.
    ///
    /// # Errors
    /// [`Error::Device`] when NCCL can't connect the ranks within the group's timeout, or refuses their devices, or
    /// the device refuses a stream; [`Error::PeerLost`] when a rank goes away meanwhile; [`Error::Env`] when
    /// `FSDP_NCCL_CHECK` has a value that there is none of.
    pub fn new(host: &ProcessGroup, compute: &Arc<CudaStream>) -> Result<Nccl> {
        let checks = checks(std::env::var(CHECK).ok())?;
        let _span = tracing::debug_span!("nccl_init", group = host.name(), ranks = host.size()).entered();
        let driver = |error: DriverError| failed(compute, "making a stream for communication", &error);
        compute.context().bind_to_thread().map_err(driver)?;
        // Its kernels are small and others wait for them.
        let (_least, greatest) = result::stream::get_priority_range().map_err(driver)?;
        let stream = compute.context().new_stream_with_priority(greatest).map_err(driver)?;
        let unique = meet::unique_id(&GroupStore::new(host), host, compute)?;
        let (group, lookout) = (host.membership(), host.lookout());
        let communicator = Arc::new(Communicator::meet(unique, group, compute, lookout.as_deref())?);
        meet::all_are_here(host)?;
        let watchdog = Watchdog::start(communicator.clone(), stream.clone(), group.clone(), lookout)?;
        Ok(Nccl { watchdog, communicator, compute: compute.clone(), stream, checks, has_failed: false })
    }

    fn driver<T>(&self, what: &str, outcome: Result<T, DriverError>) -> Result<T> {
        outcome.map_err(|error| failed(&self.stream, what, &error))
    }

    /// Enqueues what was planned.
    fn enqueue(&self, collective: &Collective<'_>, plan: Plan) -> Result<CollectiveOutput> {
        let Plan { transfers, outputs, inputs, consumed } = plan;
        // From here on inputs are ready, and outputs, which belong to the compute stream, are free: whatever used them
        // before has been issued there.
        let begin = self.driver("recording an event", self.compute.record_event(None))?;
        self.driver("waiting for the compute stream", self.stream.wait(&begin))?;
        for input in &inputs {
            read(&**input, collective.group().rank, |view| view.order(&self.stream))?;
        }
        let what = format!("{collective} of group \"{}\"", collective.group().name);
        let stream = self.stream.cu_stream();
        let asked = if transfers.is_empty() {
            Ok(())
        } else {
            let bytes: usize = transfers.iter().map(|transfer| transfer.count * transfer.dtype.size()).sum();
            let _span = tracing::trace_span!("nccl", calls = transfers.len(), bytes).entered();
            // SAFETY: what is at the addresses is in the plan, and stays until the compute stream waits for the end.
            self.communicator.as_one(&what, |communicator| unsafe { ask_all(&transfers, communicator, stream) })
        };
        if let Err(error) = &asked {
            // Some of it may run already.
            self.communicator.abort(error.clone());
        }
        let communicator = self.communicator.clone();
        let mut running =
            Running::on(&self.stream, &self.compute)?.keeping(inputs).unless(move || communicator.check());
        if let Some((inputs, memory)) = consumed {
            running = running.giving_back(inputs, &memory);
        }
        let end = running.end().clone();
        let landing = CollectiveOutput::behind(outputs, Box::new(running));
        asked?;
        self.watchdog.watch(Flight::new(collective, begin, end.clone()));
        if self.checks {
            // Else what this thread issues, later than its rank did, could wait by the compute stream for a collective
            // of another group that a peer issues behind this one.
            self.driver("waiting for a collective", end.synchronize())?;
        }
        Ok(landing)
    }
}

fn checks(value: Option<String>) -> Result<bool> {
    match value.as_deref() {
        None | Some("timeout") => Ok(false),
        Some("always") => Ok(true),
        Some(other) => Err(Error::Env(format!(
            "{CHECK}={other:?}: choose \"always\", to compare what ranks issue before each collective, or \"timeout\", \
             to compare it when a collective does not end"
        ))),
    }
}

/// Compares what all ranks issue, over the host's group. It is no collective of that group's.
fn compare(collective: &Collective<'_>, host: &ProcessGroup) -> Result<()> {
    let (call, group, sequence) = (collective.call().clone(), collective.group().clone(), collective.sequence());
    host.aside(call.clone(), move |backend, _| {
        backend.run(&Collective::new(&call, &group, sequence, true), Op::Barrier).map(drop)
    })
}

impl DeviceEngine for Nccl {
    fn device(&self) -> DeviceId {
        id(&self.compute)
    }

    /// It adds up in the buffers' dtype, in an order of its own.
    fn promises(&self, host: Promises) -> Promises {
        Promises { fixed_order: false, f32_sums: false, ..host }
    }

    /// A rank that compares waits for its peers, which may issue the collectives of two groups in another order than it
    /// does: the group's thread waits then, and not the thread that issues. It also waits for the collective's end.
    fn runs_when_issued(&self) -> bool {
        !self.checks
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op, host: &ProcessGroup) -> Result<CollectiveOutput> {
        self.communicator.check()?;
        if self.checks {
            compare(collective, host)?;
        }
        self.driver("using the device", self.stream.context().bind_to_thread())?;
        self.enqueue(collective, Plan::of(op, collective.group().rank)?)
    }

    /// A communicator of its own, met for anew. `ncclCommSplit` is for all ranks of the group that is split, but those
    /// that end alone take part in no more, and each of the new groups is made at its own time.
    fn split(&mut self, _: &Collective<'_>, _: &[usize], host: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
        Ok(Box::new(Nccl::new(host, &self.compute)?))
    }

    /// What is on its way may still end well, with the peers' help; the watchdog sees to it if not.
    fn fail(&mut self, _: &Failure) {
        self.has_failed = true;
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.watchdog.drain();
        match self.communicator.check() {
            Ok(()) if self.has_failed => {
                let why = "this rank takes part in its group no more".to_string();
                let what = "ending a collective".to_string();
                self.communicator.abort(Error::Device { device: self.communicator.device, what, cause: why });
            }
            Ok(()) => self.communicator.part(),
            // The watchdog gave it up.
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_is_chosen_by_name() {
        let of = |value: &str| checks(Some(value.into()));
        assert_eq!((checks(None).unwrap(), of("timeout").unwrap(), of("always").unwrap()), (false, false, true));
        let error = of("sometimes").unwrap_err().to_string();
        assert!(error.contains("FSDP_NCCL_CHECK=\"sometimes\": choose \"always\""), "{error}");
    }
}
