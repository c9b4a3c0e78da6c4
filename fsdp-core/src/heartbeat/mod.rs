//! Heartbeats: each rank reports to its launcher that it runs, and what it does.
//!
//! The launcher creates a [`StatusPage`] for each rank, a page of shared memory, and passes its path in the variable
//! [`VARIABLE`]. [`process_group::init`](crate::process_group::init) calls [`start`]. From then on, a thread writes a
//! heartbeat twice a second, process groups write their current collective, and the rank's main thread writes what it
//! does ([`span`], [`step`]). Without a status page, these calls do nothing. A status page never makes a rank fail.
//!
//! The launcher reads the page without help of the rank. So it also learns what a stopped or killed rank did.
//!
//! The launcher writes one thing into the page: which other ranks have exited ([`StatusPage::record_exit`]).

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
    /// Whether this thread called [`start`]. Only its spans are written.
    static IS_MAIN: Cell<bool> = const { Cell::new(false) };
}

/// Starts the heartbeat of this process, if the launcher gave it a status page. The first call decides; the calling
/// thread becomes the main thread, whose spans the page shows. If the page is missing or belongs to another process, a
/// `tracing` event says so; it is not an error.
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

/// Reports that a training step is done. The optimizers of `fsdp-candle` call it.
pub fn step(number: u64) {
    if let Some(writer) = writer().filter(|_| IS_MAIN.get()) {
        writer.step(number);
    }
}

/// Reports what this thread does until the guard is dropped: `what`, and the `unit` of the model (empty for none). Does
/// nothing on threads other than the one that called [`start`].
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

/// Ends a [`span`] when dropped: the page then shows the enclosing span again.
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

/// Returns the recorder of a process group's collectives; `None` without a status page.
pub(crate) fn collective_recorder(group: &str, rank: usize, size: usize) -> Option<CollectiveRecorder> {
    writer()?.group(group, rank, size)
}

/// A duration that is serialized as seconds, and displayed for people.
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
