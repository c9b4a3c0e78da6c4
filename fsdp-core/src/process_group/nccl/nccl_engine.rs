//! The NCCL engine: plans a collective as NCCL calls, and enqueues them on a stream of its own.

use std::sync::Arc;

use cudarc::{
    driver::{
        CudaStream, DriverError, result,
        sys::{CUdeviceptr, CUstream, CUstreamCaptureStatus},
    },
    nccl::sys::{self, ncclDataType_t, ncclRedOp_t, ncclResult_t},
};

use super::{
    super::{
        backend::{CollectiveOutput, Guarantees},
        call::Call,
        collective::{Collective, Failure},
        device_memory::{Running, address, read, take},
        group::ProcessGroup,
        group_store::GroupStore,
        on_device::DeviceEngine,
        op::{ExchangePart, GatherPart, Op, ScatterPart},
        options::Membership,
    },
    communicator::{self, Communicator, device_error, is_fine},
    communicators::Communicators,
    watchdog::{PendingCollective, Watchdog},
};
use crate::{
    Allocator, Buffer, DType, DeviceId, Error, Readable, ReduceOp, Result,
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
        let engine = Nccl { watchdog, communicator, communicators, compute, stream, checks, has_failed: false };
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
        let Plan { transfers, outputs, inputs, consumed } = plan;
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
        for input in &inputs {
            read(&**input, collective.group().rank, |view| view.order(&self.stream))?;
        }
        let stream = self.stream.cu_stream();
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
        let communicator = self.communicator.clone();
        let mut running =
            Running::on(&self.stream, &self.compute)?.keeping(inputs).with_check(move || communicator.check());
        if let Some((inputs, memory)) = consumed {
            running = running.giving_back(inputs, &memory);
        }
        let end = running.end().clone();
        let output = CollectiveOutput::pending(outputs, Box::new(running));
        asked?;
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
        self.enqueue(collective, Plan::of(op, collective.group().rank)?)
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
            Ok(()) => self.communicator.part(),
            // The watchdog aborted the communicator.
            Err(_) => {}
        }
    }
}

/// The NCCL calls of a collective, and the memory that must stay until they end.
#[derive(Default)]
struct Plan {
    pub(super) transfers: Vec<Transfer>,
    pub(super) outputs: Vec<Buffer>,
    /// Inputs that have other owners.
    pub(super) inputs: Vec<Arc<dyn Readable>>,
    /// Inputs to give back, with their allocator.
    pub(super) consumed: Option<(Vec<Buffer>, Arc<dyn Allocator>)>,
}

/// Returns the start of a rank's share in the concatenation of all ranks' shares.
fn starts(at: CUdeviceptr, dtype: DType, counts: &[usize]) -> impl Iterator<Item = (usize, CUdeviceptr, usize)> {
    let mut next = at;
    counts.iter().enumerate().map(move |(rank, &count)| {
        let start = next;
        next += (count * dtype.size()) as CUdeviceptr;
        (rank, start, count)
    })
}

/// Returns whether all ranks have equal shares.
fn is_even(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

impl Plan {
    /// Plans a collective, with outputs of its allocator.
    pub(super) fn of(op: Op, rank: usize) -> Result<Self> {
        let mut plan = Plan::default();
        match op {
            Op::AllGather { parts, memory } => {
                for part in parts {
                    plan.gather(part, &*memory, rank)?;
                }
            }
            Op::ReduceScatter { parts, op, memory } => {
                let mut inputs = vec![];
                for part in parts {
                    inputs.push(plan.scatter(part, op, &*memory, rank)?);
                }
                plan.consumed = Some((inputs, memory));
            }
            Op::AllToAll { parts, memory } => {
                let mut inputs = vec![];
                for part in parts {
                    inputs.push(plan.exchange(part, &*memory, rank)?);
                }
                plan.consumed = Some((inputs, memory));
            }
            Op::AllReduce { buffers, op } => {
                for buffer in &buffers {
                    let at = address(buffer, rank)?;
                    plan.ask(buffer.dtype(), buffer.len(), Kind::AllReduce { at, op });
                }
                plan.outputs = buffers;
            }
            Op::Broadcast { buffers, root } => {
                for buffer in &buffers {
                    let at = address(buffer, rank)?;
                    plan.ask(buffer.dtype(), buffer.len(), Kind::Broadcast { from: at, to: at, root });
                }
                plan.outputs = buffers;
            }
            // Messages are host memory, which another backend moves.
            Op::Gather(_) | Op::Scatter(_) | Op::Barrier => {}
        }
        Ok(plan)
    }

    fn ask(&mut self, dtype: DType, count: usize, kind: Kind) {
        if count > 0 {
            self.transfers.push(Transfer { dtype, count, kind });
        }
    }

    /// Equal shares use NCCL's all-gather. Unequal ones use a broadcast each, without padding and its copies.
    fn gather(&mut self, part: GatherPart, memory: &dyn Allocator, rank: usize) -> Result<()> {
        let GatherPart { input, counts } = part;
        let dtype = input.dtype();
        let own = counts[rank];
        let from = read(&*input, rank, |view| match own * dtype.size() {
            bytes if view.bytes() == bytes => Ok(view.address()),
            bytes => Err(Error::Argument {
                rank,
                message: format!("an input of {bytes} bytes shows {} of them", view.bytes()),
            }),
        })?;
        let output = Buffer::Cuda(take(memory, dtype, counts.iter().sum(), rank)?);
        let to = address(&output, rank)?;
        if is_even(&counts) {
            self.ask(dtype, own, Kind::AllGather { from, to });
        } else {
            for (root, to, count) in starts(to, dtype, &counts) {
                let from = if root == rank { from } else { to };
                self.ask(dtype, count, Kind::Broadcast { from, to, root });
            }
        }
        self.outputs.push(output);
        self.inputs.push(input);
        Ok(())
    }

    /// Equal shares use NCCL's reduce-scatter. Unequal ones use a reduction to each rank.
    fn scatter(&mut self, part: ScatterPart, op: ReduceOp, memory: &dyn Allocator, rank: usize) -> Result<Buffer> {
        let ScatterPart { input, counts } = part;
        let dtype = input.dtype();
        let from = address(&input, rank)?;
        let output = Buffer::Cuda(take(memory, dtype, counts[rank], rank)?);
        let own = address(&output, rank)?;
        if is_even(&counts) {
            self.ask(dtype, counts[rank], Kind::ReduceScatter { from, to: own, op });
        } else {
            for (root, from, count) in starts(from, dtype, &counts) {
                let to = if root == rank { own } else { 0 };
                self.ask(dtype, count, Kind::Reduce { from, to, op, root });
            }
        }
        self.outputs.push(output);
        Ok(input)
    }

    /// A rank's own share is also sent, to itself.
    fn exchange(&mut self, part: ExchangePart, memory: &dyn Allocator, rank: usize) -> Result<Buffer> {
        let ExchangePart { input, send_counts, recv_counts } = part;
        let dtype = input.dtype();
        let from = address(&input, rank)?;
        let output = Buffer::Cuda(take(memory, dtype, recv_counts.iter().sum(), rank)?);
        let to = address(&output, rank)?;
        for (peer, from, count) in starts(from, dtype, &send_counts) {
            self.ask(dtype, count, Kind::Send { from, peer });
        }
        for (peer, to, count) in starts(to, dtype, &recv_counts) {
            self.ask(dtype, count, Kind::Receive { to, peer });
        }
        self.outputs.push(output);
        Ok(input)
    }
}

/// A call of NCCL. Counts are in elements, and never 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Transfer {
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) kind: Kind,
}

/// Kind of a call, with its addresses. An address that this rank does not use is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    AllGather { from: CUdeviceptr, to: CUdeviceptr },
    ReduceScatter { from: CUdeviceptr, to: CUdeviceptr, op: ReduceOp },
    AllReduce { at: CUdeviceptr, op: ReduceOp },
    Broadcast { from: CUdeviceptr, to: CUdeviceptr, root: usize },
    Reduce { from: CUdeviceptr, to: CUdeviceptr, op: ReduceOp, root: usize },
    Send { from: CUdeviceptr, peer: usize },
    Receive { to: CUdeviceptr, peer: usize },
}

impl Transfer {
    /// Makes the call, within a group of calls.
    ///
    /// # Safety
    /// The communicator is alive, and the addresses have memory of the counts until the stream has run the call.
    pub(super) unsafe fn ask(&self, communicator: sys::ncclComm_t, stream: CUstream) -> ncclResult_t {
        let (dtype, count, stream) = (dtype(self.dtype), self.count, stream.cast());
        let source = |address: CUdeviceptr| address as *const std::ffi::c_void;
        let target = |address: CUdeviceptr| address as *mut std::ffi::c_void;
        // SAFETY: as the caller guarantees.
        unsafe {
            match self.kind {
                Kind::AllGather { from, to } => {
                    sys::ncclAllGather(source(from), target(to), count, dtype, communicator, stream)
                }
                Kind::ReduceScatter { from, to, op } => {
                    sys::ncclReduceScatter(source(from), target(to), count, dtype, how(op), communicator, stream)
                }
                Kind::AllReduce { at, op } => {
                    sys::ncclAllReduce(source(at), target(at), count, dtype, how(op), communicator, stream)
                }
                Kind::Broadcast { from, to, root } => {
                    sys::ncclBroadcast(source(from), target(to), count, dtype, root as i32, communicator, stream)
                }
                Kind::Reduce { from, to, op, root } => {
                    let root = root as i32;
                    sys::ncclReduce(source(from), target(to), count, dtype, how(op), root, communicator, stream)
                }
                Kind::Send { from, peer } => {
                    sys::ncclSend(source(from), count, dtype, peer as i32, communicator, stream)
                }
                Kind::Receive { to, peer } => {
                    sys::ncclRecv(target(to), count, dtype, peer as i32, communicator, stream)
                }
            }
        }
    }
}

/// Makes all calls, up to the first that fails.
///
/// # Safety
/// See [`Transfer::ask`].
unsafe fn ask_all(transfers: &[Transfer], communicator: sys::ncclComm_t, stream: CUstream) -> ncclResult_t {
    // SAFETY: as the caller guarantees.
    let mut answers = transfers.iter().map(|transfer| unsafe { transfer.ask(communicator, stream) });
    answers.find(|answer| !is_fine(*answer)).unwrap_or(ncclResult_t::ncclSuccess)
}

fn dtype(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
    }
}

fn how(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Product => ncclRedOp_t::ncclProd,
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
