//! Streams.

use std::ffi::{c_int, c_uint, c_void};

use super::{answer, put};
use crate::{
    machine::machine,
    operation::{Operation, Progress},
    queue::Role,
    status::{CuResult, INVALID_VALUE, NOT_READY, Refusal},
    stream::{enqueue, status, synchronize},
};

const NON_BLOCKING: c_uint = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: c_uint) -> CuResult {
    // SAFETY: as CUDA documents it: a handle is as large as a pointer.
    unsafe { cuStreamCreateWithPriority(stream, flags, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut usize, flags: c_uint, priority: c_int) -> CuResult {
    // SAFETY: as CUDA documents it: a handle is as large as a pointer.
    unsafe { answer(stream, machine().create_stream(flags & NON_BLOCKING != 0, priority)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> CuResult {
    status(machine().destroy_stream(stream as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> CuResult {
    synchronize(stream, "cuStreamSynchronize")
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: *mut c_void) -> CuResult {
    status(
        machine().query_stream(stream as usize).and_then(|ready| ready.then_some(()).ok_or(Refusal::Status(NOT_READY))),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: u64, _flags: c_uint) -> CuResult {
    status(machine().wait_event(stream as usize, event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, capturing: *mut c_int) -> CuResult {
    let known = machine().lock().resolve(stream as usize).map(|_| 0);
    // SAFETY: as CUDA documents it.
    unsafe { answer(capturing, known) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetPriority(stream: *mut c_void, priority: *mut c_int) -> CuResult {
    let mut core = machine().lock();
    let value = core.resolve(stream as usize).map(|stream| core.streams.get(stream).priority);
    drop(core);
    // SAFETY: as CUDA documents it.
    unsafe { answer(priority, value) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetFlags(stream: *mut c_void, flags: *mut c_uint) -> CuResult {
    let mut core = machine().lock();
    let role = core.resolve(stream as usize).map(|stream| core.streams.get(stream).role);
    drop(core);
    // SAFETY: as CUDA documents it.
    unsafe { answer(flags, role.map(|role| c_uint::from(role == Role::NonBlocking))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) -> CuResult {
    let mut core = machine().lock();
    let found = core.resolve(stream as usize).map(|stream| core.streams.get(stream).context);
    drop(core);
    match found {
        // SAFETY: as CUDA documents it.
        Ok(device) => unsafe { put(context, super::context::handle(device)) },
        Err(refusal) => status::<()>(Err(refusal)),
    }
}

/// Calls a function of the host when the stream comes to it. It must not call the driver.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(
    stream: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> CuResult {
    let Some(function) = function else { return INVALID_VALUE };
    let data = data as usize;
    let run = Box::new(move || {
        // SAFETY: as CUDA documents it: `data` is what the function takes, on any thread, when the stream comes to it.
        unsafe { function(data as *mut c_void) };
        Progress::Done
    });
    enqueue(stream, Operation { name: "host function".into(), touches: Vec::new(), run })
}

/// Messages call the stream so.
#[unsafe(no_mangle)]
unsafe extern "C" fn gpu_double_name_stream(stream: *mut c_void, name: *const std::ffi::c_char) -> CuResult {
    // SAFETY: as this library documents it: a text that ends with 0.
    let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy();
    status(machine().name_stream(stream as usize, &name))
}
