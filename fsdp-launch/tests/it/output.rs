//! The ranks' output, on consoles of all kinds: terminals, slow pipes, full disks, and pipes without a reader.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    io::ioctl_fionread,
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};

use crate::{Running, TIMEOUT, finish, hear_signals, ranks, sorted, wait_until};

#[test]
fn both_streams_are_prefixed_up_to_the_partial_last_line() {
    let (code, stdout, stderr) =
        finish(&mut ranks(2, "echo out $RANK; echo err $RANK >&2; printf part; printf part >&2"));
    assert_eq!(code, Some(0));
    assert_eq!(sorted(&stdout), ["[rank 0] out 0", "[rank 0] part", "[rank 1] out 1", "[rank 1] part"]);
    assert_eq!(sorted(&stderr), ["[rank 0] err 0", "[rank 0] part", "[rank 1] err 1", "[rank 1] part"]);
    assert!(stdout.ends_with('\n'));
}

#[test]
fn lines_of_different_ranks_never_mix() {
    let script = "i=0; while [ $i -lt 500 ]; do printf 'a %s ' $RANK; printf '%080d\\n' $RANK; i=$((i+1)); done";
    let (code, stdout, _) = finish(&mut ranks(4, script));
    assert_eq!((code, stdout.lines().count()), (Some(0), 2000));
    for rank in 0..4 {
        let line = format!("[rank {rank}] a {rank} {rank:080}");
        assert_eq!(stdout.lines().filter(|have| *have == line).count(), 500);
    }
}

#[test]
fn binary_output_passes_through() {
    let output = ranks(1, r"printf 'a\000\377\376\n'").output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), b"[rank 0] a\0\xff\xfe\n".as_slice()));
}

#[test]
fn a_long_line_is_printed_in_pieces() {
    let (code, stdout, _) = finish(&mut ranks(1, "head -c 3000000 /dev/zero | tr '\\0' x"));
    assert_eq!(code, Some(0));
    assert!(stdout.lines().count() > 10 && stdout.lines().all(|line| line.starts_with("[rank 0] x")));
    assert_eq!(stdout.matches('x').count(), 3_000_000);
}

#[test]
fn stdin_is_empty() {
    let (code, stdout, _) = finish(ranks(1, "cat; echo end").write_stdin("for the launcher"));
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] end\n"));
}

#[test]
fn an_escaped_process_with_the_pipe_does_not_delay_the_end() {
    let dir = tempfile::tempdir().unwrap();
    // Without its environment, the process can't be attributed to the launch.
    let script = "env -i setsid sh -c ': > away; exec sleep 300' & echo $!; while [ ! -e away ]; do sleep 0.01; done";
    let (code, stdout, _) = finish(&mut ranks(1, &format!("cd {}; {script}", dir.path().display())));
    let sleeper: i32 = stdout.trim_start_matches("[rank 0] ").trim().parse().unwrap();
    assert_eq!(code, Some(0));
    assert!(crate::is_alive(sleeper));
    rustix::process::kill_process(rustix::process::Pid::from_raw(sleeper).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
}

#[test]
fn on_a_terminal_rank_0_keeps_stderr() {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let status = Command::new("timeout")
        .arg(TIMEOUT.as_secs().to_string())
        .arg(assert_cmd::cargo::cargo_bin!("fsdp-launch"))
        .args([
            "--nproc-per-node",
            "2",
            "sh",
            "-c",
            r"printf 'bar %s\r' $RANK >&2; test -t 2 && printf 'tty %s\r' $RANK >&2; true",
        ])
        .stderr(terminal)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let mut shown = Vec::new();
    // The read fails once the terminal has no other user.
    let mut buffer = [0; 1024];
    while let Ok(read) = rustix::io::read(&master, &mut buffer)
        && read > 0
    {
        shown.extend_from_slice(&buffer[..read]);
    }
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains("bar 0\r") && !shown.contains("[rank 0]") && shown.contains("tty 0\r"), "{shown:?}");
    assert!(shown.contains("[rank 1] bar 1\r") && !shown.contains("tty 1"), "{shown:?}");
}

/// Returns a launcher command with a time limit, for a stdout or stderr of the test's choice.
fn command() -> Command {
    hear_signals();
    let mut command = Command::new("timeout");
    command.args(["-k", "30"]).arg(TIMEOUT.as_secs().to_string()).arg(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).env_remove("RUST_LOG");
    command
}

fn full_disk() -> fs::File {
    fs::File::options().write(true).open("/dev/full").unwrap()
}

fn without_reader() -> io::PipeWriter {
    io::pipe().unwrap().1
}

#[test]
fn a_closed_stderr_does_not_affect_the_run() {
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
fn a_nonblocking_console_loses_no_output() {
    let (mut reader, writer) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let mut launcher = command().args(["seq", "1", "200000"]).stdout(writer).spawn().unwrap();
    // Nothing is read before the pipe is full.
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
fn log_files_stay_complete_after_the_console_closes() {
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
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{message}");
        assert!(message.contains("is now written only to the log files"), "{message}");
        let log = fs::read_to_string(dir.path().join(id).join("attempt_0/0/stdout.log")).unwrap();
        assert!(log == expected, "{option}: {} of {} bytes", log.len(), expected.len());
    }
}

#[test]
fn warns_of_lost_and_of_kept_output() {
    let dir = tempfile::tempdir().unwrap();
    let mut launcher = command();
    launcher.args(["--nproc-per-node=3", "--tee", "0:3", "--log-dir"]).arg(dir.path()).args(["seq", "1", "1000"]);
    let output = launcher.stdout(full_disk()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{message}");
    for words in ["is now written only to the log files", "is lost from now on unless a log file keeps it"] {
        assert_eq!(message.matches(words).count(), 1, "{words:?}: {message}");
    }
}

#[test]
fn a_failing_console_loses_only_its_output() {
    // More than a pipe holds, so that an unread rank would block.
    let script = "seq 1 100000; seq 1 100000 >&2; [ $RANK = 0 ] || exit 7; sleep 1000";
    for why in ["Broken pipe", "No space left on device"] {
        let target = || -> Stdio { if why == "Broken pipe" { without_reader().into() } else { full_disk().into() } };
        let run = |stdout: Stdio, stderr: Stdio| {
            let mut launcher = command();
            launcher.args(["--nproc-per-node=2", "sh", "-c", script]).stdout(stdout).stderr(stderr);
            let output = launcher.spawn().unwrap().wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(7), "{why}");
            String::from_utf8(output.stderr).unwrap()
        };
        let message = run(target(), Stdio::piped());
        let warning =
            format!("the ranks' stdout is lost from now on unless a log file keeps it; the run continues: {why}");
        assert_eq!(message.matches(&warning).count(), 1, "{}", message.len());
        assert!(message.contains("[rank 1] 100000\n") && message.contains("failed first, with exit code 7"));
        run(Stdio::null(), target());
        run(target(), target());
        // Output that the launcher itself was asked for.
        for args in [&["--dry-run", "true"][..], &["--print-completion", "bash"]] {
            let output = command().args(args).stdout(target()).stderr(Stdio::piped()).spawn().unwrap();
            let output = output.wait_with_output().unwrap();
            let message = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{message}");
            assert_eq!(message.contains(why), why != "Broken pipe", "{message}");
        }
    }
}

#[test]
fn a_full_log_file_loses_only_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = assert_cmd::cargo::cargo_bin!("fsdp-launch").display();
    let script = format!(
        "ulimit -f 100; exec {launcher} --rdzv-id j --log-dir {} sh -c 'seq 1 100000; exit 7'",
        dir.path().display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(7), "{message}");
    assert_eq!(message.matches("is no longer written: File too large").count(), 1, "{message}");
    assert_eq!(output.stdout.iter().filter(|&&byte| byte == b'\n').count(), 100_000);
    let log = fs::read_to_string(dir.path().join("j/attempt_0/0/stdout.log")).unwrap();
    assert!(log.starts_with("1\n2\n") && log.len() < 200_000, "{} bytes", log.len());
}

#[test]
fn a_removed_log_directory_loses_only_the_logs() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("j");
    let script = format!(
        "echo attempt $FSDP_ATTEMPT; [ $FSDP_ATTEMPT = 1 ] || {{ rm -r {0}; : > {0}; exit 5; }}; exit 0",
        place.display()
    );
    let mut launcher = command();
    launcher.args(["--max-restarts=1", "--rdzv-id=j", "--log-dir"]).arg(dir.path()).args(["sh", "-c", &script]);
    let output = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{message}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "[rank 0] attempt 0\n[rank 0] attempt 1\n");
    assert!(message.contains("this attempt has no log files: the log "), "{message}");
}

#[test]
fn a_filter_for_the_program_keeps_the_launchers_warnings() {
    let warned = |filter: &str| {
        let (mut reader, writer) = io::pipe().unwrap();
        let args = ["--max-restarts", "1", "sh", "-c", "test $TORCHELASTIC_RESTART_COUNT = 1"];
        let status = command().args(args).stderr(writer).env("RUST_LOG", filter).status().unwrap();
        let mut message = String::new();
        reader.read_to_string(&mut message).unwrap();
        assert_eq!(status.code(), Some(0), "{message}");
        message.contains("starting all ranks again")
    };
    assert!(warned("foo=debug") && warned("") && !warned("off") && !warned("fsdp_launch=error"));
}

#[test]
fn an_unread_console_does_not_delay_the_end() {
    // A full pipe without a reader.
    let (reader, mut writer) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let script = "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 0.02; done";
    let args = ["--nproc-per-node=2", "--shutdown-timeout=0.2", "sh", "-c", script];
    assert_eq!(command().args(args).stderr(writer.try_clone().unwrap()).status().unwrap().code(), Some(3));

    // The same with ranks that print without end.
    let dir = tempfile::tempdir().unwrap();
    let started = dir.path().join("started");
    let script = format!(": > {}; exec yes", started.display());
    let mut launcher = command();
    launcher.args(["--shutdown-timeout=0.2", "sh", "-c", &script]).stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut launcher = launcher.spawn().unwrap();
    wait_until("the rank did not start", || started.exists());
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(143));
    drop(reader);
}
