//! NCCL across two hosts: the unique id is exchanged over the MPI group of the ranks.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use fsdp_test_support::{golden_flags, program, run, tolerance, trajectory::Trajectory, workspace};

/// The script that makes hosts, and where MPICH's programs are. The error says what this machine has not got.
fn found() -> Result<(PathBuf, PathBuf), String> {
    // Hosts that are made of one machine have its devices in common, which NCCL refuses.
    env::var_os("GPU_DOUBLE_NVCC").ok_or("real devices do not stand in for those of two hosts")?;
    let mpich = workspace().join("target/mpi/mpich/bin");
    if !mpich.join("mpirun").exists() {
        return Err("MPICH is missing (.ci/install installs it in target/mpi)".into());
    }
    let hosts = workspace().join("tests/hosts/hosts");
    let made = Command::new(&hosts).args(["each", "true"]).output().map_err(|error| error.to_string())?;
    if !made.status.success() {
        return Err(String::from_utf8_lossy(&made.stderr).into_owned());
    }
    Ok((hosts, mpich))
}

fn train(hosts: &Path, mpich: &Path, network: &str, dir: &Path) -> fsdp_test_support::Run {
    let token = dir.join("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [mpich.to_path_buf()].into_iter().chain(env::split_paths(&path));
    let mut command = Command::new(hosts);
    command.current_dir(dir).arg("each").arg(program("fsdp-launch")).args(["--nnodes", "2"]);
    command.args(["--rdzv-endpoint", "node0:29400", "--rdzv-token-file"]).arg(&token).arg(program("train"));
    command.args(golden_flags("llama_tiny")).args(["--batch-size", "2", "--metrics", "metrics.jsonl"]);
    command.args(["--device", "cuda"]).env("FSDP_DEVICE_BACKEND", "nccl").env("GPU_DOUBLE_NETWORK", network);
    command.env("PATH", env::join_paths(folders).unwrap()).env("GPU_DOUBLE_REPORT", dir);
    run(command, Duration::from_secs(300))
}

#[test]
fn llama_by_nccl_on_two_hosts() {
    let (hosts, mpich) = match found() {
        Ok(found) => found,
        Err(missing) => {
            let is_required = env::var("FSDP_TESTS_REQUIRE").is_ok_and(|word| word == "all");
            assert!(!is_required || env::var_os("GPU_DOUBLE_NVCC").is_none(), "{missing}");
            println!("not run: {missing}");
            return;
        }
    };
    let dir = tempfile::tempdir().unwrap();
    // Where the hosts' networks are joined.
    train(&hosts, &mpich, "/proc/1/ns/net", dir.path()).ok();
    let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
    let difference = ours.difference(&Trajectory::recorded("llama_tiny", "run"));
    assert!(difference.is_within(tolerance::SAME), "{difference:?}");
    // Each host's device was used, and by NCCL.
    for rank in 0..2 {
        let counted = fs::read_to_string(dir.path().join(format!("rank-{rank}.json"))).unwrap();
        assert!(counted.contains("\"ncclReduceScatter\":300"), "{counted}");
    }
}
