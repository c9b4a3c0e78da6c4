//! The NCCL engine: enqueues the NCCL calls of a collective on a stream of its own.

use std::sync::Arc;

use cudarc::driver::{
    CudaStream, DriverError, result,
    sys::{CUdeviceptr, CUstreamCaptureStatus},
};

use super::{
    super::{
        backend::{CollectiveOutput, Guarantees},
        call::Call,
        collective::{Collective, Failure},
        device_memory::{Running, read},
        group::ProcessGroup,
        group_store::GroupStore,
        on_device::DeviceEngine,
        op::Op,
        options::Membership,
    },
    communicator::{self, Communicator, device_error},
    communicators::Communicators,
    plan::{Copy, Kind, Plan, Transfer, ask_all, registered_bytes},
    registered_memory::{self, RegisteredMemory},
    watchdog::{PendingCollective, Watchdog},
};
use crate::{
    Buffer, DType, DeviceId, Error, ReduceOp, Result,
    device::cuda::{CudaMemory, failed, id, return_unused_memory},
};

/// Environment variable that chooses when ranks compare what they issue.
const CHECK: &str = "FSDP_NCCL_CHECK";

/// CUDA's variable of the number of a device's queues for work of all streams.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Bytes of each rank's share in the collectives that connect the ranks.
const CONNECT_BYTES: usize = 256;

/// Engine that moves CUDA memory by NCCL, with one process for each device. See [`ProcessGroup::on_device`].
///
/// The issuing thread enqueues a collective on a stream of the group, and does not block.
/// [`Work::wait`](crate::Work::wait) makes the compute stream wait for it. Ranks compare what they issue if
/// `FSDP_NCCL_CHECK=always`, and after the group's timeout.
///
/// After an error the outputs of pending collectives are unspecified, and all later collectives return the error.
pub struct Nccl {
    // Dropped before the communicator, which it watches.
    watchdog: Watchdog,
    communicator: Arc<Communicator>,
    registered: RegisteredMemory,
    /// All of this rank's.
    communicators: Arc<Communicators>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    checks: bool,
    has_failed: bool,
}

impl Nccl {
    /// Creates the engine of the device that computes on `compute`. Collective over `host`; blocks.
    ///
    /// NCCL accepts the devices of all ranks of `host` ([`ranks_nccl_refuses`](super::super::ranks_nccl_refuses)).
    ///
    /// When a collective fails, NCCL ends its group's work on the device. If that takes longer than a second, because
    /// work of other groups blocks it, all groups split from `host`, and `host`'s, fail with the same error. If NCCL can't
    /// end their work within another 5 s, the process ends: threads that wait for the device could not.
    ///
    /// # Errors
    /// [`Error::Device`] if NCCL cannot connect the ranks within the group's timeout or refuses their devices, or the
    /// device refuses a stream. [`Error::PeerLost`] if a rank is lost meanwhile. [`Error::Env`] if `FSDP_NCCL_CHECK` is
    /// invalid. A group split from `host` also fails with `FSDP_NCCL_CHECK=always` and `CUDA_DEVICE_MAX_CONNECTIONS=1`.
    pub fn new(host: &ProcessGroup, compute: &Arc<CudaStream>) -> Result<Nccl> {
        Self::among(Arc::default(), host, compute)
    }

    /// Creates the engine of a group among others.
    fn among(communicators: Arc<Communicators>, host: &ProcessGroup, compute: &Arc<CudaStream>) -> Result<Nccl> {
        let connections = if communicators.is_empty() { None } else { std::env::var(CONNECTIONS).ok() };
        let checks = checks(std::env::var(CHECK).ok(), connections)?;
        let _span = tracing::debug_span!("nccl_init", group = host.name(), ranks = host.size()).entered();
        let driver = |error: DriverError| failed(compute, "making a stream for communication", &error);
        compute.context().bind_to_thread().map_err(driver)?;
        // High priority: its kernels are small, and others wait for them.
        let (_least, greatest) = result::stream::get_priority_range().map_err(driver)?;
        let stream = compute.context().new_stream_with_priority(greatest).map_err(driver)?;
        // NCCL allocates memory of its own.
        return_unused_memory(compute)?;
        let unique = communicator::unique_id(&GroupStore::new(host), host, compute)?;
        let (group, peer_monitor) = (host.membership(), host.peer_monitor());
        let communicator = Arc::new(Communicator::meet(unique, group, compute, peer_monitor.as_deref())?);
        communicator::all_are_here(host)?;
        communicators.add(&communicator, peer_monitor.clone());
        let all = communicators.clone();
        let watchdog = Watchdog::start(communicator.clone(), all, stream.clone(), group.clone(), peer_monitor)?;
        let compute = compute.clone();
        let registered = RegisteredMemory::new(communicator.clone(), compute.clone());
        let engine =
            Nccl { watchdog, communicator, registered, communicators, compute, stream, checks, has_failed: false };
        engine.connect(group)?;
        Ok(engine)
    }

    /// Runs one collective of each kind. NCCL connects ranks, and allocates memory, when it first needs an algorithm: so
    /// this happens before the model and its activations take the memory, and before a step is measured.
    fn connect(&self, group: &Membership) -> Result<()> {
        let share = CONNECT_BYTES / size_of::<f32>();
        let memory = CudaMemory::zeros(&self.compute, DType::F32, group.size * share)?;
        let to = memory.view().address();
        let own = to + (group.rank * CONNECT_BYTES) as CUdeviceptr;
        let kinds = [
            (share, Kind::AllGather { from: own, to }),
            (share, Kind::ReduceScatter { from: to, to: own, op: ReduceOp::Sum }),
            (memory.len(), Kind::AllReduce { at: to, op: ReduceOp::Sum }),
            (memory.len(), Kind::Broadcast { from: to, to, root: 0 }),
        ];
        let call = Call::without_parts("connect", "NCCL");
        for (count, kind) in kinds {
            let transfers = vec![Transfer { dtype: DType::F32, count, kind }];
            let collective = Collective::new(&call, group, 0, false);
            self.enqueue(&collective, Plan { transfers, ..Plan::default() })?;
        }
        // Returns also after an abort.
        self.driver("connecting by NCCL", self.compute.synchronize())?;
        self.communicator.check()
    }

    fn driver<T>(&self, what: &str, outcome: Result<T, DriverError>) -> Result<T> {
        outcome.map_err(|error| failed(&self.stream, what, &error))
    }

    /// Enqueues a plan.
    fn enqueue(&self, collective: &Collective<'_>, plan: Plan) -> Result<CollectiveOutput> {
        let Plan { transfers, before, after, padded, outputs, mut inputs, consumed, .. } = plan;
        let what = format!("{collective} of group \"{}\"", collective.group().name);
        let captures = self.driver("asking whether a graph is captured", self.compute.capture_status())?;
        if captures != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let cause = "the device's compute stream is captured into a CUDA graph. A graph can't contain collectives: \
                         end the capture before the first, or capture only what is between two";
            return Err(device_error(id(&self.compute), &what, cause.into()));
        }
        // Inputs are ready once the compute stream has come here, and outputs, which belong to it, are free: their
        // earlier uses were issued on it.
        let begin = self.driver("recording an event", self.compute.record_event(None))?;
        self.driver("waiting for the compute stream", self.stream.wait(&begin))?;
        let mut waited = None;
        for input in &inputs {
            read(&**input, collective.group().rank, |view| view.order_with(&self.stream, &mut waited))?;
        }
        let stream = self.stream.cu_stream();
        let run = |copies: &[Copy]| {
            // SAFETY: the plan has the memory, as below.
            copies.iter().try_for_each(|copy| self.driver("copying a padded share", unsafe { copy.run(stream) }))
        };
        run(&before)?;
        let asked = if transfers.is_empty() {
            Ok(())
        } else {
            let bytes: usize = transfers.iter().map(|transfer| transfer.count * transfer.dtype.size()).sum();
            let _span = tracing::trace_span!("nccl", calls = transfers.len(), bytes).entered();
            // SAFETY: the plan has the memory, which stays until the compute stream waits for the end.
            self.communicator.as_one(&what, |communicator| unsafe { ask_all(&transfers, communicator, stream) })
        };
        if let Err(error) = &asked {
            // Some of it may be running already.
            self.communicators.abort(&self.communicator, error);
        }
        // Also after an error: the memory must stay until the stream is past this.
        let copied = asked.and_then(|()| run(&after));
        inputs.extend(padded.into_iter().map(|memory| Arc::new(Buffer::Cuda(memory)) as _));
        let communicator = self.communicator.clone();
        let mut running =
            Running::on(&self.stream, &self.compute)?.keeping(inputs).with_check(move || communicator.check());
        if let Some((inputs, memory)) = consumed {
            running = running.giving_back(inputs, &memory);
        }
        let end = running.end().clone();
        let output = CollectiveOutput::pending(outputs, Box::new(running));
        copied?;
        self.watchdog.watch(PendingCollective::new(collective, begin, end.clone()));
        if self.checks {
            // Otherwise later work of this thread could wait, on the compute stream, for a collective of another group
            // that a peer issues after this one.
            self.driver("waiting for a collective", end.synchronize())?;
        }
        Ok(output)
    }
}

/// Returns whether ranks compare each collective first. `connections` is CUDA's number of queues, where other groups use
/// the device.
fn checks(value: Option<String>, connections: Option<String>) -> Result<bool> {
    match value.as_deref() {
        None | Some("timeout") => Ok(false),
        // The groups' threads enqueue in different orders on different ranks.
        Some("always") if connections.as_deref() == Some("1") => Err(Error::Env(format!(
            "{CHECK}=always with {CONNECTIONS}=1: with one queue, collectives of several groups could wait for each other. \
             Unset {CONNECTIONS} while you use {CHECK}=always"
        ))),
        Some("always") => Ok(true),
        Some(other) => Err(Error::Env(format!(
            "{CHECK}={other:?}: choose \"always\", to compare what ranks issue before each collective, or \"timeout\", \
             to compare it when a collective does not end"
        ))),
    }
}

/// Compares what all ranks issue over the host group, without counting a collective of it.
fn compare(collective: &Collective<'_>, host: &ProcessGroup) -> Result<()> {
    host.run_uncounted(collective.call(), |backend, _| {
        let here = Collective::new(collective.call(), collective.group(), collective.sequence(), true);
        backend.run(&here, Op::Barrier).map(drop)
    })
}

impl DeviceEngine for Nccl {
    fn device(&self) -> DeviceId {
        id(&self.compute)
    }

    /// NCCL adds in the buffers' dtype and in an order of its own.
    fn guarantees(&self, host: Guarantees) -> Guarantees {
        Guarantees { fixed_order: false, f32_accumulation: false, ..host }
    }

    /// False if ranks compare: a comparing rank waits for its peers, which may issue the collectives of two groups in
    /// another order. Then the group's thread waits, and it also waits for the collective's end.
    fn runs_when_issued(&self) -> bool {
        !self.checks
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op, host: &ProcessGroup) -> Result<CollectiveOutput> {
        self.communicator.check()?;
        if self.checks {
            compare(collective, host)?;
        }
        self.driver("using the device", self.stream.context().bind_to_thread())?;
        let rank = collective.group().rank;
        if !collective.call().uses_registered_memory() {
            return self.enqueue(collective, Plan::of(op, rank, None)?);
        }
        let memory = self.registered.take(registered_bytes(&op))?;
        let output = self.enqueue(collective, Plan::of(op, rank, Some(memory))?);
        // Also after an error: some of it may be running.
        let end = self.driver("recording an event", self.stream.record_event(None))?;
        self.registered.used_until(end);
        output
    }

    fn registers_memory(&self) -> Result<(), String> {
        registered_memory::support()
    }

    /// Creates a new communicator by a new rendezvous. `ncclCommSplit` would need all ranks of the old group, including
    /// those that end up alone, at the same time.
    fn split(&mut self, _: &Collective<'_>, _: &[usize], host: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
        Ok(Box::new(Nccl::among(self.communicators.clone(), host, &self.compute)?))
    }

    /// Pending collectives may still succeed with the peers' help. Otherwise the watchdog aborts them.
    fn fail(&mut self, _: &Failure) {
        self.has_failed = true;
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.watchdog.drain();
        match self.communicator.check() {
            Ok(()) if self.has_failed => {
                let why = "this rank left its group".to_string();
                let what = "ending a collective".to_string();
                self.communicator.abort(&Error::Device { device: self.communicator.device, what, cause: why });
            }
            Ok(()) => {
                self.registered.free();
                self.communicator.part();
            }
            // The watchdog aborted the communicator.
            Err(_) => {}
        }
        // After an abort.
        self.registered.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_is_chosen_by_name() {
        let of = |value: &str| checks(Some(value.into()), None);
        assert_eq!((checks(None, None).unwrap(), of("timeout").unwrap(), of("always").unwrap()), (false, false, true));
        let error = of("sometimes").unwrap_err().to_string();
        assert!(error.contains("FSDP_NCCL_CHECK=\"sometimes\": choose \"always\""), "{error}");
        let with = |connections: &str| checks(Some("always".into()), Some(connections.into()));
        assert!(with("8").unwrap());
        let error = with("1").unwrap_err().to_string();
        assert!(error.contains("Unset CUDA_DEVICE_MAX_CONNECTIONS"), "{error}");
    }
}
