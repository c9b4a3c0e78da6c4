//! The span of the unit whose backward runs on this thread. Candle runs backward without telling where one unit ends
//! and the next begins: a unit's span lasts until the next one's.

use std::cell::RefCell;

use fsdp_core::heartbeat;
use tracing::span::EnteredSpan;

thread_local! {
    static UNIT: RefCell<Option<(EnteredSpan, heartbeat::Span)>> = const { RefCell::new(None) };
}

pub(super) fn enter(unit: &str) {
    leave();
    let entered = (tracing::debug_span!("backward", unit).entered(), heartbeat::span("backward", unit));
    UNIT.with_borrow_mut(|unit| *unit = Some(entered));
}

pub(super) fn leave() {
    UNIT.with_borrow_mut(|unit| drop(unit.take()));
}
