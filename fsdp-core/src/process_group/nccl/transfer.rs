//! What NCCL is asked for.

use cudarc::{
    driver::sys::{CUdeviceptr, CUstream},
    nccl::sys::{self, ncclDataType_t, ncclRedOp_t, ncclResult_t},
};

use super::communicator::is_fine;
use crate::{DType, ReduceOp};

/// A call of NCCL's. Counts are elements, and of no rank 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Transfer {
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) kind: Kind,
}

/// Which call, with its addresses. One that a rank does not use is 0.
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
    /// Asks for it, within a group of calls.
    ///
    /// # Safety
    /// The communicator is alive, and there is memory of the counts at the addresses until the stream has run the call.
    pub(super) unsafe fn ask(&self, communicator: sys::ncclComm_t, stream: CUstream) -> ncclResult_t {
        let (dtype, count, stream) = (dtype(self.dtype), self.count, stream.cast());
        let source = |address: CUdeviceptr| address as *const std::ffi::c_void;
        let target = |address: CUdeviceptr| address as *mut std::ffi::c_void;
        // SAFETY: as the caller promises.
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

/// Asks for all of them, up to the first that is refused.
///
/// # Safety
/// As [`Transfer::ask`].
pub(super) unsafe fn ask_all(transfers: &[Transfer], communicator: sys::ncclComm_t, stream: CUstream) -> ncclResult_t {
    // SAFETY: as the caller promises.
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
