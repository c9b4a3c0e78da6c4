//! `train` under other launchers: with their environment variables, and with the launchers that are installed. Two jobs
//! run at the same time, to detect jobs that cannot tell each other apart.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fsdp_test_support::{Run, golden_flags_of, json_lines, launch, program, run};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);

/// Returns flags for three steps of the recorded Llama.
fn flags(name: &str) -> Vec<String> {
    let own = ["--batch-size", "2", "--metrics", &format!("{name}.jsonl"), "--checkpoint-dir", name];
    golden_flags_of("llama_tiny", 3).into_iter().chain(own.map(String::from)).collect()
}

/// Returns the losses of the run `name`.
fn losses(name: &str, dir: &Path) -> Vec<Value> {
    json_lines(&dir.join(format!("{name}.jsonl"))).iter().map(|line| line["loss"].clone()).collect()
}

/// Returns the losses of two ranks under `fsdp-launch`.
fn expected(dir: &Path) -> Vec<Value> {
    launch(2, "train", &flags("ours").iter().map(String::as_str).collect::<Vec<_>>(), dir).ok();
    let losses = losses("ours", dir);
    assert_eq!(losses.len(), 3);
    losses
}

/// Removes the variables of a launcher that started the tests.
fn without_launcher(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        let prefixes = ["SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_", "HYDI_", "TORCHELASTIC_", "MASTER_", "LOCAL_"];
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) || ["RANK", "WORLD_SIZE"].contains(&&*name) {
            command.env_remove(&*name);
        }
    }
    command
}

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

#[test]
fn installed_launchers_start_train() {
    let dir = tempfile::tempdir().unwrap();
    let expected = expected(dir.path());
    let known: [&[&str]; 4] = [
        &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
        &["mpirun.mpich", "-np", "2"],
        &["mpirun", "-np", "2"],
        &["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"],
    ];
    for words in known {
        let mut words = words.to_vec();
        let mut version = Command::new(words[0]);
        version.arg("--version").stdin(Stdio::null());
        let version = match words[0] {
            // torchrun has no such option and takes seconds to say so.
            "torchrun" => which("torchrun").then(String::new),
            _ => which(words[0]).then(|| run(version, LIMIT).ok().stdout),
        };
        let Some(version) = version else {
            println!("{} is not in PATH: `train` was not started under it", words[0]);
            continue;
        };
        if words[0] == "mpirun" && version.contains("Open") {
            words.splice(1..1, ["--allow-run-as-root", "--oversubscribe"]);
        }
        let name = |n: usize| format!("{}-{n}", words[0]);
        let runs: Vec<Run> = std::thread::scope(|scope| {
            let started = [0, 1].map(|n| {
                let mut command = without_launcher(Command::new(words[0]));
                command.args(&words[1..]).arg(program("train")).args(flags(&name(n))).current_dir(dir.path());
                scope.spawn(move || run(command, LIMIT))
            });
            started.into_iter().map(|job| job.join().unwrap()).collect()
        });
        for (n, run) in runs.into_iter().enumerate() {
            assert_eq!(run.ok().stdout.matches("checkpoint: ").count(), 1, "{}", name(n));
            assert_eq!(losses(&name(n), dir.path()), expected, "{}", name(n));
        }
    }
}

fn which(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}
