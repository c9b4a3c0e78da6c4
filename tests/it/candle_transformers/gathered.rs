//! How many bytes of parameters are gathered at once.

use std::sync::{Arc, Mutex};

use fsdp_candle::{FsdpParam, ShardedVarMap};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

pub(crate) fn bytes(params: &[Arc<FsdpParam>]) -> usize {
    params.iter().map(|param| param.shape().elem_count() * param.compute_dtype().size_in_bytes()).sum()
}

/// Measures at every gather and reduction of a unit.
struct Watch {
    params: Vec<Arc<FsdpParam>>,
    most: Arc<Mutex<usize>>,
}

/// Returns the result of `f` and the largest number of parameter bytes gathered at once on this thread's rank.
pub(crate) fn most_while<T>(vars: &ShardedVarMap, f: impl FnOnce() -> T) -> (T, usize) {
    let most = Arc::new(Mutex::new(0));
    let out = fsdp_test_support::observed(Watch { params: vars.params(), most: most.clone() }, f);
    let most = *most.lock().unwrap();
    (out, most)
}

impl Subscriber for Watch {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with("fsdp_candle")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        let there: Vec<_> = self.params.iter().filter(|param| param.is_unsharded()).cloned().collect();
        let mut most = self.most.lock().unwrap();
        *most = bytes(&there).max(*most);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
