//! The commands in the README and other documents run as written, up to the first step that needs something the reader
//! has: a file, a directory, a GPU or other hosts.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, program, read_text, run, workspace};

const PROGRAMS: [&str; 4] = ["fsdp-launch", "train", "fsdp-ckpt", "bench"];

/// Returns the commands in code blocks and between backticks.
fn commands() -> Vec<String> {
    let files = [
        "README.md",
        "CONTRIBUTING.md",
        "docs/context-parallel.md",
        "docs/expert-parallel.md",
        "docs/from-candle.md",
        "docs/gpus.md",
        "docs/memory.md",
        "docs/parity.md",
        "docs/performance.md",
        "docs/tensor-parallel.md",
        "examples/README.md",
        "fsdp-ckpt/README.md",
        "fsdp-launch/README.md",
    ];
    let text = files.map(|name| read_text(&workspace().join(name)));
    let text = text.join("\n").replace("```sh\n", "```\n").replace("\\\n", " ");
    let mut spans = Vec::new();
    for (i, block) in text.split("```").enumerate() {
        if i % 2 == 0 {
            spans.extend(block.split('`').skip(1).step_by(2));
        } else if let Some(lines) = block.strip_prefix('\n') {
            spans.extend(lines.lines());
        }
    }
    let lines = spans.into_iter().map(|span| span.split_whitespace().collect::<Vec<_>>());
    // A name alone is not a command.
    let is_command = |words: &[&str]| words.len() > 1 && (words[0] == "cargo" || PROGRAMS.contains(&words[0]));
    lines.filter(|words| is_command(words)).map(|words| words.join(" ")).collect()
}

/// Runs a line in a shell, in an empty directory.
fn shell(line: &str, env: Option<(&str, &str)>) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let own = PROGRAMS.map(|name| program(name).parent().unwrap().display().to_string());
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(dir.path()).env("PATH", format!("{}:{path}", own.join(":"))).envs(env);
    run(command, Duration::from_secs(60))
}

/// Asserts that a command runs, or fails with one of the `reasons` after it has checked its flags.
fn ends(line: &str, env: Option<(&str, &str)>, reasons: &[&str]) {
    let run = shell(line, env);
    let is_expected = if reasons.is_empty() {
        run.code == Some(0)
    } else {
        run.code != Some(0) && reasons.iter().any(|reason| run.stderr.contains(reason))
    };
    assert!(is_expected, "`{line}` ended with {:?}, expected {reasons:?}:\n{}", run.code, run.stderr);
}

fn check(line: &str) {
    // `train` ends here with one of these, because the directory is empty and not in a Cargo workspace.
    let no_input = ["No such file or directory", "is not in a Cargo workspace", "this build has no CUDA"];
    let (name, rest) = line.split_once(' ').expect("a command has arguments");
    let launched = PROGRAMS.into_iter().find_map(|name| Some((name, rest.split_once(&format!(" {name}"))?.1)));
    match (name, launched) {
        ("cargo", _) => check_cargo(&rest.split(' ').collect::<Vec<_>>()),
        _ if rest.ends_with("--help") => ends(line, None, &[]),
        // The name of a subcommand.
        ("bench" | "fsdp-ckpt", _) if !rest.contains(' ') => ends(&format!("{line} --help"), None, &[]),
        ("train", _) => ends(line, None, &no_input),
        ("fsdp-ckpt", _) => ends(line, None, &["no such directory", "has no checkpoint and no model"]),
        // Benchmarks need no file. They check the number of threads after their flags.
        ("bench", _) => ends(line, Some(("RAYON_NUM_THREADS", "none")), &["is not a number of threads"]),
        // The launcher prints the processes that it would start, here and on a second host.
        (_, Some((program, args))) if program == "bench" || rest.contains("--nnodes") => {
            ends(&format!("fsdp-launch --dry-run {rest}"), None, &[]);
            if !args.is_empty() {
                check(&format!("{program}{args}"));
            }
        }
        (_, Some(_)) => ends(line, None, &no_input),
        (_, None) => ends(line, None, &[]),
    }
}

/// Looks up Cargo's flags in its help, and checks the arguments after `--`.
fn check_cargo(words: &[&str]) {
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let mut help = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    help.args([words[0], "--help"]);
    let help = run(help, Duration::from_secs(60)).ok().stdout;
    for flag in words[1..end].iter().filter(|word| word.starts_with('-')) {
        assert!(help.split([' ', ',', '\n', '[', '=']).any(|word| word == *flag), "cargo {} has no {flag}", words[0]);
    }
    let after =
        |flag: &str| words[..end].windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1]).collect::<Vec<_>>();
    for package in after("-p") {
        let is_it = |folder: &str| {
            let manifest = std::fs::read_to_string(workspace().join(folder).join("Cargo.toml")).unwrap_or_default();
            manifest.contains(&format!("name = \"{package}\""))
        };
        assert!([package, "examples", "tests"].into_iter().any(is_it), "no package {package}");
    }
    for path in after("--path") {
        assert!(workspace().join(Path::new(path)).join("Cargo.toml").exists(), "no package in {path}");
    }
    for program in after("--bin") {
        check(&format!("{program} {}", words[(end + 1).min(words.len())..].join(" ")));
    }
}

#[test]
fn documented_commands_run_up_to_what_they_need() {
    let commands = commands();
    for program in PROGRAMS.into_iter().chain(["cargo"]) {
        assert!(commands.iter().any(|line| line.starts_with(program)), "no command of {program} was found");
    }
    commands.iter().for_each(|line| check(line));
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
