//! Requests to object stores: a runtime that runs them, their timeout, and their errors.

use std::error::Error as StdError;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use object_store::client::{HttpError, HttpErrorKind};
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;

use crate::store::object::metadata;
use crate::{Error, Result};

/// Environment variable and default of a request's timeout in seconds, including retries.
const LIMIT: &str = "FSDP_STORE_TIMEOUT_S";
const LIMIT_S: f64 = 120.0;

/// A running request. Dropping it cancels it.
pub(super) struct Pending<T> {
    answer: Receiver<Result<T, Failure>>,
    task: AbortHandle,
}

impl<T> Pending<T> {
    /// Waits for the answer or the timeout.
    pub(super) fn wait(self) -> Result<T, Failure> {
        // The task sends an answer unless it panicked.
        self.answer.recv().unwrap_or(Err(Failure::Panicked))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a request on a runtime of this crate, so any thread may call it, even one of another runtime.
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
            Err(_) => Err(Failure::TimedOut(limit)),
        };
        // Fails if the caller dropped the request.
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

/// Returns the timeout from the environment.
pub(super) fn limit() -> Result<Duration> {
    let Some(text) = std::env::var_os(LIMIT) else { return Ok(Duration::from_secs_f64(LIMIT_S)) };
    let seconds = text.to_str().and_then(|text| text.parse().ok()).filter(|seconds: &f64| *seconds > 0.0);
    let limit = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit.ok_or_else(|| Error::Argument(format!("{LIMIT}={text:?} is not a number of seconds")))
}

/// The variable was valid when the client was created.
pub(super) fn limit_or_default() -> Duration {
    static KEPT: OnceLock<Duration> = OnceLock::new();
    *KEPT.get_or_init(|| limit().unwrap_or(Duration::from_secs_f64(LIMIT_S)))
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The store's error.
    Store(object_store::Error),
    /// Invalid or missing settings in the environment.
    Settings(object_store::Error),
    /// No answer within the timeout.
    TimedOut(Duration),
    /// The task panicked.
    Panicked,
    /// The runtime can't start.
    NoThreads(String),
}

impl From<object_store::Error> for Failure {
    fn from(error: object_store::Error) -> Self {
        Failure::Store(error)
    }
}

impl Failure {
    /// Returns whether the object does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Failure::Store(object_store::Error::NotFound { .. }))
    }

    /// Returns whether the store refused the request, so it has no effect.
    pub(super) fn is_refusal(&self) -> bool {
        use object_store::Error as E;
        matches!(
            self,
            Failure::Store(
                E::AlreadyExists { .. }
                    | E::NotFound { .. }
                    | E::Precondition { .. }
                    | E::PermissionDenied { .. }
                    | E::Unauthenticated { .. }
                    | E::NotImplemented { .. }
                    | E::NotSupported { .. }
            )
        )
    }

    /// Converts the failure to this crate's error.
    pub(super) fn at(self, action: &'static str, url: &Path) -> Error {
        let text = url.to_string_lossy();
        let settings = Settings::of(text.split_once("://").map_or("", |(scheme, _)| scheme));
        let reason = match &self {
            Failure::Store(error) => advice(error, &settings),
            Failure::Settings(_) => format!("its settings are missing or wrong; set {}", settings.credentials),
            Failure::TimedOut(limit) => format!(
                "no answer within {} s; check {} and the network, or raise FSDP_STORE_TIMEOUT_S",
                limit.as_secs_f64(),
                settings.endpoint
            ),
            Failure::Panicked => "the request panicked".into(),
            Failure::NoThreads(cause) => format!("can't start threads: {cause}"),
        };
        let source = match self {
            // Its text includes its causes.
            Failure::Store(error) | Failure::Settings(error) => Some(error.to_string().into()),
            _ => None,
        };
        Error::Object { action, path: url.to_path_buf(), reason, source }
    }
}

/// Names of environment variables for a kind of store.
struct Settings {
    credentials: &'static str,
    endpoint: &'static str,
    http: &'static str,
}

impl Settings {
    fn of(scheme: &str) -> Self {
        match scheme {
            "gs" => Settings {
                credentials: "GOOGLE_APPLICATION_CREDENTIALS (the path of a key file)",
                endpoint: "GOOGLE_BASE_URL",
                http: "GOOGLE_ALLOW_HTTP",
            },
            "s3" | "s3a" => Settings {
                credentials: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                endpoint: "AWS_ENDPOINT and AWS_REGION",
                http: "AWS_ALLOW_HTTP",
            },
            _ => Settings {
                credentials: "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
                endpoint: "AZURE_STORAGE_ENDPOINT",
                http: "AZURE_ALLOW_HTTP",
            },
        }
    }
}

fn advice(error: &object_store::Error, settings: &Settings) -> String {
    use object_store::Error as E;
    let Settings { credentials, endpoint, http } = settings;
    let mut text = error.to_string();
    let mut kind = None;
    let mut next: Option<&dyn StdError> = Some(error);
    while let Some(cause) = next {
        text.push_str(&cause.to_string());
        kind = kind.or_else(|| cause.downcast_ref::<HttpError>().map(HttpError::kind));
        next = cause.source();
    }
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let denied = format!("access denied; set {credentials} to credentials that may list, read and write this bucket");
    match error {
        _ if has(&["NoSuchBucket", "ContainerNotFound", "bucket does not exist"]) => {
            "there is no such bucket; create it, or correct its name".into()
        }
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => denied,
        // Errors of listing have no kind.
        _ if has(&["403 Forbidden", "401 Unauthorized"]) => denied,
        E::NotFound { .. } => "there is no such object".into(),
        E::NotImplemented { .. } | E::NotSupported { .. } => "this store can't do it".into(),
        // Without credentials, clients ask the metadata address.
        _ if has(&[metadata::OFF]) => format!("there are no credentials, and {}; set {credentials}", metadata::OFF),
        _ if has(&[metadata::NO_ANSWER, "169.254.169.254", "metadata.google", "metadata/instance"]) => {
            format!("there are no credentials, and {}; set {credentials}", metadata::NO_ANSWER)
        }
        _ if has(&["URL scheme is not allowed"]) => format!("its endpoint is not https; set {http}=true to allow it"),
        _ => match kind {
            Some(HttpErrorKind::Connect) => format!("the store can't be reached; check {endpoint} and the network"),
            Some(HttpErrorKind::Timeout) => format!("the store does not answer; check {endpoint} and the network"),
            Some(HttpErrorKind::Interrupted | HttpErrorKind::Request) => {
                "the connection broke off; check the network and try again".into()
            }
            _ => "the store failed or gave a strange answer; try again later".into(),
        },
    }
}
