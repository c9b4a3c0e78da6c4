//! MPICH programs under `fsdp-launch`, without `mpiexec`.
//!
//! Without MPICH and a C compiler, the tests are ignored. With `FSDP_TESTS_REQUIRE=all`, as in CI, they fail instead.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
};

use fsdp_test_support::{
    agent::Agent,
    need::{Mpi, missing},
};
use libtest_mimic::{Arguments, Completion, Trial};

fn main() {
    let program = build();
    let trial = |name: &'static str, test: fn(&Path)| {
        let program = program.clone();
        Trial::ignorable_test(name, move || match program {
            Ok(path) => {
                test(&path);
                Ok(Completion::Completed)
            }
            Err(why) => missing(why),
        })
    };
    let trials = vec![
        trial("ranks_of_one_host_share_memory", ranks_of_one_host_share_memory),
        trial("ranks_of_two_hosts_communicate", ranks_of_two_hosts_communicate),
        trial("hosts_may_have_different_rank_counts", hosts_may_have_different_rank_counts),
        trial("a_killed_rank_restarts_all", a_killed_rank_restarts_all),
        trial("mpi_abort_ends_all_hosts", mpi_abort_ends_all_hosts),
        trial("unsupported_calls_return_errors", unsupported_calls_return_errors),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit()
}

/// Builds the program of the ranks by the compiler beside MPICH's launcher.
fn build() -> Result<PathBuf, String> {
    let mpicc = Mpi::Mpich.mpirun()?.with_file_name("mpicc");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mpich-{}", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mpich/program.c");
    match Command::new(&mpicc).arg(source).arg("-o").arg(&program).output() {
        Ok(output) if output.status.success() => Ok(program),
        Ok(output) => Err(format!("{}: {}", mpicc.display(), String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("{}: {error}", mpicc.display())),
    }
}

fn launcher(options: &[String], program: &Path, mode: &str) -> Agent {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fsdp-launch"));
    command.args(options).arg(program).arg(mode).env_remove("RUST_LOG");
    Agent::start(command)
}

/// Runs launchers with these numbers of ranks. To MPICH each is a host, so ranks communicate over the network.
fn hosts(ranks: &[usize], options: &[&str], program: &Path, mode: &str) -> Vec<(Option<i32>, String)> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let launchers = ranks.iter().enumerate().map(|(host, count)| {
        let mut all = vec![
            format!("--nnodes={}", ranks.len()),
            format!("--nproc-per-node={count}"),
            format!("--node-rank={host}"),
            format!("--rdzv-endpoint=localhost:{port}"),
        ];
        all.extend(options.iter().map(|option| option.to_string()));
        launcher(&all, program, mode)
    });
    // Start all before waiting for one.
    let launchers: Vec<_> = launchers.collect();
    launchers.into_iter().map(Agent::finish).collect()
}

fn one_host(ranks: usize, program: &Path, mode: &str) -> (Option<i32>, String) {
    launcher(&[format!("--nproc-per-node={ranks}")], program, mode).finish()
}

/// Returns the ranks' lines, sorted.
fn lines(ended: &[(Option<i32>, String)]) -> Vec<&str> {
    assert!(ended.iter().all(|(code, _)| *code == Some(0)), "{ended:?}");
    let mut lines: Vec<_> =
        ended.iter().flat_map(|(_, text)| text.lines().filter(|line| line.contains(" sums "))).collect();
    lines.sort_unstable();
    lines
}

/// Returns the line that a rank prints: the sum over all ranks, and the number of ranks on its host.
fn told(rank: usize, world: usize, on_host: usize) -> String {
    let sum = world * (world + 1) / 2;
    format!("[rank {rank}] rank {rank} of {world} sums {sum}, {on_host} on its host")
}

fn ranks_of_one_host_share_memory(program: &Path) {
    let ended = [one_host(4, program, "sums")];
    assert_eq!(lines(&ended), [0, 1, 2, 3].map(|rank| told(rank, 4, 4)));
}

fn ranks_of_two_hosts_communicate(program: &Path) {
    let ended = hosts(&[2, 2], &[], program, "sums");
    assert_eq!(lines(&ended), [0, 1, 2, 3].map(|rank| told(rank, 4, 2)));
}

fn hosts_may_have_different_rank_counts(program: &Path) {
    let ended = hosts(&[1, 3], &[], program, "sums");
    assert_eq!(lines(&ended), [(0, 1), (1, 3), (2, 3), (3, 3)].map(|(rank, on_host)| told(rank, 4, on_host)));
}

fn a_killed_rank_restarts_all(program: &Path) {
    let ended = hosts(&[2, 1], &["--max-restarts=1"], program, "kill");
    assert_eq!(lines(&ended), [(0, 2), (1, 2), (2, 1)].map(|(rank, on_host)| told(rank, 3, on_host)));
    for (_, text) in &ended {
        let parts = ["rank 2 (pid ", "killed by SIGKILL", "starting all ranks again, restart 1 of at most 1"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

fn mpi_abort_ends_all_hosts(program: &Path) {
    for (code, text) in hosts(&[2, 1], &[], program, "abort") {
        assert_eq!(code, Some(13), "{text}");
        assert!(text.contains("rank 2 (pid ") && text.contains("it called MPI_Abort with exit code 13"), "{text}");
    }
}

fn unsupported_calls_return_errors(program: &Path) {
    let (code, text) = one_host(1, program, "spawn");
    assert!(code == Some(0) && text.contains("refused to spawn"), "{text}");
}
