//! Errors before the ranks run. How ranks end is an [`Outcome`](crate::Outcome), not an error.

use std::{ffi::OsString, io, path::PathBuf, process::ExitStatus};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a launch could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program given by name was not found.
    #[error(
        "program {name:?} was not found. Looked at: (1) {workspace}; (2) {beside}; (3) the directories of PATH. \
         Check the name against the [[bin]] and [[example]] targets of your workspace, \
         or give a path, which has a '/' in it{hint}"
    )]
    ProgramNotFound {
        /// Name of the program.
        name: OsString,
        /// Result of the search in the Cargo workspace.
        workspace: String,
        /// Directory of the running executable, in words.
        beside: String,
        /// Suggestion, or empty.
        hint: String,
    },

    /// A program given by path does not exist or can't be reached.
    #[error("program {path:?} can't be run: {source}. Check the path; it counts from the current directory")]
    ProgramPath {
        /// Path of the program.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// A program given by path has no execute permission.
    #[error(
        "program {path:?} can't be run: it is a file without execute permission. \
         `chmod +x` makes a script with a #! line executable; else start its interpreter: `python3 FILE`"
    )]
    NotExecutable {
        /// Path of the program.
        path: PathBuf,
    },

    /// A program given by path is not a regular file.
    #[error("program {path:?} can't be run: it is {found}. Give the path of an executable or a script")]
    NotAFile {
        /// Path of the program.
        path: PathBuf,
        /// Kind of file that was found.
        found: &'static str,
    },

    /// Several packages of the workspace have a target of this name.
    #[error("{name:?} is a target of several packages: {}. Change into the one that is meant, or give the path of a \
        built executable", .packages.join(", "))]
    AmbiguousTarget {
        /// Name of the target.
        name: String,
        /// Packages with such a target.
        packages: Vec<String>,
    },

    /// Cargo failed to build the program; its messages are on stderr.
    #[error("`{command}` failed with {status}: see its messages above")]
    Build {
        /// Command line.
        command: String,
        /// Exit status of Cargo.
        status: ExitStatus,
    },

    /// Cargo succeeded but reported no executable.
    #[error(
        "`{command}` succeeded but named no executable for the target: run it by hand, and give the path of what it \
            built"
    )]
    NoExecutable {
        /// Command line.
        command: String,
    },

    /// The Python interpreter is not in `PATH`.
    #[error("the Python interpreter {name:?} is not in PATH: set PYTHON_EXEC to the one that is meant")]
    NoPython {
        /// Name, from `PYTHON_EXEC` or `python3`.
        name: OsString,
    },

    /// `PYTHON_EXEC` is a path that can't be run.
    #[error("PYTHON_EXEC names no Python interpreter: {source}")]
    PythonExec {
        /// Why it can't be run.
        source: Box<Error>,
    },

    /// A log file or directory can't be created.
    #[error("the log {path:?} can't be made: {source}. Check --log-dir")]
    Log {
        /// Path of the file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

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

    /// Options contradict each other, or a required option is missing.
    #[error("{0}")]
    Options(String),

    /// The number of ranks is 0.
    #[error("the number of processes per node is 0: start at least 1")]
    NoRanks,

    /// The run id is invalid.
    #[error(
        "the run id {id:?} can't be used: it must not be empty or longer than 128 bytes, and hold no control characters"
    )]
    RunId {
        /// The run id.
        id: String,
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
    #[error("{}", no_run(.run.as_deref(), .known))]
    NoRun {
        /// Run id that was asked for.
        run: Option<String>,
        /// Ids of the existing runs.
        known: Vec<String>,
    },

    /// A system call failed.
    #[error("could not {what}: {source}")]
    System {
        /// Description of the call.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

fn no_run(run: Option<&str>, known: &[String]) -> String {
    match (run, known) {
        (None, _) => "no run of this user is under way on this host (runs are found through TMPDIR, which must be the \
            launcher's)"
            .into(),
        (Some(run), []) => format!("no run {run:?}: none of this user is under way on this host"),
        (Some(run), known) => format!("no run {run:?}: there are {}", known.join(", ")),
    }
}

impl Error {
    /// Returns the exit code of the command: 2 for a wrong command line, else 1.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Error::Usage { .. } | Error::Options(_) | Error::NoRanks | Error::RunId { .. }) {
            2
        } else {
            1
        }
    }

    /// Converts the error of a system call, for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }
}
