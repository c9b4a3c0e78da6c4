//! What a run tells about itself: events on stderr as `RUST_LOG` asks, and the trace.

use std::path::Path;

use fsdp_candle::World;
use fsdp_examples::job;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::trace::Trace;

/// Starts logging, and the trace where one is wanted. Collective.
///
/// # Errors
/// When the trace file can't be written.
pub(crate) fn init(trace: Option<&Path>, world: &World) -> anyhow::Result<Option<Trace>> {
    let (spans, trace) = match trace {
        Some(file) => {
            let (layer, trace) = Trace::start(file, world)?;
            let filter = EnvFilter::new("fsdp_candle=debug,fsdp_core=debug,train=debug");
            (Some(layer.with_filter(filter)), Some(trace))
        }
        None => (None, None),
    };
    tracing_subscriber::registry().with(spans).with(job::events()).init();
    Ok(trace)
}
