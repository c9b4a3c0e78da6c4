//! What can go wrong before the ranks run; how they end is an [`Outcome`](crate::Outcome), not an error.

use std::{ffi::OsString, io, path::PathBuf, process::ExitStatus};

/// The launcher's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a launch could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program given by name is in none of the places where one is looked for.
    #[error(
        "program {name:?} was not found. Looked at: (1) {workspace}; (2) {beside}; (3) the directories of PATH. \
         Check the name against the [[bin]] and [[example]] targets of your workspace, \
         or give a path, which has a '/' in it{hint}"
    )]
    ProgramNotFound {
        /// The name.
        name: OsString,
        /// What came of looking through the Cargo workspace.
        workspace: String,
        /// The directory of the running executable, in words.
        beside: String,
        /// A guess at what was meant, or nothing.
        hint: String,
    },

    /// A program given by path does not exist or can't be reached.
    #[error("program {path:?} can't be run: {source}. Check the path; it counts from the current directory")]
    ProgramPath {
        /// The path.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },

    /// A program given by path lacks the permission to be executed.
    #[error(
        "program {path:?} can't be run: it is a file without execute permission. \
         `chmod +x` makes a script with a #! line executable; else start its interpreter: `python3 FILE`"
    )]
    NotExecutable {
        /// The path.
        path: PathBuf,
    },

    /// A program given by path is a directory, or something else that is no file.
    #[error("program {path:?} can't be run: it is {found}. Give the path of an executable or a script")]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },

    /// Several packages of the workspace have a target of this name.
    #[error("{name:?} is a target of several packages: {}. Change into the one that is meant, or give the path of a \
        built executable", .packages.join(", "))]
    AmbiguousTarget {
        /// The target.
        name: String,
        /// The packages that have it.
        packages: Vec<String>,
    },

    /// Cargo could not build the program; it has said why on stderr.
    #[error("`{command}` failed with {status}: see its messages above")]
    Build {
        /// The command line.
        command: String,
        /// How Cargo ended.
        status: ExitStatus,
    },

    /// Cargo said it built the program but named no executable.
    #[error(
        "`{command}` succeeded but named no executable for the target: run it by hand, and give the path of what it \
            built"
    )]
    NoExecutable {
        /// The command line.
        command: String,
    },

    /// There is no Python interpreter of this name.
    #[error("the Python interpreter {name:?} is not in PATH: set PYTHON_EXEC to the one that is meant")]
    NoPython {
        /// The name, of `PYTHON_EXEC` or `python3`.
        name: OsString,
    },

    /// `PYTHON_EXEC` is the path of nothing that can be run.
    #[error("PYTHON_EXEC names no Python interpreter: {source}")]
    PythonExec {
        /// Why it can't be run.
        source: Box<Error>,
    },

    /// A log file or its directory can't be made.
    #[error("the log {path:?} can't be made: {source}. Check --log-dir")]
    Log {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },

    /// An option's value can't be used together with the others, or on this host.
    #[error("invalid value {value:?} for {flag}: {expected}")]
    Usage {
        /// The option.
        flag: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        expected: String,
    },

    /// Options contradict each other, or one lacks another; the text names them.
    #[error("{0}")]
    Options(String),

    /// There are no ranks to start.
    #[error("the number of processes per node is 0: start at least 1")]
    NoRanks,

    /// The run id can't be used.
    #[error(
        "the run id {id:?} can't be used: it must not be empty or longer than 128 bytes, and hold no control characters"
    )]
    RunId {
        /// The id.
        id: String,
    },

    /// A rank's process could not be started; the ranks before it were ended again.
    #[error("rank {rank} could not be started from {program:?}: {source}{hint}")]
    Start {
        /// The rank.
        rank: usize,
        /// The program.
        program: PathBuf,
        /// The system's reason.
        source: io::Error,
        /// The way out, or nothing.
        hint: &'static str,
    },

    /// There is no run to tell of.
    #[error("{}", no_run(.run.as_deref(), .known))]
    NoRun {
        /// The id that was asked for.
        run: Option<String>,
        /// The ids that there are.
        known: Vec<String>,
    },

    /// The system refused something the launcher needs.
    #[error("could not {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
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
    /// What the command exits with: 2 where the command line has to be changed, else 1.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Error::Usage { .. } | Error::Options(_) | Error::NoRanks | Error::RunId { .. }) {
            2
        } else {
            1
        }
    }

    /// For `map_err` on the system calls around a launch.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }
}
