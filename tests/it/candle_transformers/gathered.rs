//! How many bytes of parameters are gathered at once.

use std::sync::{Arc, Mutex};

use fsdp_candle::{FsdpParam, ShardedVarMap};

pub(crate) fn bytes(params: &[Arc<FsdpParam>]) -> usize {
    params.iter().map(|param| param.shape().elem_count() * param.compute_dtype().size_in_bytes()).sum()
}

/// Returns the result of `f` and the largest number of parameter bytes gathered at once on this thread's rank.
pub(crate) fn most_while<T>(vars: &ShardedVarMap, f: impl FnOnce() -> T) -> (T, usize) {
    let most = Arc::new(Mutex::new(0));
    let (params, see) = (vars.params(), most.clone());
    let on_event = move |event: &tracing::Metadata<'_>, _: String| {
        // At every gather and reduction of a unit.
        if event.target().starts_with("fsdp_candle") {
            let gathered: Vec<_> = params.iter().filter(|param| param.is_unsharded()).cloned().collect();
            let mut most = see.lock().unwrap();
            *most = bytes(&gathered).max(*most);
        }
    };
    let out = fsdp_test_support::observed(on_event, f);
    let most = *most.lock().unwrap();
    (out, most)
}
