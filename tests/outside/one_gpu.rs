//! `scripts/one-gpu` on CPUs, and with programs that fail or do not end: its page, its report and its exit code.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, program, run, workspace};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::need::{Need, python, trials};

/// Much longer than the script takes on one busy core.
const LIMIT: Duration = Duration::from_secs(300);

/// Steps of the script.
const STEPS: usize = 8;

pub(crate) fn trials() -> Vec<Trial> {
    trials![&[Need::Pytorch] => passes_on_cpus, reports_steps_that_fail_or_are_cut_off, ends_processes_that_it_cuts_off,
        runs_a_pack]
}

/// Runs steps with the programs of a directory.
fn one_gpu(programs: &Path, steps: &str, out: &Path, more: &[&str]) -> Run {
    let mut command = Command::new(python());
    command.arg(workspace().join("scripts/one-gpu"));
    command.args(["--small", "--device", "cpu", "--only", steps]).args(more);
    command.arg("--programs").arg(programs).arg("--out").arg(out).arg("--python").arg(python());
    run(command, LIMIT)
}

fn report(out: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(out.join("report.json")).unwrap()).unwrap()
}

/// Returns the status of each step.
fn statuses(report: &Value) -> Vec<&str> {
    report["steps"].as_array().unwrap().iter().map(|step| step["status"].as_str().unwrap()).collect()
}

fn page(out: &Path) -> String {
    fs::read_to_string(out.join("page.md")).unwrap()
}

/// Writes a shell script under the name of the launcher.
fn launcher(dir: &Path, script: &str) {
    let path = dir.join("fsdp-launch");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn passes_on_cpus() {
    let dir = tempfile::tempdir().unwrap();
    let programs = program("train");
    one_gpu(programs.parent().unwrap(), "nccl,drills,rates", dir.path(), &[]).ok();
    let report = report(dir.path());
    let mut expected = ["skipped"; STEPS];
    expected[..2].fill("passed");
    expected[4] = "passed";
    assert_eq!(statuses(&report), expected, "{report}");
    let rows = report["steps"][0]["rows"].as_array().unwrap();
    assert!(rows.len() >= 12 && rows.iter().all(|row| row["status"] == "passed"), "{report}");
    let page = page(dir.path());
    for words in [
        "No step failed",
        "3 ranks, uneven shards",
        "2 ranks, resumed on 4",
        "| SIGSTOP of rank 1 |",
        "| AdamW | step |",
    ] {
        assert!(page.contains(words), "{words} not in\n{page}");
    }
    assert!(fs::read_to_string(dir.path().join("log.txt")).unwrap().contains("[rank 0] step 5/5"));
}

fn reports_steps_that_fail_or_are_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    // The first step fails at once. The second step's run would not end.
    launcher(dir.path(), "case \"$*\" in *1000000*) exec sleep 600 ;; esac; echo no such device >&2; exit 3");
    let run = one_gpu(dir.path(), "nccl,drills,speed", dir.path(), &["--budget", "20"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let words = "not passed: nccl (failed), drills (cut off), speed (not reached)";
    assert!(run.stdout.contains(words), "{run:?}");
    assert!(run.elapsed < Duration::from_secs(200), "{run:?}");
    let report = report(dir.path());
    let mut expected = ["skipped"; STEPS];
    (expected[0], expected[1], expected[3]) = ("failed", "cut off", "not reached");
    assert_eq!(statuses(&report), expected, "{report}");
    // The program's own error.
    assert!(report["steps"][0]["rows"][0]["why"].as_str().unwrap().contains("no such device"), "{report}");
    let page = page(dir.path());
    for words in ["Not passed: nccl (failed)", "| drills | cut off |", "| speed | not reached |", "no such device"] {
        assert!(page.contains(words), "{words} not in\n{page}");
    }
}

/// As ranks do, the process leaves the session of the launcher.
fn ends_processes_that_it_cuts_off() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    let script = format!("setsid sh -c 'echo $$ >{}; trap \"\" TERM; sleep 600' & wait", file.display());
    launcher(dir.path(), &script);
    let run = one_gpu(dir.path(), "nccl", dir.path(), &["--budget", "15"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(statuses(&report(dir.path()))[0], "cut off");
    let pid = fs::read_to_string(file).unwrap();
    let state = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    // A process that nobody waited for is a zombie.
    assert!(state.is_empty() || state.contains(") Z "), "{state}");
}

/// Runs the program of an archive with the libraries of the pack, and refuses an archive that was cut short.
fn runs_a_pack() {
    let dir = tempfile::tempdir().unwrap();
    let [programs, pack, out] = ["programs", "pack", "out"].map(|name| dir.path().join(name));
    for folder in [&programs, &pack] {
        fs::create_dir(folder).unwrap();
    }
    launcher(&programs, "echo searched $LD_LIBRARY_PATH >&2; exit 3");
    let archive = |name: &str| {
        let code = "import sys, tarfile; tarfile.open(sys.argv[1], 'w:xz').add(sys.argv[2], '.')";
        let mut command = Command::new(python());
        command.args(["-c", code]).arg(pack.join(format!("{name}.tar.xz"))).arg(&programs);
        run(command, LIMIT).ok();
    };
    archive("programs");
    archive("nccl");
    let start = || {
        let mut command = Command::new(python());
        command.arg(workspace().join("scripts/one-gpu")).args(["--small", "--device", "cpu", "--only", "nccl"]);
        command.arg("--pack").arg(&pack).arg("--out").arg(&out).arg("--python").arg(python());
        run(command, LIMIT)
    };
    assert_eq!(start().code, Some(1));
    let report = report(&out);
    let why = report["steps"][0]["rows"][0]["why"].as_str().unwrap();
    assert!(why.contains(&format!("searched {}", out.join("pack/nccl").display())), "{why}");

    let whole = fs::read(pack.join("programs.tar.xz")).unwrap();
    fs::write(pack.join("programs.tar.xz"), &whole[..whole.len() / 2]).unwrap();
    let run = start();
    let words = ["programs.tar.xz: ", "Copy it again, or run scripts/one-gpu-pack"];
    assert!(run.code == Some(1) && words.iter().all(|word| run.stderr.contains(word)), "{run:?}");
}
