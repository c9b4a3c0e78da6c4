//! What can be run: the file at a path, or one in the directories of `PATH`.

use std::{
    env,
    ffi::OsStr,
    fs::Metadata,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};

use crate::{Error, Result};

/// The executable of this name in the directories of `PATH`.
pub(crate) fn find_in_path(program: &OsStr) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // An empty entry of PATH means the current directory to a shell; naming it by a dot keeps the result a path.
    let dirs = env::split_paths(&path).map(|dir| if dir.as_os_str().is_empty() { ".".into() } else { dir });
    dirs.map(|dir| dir.join(program)).find(|it| runnable(it))
}

pub(crate) fn check_path(path: PathBuf) -> Result<PathBuf> {
    match path.metadata() {
        Err(source) => Err(Error::ProgramPath { path, source }),
        Ok(meta) if !meta.is_file() => Err(not_a_file(path, &meta)),
        Ok(_) if !runnable(&path) => Err(Error::NotExecutable { path }),
        Ok(_) => Ok(path),
    }
}

/// Why that can't be run.
pub(crate) fn not_a_file(path: PathBuf, meta: &Metadata) -> Error {
    Error::NotAFile { path, found: if meta.is_dir() { "a directory" } else { "not a regular file" } }
}

pub(crate) fn runnable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}
