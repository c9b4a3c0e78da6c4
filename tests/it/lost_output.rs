//! Training continues when stdout or stderr cannot be written, as on a full disk.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, golden, program, run};

const FLAGS: &str = "--seq-len 32 --batch-size 1 --steps 3 --checkpoint-dir saved";

/// Runs a shell script on `ranks` ranks or without a launcher. `$0` is a program and `"$@"` are its arguments.
fn script(ranks: Option<usize>, script: &str, name: &str, args: &[&str], dir: &Path) -> Run {
    let mut command = Command::new("/bin/sh");
    if let Some(ranks) = ranks {
        command = Command::new(program("fsdp-launch"));
        command.arg(format!("--nproc-per-node={ranks}")).arg("/bin/sh");
    }
    command.args(["-c", script]).arg(program(name)).args(args).current_dir(dir);
    run(command, Duration::from_secs(120))
}

fn train(ranks: Option<usize>, commands: &str, more: &[&str], dir: &Path) -> Run {
    let (model, tokens) = (golden("llama_tiny"), golden("llama_tiny").join("tokens.bin"));
    let mut args = vec!["--model", model.to_str().unwrap(), "--data", tokens.to_str().unwrap()];
    args.extend(FLAGS.split(' '));
    args.extend(more);
    let run = script(ranks, commands, "train", &args, dir);
    assert!(dir.join("saved/step-00000003/checkpoint.json").exists(), "{run:?}");
    run.ok()
}

fn count(run: &Run, words: &str) -> usize {
    run.stdout.matches(words).count() + run.stderr.matches(words).count()
}

#[test]
fn trains_with_stdout_or_stderr_on_a_full_disk() {
    for ranks in [None, Some(2)] {
        let dir = |name: &str| tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let there = dir("stdout");
        let stdout = train(ranks, "exec \"$0\" \"$@\" > /dev/full", &[], there.path());
        assert_eq!(count(&stdout, "warning: can't write to stdout (No space left on device"), 1, "{stdout:?}");
        assert!(stdout.stderr.contains("step 3/3") && !stdout.stdout.contains("sample:"), "{stdout:?}");
        let there = dir("stderr");
        let stderr = train(ranks, "RUST_LOG=debug exec \"$0\" \"$@\" 2> /dev/full", &[], there.path());
        // Each rank writes a log.
        let warnings = count(&stderr, "warning: can't write to stderr (No space left on device");
        assert_eq!(warnings, ranks.unwrap_or(1), "{stderr:?}");
        assert!(stderr.stdout.contains("sample:"), "{stderr:?}");
        let there = dir("both");
        let both = train(ranks, "RUST_LOG=debug exec \"$0\" \"$@\" > /dev/full 2>&1", &[], there.path());
        assert_eq!((count(&both, "sample:"), count(&both, "warning:")), (0, 0), "{both:?}");
    }
}

#[test]
fn trains_with_a_closed_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let wait = "until [ -e gone ]; do sleep 0.01; done";
    let script = format!("{{ {wait}; \"$0\" \"$@\"; echo $? > code; }} | {{ exec <&-; : > gone; }}");
    let run = train(None, &script, &[], dir.path());
    assert_eq!(std::fs::read_to_string(dir.path().join("code")).unwrap(), "0\n");
    assert_eq!(count(&run, "warning: can't write to stdout (Broken pipe"), 1, "{run:?}");
}

#[test]
fn other_programs_do_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    let full = |name: &str, args: &[&str]| script(None, "exec \"$0\" \"$@\" > /dev/full", name, args, dir.path());
    let minimal = full("minimal", &[]).ok();
    assert!(!minimal.stderr.contains("panicked"), "{minimal:?}");
    // A benchmark fails if it cannot print its results.
    let model = golden("llama_tiny");
    for args in [
        &["collectives", "--mib", "1", "--runs", "1"][..],
        &["layers", "--runs", "1", "--batch", "1", "--json"],
        &["memory", "--width", "8", "--layers", "1", "--json"],
        &["finite", "--width", "8", "--layers", "1", "--rows", "1", "--runs", "1"],
        &["step", "--model", model.to_str().unwrap(), "--seq", "8", "--steps", "1"],
    ] {
        let text = full("bench", args).failed();
        assert!(text.contains("Error: can't print the results: No space left on device"), "{text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}
