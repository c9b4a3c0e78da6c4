//! `fsdp_candle::nn` is all of candle_nn: held against candle_nn's own source, and `docs/from-candle-nn.md` against
//! both.

mod signature;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use cargo_metadata::MetadataCommand;
use fsdp_test_support::workspace;

use source::{Target, Tree};

/// Where the source of candle_nn lies.
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

/// Whose a path is here, and how it differs from candle_nn's.
struct Comparison {
    /// `Candle's` or `ours`, by path.
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

/// What tells one target from another: `candle` is what Candle calls `candle_core`.
fn name_of(target: &Target) -> String {
    format!("{target:?}").replace("candle_core::", "candle::")
}

#[test]
fn every_public_path_of_candle_nn_is_here_with_its_signature() {
    let (candle, ours) = trees();
    let comparison = compare(&candle, &ours);
    assert!(comparison.whose.len() > 150, "{}", comparison.whose.len());
    let differences = &comparison.differences;
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

/// `| path | whose | what it is about |`, of all paths within modules.
#[test]
fn the_table_says_of_each_whose_it_is() {
    let (candle, ours) = trees();
    let whose = compare(&candle, &ours).whose;
    let expected: BTreeSet<String> = whose
        .iter()
        .filter(|(path, _)| path.contains("::"))
        .map(|(path, whose)| format!("| `{path}` | {whose} |"))
        .collect();
    let text = std::fs::read_to_string(workspace().join("docs/from-candle-nn.md")).unwrap();
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

/// The comparison itself: what is taken away or changed is named.
#[test]
fn a_missing_item_and_another_signature_are_named() {
    let (candle, mut ours) = trees();
    let in_module = |tree: &mut Tree, module: &str, edit: &mut dyn FnMut(&mut Vec<syn::Item>)| {
        let module: Vec<String> = module.split("::").map(String::from).collect();
        edit(&mut tree.modules.get_mut(&module).unwrap().items);
    };
    in_module(&mut ours, "loss", &mut |items| {
        items.retain(|item| !matches!(item, syn::Item::Fn(it) if it.sig.ident == "cross_entropy"));
    });
    in_module(&mut ours, "linear", &mut |items| {
        for item in items {
            if let syn::Item::Fn(it) = item
                && it.sig.ident == "linear_b"
            {
                it.sig = syn::parse_str("fn linear_b(a: usize, b: usize, vb: VarBuilder) -> Result<Linear>").unwrap();
            }
        }
    });
    let differences = compare(&candle, &ours).differences;
    assert!(
        differences.contains(&"`loss::cross_entropy` is missing (a fn of candle_nn)".to_string()),
        "{differences:?}"
    );
    assert!(
        differences.iter().any(|line| line.starts_with("`linear::linear_b`: the function differs")),
        "{differences:?}"
    );
    assert!(differences.iter().any(|line| line.starts_with("`linear_b`: the function differs")), "{differences:?}");
}
