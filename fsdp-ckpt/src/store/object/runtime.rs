//! The threads that talk to object stores, and waiting for them from any other thread.

use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;

use super::failure::Failure;
use crate::{Error, Result};

/// How long a request may take with all its repetitions, in seconds.
const LIMIT: &str = "FSDP_STORE_TIMEOUT_S";
const LIMIT_S: f64 = 120.0;

/// A request on its way. Dropped, it is given up.
pub(super) struct Pending<T> {
    answer: Receiver<Result<T, Failure>>,
    task: AbortHandle,
}

impl<T> Pending<T> {
    /// Waits for the answer, for the request's limit at most.
    pub(super) fn wait(self) -> Result<T, Failure> {
        // Without an answer the task is gone: it panicked.
        self.answer.recv().unwrap_or(Err(Failure::Lost))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a request. The runtime is its own, so that this works on every thread, one of another runtime included.
pub(super) fn start<T: Send + 'static>(
    limit: Duration,
    request: impl Future<Output = object_store::Result<T>> + Send + 'static,
) -> Result<Pending<T>, Failure> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        Builder::new_multi_thread().worker_threads(2).thread_name("fsdp-ckpt-store").enable_all().build()
    });
    let runtime = runtime.as_ref().map_err(|error| Failure::NoThreads(error.to_string()))?;
    let (send, answer) = sync_channel(1);
    let task = runtime.spawn(async move {
        let outcome = match tokio::time::timeout(limit, request).await {
            Ok(answered) => answered.map_err(Failure::from),
            Err(_) => Err(Failure::Late(limit)),
        };
        // Nobody waits any more: nobody needs it.
        let _ = send.send(outcome);
    });
    Ok(Pending { answer, task: task.abort_handle() })
}

/// Starts a request and waits for it.
pub(super) fn wait<T: Send + 'static>(
    request: impl Future<Output = object_store::Result<T>> + Send + 'static,
) -> Result<T, Failure> {
    start(limit_or_default(), request)?.wait()
}

/// The limit of every request, from the environment.
pub(super) fn limit() -> Result<Duration> {
    let Some(text) = std::env::var_os(LIMIT) else { return Ok(Duration::from_secs_f64(LIMIT_S)) };
    let seconds = text.to_str().and_then(|text| text.parse().ok()).filter(|seconds: &f64| *seconds > 0.0);
    let limit = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit.ok_or_else(|| Error::Argument(format!("{LIMIT}={text:?} is not a number of seconds")))
}

/// Every client was made under a limit that could be read.
pub(super) fn limit_or_default() -> Duration {
    static KEPT: OnceLock<Duration> = OnceLock::new();
    *KEPT.get_or_init(|| limit().unwrap_or(Duration::from_secs_f64(LIMIT_S)))
}
