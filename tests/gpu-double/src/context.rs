//! Which device's context a thread works in. There is one context a device, the primary one, and it is never reset.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The device of this thread's context.
pub(crate) fn current() -> Option<usize> {
    CURRENT.get()
}

pub(crate) fn set_current(device: Option<usize>) {
    CURRENT.set(device);
}
