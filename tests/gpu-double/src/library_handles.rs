//! The handles of a CUDA library, each with its stream.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    sync::{Mutex, PoisonError},
};

pub(crate) struct LibraryHandles {
    /// Handles are the numbers from here on.
    first: usize,
    state: Mutex<State>,
}

struct State {
    made: usize,
    streams: BTreeMap<usize, usize>,
}

impl LibraryHandles {
    pub(crate) const fn from(first: usize) -> Self {
        LibraryHandles { first, state: Mutex::new(State { made: 0, streams: BTreeMap::new() }) }
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a new handle, whose stream is the default stream.
    pub(crate) fn create(&self) -> *mut c_void {
        self.with(|state| {
            state.made += 1;
            let made = self.first + state.made;
            state.streams.insert(made, 0);
            made as *mut c_void
        })
    }

    /// Removes a handle. Returns `None` if it is not live.
    pub(crate) fn destroy(&self, handle: *mut c_void) -> Option<()> {
        self.with(|state| state.streams.remove(&(handle as usize)).map(drop))
    }

    /// Sets the stream of a handle. Returns `None` if it is not live.
    pub(crate) fn set_stream(&self, handle: *mut c_void, stream: *mut c_void) -> Option<()> {
        self.with(|state| state.streams.get_mut(&(handle as usize)).map(|of| *of = stream as usize))
    }

    /// Returns the stream of a handle, or `None` if it is not live.
    pub(crate) fn stream(&self, handle: *mut c_void) -> Option<*mut c_void> {
        self.with(|state| state.streams.get(&(handle as usize)).map(|stream| *stream as *mut c_void))
    }
}
