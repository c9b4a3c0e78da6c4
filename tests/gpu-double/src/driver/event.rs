//! Events.

use std::ffi::{c_uint, c_void};

use super::answer;
use crate::{
    machine::machine,
    status::{CuResult, NOT_READY, Refusal},
    stream::status,
};

const DISABLE_TIMING: c_uint = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut u64, flags: c_uint) -> CuResult {
    // SAFETY: as CUDA documents it: a handle is as large as a pointer.
    unsafe { answer(event, machine().create_event(flags & DISABLE_TIMING == 0)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> CuResult {
    status(machine().destroy_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: *mut c_void) -> CuResult {
    status(machine().record(event, stream as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecordWithFlags(event: u64, stream: *mut c_void, _flags: c_uint) -> CuResult {
    cuEventRecord(event, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> CuResult {
    status(machine().query_event(event).and_then(|ready| ready.then_some(()).ok_or(Refusal::Status(NOT_READY))))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> CuResult {
    status(machine().synchronize_event(event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { answer(milliseconds, machine().elapsed(start, end)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { cuEventElapsedTime(milliseconds, start, end) }
}
