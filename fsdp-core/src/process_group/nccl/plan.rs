//! A collective as NCCL calls, and as copies on the device where shares are padded or memory is registered.
//!
//! Ranks share a parameter's rows as `torch.chunk` does, so padded shares differ from the shares only behind the last row.
//! Buffers with room for that padding are gathered and reduced without a copy. A rank whose buffer has no room uses other
//! memory and a copy: NCCL's calls are the same.

use std::{ops::Range, sync::Arc};

use cudarc::{
    driver::{
        DriverError, result,
        sys::{CUdeviceptr, CUstream},
    },
    nccl::sys::{self, ncclDataType_t, ncclRedOp_t, ncclResult_t},
};

use super::{
    super::{
        device_memory::{address, read, take},
        op::{ExchangePart, GatherPart, Op, ScatterPart},
    },
    communicator::is_fine,
};
use crate::{
    Allocator, Buffer, DType, Error, Readable, ReduceOp, Result, device::cuda::CudaMemory, layout::padded_share,
};

/// The NCCL calls of a collective, and the memory that must stay until they end.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) transfers: Vec<Transfer>,
    /// Copies on the engine's stream before the calls, and after them.
    pub(super) before: Vec<Copy>,
    pub(super) after: Vec<Copy>,
    /// Memory of padded shares, where an input or an output has no room for the padding.
    pub(super) padded: Vec<CudaMemory>,
    /// The part of registered memory that is not in use yet. Without it, NCCL reads inputs and writes outputs in place.
    pub(super) registered: Option<Range<CUdeviceptr>>,
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

/// Returns the length of all ranks' shares, with padding where that is one NCCL call.
fn equal_share(counts: &[usize]) -> Option<usize> {
    match counts {
        [first, others @ ..] if others.iter().all(|count| count == first) => Some(*first),
        _ => padded_share(counts),
    }
}

/// Alignment of parts in registered memory.
const ALIGN: usize = 512;

/// Returns the bytes of registered memory that a collective needs. The same on all ranks.
pub(super) fn registered_bytes(op: &Op) -> usize {
    let bytes = |dtype: DType, counts: &[usize]| {
        let room = equal_share(counts).map_or(0, |share| share * counts.len());
        (room * dtype.size()).next_multiple_of(ALIGN)
    };
    match op {
        Op::AllGather { parts, .. } => parts.iter().map(|part| bytes(part.input.dtype(), &part.counts)).sum(),
        Op::ReduceScatter { parts, .. } => parts.iter().map(|part| bytes(part.input.dtype(), &part.counts)).sum(),
        _ => 0,
    }
}

/// A copy on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Copy {
    from: CUdeviceptr,
    to: CUdeviceptr,
    bytes: usize,
}

impl Copy {
    /// Enqueues the copy.
    ///
    /// # Safety
    /// The addresses have this memory until the stream has run the copy, and do not overlap.
    pub(super) unsafe fn run(self, stream: CUstream) -> Result<(), DriverError> {
        match self.bytes {
            0 => Ok(()),
            // SAFETY: as the caller guarantees.
            bytes => unsafe { result::memcpy_dtod_async(self.to, self.from, bytes, stream) },
        }
    }
}

impl Plan {
    /// Plans a collective, with outputs of its allocator. With registered memory, of [`registered_bytes`], NCCL uses only
    /// this memory in all-gathers and reduce-scatters.
    pub(super) fn of(op: Op, rank: usize, registered: Option<Range<CUdeviceptr>>) -> Result<Self> {
        let mut plan = Plan { registered, ..Plan::default() };
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

    /// Shares that are equal, or are padded, use NCCL's all-gather. Others use a broadcast each.
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
        let len = counts.iter().sum();
        let output = take(memory, dtype, len, rank)?;
        let to = output.view().address();
        match equal_share(&counts) {
            Some(share) => {
                let place_of_all = self.room(&output, share * counts.len())?;
                let own_place = place_of_all + (rank * share * dtype.size()) as CUdeviceptr;
                // A shorter share begins the padded one. NCCL gathers it in place.
                let is_in_place = own < share || self.registered.is_some();
                if is_in_place {
                    self.before.push(Copy { from, to: own_place, bytes: own * dtype.size() });
                }
                let from = if is_in_place { own_place } else { from };
                self.ask(dtype, share, Kind::AllGather { from, to: place_of_all });
                if place_of_all != to {
                    self.after.push(Copy { from: place_of_all, to, bytes: len * dtype.size() });
                }
            }
            None => {
                for (root, to, count) in starts(to, dtype, &counts) {
                    let from = if root == rank { from } else { to };
                    self.ask(dtype, count, Kind::Broadcast { from, to, root });
                }
            }
        }
        self.outputs.push(Buffer::Cuda(output));
        self.inputs.push(input);
        Ok(())
    }

    /// Shares that are equal, or are padded, use NCCL's reduce-scatter. Others use a reduction to each rank.
    fn scatter(&mut self, part: ScatterPart, op: ReduceOp, memory: &dyn Allocator, rank: usize) -> Result<Buffer> {
        let ScatterPart { input, counts } = part;
        let dtype = input.dtype();
        let Buffer::Cuda(input) = input else {
            // The group has checked it.
            return Err(Error::Internal { rank, what: "an input of the host came to an engine for a device".into() });
        };
        let from = input.view().address();
        let output = Buffer::Cuda(take(memory, dtype, counts[rank], rank)?);
        let own = address(&output, rank)?;
        match equal_share(&counts) {
            Some(share) => {
                let place_of_all = self.room(&input, share * counts.len())?;
                if place_of_all != from {
                    self.before.push(Copy { from, to: place_of_all, bytes: input.len() * dtype.size() });
                }
                let own_place = place_of_all + (rank * share * dtype.size()) as CUdeviceptr;
                // A shorter share begins the padded one. NCCL reduces it in place.
                let is_in_place = counts[rank] < share || self.registered.is_some();
                let to = if is_in_place { own_place } else { own };
                self.ask(dtype, share, Kind::ReduceScatter { from: place_of_all, to, op });
                if is_in_place {
                    self.after.push(Copy { from: own_place, to: own, bytes: counts[rank] * dtype.size() });
                }
            }
            None => {
                for (root, from, count) in starts(from, dtype, &counts) {
                    let to = if root == rank { own } else { 0 };
                    self.ask(dtype, count, Kind::Reduce { from, to, op, root });
                }
            }
        }
        self.outputs.push(output);
        Ok(Buffer::Cuda(input))
    }

    /// Returns the address of room for all padded shares of `memory`: `memory` itself, or memory beside it. NCCL's calls are
    /// the same, so peers may differ.
    fn room(&mut self, memory: &CudaMemory, room: usize) -> Result<CUdeviceptr> {
        if let Some(Range { start, end }) = &mut self.registered {
            let at = *start;
            *start += (room * memory.dtype().size()).next_multiple_of(ALIGN) as CUdeviceptr;
            if *start > *end {
                let cause = "registered memory is too small for a collective".to_string();
                return Err(Error::Device { device: memory.device(), what: "planning NCCL's calls".into(), cause });
            }
            return Ok(at);
        }
        if memory.room() >= room {
            return Ok(memory.view().address());
        }
        let padded = CudaMemory::uninit(memory.stream(), memory.dtype(), room)?;
        let at = padded.view().address();
        self.padded.push(padded);
        Ok(at)
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
    unsafe fn ask(&self, communicator: sys::ncclComm_t, stream: CUstream) -> ncclResult_t {
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
pub(super) unsafe fn ask_all(transfers: &[Transfer], communicator: sys::ncclComm_t, stream: CUstream) -> ncclResult_t {
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
