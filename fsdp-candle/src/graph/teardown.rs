//! Frees long graphs. Candle's tensors own the tensors before them, so freeing a chain of operations would recurse once
//! for each operation and overflow the stack.

use std::any::Any;
use std::cell::RefCell;

thread_local! {
    /// Parts that wait until the part that is being dropped is done; `None` while no part is.
    static WAITING: RefCell<Option<Vec<Box<dyn Any>>>> = const { RefCell::new(None) };
}

/// Drops the parts of an operation. If it runs inside another call of itself, the outer call drops them.
pub(super) fn drop_flat<T: 'static>(parts: T) {
    let mut parts = Some(parts);
    // Fails while the thread ends. The parts are then dropped at the end of this function.
    let is_outermost = WAITING.try_with(|waiting| {
        let mut waiting = waiting.borrow_mut();
        let is_outermost = waiting.is_none();
        waiting.get_or_insert_default().extend(parts.take().map(|parts| Box::new(parts) as Box<dyn Any>));
        is_outermost
    });
    if is_outermost != Ok(true) {
        return;
    }
    let next = || WAITING.with_borrow_mut(|waiting| waiting.as_mut().and_then(Vec::pop));
    while let Some(parts) = next() {
        drop(parts);
    }
    WAITING.set(None);
}
