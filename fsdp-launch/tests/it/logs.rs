//! `--log-dir`, `--redirects`, `--tee`, `--local-ranks-filter` and `--log-line-prefix-template`.

use std::{fs, path::Path};

use crate::{TIMEOUT, finish, hear_signals, launcher, sorted};

const SCRIPT: &str = "echo out $RANK; echo err $RANK >&2";

/// Runs two ranks with a log directory. Returns exit code, stdout and stderr.
fn run(dir: &Path, options: &[&str], script: &str) -> (Option<i32>, String, String) {
    let dir = dir.to_str().unwrap();
    let args = ["--nproc-per-node=2", "--rdzv-id=job", "--log-dir", dir];
    finish(&mut launcher(&[&args[..], options, &["/bin/sh", "-c", script]].concat()))
}

fn read(dir: &Path, path: &str) -> Option<String> {
    fs::read_to_string(dir.join(path)).ok()
}

#[test]
fn options_choose_what_is_shown_and_logged() {
    type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], &'a [&'a str]);
    let all = ["0/stdout", "0/stderr", "1/stdout", "1/stderr"];
    // Options, shown stdout and stderr, and log files.
    let cases: [Case<'_>; 4] = [
        (&[], &["[rank 0] out 0", "[rank 1] out 1"], &["[rank 0] err 0", "[rank 1] err 1"], &all),
        (&["--redirects", "0:1,1:3"], &[], &["[rank 0] err 0"], &["0/stdout", "1/stdout", "1/stderr"]),
        // `-t` shows and logs its streams, whatever `-r` says.
        (&["-r", "3", "-t", "1:1"], &["[rank 1] out 1"], &[], &all),
        (&["--tee=1", "--local_ranks_filter=1"], &["[rank 1] out 1"], &["[rank 1] err 1"], &["0/stdout", "1/stdout"]),
    ];
    for (options, shown, errors, logged) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (code, stdout, stderr) = run(&dir.path().join("new/logs"), options, SCRIPT);
        assert_eq!((code, &*sorted(&stdout), &*sorted(&stderr)), (Some(0), shown, errors), "{options:?}");
        for (file, line) in all.iter().zip(["out 0\n", "err 0\n", "out 1\n", "err 1\n"]) {
            let found = read(dir.path(), &format!("new/logs/job/attempt_0/{file}.log"));
            assert_eq!(found.as_deref(), logged.contains(file).then_some(line), "{options:?}: {file}");
        }
    }
    let args = ["--nproc-per-node=2", "--local-ranks-filter=0", "/bin/sh", "-c", SCRIPT];
    assert_eq!(finish(&mut launcher(&args)), (Some(0), "[rank 0] out 0\n".into(), "[rank 0] err 0\n".into()));
}

#[test]
fn every_attempt_has_its_own_files() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $RANK = 1 ] && echo '{\"message\": \"bad\"}' > \
        $TORCHELASTIC_ERROR_FILE && exit 3; sleep 300";
    let (code, _, stderr) = run(dir.path(), &["--max-restarts=1", "--redirects=1"], script);
    assert_eq!(code, Some(3));
    let place = dir.path().join("job");
    assert!(
        stderr.contains("it recorded: bad") && stderr.ends_with(&format!("\n  logs: {}\n", place.display())),
        "{stderr}"
    );
    for attempt in [0, 1] {
        let log = |name| read(&place, &format!("attempt_{attempt}/1/{name}"));
        assert_eq!(log("stdout.log"), Some(format!("attempt {attempt}\n")));
        assert_eq!(log("error.json").as_deref(), Some("{\"message\": \"bad\"}\n"));
    }
}

#[test]
fn a_second_run_of_the_same_id_keeps_the_first_logs() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        assert_eq!(run(dir.path(), &["--redirects=3"], SCRIPT).0, Some(0));
    }
    for run in ["job", "job_2"] {
        assert_eq!(read(dir.path(), &format!("{run}/attempt_0/0/stdout.log")).as_deref(), Some("out 0\n"));
    }
}

#[test]
fn a_run_id_cannot_escape_the_log_directory() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("logs");
    // The last of two equal options applies, as in torchrun.
    assert_eq!(run(&logs, &["--rdzv-id=../out"], SCRIPT).0, Some(0));
    assert!(logs.join("_.._out/attempt_0/0").is_dir() && !dir.path().join("out").exists());
}

#[test]
fn without_log_dir_a_temporary_directory_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = launcher(&["--tee", "3", "/bin/sh", "-c", "echo out"]);
    let (code, stdout, stderr) = finish(command.env("TMPDIR", dir.path()));
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] out\n"));
    let place = stderr.split("the logs are in ").nth(1).unwrap().split(' ').next().unwrap();
    assert_eq!(read(Path::new(place), "attempt_0/0/stdout.log").as_deref(), Some("out\n"));
}

#[test]
fn lines_have_the_users_prefix() {
    let prefix = "--log-line-prefix-template=<${role_name}|${local_rank}|${rank}> ";
    let (code, stdout, _) = finish(&mut launcher(&[prefix, "--role=t", "/bin/echo", "out"]));
    assert_eq!((code, stdout.as_str()), (Some(0), "<t|0|0> out\n"));

    let name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
    let run = |args: &[&str], template| finish(launcher(&[args, &["/bin/echo", "out"]].concat()).env(name, template));
    assert_eq!(run(&[], "${rank}: ").1, "0: out\n");
    assert_eq!(run(&["--log-line-prefix-template="], "${rank}: ").1, "0: out\n");
    assert_eq!(run(&[prefix, "--role=t"], "${rank}: ").1, "<t|0|0> out\n");
    assert_eq!(run(&[], "").1, "[rank 0] out\n");
    let (code, _, stderr) = run(&[], "${pid} ");
    assert!(code == Some(2) && stderr.contains("\"${pid} \" for TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"), "{stderr}");
}

#[test]
fn log_errors_are_reported_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let (code, stdout, stderr) = run(&dir.path().join("file"), &[], SCRIPT);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(stderr.contains("file\" can't be created: ") && stderr.contains("Check --log-dir"), "{stderr}");
    for option in ["--tee=2:1", "--redirects=0:1,2:3", "--local-ranks-filter=2"] {
        let (code, stdout, stderr) = run(dir.path(), &[option], SCRIPT);
        assert_eq!((code, stdout.as_str()), (Some(2), ""));
        assert!(
            stderr.contains(option.split('=').next().unwrap()) && stderr.contains("expected local ranks from 0 to 1"),
            "{stderr}"
        );
    }
}

#[test]
fn an_escaped_writer_does_not_block_the_launcher() {
    hear_signals();
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    command.args(["/bin/sh", "-c", "env -i setsid yes 2>/dev/null & sleep 0.2"]).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let (start, mut chunk) = (std::time::Instant::now(), vec![0; 4096]);
    // Read more slowly than `yes` writes.
    while std::io::Read::read(&mut output, &mut chunk).unwrap() > 0 {
        if start.elapsed() > TIMEOUT {
            child.kill().unwrap();
            panic!("it prints on");
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn the_summary_shows_the_end_of_a_hidden_stderr() {
    let logs = tempfile::tempdir().unwrap();
    let dir = logs.path().display().to_string();
    let script = "echo shown; seq 1 50 >&2; [ $RANK = 1 ] && echo ValueError: bad >&2 && exit 3; sleep 300";
    let run = |options: &[&str]| {
        let args = [&["--nproc-per-node=2", "--log-dir", &dir, "--rdzv-id=j"], options, &["sh", "-c", script]].concat();
        finish(&mut launcher(&args)).2
    };
    let stderr = run(&["--redirects=2"]);
    assert!(stderr.contains(&format!("\n  {dir}/j/attempt_0/1/stderr.log ends with:\n    42\n")), "{stderr}");
    assert!(stderr.contains("\n    50\n    ValueError: bad\n  rank 0: "), "{stderr}");
    // Output that the console showed is not repeated.
    assert!(!run(&["--tee=2"]).contains("ends with:"));
    assert!(!run(&[]).contains("ends with:"));
}

/// Runs the launcher with a limit of 8 or 16 KiB for each file, as the shell counts.
fn with_small_files(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = assert_cmd::Command::new("sh");
    command.args(["-c", "ulimit -f 16; exec \"$0\" \"$@\""]).arg(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    finish(command.timeout(TIMEOUT).args(args))
}

#[test]
fn a_log_beyond_the_limit_of_its_size_does_not_end_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let script = "yes line | head -n 10000";
    let (code, stdout, stderr) =
        with_small_files(&["--log-dir", dir.path().to_str().unwrap(), "--tee", "3", "sh", "-c", script]);
    assert_eq!((code, stdout.lines().count()), (Some(0), 10_000), "{stderr}");
    let parts = ["the log file of", "is no longer written: File too large", "bytes (ulimit -f). Raise the limit with"];
    assert!(parts.iter().all(|part| stderr.contains(part)), "{stderr}");
}

/// The launcher ignores the signal, and its ranks do not.
#[test]
fn a_rank_killed_by_the_limit_of_a_file_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("exec head -c 100000 /dev/zero > {}", dir.path().join("file").display());
    let (code, _, stderr) = with_small_files(&["sh", "-c", &script]);
    assert_eq!(code, Some(153), "{stderr}");
    assert!(stderr.contains("killed by SIGXFSZ: a file reached the limit of its size. Raise it"), "{stderr}");
}
