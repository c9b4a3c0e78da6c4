//! The limit of a file's size (`ulimit -f`).

use std::{
    error::Error,
    io, mem, ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::process::{Resource, getrlimit};

/// Whether [`return_errors`] has changed what SIGXFSZ does.
static IS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Makes a write beyond the limit of a file's size an error of the write. By default the system kills the process with
/// SIGXFSZ, and no message says why.
///
/// Ignores the signal for the whole process, unless the process handles it. Programs that the process starts inherit
/// that ([`restore_signal`]). The programs of this project and `fsdp_candle::init` call this function.
///
/// ```
/// fsdp_core::file_limit::return_errors();
/// ```
pub fn return_errors() {
    // SAFETY: all-zero bytes are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: the first pointer may be null, which changes nothing, and the second one is valid.
    let is_default = unsafe { libc::sigaction(libc::SIGXFSZ, ptr::null(), &raw mut action) } == 0
        && action.sa_sigaction == libc::SIG_DFL;
    if is_default {
        IS_IGNORED.store(true, Ordering::SeqCst);
        // SAFETY: an ignored signal runs no code.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}

/// Undoes [`return_errors`] in a new process, before it executes a program. Async-signal-safe.
///
/// ```
/// fsdp_core::file_limit::restore_signal();
/// ```
pub fn restore_signal() {
    if IS_IGNORED.swap(false, Ordering::SeqCst) {
        // SAFETY: the default action runs no code of this process. `signal` is async-signal-safe.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
    }
}

/// Returns how to raise the limit, if an error or one of its causes is a file that would be too large.
///
/// ```
/// use std::io;
/// use fsdp_core::file_limit::advice;
/// // EFBIG
/// let error = io::Error::from_raw_os_error(27);
/// assert!(advice(&error).unwrap().contains("ulimit -f"));
/// assert_eq!(advice(&io::Error::other("another error")), None);
/// ```
pub fn advice(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) == Some(libc::EFBIG) {
            return Some(match getrlimit(Resource::Fsize).current {
                Some(limit) => format!(
                    "a file of this process may have at most {limit} bytes (ulimit -f). Raise the limit with `ulimit \
                     -f unlimited`"
                ),
                None => "`ulimit -f` sets no limit, so the file system does. Use another directory".into(),
            });
        }
        next = error.source();
    }
    None
}

/// Adds the [`advice`] to the error of a file that would be too large. Other errors stay as they are.
///
/// ```
/// use std::io;
/// let error = fsdp_core::file_limit::explained(io::Error::from_raw_os_error(27));
/// assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
/// assert!(error.to_string().contains("ulimit -f"));
/// ```
pub fn explained(error: io::Error) -> io::Error {
    match advice(&error) {
        Some(advice) => io::Error::new(error.kind(), format!("{error}: {advice}")),
        None => error,
    }
}
