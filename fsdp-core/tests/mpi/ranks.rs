//! Ranks as processes: an MPI launcher runs this binary again with the name of a role. Ranks write results to files.

use std::{
    io::Read,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use crate::installed::Mpi;

/// Nothing takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(300);

/// Result of a job.
pub(crate) struct Job {
    /// Result text of each rank.
    pub(crate) said: Vec<String>,
    /// Whether its launcher says that all ended well.
    pub(crate) is_well: bool,
}

/// A folder of its own for each job.
fn folder() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("fsdp-mpi-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn play(command: &mut Command, mpi: &Mpi, role: &str, folder: &PathBuf) -> Child {
    for name in ["RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_HIERARCHY"] {
        command.env_remove(name);
    }
    if let Some(library) = &mpi.library {
        command.env("FSDP_MPI_LIBRARY", library);
    }
    command.env("FSDP_TEST_ROLE", role).env("FSDP_TEST_FOLDER", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns the output of a process, and whether it succeeded.
fn end(mut child: Child) -> (String, bool) {
    let started = Instant::now();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reads = [std::thread::spawn(move || read(&mut out)), std::thread::spawn(move || read(&mut err))];
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.success(),
            None if started.elapsed() > HANG => {
                // Its ranks end with it.
                let pid = rustix::process::Pid::from_child(&child);
                rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
                child.wait().unwrap();
                break false;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    (reads.map(|read| read.join().unwrap()).concat(), status)
}

fn read(from: &mut dyn Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A message that Open MPI's launcher sometimes prints on a busy machine before it starts a rank.
const NOT_BEGUN: &str = "The PMIx server's listener thread failed to start";

/// Runs ranks to their end.
pub(crate) fn start(mpi: &Mpi, role: &str, ranks: usize) -> Job {
    let has_begun = |job: &Job| !job.said.iter().all(|said| said.contains(NOT_BEGUN));
    let mut tries = (0..2).map(|_| start_once(mpi, role, ranks));
    tries.find(has_begun).unwrap_or_else(|| start_once(mpi, role, ranks))
}

fn start_once(mpi: &Mpi, role: &str, ranks: usize) -> Job {
    let folder = folder();
    let mut command = mpi.mpirun(ranks);
    command.arg(std::env::current_exe().unwrap());
    let (output, is_well) = end(play(&mut command, mpi, role, &folder));
    let said = |rank: usize| std::fs::read_to_string(folder.join(rank.to_string()));
    let said =
        (0..ranks).map(|rank| said(rank).unwrap_or_else(|_| format!("ended by its launcher: {output}"))).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    Job { said, is_well }
}

/// Runs a process that believes to be one of two, without the MPI's launcher.
pub(crate) fn start_without(mpi: &Mpi, role: &str) -> String {
    let folder = folder();
    let mut command = Command::new(std::env::current_exe().unwrap());
    let child = {
        let mpi = Mpi { mpirun: mpi.mpirun.clone(), library: mpi.own_library(), is_open_mpi: mpi.is_open_mpi };
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        let mut started = play(command.env("FSDP_TEST_ALONE", "1"), &mpi, role, &folder);
        started.stdin.take();
        started
    };
    let (output, _) = end(child);
    let said = std::fs::read_to_string(folder.join("0")).unwrap_or(output);
    std::fs::remove_dir_all(&folder).unwrap();
    said
}
