//! MPICH on this machine, and the tests' program.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// The program of the ranks.
#[derive(Clone)]
pub(crate) enum Program {
    Built(PathBuf),
    Missing { why: String, is_required: bool },
}

/// Builds the program, if MPICH and a compiler are installed.
pub(crate) fn program() -> Program {
    let is_required = match env::var("FSDP_TESTS_REQUIRE").as_deref() {
        Err(env::VarError::NotPresent) | Ok("") => false,
        Ok("all") => true,
        other => panic!("FSDP_TESTS_REQUIRE may be \"all\" or unset; it is {other:?}"),
    };
    match build() {
        Ok(path) => Program::Built(path),
        Err(why) => Program::Missing { why, is_required },
    }
}

fn build() -> Result<PathBuf, String> {
    let mpicc = mpicc().ok_or(
        "MPICH is missing (.ci/install installs it in target/mpi/mpich; FSDP_TESTS_MPI chooses another, by the paths \
         of mpirun as PATH lists folders)",
    )?;
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mpich-{}", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mpich/program.c");
    let built = Command::new(&mpicc).arg(source).arg("-o").arg(&program).output();
    match built {
        Ok(output) if output.status.success() => Ok(program),
        Ok(output) => Err(format!("{}: {}", mpicc.display(), String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("{}: {error}", mpicc.display())),
    }
}

/// Finds the compiler beside one of MPICH's launchers.
fn mpicc() -> Option<PathBuf> {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/mpi/mpich/bin/mpirun");
    let mut launchers: Vec<PathBuf> = match env::var_os("FSDP_TESTS_MPI") {
        Some(chosen) => env::split_paths(&chosen).collect(),
        None => vec![installed],
    };
    let path = env::var_os("PATH").unwrap_or_default();
    launchers.extend(env::split_paths(&path).map(|folder| folder.join("mpirun")));
    let is_mpich = |mpirun: &PathBuf| {
        let told = Command::new(mpirun).arg("--version").output();
        told.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("HYDRA"))
    };
    let mpirun = launchers.into_iter().filter(|path| path.is_file()).find(is_mpich)?;
    Some(mpirun.with_file_name("mpicc")).filter(|mpicc| mpicc.is_file())
}
