//! Time of a rank's communication, and the part that compute waits for, measured by trace spans of the libraries.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use tracing::{Metadata, Subscriber, span};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// Span of a collective, on any thread.
const COLLECTIVE: &str = "collective";
const WAITS: [&str; 2] = ["wait for all-gather", "wait for reduction"];

/// Times measured so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Communication {
    /// Time of all collectives. Collectives of several groups may overlap.
    pub(crate) all: Duration,
    /// Time in which the training thread waited for a collective or ran one.
    pub(crate) exposed: Duration,
}

/// Measures the communication of this process.
#[derive(Clone)]
pub(crate) struct Clock(Arc<Counts>);

struct Counts {
    trains: ThreadId,
    /// Number of nested communication spans on the training thread.
    depth: AtomicUsize,
    all: AtomicU64,
    exposed: AtomicU64,
}

/// Start of a span, which a thread enters once.
struct Entered(Instant);

impl Clock {
    /// Starts measuring. The calling thread is the training thread. Once per process.
    pub(crate) fn start() -> anyhow::Result<Self> {
        let clock = Self::of_this_thread();
        tracing_subscriber::registry().with(clock.clone().with_filter(filter_fn(is_counted))).try_init()?;
        Ok(clock)
    }

    fn of_this_thread() -> Self {
        let (depth, all, exposed) = Default::default();
        Clock(Arc::new(Counts { trains: thread::current().id(), depth, all, exposed }))
    }

    pub(crate) fn read(&self) -> Communication {
        let of = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Ordering::Relaxed));
        Communication { all: of(&self.0.all), exposed: of(&self.0.exposed) }
    }
}

fn is_counted(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && (metadata.name() == COLLECTIVE || WAITS.contains(&metadata.name()))
}

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for Clock {
    fn on_enter(&self, id: &span::Id, context: Context<'_, S>) {
        if thread::current().id() == self.0.trains {
            self.0.depth.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(Entered(Instant::now()));
        }
    }

    fn on_exit(&self, id: &span::Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let passed = span.extensions().get().map_or(0, |Entered(at)| at.elapsed().as_nanos() as u64);
        if span.name() == COLLECTIVE {
            self.0.all.fetch_add(passed, Ordering::Relaxed);
        }
        // A collective inside a wait is counted once.
        if thread::current().id() == self.0.trains && self.0.depth.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.exposed.fetch_add(passed, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_millis(20);

    #[test]
    fn waits_count_once() {
        let clock = Clock::of_this_thread();
        let layers = tracing_subscriber::registry().with(clock.clone().with_filter(filter_fn(is_counted)));
        let _traced = tracing::subscriber::set_default(layers);
        let traced = tracing::dispatcher::get_default(Clone::clone);
        thread::spawn(move || {
            let run = || tracing::debug_span!("collective").in_scope(|| thread::sleep(LONG));
            tracing::dispatcher::with_default(&traced, run);
        })
        .join()
        .unwrap();
        let Communication { all, exposed } = clock.read();
        assert!(all >= LONG && exposed == Duration::ZERO);

        let began = Instant::now();
        tracing::debug_span!("wait for all-gather").in_scope(|| {
            thread::sleep(LONG);
            tracing::debug_span!("collective").in_scope(|| thread::sleep(LONG));
        });
        let waited = began.elapsed();
        tracing::debug_span!("forward").in_scope(|| thread::sleep(LONG));
        let after = clock.read();
        assert!(after.all >= 2 * LONG && after.exposed >= 2 * LONG);
        let in_wait = after.all - all;
        assert!(after.exposed >= in_wait + LONG && in_wait >= LONG);
        // The collective inside the wait is counted once. Compute is not counted.
        assert!(after.exposed <= waited, "{after:?} in {waited:?}");

        tracing::debug_span!("collective").in_scope(|| thread::sleep(LONG));
        assert!(clock.read().exposed >= after.exposed + LONG);
    }
}
