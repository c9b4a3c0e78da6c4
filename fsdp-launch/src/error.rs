//! Errors before the ranks run. How ranks end is an [`Outcome`](crate::Outcome), not an error.

use std::{io, path::PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a launch could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program was not found, can't be run, or could not be built.
    #[error("{0}")]
    Program(String),

    /// An option's value does not fit the other options, or this host.
    #[error("invalid value {value:?} for {flag}: {expected}")]
    Usage {
        /// Name of the option.
        flag: &'static str,
        /// Value of the option.
        value: String,
        /// Expected value.
        expected: String,
    },

    /// Options are invalid together, or a required option is missing.
    #[error("{0}")]
    Options(String),

    /// A log file or directory can't be created.
    #[error("the log {path:?} can't be created: {source}. Check --log-dir")]
    Log {
        /// Path of the file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// A rank's process could not be started. The ranks started before it were ended.
    #[error("rank {rank} could not be started from {program:?}: {source}{hint}")]
    Start {
        /// Rank that failed to start.
        rank: usize,
        /// Path of the program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
        /// Hint for the user, or empty.
        hint: &'static str,
    },

    /// `status` found no run.
    #[error("{0}")]
    NoRun(String),

    /// A system call failed.
    #[error("could not {what}: {source}")]
    System {
        /// Description of the call.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    /// Returns the exit code of the command: 2 for a wrong command line, else 1.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Error::Usage { .. } | Error::Options(_)) { 2 } else { 1 }
    }

    /// Converts the error of a system call, for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: fsdp_core::file_limit::explained(source.into()) }
    }
}
