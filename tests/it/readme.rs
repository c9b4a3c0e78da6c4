//! The programs accept every command in the README and other documents.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{program, read_text, run, workspace};

/// Returns the commands in code blocks and between backticks.
fn commands() -> Vec<Vec<String>> {
    let files = [
        "README.md",
        "CONTRIBUTING.md",
        "docs/from-candle.md",
        "docs/gpus.md",
        "docs/memory.md",
        "docs/parity.md",
        "docs/performance.md",
    ];
    let text = files.map(|name| read_text(&workspace().join(name)));
    let text = text.join("\n").replace("```sh\n", "```\n");
    let mut spans = Vec::new();
    for (i, block) in text.split("```").enumerate() {
        if i % 2 == 0 {
            spans.extend(block.split('`').skip(1).step_by(2));
        } else if let Some(lines) = block.strip_prefix('\n') {
            spans.extend(lines.lines());
        }
    }
    let words = spans.into_iter().map(|span| span.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    // A name alone is not a command.
    words
        .filter(|words| {
            words.len() > 1 && ["cargo", "fsdp-launch", "train", "fsdp-ckpt", "bench"].contains(&words[0].as_str())
        })
        .collect()
}

/// Asserts that a program accepts a command line, with `--help` so that it does nothing else. Arguments after `--` are
/// another program's.
fn accepts(name: &str, args: &[String], limit: Duration) {
    let mut command = Command::new(program(name));
    let own = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    command.args(&args[..own]).arg("--help").args(&args[own..]);
    let run = run(command, limit);
    assert_eq!(run.code, Some(0), "`{name} {}`: {}", args.join(" "), run.stderr);
}

fn check(words: &[String]) {
    let limit = Duration::from_secs(60);
    match words[0].as_str() {
        "cargo" => check_cargo(&words[1..]),
        "fsdp-launch" if words[1] == "status" => accepts("fsdp-launch", &words[1..], limit),
        "fsdp-launch" => {
            // `--help` goes to the ranks.
            let mut args = words[1..].to_vec();
            let launched = |word: &String| ["train", "bench"].contains(&word.as_str());
            let at = args.iter().position(launched).expect("what the README launches is train or bench");
            args[at] = program(&args[at]).to_str().unwrap().to_owned();
            if args[..at].iter().any(|word| word == "--nnodes") {
                // This machine has no second host, so the launcher prints the command that it would start there.
                args.insert(0, "--dry-run".into());
            }
            accepts("fsdp-launch", &args, limit);
        }
        name => accepts(name, &words[1..], limit),
    }
}

/// Looks up Cargo's flags in its help, and checks the arguments after `--`.
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
        assert!([package.as_str(), "examples", "tests"].into_iter().any(is_it), "no package {package}");
        if end < words.len() {
            check(&[std::slice::from_ref(package), &words[end + 1..]].concat());
        }
    }
}

#[test]
fn programs_accept_documented_commands() {
    let commands = commands();
    for program in ["cargo", "fsdp-launch", "train", "fsdp-ckpt", "bench"] {
        assert!(commands.iter().any(|words| words[0] == program), "no command of {program} was found");
    }
    commands.iter().for_each(|words| check(words));
}

#[test]
fn linked_files_exist() {
    for document in ["README.md", "docs/tour.md"] {
        let path = workspace().join(document);
        let text = read_text(&path);
        let spans = text.split('`').skip(1).step_by(2).filter(|span| span.contains('/') && span.ends_with(".rs"));
        let links = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
        let local = links.filter(|link| !link.contains("://")).filter_map(|link| link.split('#').next());
        let files: Vec<_> = spans.chain(local).collect();
        assert!(files.len() > 10, "{document}: {files:?}");
        let missing: Vec<_> = files.iter().filter(|file| !path.parent().unwrap().join(file).exists()).collect();
        assert!(missing.is_empty(), "{document} names missing files: {missing:?}");
    }
}
