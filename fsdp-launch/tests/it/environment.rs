//! The environment of the ranks.

use std::{collections::HashMap, thread::available_parallelism};

use crate::{finish, launcher, ranks};

/// Parses each rank's variables from the output of `env`.
fn environments(world_size: usize, stdout: &str) -> Vec<HashMap<&str, &str>> {
    let of_rank = |rank| {
        let prefix = format!("[rank {rank}] ");
        stdout.lines().filter_map(|line| line.strip_prefix(&prefix)?.split_once('=')).collect()
    };
    (0..world_size).map(of_rank).collect()
}

#[test]
fn sets_every_variable_of_torchrun() {
    let (code, stdout, stderr) =
        finish(launcher(&["--nproc_per_node=3", "env"]).env("CARGO_PKG_NAME", "launcher").env("OUT_DIR", "/launcher"));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let environments = environments(3, &stdout);
    let threads = (available_parallelism().unwrap().get() / 3).max(1).to_string();
    for (rank, env) in environments.iter().enumerate() {
        let rank = rank.to_string();
        for (name, value) in [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("GROUP_RANK", "0"),
            ("ROLE_RANK", &rank),
            ("ROLE_NAME", "default"),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", environments[0]["MASTER_PORT"]),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RUN_ID", environments[0]["TORCHELASTIC_RUN_ID"]),
            ("RAYON_NUM_THREADS", &threads),
            ("OMP_NUM_THREADS", &threads),
        ] {
            assert_eq!(env.get(name), Some(&value), "{name} of rank {rank}");
        }
        assert!(env["MASTER_PORT"].parse::<u16>().unwrap() > 0);
        assert!(env["GLIBC_TUNABLES"].starts_with("glibc.malloc.hugetlb=1:"), "{}", env["GLIBC_TUNABLES"]);
        assert!(!env.contains_key("CARGO_PKG_NAME") && !env.contains_key("OUT_DIR"));
    }
    assert_ne!(environments[0]["TORCHELASTIC_ERROR_FILE"], environments[1]["TORCHELASTIC_ERROR_FILE"]);
}

#[test]
fn the_error_file_is_private_and_removed() {
    let script =
        "dir=$(dirname $TORCHELASTIC_ERROR_FILE); stat -c %a $dir; echo x > $TORCHELASTIC_ERROR_FILE; echo $dir";
    let (code, stdout, _) = finish(&mut ranks(1, script));
    let lines: Vec<&str> = stdout.lines().map(|line| line.trim_start_matches("[rank 0] ")).collect();
    assert_eq!((code, lines[0]), (Some(0), "700"));
    assert!(!std::path::Path::new(lines[1]).exists(), "{} is left", lines[1]);
}

#[test]
fn keeps_options_and_the_users_settings() {
    let mut command = launcher(&[
        "--master-addr",
        "localhost",
        "--master_port",
        "4321",
        "--rdzv-id",
        "my run",
        "--nproc-per-node",
        "1",
        "env",
    ]);
    let (code, stdout, _) = finish(
        command.env("RAYON_NUM_THREADS", "7").env("GLIBC_TUNABLES", "").env("TORCHELASTIC_USE_AGENT_STORE", "True"),
    );
    let env = &environments(1, &stdout)[0];
    assert_eq!((code, env["MASTER_ADDR"], env["MASTER_PORT"]), (Some(0), "localhost", "4321"));
    assert_eq!((env["TORCHELASTIC_RUN_ID"], env["RAYON_NUM_THREADS"], env["GLIBC_TUNABLES"]), ("my run", "7", ""));
    assert!(!env.contains_key("TORCHELASTIC_USE_AGENT_STORE"));
}

#[test]
fn run_ids_differ_between_launches() {
    let run_id = || finish(&mut ranks(1, "echo $TORCHELASTIC_RUN_ID")).1;
    let (first, second) = (run_id(), run_id());
    assert!(first.len() > "[rank 0] \n".len());
    assert_ne!(first, second);
}

#[test]
fn one_rank_per_core() {
    // Without visible GPUs, `auto` counts cores.
    for count in ["auto", "cpu"] {
        let mut command = launcher(&["--nproc-per-node", count, "/bin/echo", "here"]);
        let (code, stdout, _) = finish(command.env("CUDA_VISIBLE_DEVICES", ""));
        assert_eq!((code, stdout.lines().count()), (Some(0), available_parallelism().unwrap().get()));
    }
}

#[test]
fn a_rank_per_gpu_needs_gpus() {
    let (code, stdout, stderr) = finish(launcher(&["--nproc-per-node", "gpu", "true"]).env("CUDA_VISIBLE_DEVICES", ""));
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert!(stderr.contains("'gpu' for '--nproc-per-node <N>': found no GPU"), "{stderr}");
}
