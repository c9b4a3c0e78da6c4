//! Rows of a JSONL or CSV file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

/// A value of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Text(String),
    Number(i64),
    /// A value of another kind, which has this name.
    Other(&'static str),
}

/// Fields of a row by column. A null has no field.
pub(super) type Row = BTreeMap<String, Field>;

/// Calls `each` with the line number and the fields of each row. Blank lines are skipped. In a CSV file, the number of a
/// row after blank lines is that of the first of them.
///
/// # Errors
/// Fails for a file that is neither `.jsonl` nor `.csv`, and for lines of another form. Errors name file and line.
pub(super) fn read(path: &Path, mut each: impl FnMut(u64, Row) -> Result<()>) -> Result<()> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    let open = || File::open(path).with_context(|| format!("cannot read {}", path.display()));
    match extension.as_deref() {
        Some("jsonl" | "ndjson" | "json") => json_lines(path, BufReader::new(open()?), &mut each),
        Some("csv") => comma_separated(path, open()?, &mut each),
        _ => bail!("{}: the name must end in .jsonl or .csv, which says what the file holds", path.display()),
    }
}

fn json_lines(path: &Path, file: impl BufRead, each: &mut dyn FnMut(u64, Row) -> Result<()>) -> Result<()> {
    for (line, number) in file.lines().zip(1..) {
        let place = || format!("{}, line {number}", path.display());
        let line = line.with_context(place)?;
        let line = line.strip_prefix('\u{feff}').filter(|_| number == 1).unwrap_or(&line);
        if line.trim().is_empty() {
            continue;
        }
        let row: serde_json::Map<String, Value> = serde_json::from_str(line)
            .map_err(|error| anyhow!("it is not a JSON object ({error})"))
            .with_context(place)?;
        let fields = row.into_iter().filter_map(|(name, value)| Some((name, field(value)?))).collect();
        each(number, fields).with_context(place)?;
    }
    Ok(())
}

fn field(value: Value) -> Option<Field> {
    Some(match value {
        Value::Null => return None,
        Value::String(text) => Field::Text(text),
        Value::Number(number) => number.as_i64().map_or(Field::Other("a number that is not whole"), Field::Number),
        Value::Bool(_) => Field::Other("a boolean"),
        Value::Array(_) => Field::Other("a list"),
        Value::Object(_) => Field::Other("an object"),
    })
}

fn comma_separated(path: &Path, file: impl Read, each: &mut dyn FnMut(u64, Row) -> Result<()>) -> Result<()> {
    let whole = || format!("{}", path.display());
    let mut reader = csv::ReaderBuilder::new().from_reader(file);
    let headers = reader.headers().with_context(whole)?.clone();
    let names: Vec<&str> = headers.iter().map(|name| name.trim_start_matches('\u{feff}').trim()).collect();
    if let Some(twice) = names.iter().enumerate().find_map(|(i, name)| names[..i].contains(name).then_some(name)) {
        bail!("{}: the first line has two columns \"{twice}\"", path.display());
    }
    for row in reader.records() {
        let row = row.with_context(whole)?;
        let line = row.position().map_or(0, csv::Position::line);
        ensure!(row.len() == names.len(), "{}, line {line}: it has {} columns", path.display(), row.len());
        let fields = names.iter().zip(&row).map(|(name, text)| ((*name).to_owned(), Field::Text(text.to_owned())));
        each(line, fields.collect()).with_context(|| format!("{}, line {line}", path.display()))?;
    }
    Ok(())
}

/// Takes the text of a column, or `None` without it.
pub(super) fn text(row: &mut Row, column: &str) -> Result<Option<String>> {
    match row.remove(column) {
        None => Ok(None),
        Some(Field::Text(text)) => Ok(Some(text)),
        Some(Field::Number(number)) => bail!("\"{column}\" is the number {number}, but must be text"),
        Some(Field::Other(kind)) => bail!("\"{column}\" is {kind}, but must be text"),
    }
}

/// Lists columns for an error.
pub(super) fn listed(columns: &[String]) -> String {
    match columns {
        [] => "none".into(),
        columns => columns.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(name: &str, content: &str) -> Result<Vec<(u64, Row)>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let mut rows = vec![];
        read(&path, |line, row| {
            rows.push((line, row));
            Ok(())
        })?;
        Ok(rows)
    }

    fn error(name: &str, content: &str) -> String {
        format!("{:#}", rows(name, content).unwrap_err())
    }

    #[test]
    fn both_formats_have_the_same_rows() {
        let json = rows(
            "a.jsonl",
            "\u{feff}{\"text\": \"a, \\\"b\\\"\", \"label\": \"x\"}\n\n{\"text\": \"c\\nd\", \"label\": \"y\"}\n",
        );
        let csv = rows("a.csv", "\u{feff}text,label\r\n\"a, \"\"b\"\"\",x\n\n\"c\nd\",y\n");
        let fields = |rows: Result<Vec<(u64, Row)>>| rows.unwrap().into_iter().map(|row| row.1).collect::<Vec<_>>();
        let (json, csv) = (fields(json), fields(csv));
        assert_eq!(json, csv);
        assert_eq!(json[1]["text"], Field::Text("c\nd".into()));
    }

    #[test]
    fn lines_are_named() {
        assert_eq!(rows("a.csv", "text,label\n\"a\na\",x\nb,y\n").unwrap()[1].0, 4);
        assert!(
            error("a.csv", "text,label\na,x\nb\n").contains("line: 3"),
            "{}",
            error("a.csv", "text,label\na,x\nb\n")
        );
        assert!(error("a.csv", "text,text\na,x\n").contains("two columns \"text\""));
        assert!(error("a.jsonl", "{}\n[1]\n").contains("a.jsonl, line 2: it is not a JSON object"));
        assert!(error("a.txt", "text").contains("must end in .jsonl or .csv"));
    }

    #[test]
    fn json_values_keep_their_kind() {
        let row = rows("a.jsonl", r#"{"a": 3, "b": 0.5, "c": null, "d": true, "e": [1]}"#).unwrap().remove(0).1;
        let other = |kind| Some(Field::Other(kind));
        assert_eq!(row.get("a").cloned(), Some(Field::Number(3)));
        assert_eq!(row.get("b").cloned(), other("a number that is not whole"));
        assert_eq!((row.get("c").cloned(), row.get("d").cloned()), (None, other("a boolean")));
        assert!(text(&mut row.clone(), "e").unwrap_err().to_string().contains("\"e\" is a list, but must be text"));
        assert!(text(&mut row.clone(), "a").unwrap_err().to_string().contains("the number 3"));
        assert_eq!(text(&mut row.clone(), "z").unwrap(), None);
    }
}
