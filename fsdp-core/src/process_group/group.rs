//! The process group: everything that its backends share, and helpers for small values.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::{
    backend::{Backend, Guarantees, PeerMonitor},
    call::Call,
    collective::Collective,
    op::{self, ExchangePart, GatherPart, Op, ScatterPart},
    options::Membership,
    queue::{Job, Queue},
    signature::Signature,
    single_rank::SingleRank,
    work::Work,
};
use crate::{Allocator, Buffer, DeviceId, Element, Error, Heap, ReduceOp, Result};

/// A handle of a group of ranks that run the same collectives in the same order. Clones are handles of the same group.
///
/// Collectives take *lists* of buffers, so that the parameters of one FSDP unit move in one collective. They are issued
/// without blocking and return a [`Work`] to wait for. Collectives of a group run in issue order.
///
/// Every collective has a sequence number and a fingerprint. Ranks that disagree all get [`crate::Error::Mismatch`]. A
/// wait ends with [`crate::Error::Timeout`] after [`ProcessGroup::timeout`] without progress, and with
/// [`crate::Error::PeerLost`] soon after a peer was lost. The group is then unusable, and all later collectives return
/// the same error.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_core::{Buffer, GatherPart, Heap, ReduceOp, ScatterPart, process_group::local};
///
/// local::try_run(2, |group| {
///     let rank = group.rank();
///     // One collective for two tensors. Rank 1 has no elements of the second.
///     let of = |values: Vec<f32>| Arc::new(Buffer::F32(values));
///     let parts = vec![
///         GatherPart { input: of(vec![rank as f32; 2]), counts: vec![2, 2] },
///         GatherPart { input: of(vec![7.; 1 - rank]), counts: vec![1, 0] },
///     ];
///     let gathered = group.all_gather(parts, Heap::shared());
///     // Issued after it. Neither waits for the other.
///     let part = ScatterPart { input: Buffer::F32(vec![1., 2., 3.]), counts: vec![2, 1] };
///     let reduced = group.reduce_scatter(vec![part], ReduceOp::Sum, Heap::shared());
///
///     assert_eq!(gathered.wait()?, [Buffer::F32(vec![0., 0., 1., 1.]), Buffer::F32(vec![7.])]);
///     assert_eq!(reduced.wait()?, [Buffer::F32(if rank == 0 { vec![2., 4.] } else { vec![6.] })]);
///
///     // Splits the ranks into groups: here a group for each rank.
///     let alone = group.split(rank, 0)?;
///     assert_eq!((alone.rank(), alone.size()), (0, 1));
///     Ok::<_, fsdp_core::Error>(())
/// })?;
/// # Ok::<_, fsdp_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    ranks: Arc<Ranks>,
    /// Signature of its collectives.
    signature: Option<Signature>,
    /// Whether its collectives run on the thread that issues them.
    is_blocking: bool,
    /// Whether its all-gathers and reduce-scatters use memory of the backend.
    uses_registered_memory: bool,
}

/// State shared by the handles of a group.
struct Ranks {
    membership: Membership,
    origin: Origin,
    device: DeviceId,
    runs_when_issued: bool,
    guarantees: Guarantees,
    /// Whether the backend registers memory, or why it does not.
    registers_memory: Result<(), String>,
    peer_monitor: Option<Arc<dyn PeerMonitor>>,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
    ordinals: AtomicU64,
}

/// The ranks of a group by their numbers in the group at the root of its splits.
struct Origin {
    root: Arc<()>,
    ranks: Vec<usize>,
}

impl ProcessGroup {
    /// Creates the group whose bytes `backend` moves, and starts its thread.
    ///
    /// # Errors
    /// [`Error::Argument`] if the rank is outside the group, [`Error::Os`] if the system refuses a thread.
    pub fn new(membership: Membership, backend: Box<dyn Backend>) -> Result<Self> {
        let origin = Origin { root: Arc::new(()), ranks: (0..membership.size).collect() };
        Self::of_origin(membership, origin, backend)
    }

    fn of_origin(membership: Membership, origin: Origin, backend: Box<dyn Backend>) -> Result<Self> {
        let Membership { name, rank, size, .. } = &membership;
        if rank >= size {
            let message = format!("rank {rank} is outside group \"{name}\": expected 0 to {}", size.saturating_sub(1));
            return Err(Error::Argument { rank: *rank, message });
        }
        let (device, guarantees, runs_when_issued) =
            (backend.device(), backend.guarantees(), backend.runs_when_issued());
        let (registers_memory, peer_monitor) = (backend.registers_memory(), backend.peer_monitor());
        let queue = Arc::new(Queue::new(membership.clone(), backend));
        let served = queue.clone();
        let thread = std::thread::Builder::new()
            .name(format!("fsdp {name}:{rank}"))
            .spawn(move || served.serve())
            .map_err(|source| Error::os(*rank, format!("starting the thread of group \"{name}\""), source))?;
        let thread = Some(thread);
        let ordinals = AtomicU64::new(0);
        let ranks = Ranks {
            membership,
            origin,
            device,
            runs_when_issued,
            guarantees,
            registers_memory,
            peer_monitor,
            queue,
            thread,
            ordinals,
        };
        let ranks = Arc::new(ranks);
        Ok(ProcessGroup { ranks, signature: None, is_blocking: false, uses_registered_memory: false })
    }

    /// Creates a world of this process only.
    ///
    /// # Errors
    /// [`Error::Os`] if the system refuses a thread.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fsdp_core::{Buffer, ProcessGroup, ReduceOp};
    /// let world = ProcessGroup::single_rank(Duration::from_secs(600))?;
    /// assert_eq!(world.all_reduce_scalar(2.0, ReduceOp::Sum)?, 2.0);
    /// # Ok::<_, fsdp_core::Error>(())
    /// ```
    pub fn single_rank(timeout: Duration) -> Result<Self> {
        ProcessGroup::new(Membership::world(0, 1, timeout), Box::new(SingleRank(DeviceId::Host)))
    }

    /// Returns how often this was called before on a handle of the group. So objects that all ranks make in the same
    /// order have the same number on every rank. Does not communicate.
    ///
    /// ```
    /// use std::time::Duration;
    /// let world = fsdp_core::ProcessGroup::single_rank(Duration::from_secs(600))?;
    /// assert_eq!((world.next_ordinal(), world.clone().next_ordinal()), (0, 1));
    /// # Ok::<_, fsdp_core::Error>(())
    /// ```
    pub fn next_ordinal(&self) -> u64 {
        self.ranks.ordinals.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a rank's number in the root group, if `other` was split from the same root.
    pub(crate) fn common_number(&self, rank: usize, other: &ProcessGroup) -> Option<usize> {
        let Origin { root, ranks } = &self.ranks.origin;
        if Arc::ptr_eq(root, &other.ranks.origin.root) { ranks.get(rank).copied() } else { None }
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> usize {
        self.ranks.membership.rank
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.ranks.membership.size
    }

    /// Returns the group's name, which is the same on every rank.
    pub fn name(&self) -> &str {
        &self.ranks.membership.name
    }

    /// Returns how long a collective waits for its peers while none of them makes progress.
    pub fn timeout(&self) -> Duration {
        self.ranks.membership.timeout
    }

    /// Returns the device whose memory its collectives move.
    pub fn device(&self) -> DeviceId {
        self.ranks.device
    }

    /// Returns the guarantees of its backend.
    pub fn guarantees(&self) -> Guarantees {
        self.ranks.guarantees
    }

    /// Returns whether both handles are of the same group, whatever their signatures.
    pub fn is(&self, other: &ProcessGroup) -> bool {
        Arc::ptr_eq(&self.ranks, &other.ranks)
    }

    /// Returns a handle whose collectives carry a signature. Ranks that issue a collective with different signatures
    /// all get [`crate::Error::Mismatch`], which names the difference. Signatures add no communication.
    pub fn signed(&self, signature: Signature) -> ProcessGroup {
        ProcessGroup { signature: Some(signature), ..self.clone() }
    }

    /// Returns a handle whose collectives are blocking: they run on the thread that issues them, after those issued
    /// before, and are done when the call returns. No other thread has to wake up, which takes longer than a small
    /// collective. Peers see no difference.
    ///
    /// ```
    /// use fsdp_core::{Buffer, ReduceOp, process_group::local};
    /// local::run(2, |group| {
    ///     let mut sum = group.blocking().all_reduce(vec![Buffer::F32(vec![1.0])], ReduceOp::Sum);
    ///     assert!(sum.is_done());
    ///     assert_eq!(sum.wait().unwrap(), [Buffer::F32(vec![2.0])]);
    /// });
    /// ```
    pub fn blocking(&self) -> ProcessGroup {
        ProcessGroup { is_blocking: true, ..self.clone() }
    }

    /// Returns a handle whose all-gathers and reduce-scatters of device memory go through memory that the backend
    /// allocates and registers with the network: NCCL then needs no copies of its own, and fewer of the device's
    /// processors. They copy inputs there and outputs from there. The group keeps this memory, as large as its largest
    /// collective, until it ends. Use it on all ranks alike.
    ///
    /// # Errors
    /// [`Error::Argument`] if the backend has none: it is not NCCL, or NCCL is older than 2.19.
    ///
    /// ```
    /// let error = fsdp_core::process_group::local::run(2, |group| group.with_registered_memory().err().unwrap());
    /// assert!(error[0].to_string().contains("has no registered memory"), "{}", error[0]);
    /// ```
    pub fn with_registered_memory(&self) -> Result<ProcessGroup> {
        match &self.ranks.registers_memory {
            Ok(()) => Ok(ProcessGroup { uses_registered_memory: true, ..self.clone() }),
            Err(why) => Err(Error::Argument {
                rank: self.rank(),
                message: format!(
                    "group \"{}\" has no registered memory: {why}. It needs a CUDA device for each rank and NCCL 2.19 or \
                     newer",
                    self.name()
                ),
            }),
        }
    }

    /// Gives every rank the concatenation of all ranks' inputs, for each part. Outputs are allocated from `memory` when
    /// the collective starts.
    pub fn all_gather(&self, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        let call = op::gather(&parts, &self.ranks.membership, self.ranks.device);
        self.issue(self.registered(call), Op::AllGather { parts, memory })
    }

    /// Gives rank `r` the reduction of all ranks' elements for `r`, for each part. Outputs are allocated from `memory`,
    /// and inputs are given back to it as soon as they are consumed.
    pub fn reduce_scatter(&self, parts: Vec<ScatterPart>, op: ReduceOp, memory: Arc<dyn Allocator>) -> Work {
        let call = op::scatter(&parts, op, &self.ranks.membership, self.ranks.device);
        self.issue(self.registered(call), Op::ReduceScatter { parts, op, memory })
    }

    /// Gives every rank the reduction over all ranks, in place.
    pub fn all_reduce(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Work {
        let call = op::reduce(&buffers, op, &self.ranks.membership, self.ranks.device);
        self.issue(call, Op::AllReduce { buffers, op })
    }

    /// Gives every rank the buffers of rank `root`, in place.
    pub fn broadcast(&self, buffers: Vec<Buffer>, root: usize) -> Work {
        let call = op::broadcast(&buffers, root, &self.ranks.membership, self.ranks.device);
        self.issue(call, Op::Broadcast { buffers, root })
    }

    /// Gives rank `r` the elements that all ranks sent to it, concatenated in rank order, for each part.
    pub fn all_to_all(&self, parts: Vec<ExchangePart>, memory: Arc<dyn Allocator>) -> Work {
        let call = op::exchange(&parts, &self.ranks.membership, self.ranks.device);
        self.issue(call, Op::AllToAll { parts, memory })
    }

    /// Completes once all ranks have issued it.
    pub fn barrier(&self) -> Work {
        self.issue(Ok(Call::without_parts("barrier", "")), Op::Barrier)
    }

    /// Splits the group into groups of ranks that pass the same `color`, ordered by `key` and then by rank. Collective;
    /// blocks.
    ///
    /// # Errors
    /// Errors of a collective.
    pub fn split(&self, color: usize, key: usize) -> Result<ProcessGroup> {
        let call = self.sign(Call::without_parts("split", ""));
        let (membership, members, backend) =
            self.run_here(&call, |backend, collective| split(backend, collective, color, key))?;
        // A failure must reach the peers, which wait for this rank in the new group.
        let of_root = |rank: usize| self.ranks.origin.ranks[rank];
        let origin = Origin { root: self.ranks.origin.root.clone(), ranks: members.into_iter().map(of_root).collect() };
        ProcessGroup::of_origin(membership, origin, backend)
            .inspect_err(|error| self.ranks.queue.push(Job::Fail(error.clone())))
    }

    /// Issues a checked operation, or fails the group if the check failed.
    pub(super) fn issue(&self, checked: Result<Call>, op: Op) -> Work {
        let call = match checked {
            Ok(call) => self.sign(call),
            Err(error) => {
                // The peers are about to wait for this collective.
                self.ranks.queue.push(Job::Fail(error.clone()));
                return Work::ready(Err(error));
            }
        };
        let runs_here = self.is_blocking || self.ranks.runs_when_issued && op.device() != DeviceId::Host;
        if runs_here {
            return Work::known(self.run_here(&call, |backend, collective| backend.run(collective, op)));
        }
        let (completion, work) = Work::pending(self.rank());
        let run = Box::new(move |backend: &mut dyn Backend, collective: &Collective<'_>| backend.run(collective, op));
        self.ranks.queue.push(Job::Run { call, run, completion });
        work
    }

    fn registered(&self, checked: Result<Call>) -> Result<Call> {
        if self.uses_registered_memory { checked.map(Call::with_registered_memory) } else { checked }
    }

    fn sign(&self, call: Call) -> Call {
        match &self.signature {
            Some(signature) => call.signed(signature),
            None => call,
        }
    }

    fn run_here<T>(&self, call: &Call, run: impl FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<T>) -> Result<T> {
        self.ranks.queue.run_here(call, run).unwrap_or_else(|| Err(self.ended()))
    }

    /// Returns the backend's view of the peers.
    pub(super) fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        self.ranks.peer_monitor.clone()
    }

    /// Returns the group's name and size, and this process's rank in it.
    pub fn membership(&self) -> &Membership {
        &self.ranks.membership
    }

    /// Runs `f` on the backend, in turn, without counting it as a collective of the group. Blocks.
    pub(super) fn run_uncounted<T>(
        &self,
        call: &Call,
        f: impl FnOnce(&mut dyn Backend, &Collective<'_>) -> Result<T>,
    ) -> Result<T> {
        self.ranks.queue.run_uncounted(call, f).unwrap_or_else(|| Err(self.ended()))
    }

    fn ended(&self) -> Error {
        let what = format!("group \"{}\" ended while it was in use", self.name());
        Error::Internal { rank: self.rank(), what }
    }
}

/// Creates this rank's end of the group of ranks that pass the same `color`.
fn split(
    backend: &mut dyn Backend,
    collective: &Collective<'_>,
    color: usize,
    key: usize,
) -> Result<(Membership, Vec<usize>, Box<dyn Backend>)> {
    let group = collective.group();
    let internal = |what: String| Error::Internal {
        rank: group.rank,
        what: format!("splitting group \"{}\": {what}", group.name),
    };
    let part = GatherPart { input: Arc::new(Buffer::I64(vec![color as i64, key as i64])), counts: vec![2; group.size] };
    let gather = Op::AllGather { parts: vec![part], memory: Heap::shared() };
    let mut gathered = backend.run(collective, gather)?.outputs;
    let numbers = match gathered.pop() {
        Some(Buffer::I64(numbers)) if numbers.len() == 2 * group.size => numbers,
        other => return Err(internal(format!("gathered {other:?}, expected two I64 for each rank"))),
    };
    let mut members: Vec<_> = numbers
        .chunks_exact(2)
        .enumerate()
        .filter(|(_, pair)| pair[0] == color as i64)
        .map(|(rank, pair)| (pair[1] as usize, rank))
        .collect();
    members.sort_unstable();
    let ranks: Vec<_> = members.into_iter().map(|(_, rank)| rank).collect();
    let Some(rank) = ranks.iter().position(|&rank| rank == group.rank) else {
        return Err(internal(format!("this rank's color {color} was not gathered")));
    };
    // The collective's sequence number makes the names unique.
    let name = format!("{}/{}.{color}", group.name, collective.sequence());
    let hosts = group.hosts.select(&ranks);
    let membership = Membership { name, rank, size: ranks.len(), timeout: group.timeout, hosts };
    let backend = match ranks.len() {
        1 => Box::new(SingleRank(backend.device())),
        _ => backend.split(collective, &ranks, &membership)?,
    };
    Ok((membership, ranks, backend))
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Membership { name, rank, size, .. } = &self.ranks.membership;
        write!(f, "ProcessGroup(\"{name}\", rank {rank} of {size})")
    }
}

impl Drop for Ranks {
    /// Lets the queued collectives finish and leaves the group.
    fn drop(&mut self) {
        self.queue.close();
        if let Some(thread) = self.thread.take()
            // A collective drops the group on the group's thread if its buffers held the last reference.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl ProcessGroup {
    /// Reduces each rank's values elementwise. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_reduce`].
    pub fn all_reduce_values<T: Element>(&self, values: Vec<T>, op: ReduceOp) -> Result<Vec<T>> {
        let len = values.len();
        self.elements(self.blocking().all_reduce(vec![Buffer::from(values)], op), len)
    }

    /// Reduces each rank's value. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_reduce`].
    ///
    /// ```
    /// use fsdp_core::{ReduceOp, process_group::local};
    /// local::run(3, |group| {
    ///     assert_eq!(group.all_reduce_scalar(group.rank() as f64, ReduceOp::Avg).unwrap(), 1.0);
    ///     assert_eq!(group.all_reduce_scalar(group.rank() as u32, ReduceOp::Max).unwrap(), 2);
    /// });
    /// ```
    pub fn all_reduce_scalar<T: Element>(&self, value: T, op: ReduceOp) -> Result<T> {
        Ok(self.all_reduce_values(vec![value], op)?[0])
    }

    /// Returns all ranks' values in rank order. All ranks pass the same number of values. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_gather`].
    pub fn gather_values<T: Element>(&self, values: Vec<T>) -> Result<Vec<T>> {
        let counts = vec![values.len(); self.size()];
        self.gather(values, counts)
    }

    /// Sends an equal number of values to each rank, in rank order. Returns the values of rank 0, then those of rank 1,
    /// and so on. All ranks pass the same number of values, which the number of ranks divides. Collective; blocks.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::all_to_all`].
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// local::run(2, |group| {
    ///     let values = [[1u32, 2], [3, 4]][group.rank()].to_vec();
    ///     assert_eq!(group.exchange_values(values).unwrap(), [[1, 3], [2, 4]][group.rank()]);
    /// });
    /// ```
    pub fn exchange_values<T: Element>(&self, values: Vec<T>) -> Result<Vec<T>> {
        let (len, size) = (values.len(), self.size());
        if !len.is_multiple_of(size) {
            let message = format!(
                "exchange_values: {len} values can't be divided evenly over the {size} ranks of group \"{}\": pass as many \
                 for each",
                self.name()
            );
            return Err(Error::Argument { rank: self.rank(), message });
        }
        let counts = vec![len / size; size];
        let part = ExchangePart { input: values.into(), send_counts: counts.clone(), recv_counts: counts };
        self.elements(self.blocking().all_to_all(vec![part], Heap::shared()), len)
    }

    pub(super) fn gather<T: Element>(&self, values: Vec<T>, counts: Vec<usize>) -> Result<Vec<T>> {
        let len = counts.iter().sum();
        let part = GatherPart { input: Arc::new(Buffer::from(values)), counts };
        self.elements(self.blocking().all_gather(vec![part], Heap::shared()), len)
    }

    /// Waits for a collective of one part and returns its output.
    pub(crate) fn only_output(&self, work: Work) -> Result<Buffer> {
        work.wait()?.pop().ok_or_else(|| Error::Internal {
            rank: self.rank(),
            what: format!("group \"{}\" returned no output for a collective of one part", self.name()),
        })
    }

    /// Waits for a collective of one part and returns its `len` elements.
    pub(super) fn elements<T: Element>(&self, work: Work, len: usize) -> Result<Vec<T>> {
        let found = match self.only_output(work)?.into_vec() {
            Ok(values) if values.len() == len => return Ok(values),
            Ok(values) => format!("{} {}", values.len(), T::DTYPE),
            Err(other) => format!("{} {}", other.len(), other.dtype()),
        };
        Err(Error::Internal {
            rank: self.rank(),
            what: format!("a collective of group \"{}\" gave {found}, expected {len} {}", self.name(), T::DTYPE),
        })
    }
}
