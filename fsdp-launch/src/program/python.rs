//! Python scripts: started by the interpreter, as `torchrun` does.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use crate::{
    Error, Result,
    program::path::{check_path, find_in_path, not_a_file},
};

/// Runs a script with `runpy`, as torchrun's `--run-path`.
const RUN_PATH: &str = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// What the first word after the options is to Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file to run.
    Script,
    /// `--module`: a module to run.
    Module,
    /// `--run-path`: what `runpy.run_path` takes, a file, a directory or a zip archive.
    RunPath,
}

/// A name that only Python can mean.
pub(crate) fn is_script(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py")
}

/// The interpreter and its arguments up to the script's own.
///
/// # Errors
/// [`Error::ProgramPath`] and [`Error::NoPython`] where the script or the interpreter is not there.
pub(crate) fn command(kind: Kind, name: OsString) -> Result<(PathBuf, Vec<OsString>)> {
    if kind != Kind::Module {
        let path = PathBuf::from(&name);
        match path.metadata() {
            Err(source) => return Err(Error::ProgramPath { path, source }),
            Ok(meta) if kind == Kind::Script && !meta.is_file() => return Err(not_a_file(path, &meta)),
            Ok(_) => {}
        }
    }
    // Unbuffered: a line is seen when it is printed, not when the rank ends.
    let mut args: Vec<OsString> = vec!["-u".into()];
    match kind {
        Kind::Script => {}
        Kind::Module => args.push("-m".into()),
        Kind::RunPath => args.extend(["-c".into(), RUN_PATH.into()]),
    }
    args.push(name);
    Ok((interpreter()?, args))
}

fn interpreter() -> Result<PathBuf> {
    let name = env::var_os("PYTHON_EXEC").filter(|name| !name.is_empty()).unwrap_or_else(|| "python3".into());
    if Path::new(&name).components().count() > 1 {
        return check_path(name.into()).map_err(|error| Error::PythonExec { source: Box::new(error) });
    }
    find_in_path(&name).ok_or(Error::NoPython { name })
}
