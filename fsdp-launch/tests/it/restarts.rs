//! `--max-restarts`.

use rustix::process::Signal;

use crate::{Running, assert_gone, assert_gone_soon, executable, finish, launcher, sorted, without_times};

fn run(max_restarts: &str, script: &str) -> (Option<i32>, String, String) {
    finish(&mut launcher(&["--nproc-per-node=2", "--max-restarts", max_restarts, "/bin/sh", "-c", script]))
}

#[test]
fn restarts_until_success() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; [ $TORCHELASTIC_RESTART_COUNT = 2 ] \
    && exit 0; \
                  [ $RANK = $TORCHELASTIC_RESTART_COUNT ] && exit 7; sleep 300";
    let (code, stdout, stderr) = run("5", script);
    assert_eq!(code, Some(0), "{stderr}");
    let attempts = [
        "[rank 0] 0 of 5",
        "[rank 0] 1 of 5",
        "[rank 0] 2 of 5",
        "[rank 1] 0 of 5",
        "[rank 1] 1 of 5",
        "[rank 1] 2 of 5",
    ];
    assert_eq!(sorted(&stdout), attempts);
    for part in [
        "starting all ranks again, restart 1 of at most 5",
        "all ranks succeeded\n  restarts used: 2 of at most 5\n  attempt 0: rank 0 (pid ",
        "\n  attempt 1: rank 1 (pid ",
    ] {
        assert!(stderr.contains(part), "{part} is not in {stderr}");
    }
}

#[test]
fn the_last_failure_counts_after_all_restarts() {
    let script = "[ $RANK = 1 ] && echo '{\"message\": \"try '$TORCHELASTIC_RESTART_COUNT'\"}' > \
    $TORCHELASTIC_ERROR_FILE && \
                  exit $((TORCHELASTIC_RESTART_COUNT + 3)); sleep 300";
    let (code, _, stderr) = run("2", script);
    assert_eq!(code, Some(5));
    let summary = without_times(stderr.split("fsdp-launch: ").last().unwrap());
    for part in [
        "failed first, with exit code 5\n  it recorded: try 2\n  rank 0: ended by SIGTERM\n  restarts used: 2 of at \
            most 2\n",
        "failed first, with exit code 3\n    it recorded: try 0\n",
        "failed first, with exit code 4\n    it recorded: try 1\n",
    ] {
        assert!(summary.contains(part), "{part} is not in {summary}");
    }
}

#[test]
fn attempts_share_the_run_id_but_no_processes() {
    let script = "echo $TORCHELASTIC_RUN_ID; sleep 300 & echo pid $!; [ $RANK = 0 ] && kill -9 $$; wait";
    let (code, stdout, _) = run("1", script);
    assert_eq!(code, Some(137));
    let lines: Vec<Vec<&str>> = stdout.lines().map(|line| line.split(' ').skip(2).collect()).collect();
    let pids: Vec<i32> = lines.iter().filter(|line| line[0] == "pid").map(|line| line[1].parse().unwrap()).collect();
    assert_gone(&pids);
    let mut seen: Vec<&Vec<&str>> = lines.iter().filter(|line| line[0] != "pid").collect();
    seen.sort();
    seen.dedup_by_key(|line| line[0]);
    assert_eq!(seen.len(), 1, "{stdout}");
}

#[test]
fn a_signal_does_not_restart() {
    let script = "trap 'exit 3' TERM INT; echo $$; while :; do sleep 0.01; done";
    for signal in [Signal::INT, Signal::TERM] {
        let mut launcher = Running::start(&["--nproc-per-node=2", "--max-restarts=9", "sh", "-c", script]);
        let pids = launcher.pids(2);
        launcher.signal(signal);
        assert!(launcher.lines.next().is_none());
        assert_eq!(launcher.wait().code(), Some(128 + signal.as_raw()));
        assert_gone(&pids);
    }
}

#[test]
fn sigint_during_a_shutdown_ends_the_run() {
    // Rank 1 fails; rank 0 ignores SIGTERM until SIGINT to the launcher kills it.
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {}; if [ $RANK = 1 ]; then while [ ! -e ready ]; do sleep 0.01; done; exit 3; fi; \
         trap 'echo asked' TERM; : > ready; while :; do sleep 0.01; done",
        dir.path().display()
    );
    let args = ["--nproc-per-node=2", "--max-restarts=9", "--shutdown-timeout=1000", "sh", "-c", &script];
    let mut launcher = Running::start(&args);
    assert_eq!(launcher.line(), "[rank 0] asked");
    launcher.signal(Signal::INT);
    assert!(launcher.lines.next().is_none());
    assert_eq!(launcher.wait().code(), Some(3));
}

#[test]
fn a_run_without_failure_is_silent() {
    assert_eq!(run("3", "exit 0"), (Some(0), String::new(), String::new()));
}

#[test]
fn a_launcher_killed_after_a_restart_leaves_nothing() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; trap '' TERM HUP; sh -c 'echo $$; sleep 300; :' & \
        echo $$; wait";
    let mut launcher = Running::start(&["--nproc-per-node=2", "--max-restarts=1", "sh", "-c", script]);
    let pids = launcher.pids(4);
    launcher.signal(Signal::KILL);
    launcher.wait();
    assert_gone_soon(&pids);
}

#[test]
fn a_vanished_program_ends_the_run_with_its_history() {
    let dir = tempfile::tempdir().unwrap();
    // Wait until the other rank's shell has read the script.
    let script = format!(
        "#!/bin/sh\ncd {}\nif [ $RANK = 0 ]; then : > up; exec sleep 300; fi\n\
         until [ -e up ]; do sleep 0.01; done\nrm $0\nexit 3\n",
        dir.path().display()
    );
    let program = executable(dir.path().join("program"), script);
    let program = program.display().to_string();
    let (code, _, stderr) = finish(&mut launcher(&["--nproc-per-node=2", "--max-restarts=5", &program]));
    assert_eq!(code, Some(1), "{stderr}");
    let summary = stderr.split("\nfsdp-launch: ").last().unwrap();
    for part in [
        "rank 0 could not be started from",
        "restarts used: 1 of at most 5\n  attempt 0: rank 1 (pid ",
        "with exit code 3",
    ] {
        assert!(summary.contains(part), "{part} is not in {stderr}");
    }
}
