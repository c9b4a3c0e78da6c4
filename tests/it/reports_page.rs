//! docs/reports.md names tests that exist, and `scripts/reports` runs exactly these.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{read_text, run, workspace};

/// Returns the rows of each table of the page, as cells.
fn tables() -> Vec<Vec<Vec<String>>> {
    let page = read_text(&workspace().join("docs/reports.md"));
    let mut tables: Vec<Vec<Vec<String>>> = vec![];
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with('|') && lines.next_if(|line| line.starts_with("|---")).is_some() {
            let mut rows = vec![];
            while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
                rows.push(row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_string()).collect());
            }
            tables.push(rows);
        }
    }
    tables
}

/// Returns the tests between backticks, as `FILE::NAME`.
fn tests(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).filter(|span| span.contains(".rs::")).collect()
}

#[test]
fn named_tests_exist() {
    let tables = tables();
    assert_eq!(tables.len(), 2, "the reports, and the faults found in attacks");
    assert_eq!(tables[0].len(), 27);
    for row in tables.iter().flatten() {
        assert_eq!(row.len(), 4, "{row:?}");
        let named = tests(&row[3]);
        assert!(!named.is_empty() || row[3].contains("waits for"), "{row:?} names no test");
        for test in named {
            let (file, name) = test.split_once("::").unwrap();
            let path = workspace().join(file);
            assert!(path.exists(), "{test}: the file does not exist");
            let text = read_text(&path);
            let at = text.find(&format!("fn {name}(")).unwrap_or_else(|| panic!("{test}: the file has no such test"));
            // Tests of `tests/outside` are listed in a macro.
            let is_test = text[..at].trim_end().ends_with("#[test]") || file.starts_with("tests/outside/");
            assert!(is_test, "{test}: it is not a test");
        }
    }
}

#[test]
fn the_script_runs_the_named_tests() {
    let mut command = Command::new(workspace().join("scripts/reports"));
    command.arg("--list");
    let listed: BTreeSet<String> = run(command, Duration::from_secs(60)).ok().stdout.lines().map(Into::into).collect();
    let named: BTreeSet<String> = tables().iter().flatten().flat_map(|row| tests(&row[3])).map(Into::into).collect();
    assert_eq!(listed, named);
}
