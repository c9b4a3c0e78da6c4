//! Shell completions of the programs. The launcher's own are tested in fsdp-launch.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, program, run};

fn completion(name: &str, args: &[&str]) -> Run {
    let mut command = Command::new(program(name));
    command.arg("--print-completion").args(args);
    run(command, Duration::from_secs(60))
}

/// Returns the words that bash offers after `words`.
fn offered(name: &str, words: &[&str]) -> Vec<String> {
    let script = completion(name, &["bash"]).ok().stdout;
    let (line, last) = (words.join(" "), words.len() - 1);
    let previous = words[last - 1];
    let complete = format!(
        "COMP_WORDS=({line}); COMP_CWORD={last}; _{name} {name} {} {previous}; echo \"${{COMPREPLY[@]}}\"",
        words[last]
    );
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", &format!("{script}\n{complete}")]);
    run(bash, Duration::from_secs(60)).ok().stdout.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn shells_complete_the_programs() {
    for name in ["train", "bench"] {
        for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
            let script = completion(name, &[shell]).ok().stdout;
            assert!(script.contains(name) && script.contains("print-completion"), "{shell}: {script}");
        }
    }
    assert_eq!(offered("train", &["train", "--packing", "o"]), ["on", "off"]);
    assert_eq!(offered("train", &["train", "--export-h"]), ["--export-hf"]);
    assert_eq!(offered("bench", &["bench", "coll"]), ["collectives"]);
    // A subcommand has its own flags.
    let flags = offered("bench", &["bench", "memory", "--m"]);
    assert!(flags.contains(&"--mode".to_owned()) && !flags.contains(&"--model".to_owned()), "{flags:?}");
}

#[test]
fn wrong_requests_of_completions_are_refused() {
    for (name, args, part) in [
        ("train", &["tcsh"][..], "possible values: bash"),
        ("bench", &["tcsh"], "possible values: bash"),
        ("bench", &[], "a value is required"),
        ("train", &["bash", "--steps", "3"], "cannot be used with"),
    ] {
        let run = completion(name, args);
        assert!(run.code == Some(2) && run.stderr.contains(part), "{name} {args:?}: {}", run.stderr);
    }
    let run = run(Command::new(program("bench")), Duration::from_secs(60));
    assert!(run.code == Some(2) && run.stderr.contains("collectives"), "{}", run.stderr);
}
