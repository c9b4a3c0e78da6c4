//! docs/from-pytorch.md has a row for every name of PyTorch's API, and every name in our column exists.

use std::collections::BTreeSet;
use std::path::Path;

use fsdp_test_support::{read_text, workspace};
use serde_json::Value;

/// Protocols, idioms and other names that PyTorch's users know, besides the names in `tests/interop/surface.json`.
const IDIOMS: &[&str] = &[
    "FSDPLinear",
    "tied parameters",
    "frozen and trainable",
    "torch.no_grad()",
    "torch.autograd.gradcheck",
    "to_empty",
    "reset_parameters",
    "param_device",
    "reduce_device",
    "output_device",
    "optimizer_state_device",
    "fsdp_pre_all_gather",
    "fsdp_post_all_gather",
    "mesh[\"dp\"]",
    "mesh[\"dp\", \"tp\"]",
    "SGD",
    "parameter groups",
    "zero_grad",
    "underscores",
    "FlatParameter",
    "ignored_parameters",
    "_module_classes_to_ignore",
];

/// Names in our column that belong to Candle or Rust, or stand for the user's code.
const NOT_OURS: &[&str] = &[
    "GradStore",
    "extend",
    "VarBuilder",
    "Optimizer",
    "candle_nn",
    "Module",
    "Option",
    "Arc",
    "Display",
    "Var",
    "Some",
    "None",
    "bool",
    "mut",
    "dyn",
    "tracing",
];
/// Variables of the examples in our column.
const PLACEHOLDERS: &[&str] = &[
    "opts", "vb", "vars", "model", "loss", "inputs", "grads", "fqn", "x", "m", "dp", "n", "b", "a", "ab", "block",
    "hook", "tp", "unit", "group",
];

/// A row of a table.
struct Row {
    line: usize,
    /// The headings above it, from the section's on.
    headings: Vec<String>,
    theirs: String,
    ours: String,
    differences: String,
}

/// Reads the rows of all tables. Each row must be in a table and have three cells.
fn rows() -> Vec<Row> {
    let text = read_text(&workspace().join("docs/from-pytorch.md"));
    let (mut rows, mut headings) = (vec![], vec![]);
    let mut in_table = 0;
    for (line, text) in text.lines().enumerate() {
        let line = line + 1;
        let Some(inner) = text.strip_prefix('|') else {
            in_table = 0;
            if let Some((level, heading)) = text.split_once(' ').filter(|(level, _)| level.starts_with("##")) {
                headings.truncate(level.len() - 2);
                headings.push(heading.to_string());
            }
            continue;
        };
        let inner = inner.replace("\\|", "\u{1}");
        let mut cells: Vec<String> = inner.split('|').map(|cell| cell.trim().replace('\u{1}', "|")).collect();
        assert_eq!(cells.pop().as_deref(), Some(""), "line {line}: the row does not end");
        let Ok([theirs, ours, differences]) = <[String; 3]>::try_from(cells) else {
            panic!("line {line}: a row has three cells")
        };
        match in_table {
            0 => assert_eq!([theirs, ours, differences], ["PyTorch", "ours", "differences"], "line {line}"),
            1 => assert_eq!([theirs, ours, differences], ["---"; 3], "line {line}: a row outside a table"),
            _ => rows.push(Row { line, headings: headings.clone(), theirs, ours, differences }),
        }
        in_table += 1;
    }
    rows
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns whether `name` is in `text` as a whole word.
fn names(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + name.len()..].chars().next();
        // A flag may follow dashes only if it begins with them.
        !before.is_some_and(is_word) && !after.is_some_and(|c| is_word(c) || name.starts_with("--") && c == '-')
    })
}

/// Returns whether `name` is in the code spans of `text`.
fn in_code(text: &str, name: &str) -> bool {
    text.split('`').skip(1).step_by(2).any(|code| names(code, name))
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|value| value.as_str().unwrap()).collect()
}

/// Returns the names of `record` without a row. A function, class or option must be in the code of a row's first cell.
/// A parameter or member needs its owner there or in a heading above, and a method's parameter the method.
fn missing(record: &Value, rows: &[Row]) -> Vec<String> {
    let is_about = |row: &Row, owner: &str| {
        in_code(&row.theirs, owner) || row.headings.iter().any(|heading| in_code(heading, owner))
    };
    let has = |owner: &str, name: &str| rows.iter().any(|row| is_about(row, owner) && in_code(&row.theirs, name));
    let mut missing = vec![];
    for option in strings(&record["torchrun"]) {
        if !has("torchrun", option) {
            missing.push(format!("torchrun {option}"));
        }
    }
    for (module, items) in record["modules"].as_object().unwrap() {
        for (item, entry) in items.as_object().unwrap() {
            let of_item = |name: &str| format!("{module}.{item}: {name}");
            if !rows.iter().any(|row| is_about(row, item)) {
                missing.push(format!("{module}.{item}"));
            }
            let parameters = entry.get("parameters").map(strings).unwrap_or_default();
            let members = entry.get("members").map(keys).unwrap_or_default();
            missing.extend(parameters.iter().chain(&members).filter(|name| !has(item, name)).map(|name| of_item(name)));
            for member in members {
                let of_method = strings(&entry["members"][member]);
                let lost = of_method.iter().filter(|name| {
                    !rows
                        .iter()
                        .any(|row| is_about(row, item) && [member, name].iter().all(|n| in_code(&row.theirs, n)))
                });
                missing.extend(lost.map(|name| of_item(&format!("{member}({name})"))));
            }
        }
    }
    missing
}

fn record() -> Value {
    serde_json::from_str(&read_text(&workspace().join("tests/interop/surface.json"))).unwrap()
}

#[test]
fn every_pytorch_name_has_a_row() {
    let missing = missing(&record(), &rows());
    assert!(missing.is_empty(), "docs/from-pytorch.md has no row for {missing:#?}");
}

#[test]
fn every_idiom_has_a_row() {
    let rows = rows();
    let missing: Vec<_> = IDIOMS.iter().filter(|name| !rows.iter().any(|row| names(&row.theirs, name))).collect();
    assert!(missing.is_empty(), "docs/from-pytorch.md has no row for {missing:?}");
}

#[test]
fn every_row_has_a_counterpart_or_a_reason() {
    for Row { line, theirs, ours, differences, .. } in rows() {
        assert!(!ours.is_empty(), "line {line}: {theirs} has no counterpart, and no reason why");
        let is_known = ["not yet", "not needed", "not offered"].iter().any(|status| ours.starts_with(status));
        assert!(!ours.starts_with("not ") || is_known, "line {line}: {ours:?} is not explained");
        assert!(!is_known || !differences.is_empty(), "line {line}: {ours}, and no reason why");
    }
}

/// Returns every name that the crates' sources define: items, fields, variants, modules and crates.
fn definitions() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for name in ["fsdp-core", "fsdp-ckpt", "fsdp-launch", "fsdp-candle", "examples"] {
        names.insert(name.replace('-', "_"));
        names.insert(name.to_string());
        collect(&workspace().join(name).join("src"), &mut names);
    }
    names
}

fn collect(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        names.insert(path.file_stem().unwrap().to_str().unwrap().to_string());
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            text.lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .for_each(|line| names.extend(defined(line)));
        }
    }
}

/// Returns the name that a line of code defines: an item, a field or a variant.
fn defined(line: &str) -> Option<String> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub ")).unwrap_or(line);
    let mut words = line.split_whitespace();
    let first = words.next()?;
    let (name, is_item) = match ["fn", "struct", "enum", "trait", "type", "mod", "const"].contains(&first) {
        true => (words.next()?, true),
        false => (first, false),
    };
    let end = name.find(|c| !is_word(c)).unwrap_or(name.len());
    let variant =
        name.starts_with(char::is_uppercase) && (end == name.len() || name[end..].starts_with([',', '(', '{']));
    let field = name[end..].starts_with(':') && !name[end..].starts_with("::");
    (end > 0 && (is_item || variant || field)).then(|| name[..end].to_string())
}

/// Returns the names in the code spans of a cell.
fn ours(cell: &str) -> Vec<String> {
    let mut names = vec![];
    for code in cell.split('`').skip(1).step_by(2) {
        // Quoted text is not code.
        for code in code.split('"').step_by(2) {
            for word in code.split(|c: char| !is_word(c) && c != '-') {
                let flag = word.strip_prefix("--").map(|flag| flag.replace('-', "_"));
                let word = flag.unwrap_or_else(|| word.trim_matches('-').to_string());
                // Words in capitals are values of flags, or dtypes.
                let value = word.chars().all(|c| !c.is_lowercase());
                if word.starts_with(|c: char| c.is_alphabetic() || c == '_') && !value {
                    names.push(word);
                }
            }
        }
    }
    names
}

/// Returns our names in a row: those in our cell, and PyTorch's without parameters if our cell says "the same".
fn names_of_ours(row: &Row) -> Vec<String> {
    let mut names = ours(&row.ours);
    if row.ours.starts_with("the same") {
        let theirs = row.theirs.split('`').skip(1).step_by(2).map(|code| {
            // Short flags and environment variables are not defined by this project.
            let name = code.split(['(', ' ', '=', '.']).next().unwrap();
            if name.starts_with('-') && !name.starts_with("--") || name.ends_with(char::is_uppercase) {
                ""
            } else {
                name
            }
        });
        names.extend(theirs.flat_map(|name| ours(&format!("`{name}`"))));
    }
    names
}

#[test]
fn every_name_in_our_column_exists() {
    let mut known = definitions();
    known.extend(["torchrun", "torch-dcp"].map(String::from));
    known.extend(["train", "fsdp-launch", "fsdp-ckpt", "debug", "true", "false", "auto", "cpu"].map(String::from));
    known.extend(NOT_OURS.iter().chain(PLACEHOLDERS).map(|name| name.to_string()));
    let unknown: Vec<_> = rows()
        .into_iter()
        .flat_map(|row| names_of_ours(&row).into_iter().map(move |name| (row.line, name)))
        .filter(|(_, name)| !known.contains(name))
        .collect();
    assert!(unknown.is_empty(), "docs/from-pytorch.md has undefined names, by line: {unknown:?}");
}
