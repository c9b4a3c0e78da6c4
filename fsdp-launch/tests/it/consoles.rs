//! A stdout or stderr of the launcher's that is slow, or that nobody reads.

use std::{
    fs,
    io::{self, Read, Write},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    io::ioctl_fionread,
    process::{Pid, Signal, kill_process},
};

use crate::{Running, TIMEOUT, hear_signals};

/// The launcher with a stdout or stderr of the test's choice, ended in time.
fn command() -> Command {
    hear_signals();
    let mut command = Command::new("timeout");
    command.args(["-k", "30"]).arg(TIMEOUT.as_secs().to_string()).arg(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).env_remove("RUST_LOG");
    command
}

fn without_reader() -> io::PipeWriter {
    io::pipe().unwrap().1
}

#[test]
fn a_lost_stderr_changes_neither_the_run_nor_the_exit_code() {
    let run = |args: &[&str]| command().args(args).stderr(without_reader()).status().unwrap().code();
    assert_eq!(run(&["--max-restarts", "2", "sh", "-c", "test $TORCHELASTIC_RESTART_COUNT = 1"]), Some(0));
    assert_eq!(run(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(run(&["--no-such-option"]), Some(2));
    assert_eq!(run(&["--rdzv-id", "", "true"]), Some(2));
    assert_eq!(run(&["./no-such-program"]), Some(1));
    let closed = format!("exec {} sh -c 'exit 7' 2>&-", assert_cmd::cargo::cargo_bin!("fsdp-launch").display());
    assert_eq!(Running::of("sh", &["-c", &closed]).wait().code(), Some(7));
}

#[test]
fn a_console_that_does_not_block_loses_nothing() {
    let (mut reader, writer) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let mut launcher = command().args(["seq", "1", "200000"]).stdout(writer).spawn().unwrap();
    // Nobody reads before the pipe is full.
    let (start, mut before) = (Instant::now(), 0);
    loop {
        let there = ioctl_fionread(&reader).unwrap();
        if there > 0 && there == before {
            break;
        }
        assert!(start.elapsed() < TIMEOUT);
        before = there;
        sleep(Duration::from_millis(100));
    }
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let expected: String = (1..=200_000).map(|number| format!("[rank 0] {number}\n")).collect();
    assert!(text == expected, "{} of {} bytes", text.len(), expected.len());
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
}

#[test]
fn what_is_kept_is_kept_whole_when_nobody_looks_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let expected: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    for (id, option) in [("kept", "--log-dir"), ("teed", "--tee=1")] {
        let mut launcher = command();
        launcher.args(["--rdzv-id", id, "--log-dir"]).arg(dir.path());
        if option != "--log-dir" {
            launcher.arg(option);
        }
        let mut launcher =
            launcher.args(["seq", "1", "100000"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut start = [0; 10];
        launcher.stdout.take().unwrap().read_exact(&mut start).unwrap();
        assert_eq!(&start, b"[rank 0] 1");
        let output = launcher.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{told}");
        assert!(told.contains("no longer shown, only kept in the log files"), "{told}");
        let log = fs::read_to_string(dir.path().join(id).join("attempt_0/0/stdout.log")).unwrap();
        assert!(log == expected, "{option}: {} of {} bytes", log.len(), expected.len());
    }
}

#[test]
fn a_programs_filter_leaves_the_launchers_warnings() {
    let warned = |filter: &str| {
        let (mut reader, writer) = io::pipe().unwrap();
        let args = ["--max-restarts", "1", "sh", "-c", "test $TORCHELASTIC_RESTART_COUNT = 1"];
        let status = command().args(args).stderr(writer).env("RUST_LOG", filter).status().unwrap();
        let mut told = String::new();
        reader.read_to_string(&mut told).unwrap();
        assert_eq!(status.code(), Some(0), "{told}");
        told.contains("starting all ranks again")
    };
    assert!(warned("foo=debug") && warned("") && !warned("off") && !warned("fsdp_launch=error"));
}

#[test]
fn a_console_that_nobody_reads_delays_no_end() {
    // Full, and read by nobody.
    let (reader, mut writer) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let script = "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 0.02; done";
    let args = ["--nproc-per-node=2", "--shutdown-timeout=0.2", "sh", "-c", script];
    assert_eq!(command().args(args).stderr(writer.try_clone().unwrap()).status().unwrap().code(), Some(3));

    // The ranks too have much to say.
    let mut launcher = command();
    launcher.args(["--shutdown-timeout=0.2", "yes"]).stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut launcher = launcher.spawn().unwrap();
    sleep(Duration::from_millis(300));
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(143));
    drop(reader);
}
