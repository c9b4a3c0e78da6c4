//! Code, comments and documents have one width, and files of code an end in sight.
//!
//! A wider line is free only where it has no place to be broken at: a row of a Markdown table, and a line that is one
//! word, such as a link, behind the mark of a comment or of a list.

use std::path::{Path, PathBuf};

use fsdp_tests::workspace;

/// As `rustfmt.toml` has it, which breaks no comment, no string and no document.
const WIDTH: usize = 120;

/// Lines of a file of code. A longer one has two subjects.
const LINES: usize = 450;

const KINDS: [&str; 8] = ["rs", "md", "toml", "py", "yaml", "yml", "sbatch", "service"];

/// What stands before the text of a line.
const MARKS: [&str; 8] = ["///", "//!", "//", "#", "-", "*", ">", "\""];

/// The files that people write, below `dir`. Folders out of sight but `.ci`, and what is built, hold none.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_script = dir.file_name().is_some_and(|name| [".ci", "scripts", "hosts"].iter().any(|it| name == *it));
        if path.is_dir() {
            let is_theirs = (name.starts_with('.') && name != ".ci") || path.join("CACHEDIR.TAG").exists();
            if !is_theirs {
                found.extend(files(&path));
            }
        } else if is_script || path.extension().is_some_and(|kind| KINDS.iter().any(|it| kind == *it)) {
            found.push(path);
        }
    }
    found
}

/// Whether a line is too wide and could be broken.
fn is_too_wide(line: &str, is_markdown: bool) -> bool {
    let mut text = line.trim();
    if line.chars().count() <= WIDTH || (is_markdown && text.starts_with('|')) {
        return false;
    }
    while let Some(rest) = MARKS.iter().find_map(|mark| text.strip_prefix(mark)) {
        text = rest.trim_start();
    }
    text.contains(char::is_whitespace)
}

#[test]
fn no_line_is_wider_than_120_columns() {
    let mut wide = Vec::new();
    for path in files(workspace()) {
        let text = std::fs::read_to_string(&path).unwrap();
        let is_markdown = path.extension().is_some_and(|kind| kind == "md");
        let lines = text.lines().enumerate().filter(|(_, line)| is_too_wide(line, is_markdown));
        let name = path.strip_prefix(workspace()).unwrap().display().to_string();
        wide.extend(lines.map(|(at, line)| format!("{name}:{}: {} columns", at + 1, line.chars().count())));
    }
    assert!(wide.is_empty(), "{} lines are wider than {WIDTH} columns:\n{}", wide.len(), wide.join("\n"));
}

#[test]
fn no_file_of_code_is_longer_than_450_lines() {
    let is_code = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "rs");
    let lines = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
    let long = files(workspace()).into_iter().filter(is_code).map(|path| (lines(&path), path));
    let long: Vec<_> = long.filter(|(lines, _)| *lines > LINES).collect();
    assert!(long.is_empty(), "{long:?}");
}

/// A file that no other one names as its module is not compiled, and no compiler says so.
#[test]
fn every_file_of_code_is_compiled() {
    let code: Vec<_> =
        files(workspace()).into_iter().filter(|path| path.extension().is_some_and(|k| k == "rs")).collect();
    let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    // Targets that Cargo finds without being told.
    let is_target = |path: &Path| {
        let stem = path.file_stem().unwrap();
        ["main", "lib", "build"].iter().any(|root| stem == *root)
            || path.parent().unwrap().ends_with("bin")
            || path.parent().unwrap().join("../Cargo.toml").exists() && path.parent().unwrap().ends_with("tests")
            || path.components().any(|part| part.as_os_str() == "fuzz")
    };
    let is_named = |path: &Path| {
        let dir = path.parent().unwrap();
        let name = if path.ends_with("mod.rs") { dir.file_name() } else { path.file_stem() };
        let name = name.unwrap().to_str().unwrap();
        let home = if path.ends_with("mod.rs") { dir.parent().unwrap() } else { dir };
        let roots = ["main.rs", "lib.rs", "mod.rs"].map(|root| home.join(root));
        let words = [format!("mod {name};"), format!("mod {name} {{")];
        let beside = roots.iter().chain([&home.with_extension("rs")]).map(|root| text(root)).collect::<String>();
        words.iter().any(|word| beside.contains(word))
            || code.iter().any(|other| text(other).contains(&format!("#[path = \"{name}.rs\"]")))
    };
    let lost: Vec<_> = code.iter().filter(|path| !is_target(path) && !is_named(path)).collect();
    assert!(lost.is_empty(), "no file says `mod` of these: {lost:?}");
}

#[test]
fn what_can_not_be_broken_is_free() {
    let long = "x".repeat(WIDTH);
    for free in [
        long.clone(),
        format!("/// {long}"),
        format!("- <https://{long}>"),
        format!("    \"{long}\","),
        format!("{} é", "x".repeat(WIDTH - 2)),
    ] {
        assert!(!is_too_wide(&free, false), "{free}");
    }
    let row = format!("| a | {long} |");
    assert!(!is_too_wide(&row, true) && is_too_wide(&row, false));
    for wide in [format!("a {long}"), format!("/// a {long}"), format!("- a {long}"), format!("\"a {long}\"")] {
        assert!(is_too_wide(&wide, true), "{wide}");
    }
}

#[test]
fn the_files_of_every_kind_are_looked_at() {
    let files = files(workspace());
    for name in [
        "README.md",
        ".ci/run",
        "scripts/check-cuda",
        "tests/hosts/slurm",
        "Cargo.toml",
        "fsdp-core/src/lib.rs",
        "tests/it/width.rs",
        "docs/memory.md",
    ] {
        assert!(files.contains(&workspace().join(name)), "{name}");
    }
    assert!(!files.iter().any(|path| path.components().any(|part| part.as_os_str() == ".git")));
}
