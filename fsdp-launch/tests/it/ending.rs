//! Exit codes, signals, the first failure, and the end of all processes.

use std::{path::PathBuf, time::Duration};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Running, assert_gone, assert_gone_soon, finish, launcher, ranks, wait_until};

#[test]
fn success_is_silent() {
    assert_eq!(finish(&mut ranks(3, "exit 0")), (Some(0), String::new(), String::new()));
}

/// Waits until the process whose id is in the file `pid` has ended.
const AFTER_PID: &str =
    "while [ ! -e pid ]; do sleep 0.01; done; read pid < pid; while kill -0 $pid 2>/dev/null; do :; done";

#[test]
fn the_first_failure_is_reported_and_its_code_returned() {
    let record = "record() { echo '{\"message\": \"'$1'\"}' > $TORCHELASTIC_ERROR_FILE; }";
    let leave_pid = "echo $$ > new; mv new pid";
    let recorded =
        |json: &str| format!("[ $RANK = 1 ] && echo '{json}' > $TORCHELASTIC_ERROR_FILE && exit 1; sleep 300");
    let signalled = |signal: &str| format!("[ $RANK = 1 ] && kill -{signal} $$; sleep 300");
    let first = "rank 1 (pid ";
    let cases: [(String, i32, &[&str]); 12] = [
        (
            "[ $RANK = 0 ] || exit 3; sleep 300".into(),
            3,
            &[first, "failed first, with exit code 3", "rank 0: ended by SIGTERM"],
        ),
        (signalled("SEGV"), 139, &[first, "failed first, killed by SIGSEGV"]),
        (signalled("KILL"), 137, &[first, "failed first, killed by SIGKILL"]),
        (signalled("ABRT"), 134, &[first, "failed first, killed by SIGABRT"]),
        // Rank 0 fails because rank 1 has failed.
        (
            format!("if [ $RANK = 1 ]; then {leave_pid}; exit 5; fi; {AFTER_PID}; exit 1"),
            5,
            &[first, "failed first, with exit code 5"],
        ),
        // Rank 0 reports its error only when rank 1 is gone; after SIGTERM it would exit with 9.
        (
            format!(
                "trap 'exit 9' TERM; if [ $RANK = 1 ]; then {leave_pid}; exit 5; fi; {AFTER_PID}; echo bad input >&2; \
                 exit 6"
            ),
            5,
            &["[rank 0] bad input", "rank 0: failed too, with exit code 6"],
        ),
        // Rank 1 records its error first, but rank 0, which fails because of it, ends first.
        (
            format!(
                "{record}; if [ $RANK = 1 ]; then record cause; : > recorded; {AFTER_PID}; exit 5; fi; \
                 while [ ! -e recorded ]; do sleep 0.01; done; sleep 0.02; record echo; {leave_pid}; exit 6"
            ),
            5,
            &[first, "it recorded: cause"],
        ),
        (
            recorded(r#"{"message": {"message": "RuntimeError: no data", "extraInfo": {"timestamp": "17"}}}"#),
            1,
            &["\n  it recorded: RuntimeError: no data\n"],
        ),
        (recorded(r#"{"message": "RuntimeError: no data"}"#), 1, &["\n  it recorded: RuntimeError: no data\n"]),
        // Malformed error files.
        ("mkfifo $TORCHELASTIC_ERROR_FILE; exit 4".into(), 4, &[]),
        ("mkdir $TORCHELASTIC_ERROR_FILE; exit 4".into(), 4, &[]),
        ("head -c 9000000 /dev/zero > $TORCHELASTIC_ERROR_FILE; exit 4".into(), 4, &[]),
    ];
    for (script, want, parts) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (code, _, stderr) = finish(&mut ranks(2, &format!("cd {}; {script}", dir.path().display())));
        assert!(code == Some(want) && parts.iter().all(|part| stderr.contains(part)), "{script}: {code:?}: {stderr}");
        assert!(stderr.len() < 10_000, "{script}: {} bytes", stderr.len());
    }
}

#[test]
fn kills_a_rank_that_ignores_sigterm() {
    let script = "if [ $RANK = 1 ]; then read x < fifo; exit 3; fi; trap '' TERM; echo $$; : > fifo; while :; do \
        sleep 300; done";
    let dir = tempfile::tempdir().unwrap();
    let script = format!("cd {}; mkfifo fifo 2>/dev/null; {script}", dir.path().display());
    let mut command = launcher(&["--nproc-per-node", "2", "--shutdown-timeout", "0.2", "sh", "-c", &script]);
    let (code, stdout, stderr) = finish(&mut command);
    assert_eq!(code, Some(3));
    assert!(stderr.contains("rank 0: killed by SIGKILL"), "{stderr}");
    assert_gone(&[stdout.trim_start_matches("[rank 0] ").trim().parse().unwrap()]);
}

#[test]
fn a_rank_may_save_its_state_after_sigterm() {
    let script = "if [ $RANK = 1 ]; then read x < fifo; exit 3; fi; trap 'sleep 0.2; echo saved; exit 0' TERM; : > \
        fifo; while :; do sleep 0.01; done";
    let dir = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) =
        finish(&mut ranks(2, &format!("cd {}; mkfifo fifo 2>/dev/null; {script}", dir.path().display())));
    assert_eq!((code, stdout.as_str()), (Some(3), "[rank 0] saved\n"));
    assert!(stderr.contains("rank 0: asked to end, exit code 0"), "{stderr}");
}

#[test]
fn grandchildren_end_with_the_ranks() {
    // After a failure and after a success.
    for code in [3, 0] {
        let script = format!("sleep 300 & echo $!; (trap '' TERM HUP; sleep 300) & echo $!; exit {code}");
        let mut command = launcher(&["--nproc-per-node", "1", "--shutdown-timeout", "0.2", "sh", "-c", &script]);
        let (ended, stdout, _) = finish(&mut command);
        let pids: Vec<i32> = stdout.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert_eq!((ended, pids.len()), (Some(code), 2));
        assert_gone(&pids);
    }
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let script = "trap '' TERM HUP; sh -c 'echo $$; sleep 300; :' & echo $$; dirname $TORCHELASTIC_ERROR_FILE; wait";
    let mut launcher = Running::start(&["--nproc-per-node", "2", "sh", "-c", script]);
    let lines: Vec<String> = (0..6).map(|_| launcher.line().rsplit(' ').next().unwrap().to_owned()).collect();
    let pids: Vec<i32> = lines.iter().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(pids.len(), 4);
    assert!(pids.iter().all(|&pid| crate::is_alive(pid)));
    launcher.signal(Signal::KILL);
    launcher.wait();
    assert_gone_soon(&pids);
    let dir = std::path::Path::new(lines.iter().find(|line| line.starts_with('/')).unwrap());
    wait_until("the directory is still there", || !dir.exists());
}

#[test]
fn the_next_launcher_removes_what_a_killed_one_left() {
    let temp = tempfile::tempdir().unwrap();
    let start = |script: &str| {
        let tmpdir = format!("TMPDIR={}", temp.path().display());
        let program = assert_cmd::cargo::cargo_bin!("fsdp-launch").display().to_string();
        Running::of("/usr/bin/env", &[&tmpdir, &program, "sh", "-c", script])
    };
    let script = "dirname $TORCHELASTIC_ERROR_FILE; sleep 300";
    let [mut dead, mut alive] = [start(script), start(script)];
    let dir_of = |launcher: &mut Running| PathBuf::from(launcher.line().trim_start_matches("[rank 0] "));
    let [left, kept] = [dir_of(&mut dead), dir_of(&mut alive)];
    assert!(left.starts_with(temp.path()) && kept.starts_with(temp.path()));
    // Kill the guard first, so that it can't clean up.
    let pid = dead.child.id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let is_guard = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().contains("fsdp-launch-guard")
    };
    let guard: i32 = children.split_whitespace().find(is_guard).unwrap().parse().unwrap();
    kill_process(Pid::from_raw(guard).unwrap(), Signal::KILL).unwrap();
    dead.signal(Signal::KILL);
    dead.wait();
    assert!(left.is_dir());

    assert_eq!(finish(launcher(&["true"]).env("TMPDIR", temp.path())).0, Some(0));
    assert!(!left.exists(), "{} is left", left.display());
    assert!(kept.is_dir());
    alive.signal(Signal::TERM);
    assert_eq!(alive.wait().code(), Some(143));
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
}

#[test]
fn processes_outside_the_group_end_with_the_rank() {
    let leaves = "setsid sleep 777 & echo $!; exit 3";
    let (code, stdout, stderr) = finish(&mut ranks(1, leaves));
    assert_eq!(code, Some(3), "{stderr}");
    let pid: i32 = stdout.trim().rsplit(' ').next().unwrap().parse().unwrap();
    assert_gone(&[pid]);

    let mut launcher = Running::start(&["sh", "-c", "setsid sleep 777 & echo $!; wait"]);
    let pids = launcher.pids(1);
    launcher.signal(Signal::KILL);
    assert_gone_soon(&pids);
}

#[test]
fn descendants_of_orphans_end_too() {
    // The kernel takes a while to free the middle process's memory; until then its child is not an orphan.
    let inner = "import subprocess; memory = bytearray(b'x' * (400 << 20)); \
                 child = subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=subprocess.DEVNULL, \
                 stderr=subprocess.DEVNULL); \
                 open('pid.new', 'w').write(f'{child.pid}'); import os; os.rename('pid.new', 'pid'); \
                 import time; time.sleep(300)";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display();
    let script = format!(
        "cd {path}; setsid python3 -c \"{inner}\" >/dev/null 2>&1 & cd {path}; until [ -e pid ]; do sleep 0.02; done"
    );
    let (code, _, stderr) = finish(&mut ranks(1, &script));
    assert_eq!(code, Some(0), "{stderr}");
    let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
    assert_gone(&[pid.parse().unwrap()]);
}

#[test]
fn ended_orphans_are_reaped() {
    let script = "for i in 1 2 3 4 5 6 7 8 9 10; do ( setsid sleep 0.01 & ); done; echo started $$; sleep 300";
    let mut launcher = Running::start(&["sh", "-c", script]);
    assert!(launcher.line().contains("started"));
    let zombies = || {
        let own = launcher.child.id();
        let children = std::fs::read_dir(format!("/proc/{own}/task")).unwrap().flatten();
        let children = children.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
        let children = children.collect::<String>();
        let state = |pid: &&str| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        children.split_whitespace().filter(|pid| state(pid).contains(") Z")).count()
    };
    std::thread::sleep(Duration::from_millis(200));
    wait_until("zombies remain", || zombies() == 0);
}

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
    kill_process(Pid::from_raw(parent).unwrap(), Signal::HUP).unwrap();
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
