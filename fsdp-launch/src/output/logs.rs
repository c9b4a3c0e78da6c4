//! The log files of a run: `DIR/<run id>/attempt_<n>/<local rank>/` with stdout.log, stderr.log and error.json, as
//! `torchrun` names them.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    process::Stdio,
};

use fsdp_core::file_limit;

use crate::{Error, LogSpec, Result};

pub(crate) const STDOUT: &str = "stdout.log";
pub(crate) const STDERR: &str = "stderr.log";

/// Creates the directory of a run, if it needs one. Existing directories are kept: a second run of the same id gets a
/// numbered name.
pub(crate) fn create_run_dir(spec: &LogSpec, ranks: usize, run_id: &str) -> Result<Option<PathBuf>> {
    let to_file = |rank: usize| [spec.redirects.of(rank), spec.tee.of(rank)].iter().any(|it| it.stdout || it.stderr);
    let base = match &spec.dir {
        Some(dir) => dir.clone(),
        None if !(0..ranks).any(to_file) => return Ok(None),
        None => {
            let made = tempfile::Builder::new().prefix("fsdp-launch-logs-").tempdir();
            made.map_err(Error::system("make a temporary directory for logs; --log-dir names another"))?.keep()
        }
    };
    fs::create_dir_all(&base).map_err(failed(&base))?;
    // The id must not lead to another directory.
    let name = run_id.replace('/', "_");
    let name = if name.starts_with('.') { format!("_{name}") } else { name };
    let numbered = (2u32..).map(|number| format!("{name}_{number}"));
    for name in std::iter::once(name.clone()).chain(numbered) {
        let dir = base.join(name);
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| Some(dir.clone())).map_err(failed(&dir)),
        }
    }
    Ok(None)
}

/// Creates the directories of an attempt's ranks.
pub(crate) fn create_attempt_dir(run_dir: &Path, restart_count: u32, ranks: usize) -> Result<PathBuf> {
    let dir = run_dir.join(format!("attempt_{restart_count}"));
    for rank in 0..ranks {
        let dir = dir.join(rank.to_string());
        fs::create_dir_all(&dir).map_err(failed(&dir))?;
    }
    Ok(dir)
}

/// Destination of one stream of a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Console,
    /// The rank writes the file directly.
    File,
    Both,
    Discard,
}

impl Route {
    /// Opens the destination of the stream `name` of `rank`. Returns the rank's end, and the file that receives a copy
    /// of a piped stream.
    pub(crate) fn open(self, dir: Option<&Path>, rank: usize, name: &str) -> Result<(Stdio, Option<File>)> {
        let file = || {
            let path = dir.map(|dir| log_file(dir, rank, name)).unwrap_or_default();
            OpenOptions::new().create(true).append(true).open(&path).map_err(failed(&path))
        };
        Ok(match self {
            Route::Console => (Stdio::piped(), None),
            Route::File => (file()?.into(), None),
            Route::Both => (Stdio::piped(), Some(file()?)),
            Route::Discard => (Stdio::null(), None),
        })
    }
}

/// Returns the destinations of a rank's stdout and stderr. Without a log directory, no stream goes to a file.
pub(crate) fn routes(spec: &LogSpec, has_dir: bool, rank: usize) -> [Route; 2] {
    let (redirect, tee, shown) = (spec.redirects.of(rank), spec.tee.of(rank), spec.local_ranks_filter.shows(rank));
    [(redirect.stdout, tee.stdout), (redirect.stderr, tee.stderr)].map(|(redirect, tee)| {
        match (has_dir && (redirect || tee), shown) {
            (true, true) if tee => Route::Both,
            (true, _) => Route::File,
            (false, true) => Route::Console,
            (false, false) => Route::Discard,
        }
    })
}

/// Returns the file of a rank's stderr, if the console does not show it.
pub(crate) fn hidden_stderr(spec: &LogSpec, dir: Option<&Path>, rank: usize) -> Option<PathBuf> {
    let [_, stderr] = routes(spec, dir.is_some(), rank);
    dir.filter(|_| stderr == Route::File).map(|dir| log_file(dir, rank, STDERR))
}

fn log_file(dir: &Path, rank: usize, name: &str) -> PathBuf {
    dir.join(rank.to_string()).join(name)
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Log { path: path.to_owned(), source: file_limit::explained(source) }
}
