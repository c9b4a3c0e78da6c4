//! The table of all files in `docs/candle-transformers.md`, which `scripts/candle-transformers` writes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cargo_metadata::MetadataCommand;
use fsdp_test_support::{read_text, workspace};

use super::{TRAINED, lines_changed};

const DOCUMENT: &str = "docs/candle-transformers.md";

/// Returns the folder of candle-transformers' models.
fn models() -> PathBuf {
    let mut command = MetadataCommand::new();
    command.manifest_path(workspace().join("Cargo.toml")).other_options(["--locked".to_string()]);
    let metadata = command.exec().unwrap();
    let package = metadata.packages.iter().find(|package| package.name.as_str() == "candle-transformers").unwrap();
    package.manifest_path.parent().unwrap().join("src/models").into()
}

/// Adds the paths of Rust files below a folder.
fn add_files(folder: &Path, prefix: &str, files: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() {
            add_files(&path, &format!("{name}/"), files);
        } else if name.ends_with(".rs") && !name.contains("quantized") && name != "mod.rs" {
            files.insert(name);
        }
    }
}

/// Returns the cells of each row: file, compiles, gradients, in plain Candle, losses.
fn rows() -> Vec<[String; 5]> {
    let text = read_text(&workspace().join(DOCUMENT));
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let cells = |row: &str| -> Vec<String> {
        row.replace("\\|", "/").split('|').map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
    };
    rows.map(|row| cells(row).try_into().unwrap_or_else(|_| panic!("{row} has other cells"))).collect()
}

/// The start of a cell, without details.
fn kind(cell: &str) -> &str {
    cell.split([':', ';', ',']).next().unwrap()
}

/// Whether the second loss is below the first. `None` without losses.
fn falls(cell: &str) -> Option<bool> {
    let (first, last) = cell.split_once(" → ")?;
    Some(last.parse::<f64>().unwrap() < first.parse::<f64>().unwrap())
}

#[test]
fn the_table_has_every_file() {
    let mut files = BTreeSet::new();
    add_files(&models(), "", &mut files);
    let found: Vec<String> = rows().into_iter().map(|[file, ..]| file.trim_matches('`').to_owned()).collect();
    assert_eq!(found.len(), found.iter().collect::<BTreeSet<_>>().len(), "a file has two rows");
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), files, "run scripts/candle-transformers");
}

#[test]
fn the_counts_are_those_of_the_table() {
    let rows = rows();
    let measured: Vec<_> = rows.iter().filter(|row| falls(&row[4]).is_some()).collect();
    let right = measured.iter().filter(|row| kind(&row[2]) == "right").count();
    let fall = measured.iter().filter(|row| falls(&row[4]) == Some(true)).count();
    let defect = |cell: &str| ["missing", "wrong", "error", "other values"].iter().any(|word| cell.contains(word));
    let defects = measured.iter().filter(|row| defect(&row[3])).count();
    let begins = |text: &str, at: usize| rows.iter().filter(|row| row[at].starts_with(text)).count();
    let expected = [
        format!("- {} files, {} of which compile with the line.", rows.len(), begins("yes", 1)),
        format!(
            "- {} files were trained. Gradients are right in {right} of them, and the loss falls in {fall}.",
            measured.len()
        ),
        format!(
            "- In plain Candle, without the line, {defects} of these {} have a defect: an error, other values,",
            measured.len()
        ),
        format!(
            "- {} files failed to build or to run as they are, for the reasons in the table.",
            begins("not measured", 2)
        ),
        format!(
            "- {} files have no parameters, and {} were not tried.",
            begins("no parameters", 2),
            begins("not tried", 2)
        ),
    ];
    let text = read_text(&workspace().join(DOCUMENT));
    for line in expected {
        assert!(text.contains(&format!("{line}\n")), "{DOCUMENT} lacks: {line}");
    }
}

/// `every_file_trains_as_on_one_rank` measures these files on every commit.
#[test]
fn the_table_agrees_with_the_tested_files() {
    let rows = rows();
    for name in TRAINED {
        let row = rows.iter().find(|row| row[0] == format!("`{name}`")).unwrap();
        assert!(lines_changed(super::file(&format!("models/{name}"))) == 1 && row[1] == "yes", "{row:?}");
        let gradients = if *name == "mixtral.rs" { "none for `" } else { "right" };
        assert!(row[2].starts_with(gradients) && falls(&row[4]) == Some(true), "{row:?}");
    }
}
