//! NCCL between processes that connect through shared memory.
//!
//! Collectives of a communicator run in the order of its streams, with all calls of a group as one operation. The bytes
//! are exchanged by fsdp-core's process groups: one for collectives, and one for each direction between two ranks that
//! send. The double behaves as unfavorably as NCCL may:
//! - A non-blocking communicator returns `ncclInProgress` for a while, also after the end of a group. Its calls are on
//!   their streams only when it returns `ncclSuccess`.
//! - Sums are computed in the buffer's dtype, around a ring. The first rank depends on the seed and the calls, so the
//!   same calls have the same bits.
//! - Ranks with different calls wait for each other until one aborts. A line on stderr names the difference.
//! - An aborted operation ends without writing. An abort frees memory, for which CUDA waits until the device has done all
//!   work: it blocks while a kernel of another communicator waits for a peer, unless both are aborted in one group.
//!   With `GPU_DOUBLE_ABORT=hangs` it never ends.
//! - The use of a destroyed communicator is a fault.
//!
//! - Memory of `ncclMemAlloc` is freed once, without waiting for the device, and after its registrations end. A
//!   communicator has no registrations when it is finalized or destroyed; an abort ends them. A call that reads registered
//!   memory also writes registered memory, on all ranks.
//!
//! `transfer` is one call and its dtype, `exchange` a group of calls as bytes between ranks, and `communicator` the
//! state of a rank, with its registered memory (`registered`). This file has the functions themselves.

mod communicator;
mod exchange;
mod registered;
#[cfg(test)]
mod tests;
mod transfer;

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::Arc,
};

use crate::machine::{current, machine};
use communicator::{Communicator, end, find, forget, register, start};
use transfer::{Element, Kind, Op, Seat, Transfer};

/// An `ncclResult_t`.
pub(crate) type Status = u32;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const SYSTEM_ERROR: Status = 2;
pub(crate) const INVALID_ARGUMENT: Status = 4;
pub(crate) const INVALID_USAGE: Status = 5;
pub(crate) const REMOTE_ERROR: Status = 6;
pub(crate) const IN_PROGRESS: Status = 7;

/// Returns NCCL's text for a status.
pub(crate) fn text(status: Status) -> &'static CStr {
    match status {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        3 => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}

type Handle = u64;

/// Magic number of a configuration.
const MAGIC: c_uint = 0xcafe_beef;

/// An `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// The first fields of an `ncclConfig_t`.
#[repr(C)]
pub(crate) struct Config {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
}

/// `to` is null, or a place for a value.
unsafe fn put<T>(to: *mut T, value: T) -> Status {
    if to.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: ensured by the caller.
    unsafe { to.write(value) };
    SUCCESS
}

/// The version, encoded as in nccl.h: `GPU_DOUBLE_NCCL`, or 2.30.7.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Status {
    let chosen = std::env::var("GPU_DOUBLE_NCCL").ok().and_then(|number| number.parse().ok());
    // SAFETY: as documented by NCCL.
    unsafe { put(version, chosen.unwrap_or(23_007)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclMemAlloc(at: *mut u64, len: usize) -> Status {
    match registered::allocate(len) {
        // SAFETY: as documented by NCCL.
        Ok(address) => unsafe { put(at, address) },
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclMemFree(at: u64) -> Status {
    registered::free(at)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommRegister(comm: Handle, at: u64, len: usize, handle: *mut u64) -> Status {
    let Some(communicator) = find(comm, "ncclCommRegister") else { return INVALID_ARGUMENT };
    match communicator.register(at, len) {
        // SAFETY: as documented by NCCL.
        Some(registration) => unsafe { put(handle, registration) },
        None => INVALID_ARGUMENT,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommDeregister(comm: Handle, handle: u64) -> Status {
    let Some(communicator) = find(comm, "ncclCommDeregister") else { return INVALID_ARGUMENT };
    communicator.deregister(handle)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Status {
    let Ok(name) = std::fs::read_to_string("/proc/sys/kernel/random/uuid") else { return SYSTEM_ERROR };
    let mut bytes = [0; 128];
    name.trim().bytes().zip(&mut bytes).for_each(|(byte, to)| *to = byte);
    // SAFETY: as documented by NCCL.
    unsafe { put(id, UniqueId(bytes)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut Handle,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> Status {
    // SAFETY: as documented by NCCL: it is null or a configuration. The double has non-blocking communicators only.
    let is_known = unsafe { config.as_ref() }.is_some_and(|config| {
        config.magic == MAGIC && config.size >= size_of::<Config>() && config.version >= 21_400 && config.blocking == 0
    });
    if !is_known {
        return INVALID_ARGUMENT;
    }
    let (Ok(ranks @ 1..), Ok(rank), Some(device)) = (usize::try_from(ranks), usize::try_from(rank), current()) else {
        return INVALID_ARGUMENT;
    };
    let end = id.0.iter().position(|byte| *byte == 0).unwrap_or(id.0.len());
    if end == 0 || rank >= ranks {
        return INVALID_ARGUMENT;
    }
    let name = String::from_utf8_lossy(&id.0[..end]).into_owned();
    let seed = machine().lock().settings.seed;
    let handle = register(Communicator::begin(&name, Seat { rank, ranks }, device, seed));
    // SAFETY: as documented by NCCL.
    match unsafe { put(comm, handle) } {
        SUCCESS => IN_PROGRESS,
        refused => refused,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommGetAsyncError(comm: Handle, status: *mut Status) -> Status {
    let Some(communicator) = find(comm, "ncclCommGetAsyncError") else { return INVALID_ARGUMENT };
    // SAFETY: as documented by NCCL.
    unsafe { put(status, communicator.state()) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommAbort(comm: Handle) -> Status {
    let Some(communicator) = find(comm, "ncclCommAbort") else { return INVALID_ARGUMENT };
    communicator::abort(communicator);
    forget(comm);
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommFinalize(comm: Handle) -> Status {
    find(comm, "ncclCommFinalize").map_or(INVALID_ARGUMENT, |communicator| communicator.finalize())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommDestroy(comm: Handle) -> Status {
    let Some(communicator) = find(comm, "ncclCommDestroy") else { return INVALID_ARGUMENT };
    communicator.registrations.must_be_empty("ncclCommDestroy");
    drop(communicator);
    forget(comm);
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetErrorString(status: Status) -> *const c_char {
    text(status).as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetLastError(comm: Handle) -> *const c_char {
    let said: &CStr = find(comm, "ncclGetLastError").map_or(c"", |communicator| communicator.said());
    said.as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupStart() -> Status {
    start()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupEnd() -> Status {
    end()
}

/// Checks the dtype, and makes a call.
fn call(asked: &str, comm: Handle, stream: *mut c_void, count: usize, dtype: c_uint, kind: Option<Kind>) -> Status {
    let communicator: Option<Arc<Communicator>> = find(comm, asked);
    let transfer = kind.zip(Element::of(dtype));
    let transfer = transfer.map(|(kind, element)| Transfer { kind, element, count, is_registered: false });
    communicator::call(communicator, stream as usize, transfer)
}

fn rank(number: c_int) -> Option<usize> {
    usize::try_from(number).ok()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclAllGather(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_uint,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    call("ncclAllGather", comm, stream, count, dtype, Some(Kind::AllGather { from, to }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_uint,
    op: c_uint,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    let kind = Op::of(op).map(|op| Kind::AllReduce { from, to, op });
    call("ncclAllReduce", comm, stream, count, dtype, kind)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_uint,
    op: c_uint,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    let kind = Op::of(op).map(|op| Kind::ReduceScatter { from, to, op });
    call("ncclReduceScatter", comm, stream, count, dtype, kind)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_uint,
    root: c_int,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    let kind = rank(root).map(|root| Kind::Broadcast { from, to, root });
    call("ncclBroadcast", comm, stream, count, dtype, kind)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclReduce(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_uint,
    op: c_uint,
    root: c_int,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    let kind = Op::of(op).zip(rank(root)).map(|(op, root)| Kind::Reduce { from, to, op, root });
    call("ncclReduce", comm, stream, count, dtype, kind)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclSend(
    from: u64,
    count: usize,
    dtype: c_uint,
    peer: c_int,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    call("ncclSend", comm, stream, count, dtype, rank(peer).map(|peer| Kind::Send { from, peer }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    dtype: c_uint,
    peer: c_int,
    comm: Handle,
    stream: *mut c_void,
) -> Status {
    call("ncclRecv", comm, stream, count, dtype, rank(peer).map(|peer| Kind::Receive { to, peer }))
}
