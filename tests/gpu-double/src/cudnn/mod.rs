//! cuDNN 9.26's graphs: attention and its gradients by backend descriptors.
//!
//! Descriptors and attributes that are not listed in `attributes` are refused by name. A graph may be any of the known
//! operations: `evaluate` computes one after the other, so that a wrong graph has a wrong result. `engine` refuses
//! graphs that cuDNN's engines do not compute on a GPU of capability 9.0.
#![allow(non_snake_case, reason = "cuDNN's names")]

use std::ffi::{c_char, c_int, c_void};

use crate::{library_handles::LibraryHandles, streams};

mod attributes;
mod build;
mod descriptor;
mod engine;
mod evaluate;
mod execute;
mod graph;
mod refusal;
mod tensor;
#[cfg(test)]
mod tests;

use refusal::{EXECUTION_FAILED, NOT_INITIALIZED, NULL_POINTER, Refusal, SUCCESS, status};

/// The version, unless `GPU_DOUBLE_CUDNN` has another one.
const VERSION: usize = 92_600;

static HANDLES: LibraryHandles = LibraryHandles::from(0x4300_0000);

fn is_handle(handle: usize) -> bool {
    HANDLES.stream(handle as *mut c_void).is_some()
}

fn unknown_handle() -> Refusal {
    Refusal { status: NOT_INITIALIZED, why: "the handle is not live".into() }
}

fn null(what: &str) -> Refusal {
    Refusal { status: NULL_POINTER, why: format!("{what} is null") }
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetVersion() -> usize {
    std::env::var("GPU_DOUBLE_CUDNN").ok().and_then(|number| number.parse().ok()).unwrap_or(VERSION)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetErrorString(status: c_int) -> *const c_char {
    refusal::name(status).as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetLastErrorString(message: *mut c_char, max_size: usize) {
    let last = refusal::take_last();
    if message.is_null() || max_size == 0 {
        return;
    }
    let len = last.len().min(max_size - 1);
    // SAFETY: the caller's buffer has `max_size` bytes.
    unsafe {
        message.cast::<u8>().copy_from(last.as_ptr(), len);
        message.add(len).write(0);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnCreate(handle: *mut *mut c_void) -> c_int {
    // SAFETY: the caller passes a pointer to a handle.
    unsafe { *handle = HANDLES.create() };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroy(handle: *mut c_void) -> c_int {
    status("cudnnDestroy", HANDLES.destroy(handle).ok_or_else(unknown_handle))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetStream(handle: *mut c_void, stream: *mut c_void) -> c_int {
    status("cudnnSetStream", HANDLES.set_stream(handle, stream).ok_or_else(unknown_handle))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut *mut c_void) -> c_int {
    let created = match descriptor.is_null() {
        true => Err(null("the place of the descriptor")),
        // SAFETY: the caller passes a pointer to a descriptor.
        false => descriptor::create(kind).map(|made| unsafe { *descriptor = made as *mut c_void }),
    };
    status("cudnnBackendCreateDescriptor", created)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> c_int {
    status("cudnnBackendDestroyDescriptor", descriptor::destroy(descriptor as usize))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendSetAttribute(
    descriptor: *mut c_void,
    attribute: c_int,
    of: c_int,
    count: i64,
    values: *const c_void,
) -> c_int {
    // SAFETY: the caller passes as many elements.
    let set = unsafe { descriptor::set(descriptor as usize, attribute, of, count, values) };
    status("cudnnBackendSetAttribute", set)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendGetAttribute(
    descriptor: *mut c_void,
    attribute: c_int,
    of: c_int,
    wanted: i64,
    count: *mut i64,
    values: *mut c_void,
) -> c_int {
    // SAFETY: the caller passes room for as many elements.
    let got = unsafe { descriptor::get(descriptor as usize, attribute, of, wanted, count, values) };
    status("cudnnBackendGetAttribute", got)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendFinalize(descriptor: *mut c_void) -> c_int {
    status("cudnnBackendFinalize", descriptor::finalize(descriptor as usize))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendExecute(handle: *mut c_void, plan: *mut c_void, pack: *mut c_void) -> c_int {
    let execute = || {
        let stream = HANDLES.stream(handle).ok_or_else(unknown_handle)?;
        let (plan, pack) = descriptor::plan_and_pack(plan as usize, pack as usize)?;
        // SAFETY: the caller passes the addresses of numbers of their tensors' types.
        let operation = unsafe { execute::operation(&plan, &pack) }?;
        match streams::enqueue(stream, operation) {
            0 => Ok(()),
            error => Err(Refusal { status: EXECUTION_FAILED, why: format!("the driver refuses with {error}") }),
        }
    };
    status("cudnnBackendExecute", execute())
}
