//! Hung ranks, collectives that time out, and the reports about them. The ranks run this binary.

use std::time::Duration;

use fsdp_core::{
    Buffer, RankEnv, ReduceOp, heartbeat,
    process_group::{self, Options},
};
use rustix::process::{Signal, getpid, kill_process};

use crate::{finish, launcher, ranks};

/// Returns the command that runs [`run_as_a_rank`] in a role.
pub(crate) fn rank_program(role: &str) -> Vec<String> {
    let this = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    let words = [this.as_str(), "--exact", "heartbeats::run_as_a_rank", "--nocapture", "--test-threads=1"];
    let role = format!("FSDP_TEST_ROLE={role}");
    ["/usr/bin/env", &role].into_iter().chain(words).map(str::to_owned).collect()
}

/// Not a test: the program of the ranks. Rank 1 does not reach the second collective.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var("FSDP_TEST_ROLE") else { return };
    let env = RankEnv::from_env().unwrap();
    match (role.as_str(), env.rank) {
        ("stops_early", 1) => {
            kill_process(getpid(), Signal::STOP).unwrap();
            std::thread::sleep(Duration::from_secs(1000));
        }
        ("rank_0_does_not_join", 0) | ("rank_1_does_not_join", 1) => std::process::exit(0),
        _ => {}
    }
    let world = process_group::init(&env, Options::default()).unwrap_or_else(|error| fail(&error));
    if role == "joins" {
        std::process::exit(0);
    }
    world.barrier().wait().unwrap();
    heartbeat::step(7);
    if env.rank == 1 && env.attempt == 0 {
        let _span = heartbeat::span("forward", "layers.3");
        match role.as_str() {
            // The process runs on for a moment until the signal has reached all threads.
            "stops" => {
                kill_process(getpid(), Signal::STOP).unwrap();
                std::thread::sleep(Duration::from_secs(1000));
            }
            "stays_away" => std::thread::sleep(Duration::from_secs(1000)),
            "fails" => std::process::exit(4),
            _ => {}
        }
    }
    let sum = world.all_reduce(vec![Buffer::F32(vec![1.])], ReduceOp::Sum).wait();
    sum.unwrap_or_else(|error| fail(&error));
}

fn fail(error: &fsdp_core::Error) -> ! {
    fsdp_core::record_error(&error.to_string());
    std::process::exit(3);
}

/// Runs two ranks in a role. Returns the launcher's exit code and stderr.
fn run(options: &[&str], role: &str, timeout: &str) -> (Option<i32>, String) {
    let program = rank_program(role);
    let args: Vec<&str> =
        ["--nproc-per-node=2"].iter().chain(options).copied().chain(program.iter().map(String::as_str)).collect();
    let (code, _, stderr) = finish(launcher(&args).env("FSDP_TIMEOUT_S", timeout));
    (code, stderr)
}

fn assert_all(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in:\n{text}"));
}

const WHO_ARRIVED: &str = "all_reduce (collective 1 of \"world\", 2 ranks): rank 0 arrived; rank 1 did not";

#[test]
fn ranks_do_not_wait_for_a_rank_that_exited_before_joining() {
    for (ended, waits) in [(0, 1), (1, 0)] {
        let (code, stderr) = run(&[], &format!("rank_{ended}_does_not_join"), "10000");
        assert_eq!(code, Some(3), "{stderr}");
        let message =
            format!("it recorded: rank {waits}: rank(s) {ended} ended with exit code 0 before they joined the others");
        assert_all(&stderr, &[&message]);
    }
    // With more ranks, rank 0 forwards the failure. The launcher ends the ranks soon after the first failure, which on
    // a busy machine may be earlier: then repeat.
    let heard = (0..10).any(|_| {
        let (code, stderr) = run(&["--nproc-per-node=4"], "rank_1_does_not_join", "10000");
        assert_eq!(code, Some(3), "{stderr}");
        assert_all(&stderr, &["rank(s) 1 ended with exit code 0"]);
        assert!(!stderr.contains("SIGKILL"), "{stderr}");
        stderr.contains("failed too, with exit code 3")
    });
    assert!(heard, "no rank but the first was ever heard");
}

#[test]
fn a_rank_may_exit_right_after_joining() {
    for _ in 0..3 {
        let (code, stderr) = run(&["--nproc-per-node=6"], "joins", "10000");
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
    }
}

#[test]
fn a_stopped_rank_causes_a_restart() {
    let (code, stderr) = run(&["--heartbeat-timeout=2", "--max-restarts=1"], "stops", "100");
    assert_eq!(code, Some(0), "{stderr}");
    let (message, summary) = stderr.split_once("starting all ranks again").unwrap();
    assert_all(
        message,
        &[
            "rank 1 (pid ",
            "failed first, it hung: no heartbeat for ",
            " s (stopped",
            "\n  state of rank 0: step 7, waits in all_reduce (collective 1 of \"world\") for ",
            "\n  state of rank 1: step 7, forward layers.3 for ",
            WHO_ARRIVED,
        ],
    );
    assert_all(
        summary,
        &["all ranks succeeded\n  restarts used: 1 of at most 1\n  attempt 0: rank 1 (pid ", "it hung"],
    );
}

#[test]
fn a_stopped_rank_is_killed_at_once() {
    // A stopped rank does not handle SIGTERM.
    let (code, stderr) = run(&["--heartbeat-timeout=2", "--shutdown-timeout=1000"], "stops", "100");
    assert_eq!(code, Some(137), "{stderr}");
    assert_all(&stderr, &["it hung: no heartbeat for ", "\n  rank 0: ended by SIGTERM", WHO_ARRIVED]);

    // Also a rank that was stopped before its first heartbeat.
    let (code, stderr) = run(&["--heartbeat-timeout=2", "--shutdown-timeout=1000"], "stops_early", "100");
    assert_eq!(code, Some(137), "{stderr}");
    assert_all(
        &stderr,
        &["rank 1 (pid ", "it hung: no heartbeat for ", "\n  state of rank 1: no status page; stopped"],
    );

    // Also a rank that is stopped when another one fails.
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {}; if [ $RANK = 1 ]; then echo $$ > new; mv new pid; kill -STOP $$; fi; \
         while [ ! -e pid ] || ! grep -q ') T' /proc/$(cat pid)/stat; do sleep 0.01; done; exit 3",
        dir.path().display()
    );
    let mut command = launcher(&["--nproc-per-node=2", "--shutdown-timeout=1000", "sh", "-c", &script]);
    let (code, _, stderr) = finish(&mut command);
    assert_eq!(code, Some(3), "{stderr}");
    assert_all(&stderr, &["\n  rank 1: killed by SIGKILL: it was stopped, and could not be asked to end"]);
}

#[test]
fn a_timed_out_collective_names_the_missing_ranks() {
    let (code, stderr) = run(&[], "stays_away", "5");
    assert_eq!(code, Some(3), "{stderr}");
    assert_all(
        &stderr,
        &[
            "rank 0 (pid ",
            "failed first, with exit code 3\n  it recorded: rank 0: all_reduce (collective 1) in group \"world\" \
                timed out",
            "\n  state of rank 0: step 7, all_reduce (collective 1 of \"world\") timed out ",
            "\n  state of rank 1: step 7, forward layers.3 for ",
            WHO_ARRIVED,
        ],
    );
}

#[test]
fn an_ordinary_failure_has_a_short_report() {
    let (code, stderr) = run(&[], "fails", "100");
    assert_eq!(code, Some(4), "{stderr}");
    assert!(!stderr.contains("state of rank") && stderr.contains("rank 0: failed too, with exit code 3"), "{stderr}");
}

#[test]
fn a_script_may_outlive_the_process_with_the_heartbeat() {
    let program = rank_program("ends").join(" ");
    let script = format!("{program} || exit 9; sleep 5; echo went on");
    let args = ["--nproc-per-node=2", "--heartbeat-timeout=3", "sh", "-c", &script];
    let (code, stdout, stderr) = finish(&mut launcher(&args));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert_eq!(stdout.matches("went on").count(), 2, "{stdout}");
}

#[test]
fn ranks_without_heartbeat_are_exempt_and_pages_are_separate() {
    let args = ["--nproc-per-node=2", "--heartbeat-timeout=0.1", "sh", "-c", "sleep 1; echo $FSDP_HEARTBEAT"];
    let (code, stdout, stderr) = finish(launcher(&args).env("FSDP_HEARTBEAT", "/of/another/launcher"));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let mut boards: Vec<&str> = stdout.lines().filter_map(|line| line.split(' ').next_back()).collect();
    boards.sort_unstable();
    boards.dedup();
    assert!(boards.len() == 2 && boards.iter().all(|board| board.starts_with("/proc/")), "{stdout}");
}

#[test]
fn random_bytes_on_a_status_page_are_tolerated() {
    let script = "head -c 4096 /dev/urandom > $FSDP_HEARTBEAT; [ $RANK = 1 ] && exit 5; sleep 300";
    let (code, _, stderr) = finish(&mut ranks(2, script));
    assert_eq!(code, Some(5), "{stderr}");
    assert!(stderr.len() < 20_000 && !stderr.trim().contains(|c: char| c.is_control() && c != '\n'), "{stderr}");
}
