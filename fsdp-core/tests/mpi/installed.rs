//! The MPIs of this machine.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use fsdp_test_support::need::{self, missing};
use libtest_mimic::{Completion, Failed};

/// An MPI, and one of its libraries.
#[derive(Debug)]
pub(crate) struct Mpi {
    /// The launcher.
    pub(crate) mpirun: PathBuf,
    /// The library, if it is not the one that would be found.
    pub(crate) library: Option<PathBuf>,
    pub(crate) is_open_mpi: bool,
}

impl Mpi {
    /// Returns the launcher for some ranks. In `tests/hosts/hosts`, they run on all of its hosts.
    pub(crate) fn mpirun(&self, ranks: usize) -> Command {
        let mut command = Command::new(&self.mpirun);
        command.args(["-n", &ranks.to_string()]);
        let hosts = env::var("FSDP_HOSTS").map_or(0, |hosts| hosts.split(' ').count());
        if hosts > 0 {
            let each = ranks.div_ceil(hosts);
            let list: Vec<_> = (0..hosts).map(|host| format!("node{host}:{each}")).collect();
            command.arg(if self.is_open_mpi { "--host" } else { "-hosts" }).arg(list.join(","));
        }
        if self.is_open_mpi {
            command.args(["--oversubscribe", "--bind-to", "none"]);
            // Open MPI passes only named variables on to other hosts.
            command.args(["-x", "FSDP_TEST_ROLE", "-x", "FSDP_TEST_FOLDER"]);
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        command
    }

    /// Returns the library that its programs find.
    pub(crate) fn own_library(&self) -> Option<PathBuf> {
        let found = self.mpirun.canonicalize().ok()?;
        let lib = found.parent()?.parent()?.join("lib");
        let names: &[&str] =
            if self.is_open_mpi { &["libmpi.so.40", "x86_64-linux-gnu/libmpi.so.40"] } else { &["libmpi_abi.so.1"] };
        self.library.clone().or_else(|| names.iter().map(|name| lib.join(name)).find(|path| path.is_file()))
    }
}

/// The binary interfaces of MPICH that a test runs with. They differ in how numbers are encoded.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Interfaces {
    First,
    All,
}

/// Runs a test under each installed MPI.
pub(crate) fn each(test: fn(&Mpi), interfaces: Interfaces) -> Result<Completion, Failed> {
    let mut found = vec![];
    let mut outcome = Completion::Completed;
    for kind in [need::Mpi::Open, need::Mpi::Mpich] {
        match kind.mpirun() {
            Ok(mpirun) => found.extend(libraries(&mpirun, kind, interfaces)),
            Err(reason) => outcome = missing(reason)?,
        }
    }
    found.iter().for_each(test);
    Ok(if found.is_empty() { outcome } else { Completion::Completed })
}

/// Returns an MPI with its binary interfaces.
fn libraries(mpirun: &Path, kind: need::Mpi, interfaces: Interfaces) -> Vec<Mpi> {
    let mpi = |library| Mpi { mpirun: mpirun.to_path_buf(), library, is_open_mpi: kind == need::Mpi::Open };
    let lib = mpirun.parent().unwrap().join("../lib");
    let (standard, classic) = (lib.join("libmpi_abi.so.1"), lib.join("libmpi.so.12"));
    // Between hosts, one is enough.
    let are_two = standard.is_file() && classic.is_file() && env::var_os("FSDP_HOSTS").is_none();
    if are_two && interfaces == Interfaces::All { vec![mpi(None), mpi(Some(classic))] } else { vec![mpi(None)] }
}
