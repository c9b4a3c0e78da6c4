//! `train` with the environment variables of other launchers. Two jobs run at the same time, to detect jobs that cannot
//! tell each other apart. `tests/outside` has the launchers themselves.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fsdp_test_support::program;
use fsdp_test_support::two_jobs::{expected, flags, losses, without_launcher};

const LIMIT: Duration = Duration::from_secs(120);

/// A job of two processes. If `socket` is given, both have it as standard input.
struct Pair {
    children: Vec<Child>,
    name: String,
}

impl Pair {
    fn start(name: &str, dir: &Path, vars: &dyn Fn(usize) -> String, socket: Option<&UnixStream>) -> Self {
        let children =
            (0..2).map(|rank| {
                let mut command = without_launcher(Command::new(program("train")));
                command.args(flags(name)).current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::piped());
                command.envs(vars(rank).split_whitespace().map(|var| var.split_once('=').unwrap()));
                command.stdin(socket.map_or(Stdio::null(), |socket| {
                    Stdio::from(std::os::fd::OwnedFd::from(socket.try_clone().unwrap()))
                }));
                command.spawn().unwrap()
            });
        Pair { children: children.collect(), name: name.into() }
    }

    /// Waits for both processes. Only rank 0 prints the checkpoint's path.
    fn finish(mut self, started: Instant) {
        let mut said = 0;
        for mut child in self.children.drain(..) {
            while child.try_wait().unwrap().is_none() {
                if started.elapsed() > LIMIT {
                    child.kill().unwrap();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}: {}", self.name, String::from_utf8_lossy(&output.stderr));
            said += usize::from(String::from_utf8_lossy(&output.stdout).contains("checkpoint: "));
        }
        assert_eq!(said, 1, "{}: the processes did not meet", self.name);
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn jobs_with_launchers_variables_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let expected = expected(dir.path());
    let slurm = |step: usize| {
        move |rank: usize| {
            format!(
                "SLURM_JOB_ID=1234567 SLURM_STEP_ID={step} SLURM_PROCID={rank} SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 \
                SLURM_LOCALID={rank} SLURM_NODEID=0 \
                 SLURM_NNODES=1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=node[07] SLURM_JOB_NODELIST=node[01-07]"
            )
        }
    };
    let open_mpi = |job: usize| {
        move |rank: usize| {
            format!(
                "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} \
                 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
                 OMPI_COMM_WORLD_NODE_RANK={rank} OMPI_MCA_ess_base_jobid={job} PMIX_NAMESPACE={job} \
                 PMIX_RANK={rank} PMIX_ID={job}.{rank}"
            )
        }
    };
    let mpich = |rank: usize| {
        format!(
            "PMI_RANK={rank} PMI_SIZE=2 MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=2 HYDI_CONTROL_FD=0 \
                MPIR_CVAR_CH3_INTERFACE_HOSTNAME=host"
        )
    };
    let sockets = UnixStream::pair().unwrap();
    let id = std::process::id() as usize;
    let start = |name: &str, vars: &dyn Fn(usize) -> String, socket| Pair::start(name, dir.path(), vars, socket);
    let started = Instant::now();
    let pairs = [
        start("slurm-step-0", &slurm(0), None),
        start("slurm-step-1", &slurm(1), None),
        start("open-mpi-0", &open_mpi(id * 2), None),
        start("open-mpi-1", &open_mpi(id * 2 + 1), None),
        start("mpich-0", &mpich, Some(&sockets.0)),
        start("mpich-1", &mpich, Some(&sockets.1)),
    ];
    for pair in pairs {
        let name = pair.name.clone();
        pair.finish(started);
        assert_eq!(losses(&name, dir.path()), expected, "{name}");
    }
}
