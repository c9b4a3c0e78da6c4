//! Heartbeats: how a rank tells its launcher that it lives, and where it is, for as long as it runs and however it
//! ends.
//!
//! The launcher makes a [`Board`] for each rank, a page of shared memory, and names it to the rank in the variable
//! [`VARIABLE`]. [`process_group::init`](crate::process_group::init) calls [`start`], and from then on a thread of the
//! rank beats, process groups write the collective that they are in, and the rank's own thread what it does ([`span`],
//! [`step`]). A rank without a board does nothing of this, and a board never makes a rank fail. Reading needs nothing
//! of the rank: a rank that is stopped, or killed, has a board that says where.
//!
//! A board also carries what the launcher tells its rank: which of the others have ended ([`Board::tell_ended`]).
//!
//! From the bottom up: `age` (a time for people), `memory` (the page), `entry` (several words at once), `board` (what
//! lies where; reading), `ended`, `writer`.

mod age;
mod board;
mod ended;
mod entry;
mod memory;
mod writer;

use std::{
    cell::Cell,
    marker::PhantomData,
    path::Path,
    sync::{Arc, OnceLock},
};

pub use age::Age;
pub use board::{Board, Collective, Doing, Progress, Snapshot, StepDone, VARIABLE, read};
pub(crate) use ended::Peers;
pub(crate) use writer::Collectives;
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
    Span { previous: writer.map(|writer| (&**writer, writer.enter(what, unit))), on_this_thread: PhantomData }
}

/// Ends a [`span`] when it is dropped: the board then shows again what it showed before.
pub struct Span {
    previous: Option<(&'static Writer, SpanWords)>,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some((writer, words)) = self.previous {
            writer.restore(&words);
        }
    }
}

/// Where a group of this process writes its collectives, if anywhere.
pub(crate) fn collectives(group: &str, rank: usize, size: usize) -> Option<Collectives> {
    writer()?.group(group, rank, size)
}
