//! Warnings that reach programs with and without a `tracing` subscriber.

/// Warns by `tracing`, or on stderr if the program has no subscriber.
pub(crate) fn warn(message: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{message}");
    } else {
        // `eprintln!` panics if stderr is on a full disk.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("warning: {message}\n"));
    }
}
