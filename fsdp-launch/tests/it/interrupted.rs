//! Signals that end the launcher.

use rustix::process::Signal;

use crate::{Running, assert_gone};

#[test]
fn each_signal_reaches_all_ranks_once() {
    for (signal, name, code) in
        [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143), (Signal::HUP, "HUP", 129), (Signal::QUIT, "QUIT", 131)]
    {
        // Each rank prints the signal that it received.
        let traps = ["INT", "TERM", "HUP", "QUIT"].map(|name| format!("trap 'echo {name}; exit 0' {name}; ")).concat();
        let script = &format!("{traps} echo $$; while :; do sleep 0.01; done");
        let mut launcher = Running::start(&["--nproc-per-node", "2", "sh", "-c", script]);
        let pids = launcher.pids(2);
        launcher.signal(signal);
        let mut rest = [launcher.line(), launcher.line()];
        rest.sort();
        assert_eq!(rest, [0, 1].map(|rank| format!("[rank {rank}] {name}")));
        assert!(launcher.lines.next().is_none());
        assert_eq!(launcher.wait().code(), Some(code));
        assert_gone(&pids);
    }
}

#[test]
fn ranks_that_ignore_the_signal_are_killed() {
    let script = "trap '' TERM; echo $$; while :; do sleep 0.01; done";
    let mut launcher = Running::start(&["--nproc-per-node", "2", "--shutdown-timeout", "0.1", "sh", "-c", script]);
    let pids = launcher.pids(2);
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.wait().code(), Some(143));
    assert_gone(&pids);
}

#[test]
fn a_second_sigint_kills_at_once() {
    let script = "trap 'echo term' TERM INT; echo $$; while :; do sleep 0.01; done";
    let mut launcher = Running::start(&["--nproc-per-node", "2", "--shutdown-timeout", "100000", "sh", "-c", script]);
    let pids = launcher.pids(2);
    launcher.signal(Signal::INT);
    assert!(launcher.line().ends_with("term") && launcher.line().ends_with("term"));
    // Only a second SIGINT kills.
    launcher.signal(Signal::TERM);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.wait().code(), Some(130));
    assert_gone(&pids);
}

#[test]
fn an_ignored_hangup_stays_ignored() {
    let script = "echo $$; while [ ! -e \"$0\" ]; do sleep 0.01; done; exit 7";
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("go");
    let program = assert_cmd::cargo::cargo_bin!("fsdp-launch");
    let nohup = format!("trap '' HUP; exec {} sh -c '{script}' {}", program.display(), flag.display());
    let mut launcher = Running::start(&["--nproc-per-node", "1", "sh", "-c", &nohup]);
    let inner = launcher.pids(1)[0];
    let parent = std::fs::read_to_string(format!("/proc/{inner}/stat")).unwrap();
    let parent: i32 = parent.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(parent).unwrap(), Signal::HUP).unwrap();
    std::fs::write(flag, "").unwrap();
    assert_eq!(launcher.wait().code(), Some(7));
}

#[test]
fn a_named_signal_is_handled_even_if_ignored() {
    let script = "trap \"echo hup; exit 0\" HUP; echo $$; while :; do sleep 0.01; done";
    let program = assert_cmd::cargo::cargo_bin!("fsdp-launch");
    let nohup = format!("trap '' HUP; exec {} --signals-to-handle SIGHUP sh -c '{script}'", program.display());
    let mut launcher = Running::of("sh", &["-c", &nohup]);
    let pids = launcher.pids(1);
    launcher.signal(Signal::HUP);
    assert_eq!(launcher.line(), "[rank 0] hup");
    assert_eq!(launcher.wait().code(), Some(129));
    assert_gone(&pids);
}

#[test]
fn background_jobs_that_ignore_the_signal_get_sigterm() {
    // Background jobs of a shell ignore SIGINT and SIGQUIT; the rank itself ends by them.
    let script = "sleep 1000 & echo $!; echo $$; wait";
    for signal in [Signal::INT, Signal::QUIT] {
        let mut launcher = Running::start(&["--shutdown-timeout", "100000", "sh", "-c", script]);
        let pids = launcher.pids(2);
        launcher.signal(signal);
        assert_eq!(launcher.wait().code(), Some(128 + signal.as_raw()));
        assert_gone(&pids);
    }
}
