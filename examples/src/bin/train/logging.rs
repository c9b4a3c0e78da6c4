//! What a run tells about itself: events on stderr as `RUST_LOG` asks, and a trace file.

use std::path::Path;

use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

/// Starts logging. The trace is whole when the guard is dropped.
pub(crate) fn init(trace: Option<&Path>) -> Option<FlushGuard> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    let events = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(filter);
    let (spans, guard) = trace
        .map(|file| {
            let (layer, guard) = ChromeLayerBuilder::new().file(of_rank(file)).include_args(true).build();
            (layer.with_filter(EnvFilter::new("fsdp_candle=debug,fsdp_core=debug")), guard)
        })
        .unzip();
    tracing_subscriber::registry().with(events).with(spans).init();
    guard
}

/// `trace.json` for rank 0, `trace.rank1.json` for rank 1.
fn of_rank(file: &Path) -> std::path::PathBuf {
    match fsdp_core::RankEnv::from_env().map_or(0, |env| env.rank) {
        0 => file.to_path_buf(),
        rank => {
            let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or("json");
            file.with_extension(format!("rank{rank}.{extension}"))
        }
    }
}
