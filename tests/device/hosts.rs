//! NCCL across two hosts. Without MPI, ranks meet at rank 0's port; with it, the MPI group exchanges the unique id.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_test_support::{
    Run, agent::Agent, golden, golden_flags, program, run, tolerance, trajectory::Trajectory, workspace,
};
use rustix::process::{Pid, Signal, kill_process};

/// Much longer than a test takes.
const LIMIT: Duration = Duration::from_secs(300);
/// Where the hosts' networks are joined.
const NETWORK: &str = "/proc/1/ns/net";

/// The script that makes hosts. The error says what this machine has not got.
fn hosts() -> Result<PathBuf, String> {
    // Hosts that are made of one machine have its devices in common, which NCCL refuses.
    env::var_os("GPU_DOUBLE_NVCC").ok_or("real devices do not stand in for those of two hosts")?;
    let hosts = workspace().join("tests/hosts/hosts");
    let made = Command::new(&hosts).args(["each", "true"]).output().map_err(|error| error.to_string())?;
    if !made.status.success() {
        return Err(String::from_utf8_lossy(&made.stderr).into_owned());
    }
    Ok(hosts)
}

/// Returns the directory of MPICH's programs.
fn mpich() -> Result<PathBuf, String> {
    let mpich = workspace().join("target/mpi/mpich/bin");
    match mpich.join("mpirun").exists() {
        true => Ok(mpich),
        false => Err("MPICH is missing (.ci/install installs it in target/mpi)".into()),
    }
}

/// Returns what a test needs, or `None` with a line that says what is missing.
fn found<T>(found: Result<T, String>) -> Option<T> {
    found
        .inspect_err(|missing| {
            let is_required = env::var("FSDP_TESTS_REQUIRE").is_ok_and(|word| word == "all");
            assert!(!is_required || env::var_os("GPU_DOUBLE_NVCC").is_none(), "{missing}");
            println!("not run: {missing}");
        })
        .ok()
}

/// Writes a secret, and returns its file.
fn secret(dir: &Path) -> PathBuf {
    let file = dir.join("token");
    fs::write(&file, "0123456789abcdef0123456789abcdef").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    file
}

/// Trains a recorded model by `fsdp-launch` on both hosts.
fn train(hosts: &Path, mpich: Option<&Path>, dir: &Path) -> Run {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = mpich.into_iter().map(Path::to_path_buf).chain(env::split_paths(&path));
    let mut command = Command::new(hosts);
    command.current_dir(dir).arg("each").arg(program("fsdp-launch")).args(["--nnodes", "2"]);
    command.args(["--rdzv-endpoint", "node0:29400", "--rdzv-token-file"]).arg(secret(dir)).arg(program("train"));
    command.args(golden_flags("llama_tiny")).args(["--batch-size", "2", "--metrics", "metrics.jsonl"]);
    command.args(["--device", "cuda"]).env("GPU_DOUBLE_NETWORK", NETWORK).env("GPU_DOUBLE_REPORT", dir);
    command.env("PATH", env::join_paths(folders).unwrap()).env("RUST_LOG", "fsdp_core=info");
    match mpich {
        Some(_) => command.env("FSDP_BACKEND", "mpi"),
        // It is not needed.
        None => command.env_remove("FSDP_BACKEND").env("FSDP_MPI_LIBRARY", "/nowhere.so"),
    };
    run(command, LIMIT)
}

/// The run has the recorded losses, and moved its tensors by NCCL on both hosts.
fn is_recorded_run(dir: &Path) {
    let ours = Trajectory::of_metrics(&dir.join("metrics.jsonl"));
    let difference = ours.difference(&Trajectory::recorded("llama_tiny", "run"));
    assert!(difference.is_within(tolerance::SAME), "{difference:?}");
    for rank in 0..2 {
        let counted = fs::read_to_string(dir.join(format!("rank-{rank}.json"))).unwrap();
        // One of them connects the ranks.
        assert!(counted.contains("\"ncclReduceScatter\":421"), "{counted}");
    }
}

#[test]
fn llama_by_nccl_on_two_hosts() {
    let Some(hosts) = found(hosts()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let text = train(&hosts, None, dir.path()).ok().stderr;
    is_recorded_run(dir.path());
    assert!(text.contains("2 ranks on 2 hosts connect by tcp (the default; FSDP_BACKEND chooses)"), "{text}");
}

#[test]
fn llama_by_nccl_and_mpi_on_two_hosts() {
    let Some((hosts, mpich)) = found(hosts().and_then(|hosts| Ok((hosts, mpich()?)))) else { return };
    let dir = tempfile::tempdir().unwrap();
    train(&hosts, Some(&mpich), dir.path()).ok();
    is_recorded_run(dir.path());
}

/// Starts a long run without a launcher that would end the ranks. Rank N writes stderr to `said.N`.
fn start(hosts: &Path, options: &[&str], timeout: &str, dir: &Path) -> Agent {
    let script = "export RANK=$HOST_NUMBER WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 FSDP_HOSTS=2 \
                  MASTER_ADDR=node0 MASTER_PORT=29500; exec \"$0\" \"$@\" 2>said.$RANK";
    let model = golden("llama_tiny");
    let mut command = Command::new(hosts);
    command.current_dir(dir).args(options).args(["each", "sh", "-c", script]).arg(program("train"));
    command.arg("--model").arg(&model).arg("--data").arg(model.join("tokens.bin"));
    command.args(["--seq-len", "32", "--steps", "1000000", "--batch-size", "1", "--metrics", "metrics.jsonl"]);
    command.args(["--device", "cuda"]).env("GPU_DOUBLE_NETWORK", NETWORK).env("FSDP_STORE_SECRET_FILE", secret(dir));
    // The double's NCCL does not notice a cut link. The ranks compare each collective, so that they do.
    command.env("FSDP_NCCL_CHECK", "always").env("FSDP_TIMEOUT_S", timeout).env_remove("FSDP_BACKEND");
    Agent::start(command)
}

/// Finds the process of a rank.
fn process(rank: usize, dir: &Path) -> Option<Pid> {
    let marker = format!("RANK={rank}");
    let is_it = |process: &PathBuf| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        fs::read_link(process.join("exe")).is_ok_and(|exe| exe == program("train"))
            && fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == dir)
            && environment.split(|&byte| byte == 0).any(|variable| variable == marker.as_bytes())
    };
    let process = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path())).find(is_it)?;
    Pid::from_raw(process.file_name()?.to_str()?.parse().ok()?)
}

fn said(rank: usize, dir: &Path) -> String {
    fs::read_to_string(dir.join(format!("said.{rank}"))).unwrap_or_default()
}

/// Waits for the first steps.
fn wait_for_steps(agent: &mut Agent, dir: &Path) {
    let began = Instant::now();
    while fs::read_to_string(dir.join("metrics.jsonl")).map_or(0, |metrics| metrics.lines().count()) < 3 {
        let text = || format!("{}\n{}\n{}", agent.text(), said(0, dir), said(1, dir));
        assert!(began.elapsed() < LIMIT, "no step:\n{}", text());
        assert!((0..2).all(|rank| said(rank, dir).matches("Error").count() == 0), "{}", text());
        sleep(Duration::from_millis(20));
    }
}

/// Waits until a rank has ended, and returns its stderr.
fn wait_for_end(rank: usize, dir: &Path) -> String {
    let began = Instant::now();
    while process(rank, dir).is_some() {
        assert!(began.elapsed() < LIMIT, "rank {rank} goes on: {}", said(rank, dir));
        sleep(Duration::from_millis(20));
    }
    println!("rank {rank} ended after {:.1} s: {}", began.elapsed().as_secs_f64(), said(rank, dir));
    said(rank, dir)
}

#[test]
fn a_killed_rank_on_another_host_is_named() {
    let Some(hosts) = found(hosts()) else { return };
    for (lost, other) in [(1, 0), (0, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let mut agent = start(&hosts, &[], "60", dir.path());
        wait_for_steps(&mut agent, dir.path());
        let killed = Instant::now();
        kill_process(process(lost, dir.path()).unwrap(), Signal::KILL).unwrap();
        let text = wait_for_end(other, dir.path());
        assert!(text.contains(&format!("rank {lost} on node{lost} died")), "{text}");
        assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    }
}

#[test]
fn a_host_off_the_network_is_named_on_both_sides() {
    let Some(hosts) = found(hosts()) else { return };
    // The link's own limit of 15 s, and a shorter timeout of the ranks.
    for (timeout, parts) in
        [("60", ["has not answered for 15 s"; 2]), ("4", ["timed out after 4", "waited for rank(s) "])]
    {
        let dir = tempfile::tempdir().unwrap();
        let cut = dir.path().join("cut");
        let option = format!("node1:{}", cut.display());
        let mut agent = start(&hosts, &["--cut", &option], timeout, dir.path());
        wait_for_steps(&mut agent, dir.path());
        fs::write(&cut, "").unwrap();
        for (rank, other) in [(0, 1), (1, 0)] {
            let text = wait_for_end(rank, dir.path());
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            assert!(
                [format!("rank {other} on node{other}"), format!("[{other}] on node{other}")]
                    .iter()
                    .any(|name| text.contains(name)),
                "{text}"
            );
        }
    }
}
