//! The span, for traces and heartbeats, of the unit whose backward runs on a thread.

use std::cell::RefCell;

use fsdp_core::heartbeat;
use tracing::span::EnteredSpan;

thread_local! {
    /// Candle does not tell where a unit's backward ends, so the span lasts until the next unit's.
    static UNIT_SPAN: RefCell<Option<(EnteredSpan, heartbeat::Span)>> = const { RefCell::new(None) };
}

pub(super) fn enter_unit_span(unit: &str) {
    leave_unit_span();
    let entered = (tracing::debug_span!("backward", unit).entered(), heartbeat::span("backward", unit));
    UNIT_SPAN.with_borrow_mut(|span| *span = Some(entered));
}

pub(super) fn leave_unit_span() {
    UNIT_SPAN.with_borrow_mut(|span| drop(span.take()));
}
