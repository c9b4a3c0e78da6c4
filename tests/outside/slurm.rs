//! Slurm on simulated hosts, with and without `examples/deploy/slurm.sbatch`.

use std::{collections::BTreeSet, env, fs, path::Path, process::Command, time::Duration};

use fsdp_test_support::{Run, golden_flags_of, need::Mpi, program, run, trajectory::Trajectory, workspace};
use libtest_mimic::Trial;

use crate::need::{Need, trials};

const NEEDS: &[Need] = &[Need::Networks, Need::Mpi, Need::Slurm];
/// Steps, and flags of each of four ranks.
const AS_RECORDED: (usize, &[&str]) = (20, &["--batch-size", "1"]);
/// Much longer than a test takes.
const LIMIT: Duration = Duration::from_secs(300);

pub(crate) fn trials() -> Vec<Trial> {
    trials![NEEDS =>
        srun_starts_ranks_of_either_mpi_and_our_launchers,
        the_batch_script_trains_on_two_hosts,
        a_job_survives_a_dead_rank_its_time_limit_and_a_failed_host,
    ]
}

/// Checks that Slurm is installed.
pub(crate) fn installed() -> Result<(), String> {
    let programs = [("slurmctld", "slurmctld"), ("slurmd", "slurmd"), ("sbatch", "slurm-client"), ("munged", "munge")];
    let path = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> = env::split_paths(&path).chain(["/usr/sbin".into()]).collect();
    for (program, package) in programs {
        if !folders.iter().any(|folder| folder.join(program).is_file()) {
            return Err(format!("{program} is missing (.ci/install installs the distribution's package {package})"));
        }
    }
    Ok(())
}

/// Runs a bash script on the first of several hosts. `$0` is the batch script, `"$@"` is `train` with the flags of a
/// recorded run, and `MPICH` and `OPEN_MPI` are the folders of their programs.
fn on_slurm(hosts: usize, script: &str, (steps, more): (usize, &[&str]), dir: &Path) -> Run {
    let [mpich, open_mpi] = [Mpi::Mpich, Mpi::Open].map(|mpi| mpi.mpirun().unwrap().parent().unwrap().to_path_buf());
    let programs = program("fsdp-launch").parent().unwrap().to_path_buf();
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([programs, mpich.clone()].into_iter().chain(env::split_paths(&path))).unwrap();
    let mut train: Vec<String> = vec![program("train").display().to_string()];
    train.extend(golden_flags_of("llama_tiny", steps));
    train.extend(["--metrics", "metrics.jsonl"].iter().chain(more).map(ToString::to_string));
    let mut command = Command::new(workspace().join("tests/hosts/slurm"));
    command.current_dir(dir).args(["--hosts", &hosts.to_string(), "bash", "-euc", script]);
    command.arg(workspace().join("examples/deploy/slurm.sbatch")).args(train);
    command.env("PATH", path).env("MPICH", mpich).env("OPEN_MPI", open_mpi);
    command.env("FSDP_TIMEOUT_S", "60").env_remove("FSDP_BACKEND").env_remove("FSDP_MPI_LIBRARY");
    run(command, LIMIT)
}

/// Asserts that the run reproduced the recorded run.
fn reproduces(dir: &Path, what: &str) {
    let ours = Trajectory::of_metrics(&dir.join("metrics.jsonl"));
    let difference = ours.difference(&Trajectory::recorded("llama_tiny", "run"));
    assert!(difference.max() < 2e-5, "{what}: {difference:?}");
}

fn srun_starts_ranks_of_either_mpi_and_our_launchers() {
    // Three ranks on one host, one on the other.
    for (mpi, folder) in [("pmi2", "$MPICH"), ("pmix", "$OPEN_MPI")] {
        let dir = tempfile::tempdir().unwrap();
        let script = format!("PATH={folder}:$PATH srun --mpi={mpi} --nodes 2 --ntasks 4 \"$@\"");
        on_slurm(2, &script, AS_RECORDED, dir.path()).ok();
        reproduces(dir.path(), mpi);
    }
    // Our launcher ignores Slurm's settings for MPI.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("token"), "0123456789abcdef0123456789abcdef").unwrap();
    let script = "srun --mpi=pmix --nodes 2 --ntasks 2 fsdp-launch --nnodes 2 --nproc-per-node 2 --rdzv-endpoint \
        node0:29400 --rdzv-token-file token \"$@\"";
    on_slurm(2, script, AS_RECORDED, dir.path()).ok();
    reproduces(dir.path(), "fsdp-launch");
    // Slurm starts the ranks without support for MPI.
    let dir = tempfile::tempdir().unwrap();
    let run = on_slurm(2, r#"srun --mpi=none --nodes 2 --ntasks 4 "$@""#, AS_RECORDED, dir.path());
    let parts = ["the 4 ranks run on 2 hosts", "srun --mpi=pmi2|pmix"];
    assert!(run.code != Some(0) && parts.iter().all(|part| run.stderr.contains(part)), "{run:?}");
    assert!(!run.stderr.contains("on 4 hosts"), "{run:?}");
}

fn the_batch_script_trains_on_two_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"export NPROC_PER_NODE=2; sbatch --wait --nodes 2 --cpus-per-task 2 "$0" "$@""#;
    let run = on_slurm(2, script, AS_RECORDED, dir.path());
    let said = fs::read_to_string(dir.path().join("slurm-1.out")).unwrap_or_default();
    assert!(run.code == Some(0), "{run:?}\n{said}");
    reproduces(dir.path(), "slurm.sbatch");
    let logs: BTreeSet<_> =
        fs::read_dir(dir.path().join("run-1/logs")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(logs, ["1_node0", "1_node1"].map(Into::into).into());
    assert!(!dir.path().join("run-1/rdzv-token").exists());
}

/// The script of [`a_job_survives_a_dead_rank_its_time_limit_and_a_failed_host`]. It writes its observations to files.
const HAPPENS: &str = r#"
export NPROC_PER_NODE=1
train=$1
job=$(sbatch --parsable --nodes 2 --cpus-per-task 2 "$0" "$@")
state() { squeue --noheader --jobs "$job" --format '%T %N' 2>/dev/null || true; }
until_is() {
    for _ in $(seq 900); do [[ $(state) == $1 ]] && return; sleep 0.1; done
    echo "the job is '$(state)' instead of '$1'" >&2; exit 9
}
newest() { ls saved 2>/dev/null | grep '^step-[0-9]*$' | tail -1; }
until_saved() {
    for _ in $(seq 900); do [[ $(newest) > $1 ]] && return; sleep 0.1; done
    echo "no checkpoint came after '$1'" >&2; exit 9
}
# The process of rank 1.
rank() {
    for process in /proc/[0-9]*; do
        if [[ $(readlink "$process/exe") == "$train" ]] && grep --quiet --null-data '^RANK=1$' "$process/environ"
        then echo "${process#/proc/}"; fi
    done
}
until_saved ''
# A rank dies.
kill -KILL "$(rank)"
until grep --quiet 'starting all ranks again, restart 1' slurm-1.out; do sleep 0.1; done
last=$(newest); until_saved "$last"
# The time is nearly over: what --signal=B:USR1 does.
scancel --batch --signal=USR1 "$job"
until_is 'PENDING*'; last=$(newest); ls run-1 >after_time
until_is 'RUNNING node\[0-1\]'; until_saved "$last"
# A host fails.
scontrol update NodeName=node1 State=DOWN Reason=test
until_is 'PENDING*'; last=$(newest)
until_is 'RUNNING node\[0,2\]'; until_saved "$last"
scancel "$job"
until_is ''
rank >left
"#;

fn a_job_survives_a_dead_rank_its_time_limit_and_a_failed_host() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--batch-size", "2", "--checkpoint-dir", "saved", "--save-every", "10", "--keep", "2"];
    let more = [&more[..], &["--resume", "auto"]].concat();
    let run = on_slurm(3, HAPPENS, (1_000_000, &more), dir.path());
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap_or_default();
    let said = read("slurm-1.out");
    assert!(run.code == Some(0), "{run:?}\n{said}");
    for part in ["rank 1 (pid ", "failed first, killed by SIGKILL", "resumed from saved/step-", "DUE TO NODE FAILURE"] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    // The launchers ended their ranks and were not killed.
    assert!(said.matches("stopped by SIGTERM").count() >= 2 && !said.contains(": Killed"), "{said}");
    assert_eq!((read("after_time").as_str(), read("left").as_str()), ("logs\n", ""), "{said}");
    let steps: Vec<u64> =
        Trajectory::of_metrics(&dir.path().join("metrics.jsonl")).0.iter().map(|step| step.number).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
}
