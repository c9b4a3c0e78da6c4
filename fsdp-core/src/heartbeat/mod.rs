//! Heartbeats: how a rank tells its launcher that it lives, and where it is, for as long as it runs and however it
//! ends.

mod memory;
mod page;
mod writer;

use std::{
    cell::Cell,
    fmt,
    marker::PhantomData,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

pub(crate) use page::PeerExits;
pub use page::{Activity, Collective, Progress, Snapshot, StatusPage, StepDone, VARIABLE, read};
use serde::{Deserialize, Serialize};
pub(crate) use writer::CollectiveRecorder;
use writer::{SpanWords, Writer};

static WRITER: OnceLock<Option<Arc<Writer>>> = OnceLock::new();

thread_local! {
    /// This is the thread that called [`start`], whose spans are the rank's.
    static IS_MAIN: Cell<bool> = const { Cell::new(false) };
}

/// Starts the heart of this process, if its launcher gave it a board: the first call decides, and the thread that makes
/// it is the one whose spans the board shows. A board that can't be used, because it is not there or is another
/// process's, is told as a `tracing` event and is no error.
pub fn start() {
    WRITER.get_or_init(|| {
        let path = std::env::var_os(VARIABLE)?;
        let claimed = Writer::claim(Path::new(&path), std::process::id()).map(Arc::new);
        match claimed.and_then(|writer| writer.start_beating().map(|()| writer)) {
            Ok(writer) => {
                IS_MAIN.set(true);
                Some(writer)
            }
            Err(error) => {
                tracing::debug!("no heartbeat: {VARIABLE}={}: {error}", path.display());
                None
            }
        }
    });
}

fn writer() -> Option<&'static Arc<Writer>> {
    WRITER.get()?.as_ref()
}

/// Tells that a training step is done. The optimizers of `fsdp-candle` do.
pub fn step(number: u64) {
    if let Some(writer) = writer().filter(|_| IS_MAIN.get()) {
        writer.step(number);
    }
}

/// Tells what this thread does until the guard is dropped: `what`, and to which `unit` of the model (empty for none).
/// On threads other than the one that called [`start`] it does nothing.
///
/// ```
/// let _span = fsdp_core::heartbeat::span("evaluation", "");
/// for batch in 0..3 {
///     let _span = fsdp_core::heartbeat::span("evaluation of batch", &batch.to_string());
/// }
/// ```
#[must_use = "the span ends when the guard is dropped"]
pub fn span(what: &str, unit: &str) -> Span {
    let writer = writer().filter(|_| IS_MAIN.get());
    Span { previous: writer.map(|writer| (&**writer, writer.enter_span(what, unit))), on_this_thread: PhantomData }
}

/// Ends a [`span`] when it is dropped: the board then shows again what it showed before.
pub struct Span {
    previous: Option<(&'static Writer, SpanWords)>,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some((writer, words)) = self.previous {
            writer.write_span(&words);
        }
    }
}

/// Where a group of this process writes its collectives, if anywhere.
pub(crate) fn collective_recorder(group: &str, rank: usize, size: usize) -> Option<CollectiveRecorder> {
    writer()?.group(group, rank, size)
}

/// A duration that is serialized as a number of seconds, and printed as people say it.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::heartbeat::Age;
/// assert_eq!(Age(Duration::from_millis(1260)).to_string(), "1.3 s");
/// assert_eq!(Age(Duration::from_secs(754)).to_string(), "12 min 34 s");
/// assert_eq!(Age(Duration::from_secs(93_784)).to_string(), "26 h 3 min");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Age(pub Duration);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            0..60 => write!(f, "{:.1} s", self.0.as_secs_f64()),
            seconds @ 60..3600 => write!(f, "{} min {} s", seconds / 60, seconds % 60),
            seconds => write!(f, "{} h {} min", seconds / 3600, seconds % 3600 / 60),
        }
    }
}

impl From<Age> for f64 {
    fn from(age: Age) -> f64 {
        age.0.as_secs_f64()
    }
}

impl TryFrom<f64> for Age {
    type Error = std::time::TryFromFloatSecsError;

    fn try_from(seconds: f64) -> Result<Self, Self::Error> {
        Duration::try_from_secs_f64(seconds).map(Age)
    }
}
