//! Ranks as processes: an MPI launcher runs this binary again with the name of a role. Ranks write results to files.

use std::{
    path::Path,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use fsdp_test_support::{ranks::ROLE, run};

use crate::installed::Mpi;

/// A limit that only a hang exceeds.
const HANG: Duration = Duration::from_secs(300);

/// Result of a job.
pub(crate) struct Job {
    /// Result text of each rank.
    pub(crate) said: Vec<String>,
    /// Whether the launcher succeeded.
    pub(crate) is_well: bool,
}

/// Runs `command`, with the ranks' results in a directory of its own.
fn play(mut command: Command, library: Option<&Path>, role: &str, ranks: usize) -> Job {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("fsdp-mpi-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_HIERARCHY"] {
        command.env_remove(name);
    }
    if let Some(library) = library {
        command.env("FSDP_MPI_LIBRARY", library);
    }
    command.env(ROLE, role).env("FSDP_TEST_FOLDER", &folder);
    let ended = run(command, HANG);
    let said = (0..ranks).map(|rank| {
        let said = std::fs::read_to_string(folder.join(rank.to_string()));
        said.unwrap_or_else(|_| format!("ended by its launcher: {}{}", ended.stdout, ended.stderr))
    });
    let job = Job { said: said.collect(), is_well: ended.code == Some(0) };
    std::fs::remove_dir_all(&folder).unwrap();
    job
}

/// A message that Open MPI's launcher sometimes prints on a busy machine before it starts a rank.
const NOT_BEGUN: &str = "The PMIx server's listener thread failed to start";

/// Runs ranks to their end.
pub(crate) fn start(mpi: &Mpi, role: &str, ranks: usize) -> Job {
    let start_once = || {
        let mut command = mpi.mpirun(ranks);
        command.arg(std::env::current_exe().unwrap());
        play(command, mpi.library.as_deref(), role, ranks)
    };
    let has_begun = |job: &Job| !job.said.iter().all(|said| said.contains(NOT_BEGUN));
    let mut tries = (0..2).map(|_| start_once());
    tries.find(has_begun).unwrap_or_else(start_once)
}

/// Runs a process that believes to be one of two, without the MPI's launcher.
pub(crate) fn start_without(mpi: &Mpi, role: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1").env("FSDP_TEST_ALONE", "1");
    play(command, mpi.own_library().as_deref(), role, 1).said.remove(0)
}
