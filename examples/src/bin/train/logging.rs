//! What a run tells about itself: events on stderr as `RUST_LOG` asks, and a trace file.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::Context;
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

/// Starts logging. The trace is whole when the guard is dropped.
///
/// # Errors
/// When the trace file can't be written.
pub(crate) fn init(trace: Option<&Path>) -> anyhow::Result<Option<FlushGuard>> {
    if let Some(file) = trace {
        let file = of_rank(file);
        std::fs::File::create(&file).with_context(|| format!("can't write --trace {}", file.display()))?;
    }
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    let events = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .with_filter(filter);
    let (spans, guard) = trace
        .map(|file| {
            let (layer, guard) = ChromeLayerBuilder::new().file(of_rank(file)).include_args(true).build();
            (layer.with_filter(EnvFilter::new("fsdp_candle=debug,fsdp_core=debug")), guard)
        })
        .unzip();
    tracing_subscriber::registry().with(events).with(spans).init();
    Ok(guard)
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
