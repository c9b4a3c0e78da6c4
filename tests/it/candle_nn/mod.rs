//! `fsdp_candle::nn` has every public path of candle_nn with the same signature, by candle_nn's source.
//! `docs/from-candle-nn.md` lists each path as re-exported or reimplemented.

mod signature;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use cargo_metadata::MetadataCommand;
use fsdp_test_support::{read_text, workspace};

use source::{Target, Tree};

/// Returns the path of candle_nn's source.
fn candle_nn() -> PathBuf {
    let rustc = Command::new("rustc").arg("-vV").output().unwrap();
    let rustc = String::from_utf8(rustc.stdout).unwrap();
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let mut command = MetadataCommand::new();
    command.manifest_path(workspace().join("Cargo.toml"));
    // Packages of other platforms may not have been downloaded.
    command.other_options(["--filter-platform".to_string(), host.to_string(), "--locked".to_string()]);
    let metadata = command.exec().unwrap();
    let package = metadata.packages.iter().find(|package| package.name.as_str() == "candle-nn").unwrap();
    package.manifest_path.parent().unwrap().join("src/lib.rs").into()
}

fn trees() -> (Tree, Tree) {
    let ours = workspace().join("fsdp-candle/src/nn/mod.rs");
    (Tree::read("candle_nn", &[], &candle_nn()), Tree::read("nn", &["nn"], &ours))
}

/// A comparison of the public paths of two crates.
struct Comparison {
    /// `Candle's` (re-exported) or `ours` (reimplemented), by path.
    whose: BTreeMap<String, &'static str>,
    differences: Vec<String>,
}

fn compare(candle: &Tree, ours: &Tree) -> Comparison {
    let found = ours.public(&[candle]);
    let mut comparison = Comparison { whose: BTreeMap::new(), differences: vec![] };
    for (path, targets) in candle.public(&[]) {
        for target in targets {
            let kind = match &target {
                Target::Item(_, _, _, kind) => kind,
                _ => "item of another crate",
            };
            let here = found.get(&path).into_iter().flatten().find(|it| is_same_kind(it, &target));
            match here {
                None => comparison.differences.push(format!("`{path}` is missing (a {kind} of candle_nn)")),
                Some(Target::Item("nn", module, name, kind)) => {
                    comparison.whose.insert(path.clone(), "ours");
                    let Target::Item(_, their_module, their_name, _) = &target else {
                        comparison.differences.push(format!("`{path}` is Candle's {target:?}, and ours here"));
                        continue;
                    };
                    let own = signature::of_item(ours, module, name, kind);
                    for (what, theirs) in signature::of_item(candle, their_module, their_name, kind) {
                        match own.get(&what) {
                            None => comparison.differences.push(format!("`{path}`: {what} is missing: {theirs}")),
                            Some(own) if *own != theirs => comparison
                                .differences
                                .push(format!("`{path}`: {what} differs\n    theirs: {theirs}\n    ours:   {own}")),
                            Some(_) => {}
                        }
                    }
                }
                Some(here) => {
                    comparison.whose.insert(path.clone(), "Candle's");
                    if name_of(here) != name_of(&target) {
                        comparison.differences.push(format!("`{path}` leads to {here:?}, not to {target:?}"));
                    }
                }
            }
        }
    }
    comparison
}

fn is_same_kind(a: &Target, b: &Target) -> bool {
    match (a, b) {
        (Target::Item(_, _, _, a), Target::Item(_, _, _, b)) => a == b,
        _ => true,
    }
}

/// Returns a comparable name. Candle's sources call `candle_core` `candle`.
fn name_of(target: &Target) -> String {
    format!("{target:?}").replace("candle_core::", "candle::")
}

#[test]
fn every_public_path_has_the_same_signature() {
    let (candle, ours) = trees();
    let comparison = compare(&candle, &ours);
    assert!(comparison.whose.len() > 150, "{}", comparison.whose.len());
    let differences = &comparison.differences;
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

/// Rows are `| path | whose | ... |`, for all paths within modules.
#[test]
fn the_documented_table_is_complete() {
    let (candle, ours) = trees();
    let whose = compare(&candle, &ours).whose;
    let expected: BTreeSet<String> = whose
        .iter()
        .filter(|(path, _)| path.contains("::"))
        .map(|(path, whose)| format!("| `{path}` | {whose} |"))
        .collect();
    let text = read_text(&workspace().join("docs/from-candle-nn.md"));
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let found: Vec<String> = rows.map(|line| line.split_inclusive('|').take(3).collect::<String>()).collect();
    let unique: BTreeSet<String> = found.iter().cloned().collect();
    assert_eq!(unique.len(), found.len(), "a path has two rows");
    let missing: Vec<_> = expected.difference(&unique).cloned().collect();
    let stale: Vec<_> = unique.difference(&expected).cloned().collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "docs/from-candle-nn.md lacks\n{}\nand says\n{}",
        missing.join("\n"),
        stale.join("\n")
    );
}
