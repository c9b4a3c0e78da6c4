//! Every command in the README is one that the programs understand.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{program, run, workspace};

/// The commands in code blocks of the README and of other documents, and those between backticks.
fn commands() -> Vec<Vec<String>> {
    let files = [
        "README.md",
        "CONTRIBUTING.md",
        "docs/from-candle.md",
        "docs/gpus.md",
        "docs/parity.md",
        "docs/performance.md",
    ];
    let text = files.map(|name| std::fs::read_to_string(workspace().join(name)).unwrap());
    let text = text.join("\n").replace("```sh\n", "```\n");
    let mut spans = Vec::new();
    for (i, block) in text.split("```").enumerate() {
        if i % 2 == 0 {
            spans.extend(block.split('`').skip(1).step_by(2));
        } else if let Some(lines) = block.strip_prefix('\n') {
            // Blocks of another language say so.
            spans.extend(lines.lines());
        }
    }
    let words = spans.into_iter().map(|span| span.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    // A name alone is a program that the text is about.
    words
        .filter(|words| {
            words.len() > 1 && ["cargo", "fsdp-launch", "train", "fsdp-ckpt", "bench"].contains(&words[0].as_str())
        })
        .collect()
}

/// Has a program read its command line and do nothing.
fn understands(name: &str, args: &[String], limit: Duration) {
    let mut command = Command::new(program(name));
    command.args(args).arg("--help");
    let run = run(command, limit);
    assert_eq!(run.code, Some(0), "`{name} {}`: {}", args.join(" "), run.stderr);
}

fn check(words: &[String]) {
    let limit = Duration::from_secs(60);
    match words[0].as_str() {
        "cargo" => check_cargo(&words[1..]),
        "fsdp-launch" if words[1] == "status" => understands("fsdp-launch", &words[1..], limit),
        "fsdp-launch" => {
            // The ranks then read their command lines: `--help` goes to them.
            let mut args = words[1..].to_vec();
            let launched = |word: &String| ["train", "bench"].contains(&word.as_str());
            let at = args.iter().position(launched).expect("what the README launches is train or bench");
            args[at] = program(&args[at]).to_str().unwrap().to_owned();
            if args[..at].iter().any(|word| word == "--nnodes") {
                // There is no second host: the launcher prints what it would start.
                args.insert(0, "--dry-run".into());
            }
            understands("fsdp-launch", &args, limit);
        }
        name => understands(name, &words[1..], limit),
    }
}

/// Of Cargo's commands, the flags are looked up, and what a program gets is checked.
fn check_cargo(words: &[String]) {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let mut help = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    help.args([&words[0], "--help"]);
    let help = run(help, Duration::from_secs(60)).ok().stdout;
    for flag in words[1..end].iter().filter(|word| word.starts_with('-')) {
        assert!(help.split([' ', ',', '\n', '[', '=']).any(|word| word == flag), "cargo {} has no {flag}", words[0]);
    }
    for (at, _) in words[..end].iter().enumerate().filter(|(_, word)| *word == "-p") {
        let package = &words[at + 1];
        let is_it = |folder: &str| {
            let manifest = std::fs::read_to_string(workspace().join(folder).join("Cargo.toml")).unwrap_or_default();
            manifest.contains(&format!("name = \"{package}\""))
        };
        assert!([package.as_str(), "examples", "tests", "tests/gpu"].into_iter().any(is_it), "no package {package}");
        if end < words.len() {
            check(&[std::slice::from_ref(package), &words[end + 1..]].concat());
        }
    }
}

#[test]
fn every_command_in_the_readme_is_understood() {
    let commands = commands();
    for program in ["cargo", "fsdp-launch", "train", "fsdp-ckpt", "bench"] {
        assert!(commands.iter().any(|words| words[0] == program), "no command of {program} was found");
    }
    commands.iter().for_each(|words| check(words));
}

#[test]
fn a_wrong_command_would_be_found() {
    let wrong = "fsdp-launch --nproc-per-node 2 train --no-such-flag".split(' ').map(str::to_owned).collect::<Vec<_>>();
    assert!(std::panic::catch_unwind(|| check(&wrong)).is_err());
}

/// The files that the README names or links to.
fn files(text: &str) -> Vec<String> {
    let spans = text.split('`').skip(1).step_by(2).filter(|span| span.contains('/') && span.ends_with(".rs"));
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
    let local = links.filter(|link| !link.contains("://")).filter_map(|link| link.split('#').next());
    spans.chain(local).map(str::to_owned).collect()
}

#[test]
fn every_stop_of_the_tour_is_there() {
    let docs = workspace().join("docs");
    let files = files(&std::fs::read_to_string(docs.join("tour.md")).unwrap());
    assert!(files.len() > 10, "{files:?}");
    let missing: Vec<_> = files.iter().filter(|file| !docs.join(file).exists()).collect();
    assert!(missing.is_empty(), "the tour leads to files that are not there: {missing:?}");
}

#[test]
fn every_file_that_the_readme_names_is_there() {
    let files = files(&std::fs::read_to_string(workspace().join("README.md")).unwrap());
    assert!(files.iter().any(|file| file == "examples/src/bin/minimal.rs"), "{files:?}");
    assert!(files.iter().any(|file| file == "docs/memory.md"), "{files:?}");
    let missing: Vec<_> = files.iter().filter(|file| !workspace().join(file).exists()).collect();
    assert!(missing.is_empty(), "the README names files that are not there: {missing:?}");
}
