//! How the ranks' output is printed.

use std::{
    fs::File,
    process::{Command, Stdio},
};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::{TIMEOUT, finish, ranks, sorted};

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
