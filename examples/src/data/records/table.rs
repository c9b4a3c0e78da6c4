//! Rows of a JSONL or CSV file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::Value;
use minijinja::value::ValueKind;

use crate::json;

use crate::input::check_data;

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

/// Calls `each` with the line number and the fields of each row. Blank lines are skipped.
///
/// # Errors
/// Fails for a file that is neither `.jsonl` nor `.csv`, and for lines of another form. Errors name file and line.
pub(super) fn read(path: &Path, mut each: impl FnMut(u64, Row) -> Result<()>) -> Result<()> {
    check_data(path)?;
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
        let row = json::fields(line).with_context(place)?;
        let fields = row.into_iter().filter_map(|(name, value)| Some((name, field(&value)?))).collect();
        each(number, fields).with_context(place)?;
    }
    Ok(())
}

fn field(value: &Value) -> Option<Field> {
    Some(match value.kind() {
        ValueKind::None => return None,
        ValueKind::String => Field::Text(value.to_string()),
        ValueKind::Number if value.is_integer() => {
            value.as_i64().map_or(Field::Other("a number of more than 64 bits"), Field::Number)
        }
        ValueKind::Number => Field::Other("a number that is not whole"),
        ValueKind::Bool => Field::Other("a boolean"),
        ValueKind::Map => Field::Other("an object"),
        _ => Field::Other("a list"),
    })
}

fn comma_separated(path: &Path, mut file: impl Read, each: &mut dyn FnMut(u64, Row) -> Result<()>) -> Result<()> {
    let whole = || format!("{}", path.display());
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).with_context(whole)?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(bytes);
    let headers = reader.headers().with_context(whole)?.clone();
    let names: Vec<&str> = headers.iter().map(str::trim).collect();
    if let Some(twice) = names.iter().enumerate().find_map(|(i, name)| names[..i].contains(name).then_some(name)) {
        bail!("{}: the first line has two columns \"{twice}\"", path.display());
    }
    let mut row = csv::ByteRecord::new();
    let mut lines = Lines { bytes, at: 0, line: 1 };
    while reader.read_byte_record(&mut row).with_context(whole)? {
        let line = lines.of(row.position().map_or(0, csv::Position::byte) as usize);
        let place = || format!("{}, line {line}", path.display());
        let row = csv::StringRecord::from_byte_record(std::mem::take(&mut row));
        let row = row.map_err(|_| anyhow!("it is not UTF-8")).with_context(place)?;
        ensure!(
            row.len() == names.len(),
            "{}: it has {} columns, but the first line has {}",
            place(),
            row.len(),
            names.len()
        );
        let fields = names.iter().zip(&row).map(|(name, text)| ((*name).to_owned(), Field::Text(text.to_owned())));
        each(line, fields.collect()).with_context(place)?;
    }
    Ok(())
}

/// Line numbers of places in a file, as an editor shows them. `csv` counts the line ends of Windows otherwise.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u64,
}

impl Lines<'_> {
    /// Returns the line of the row that starts at a place, or after line ends there. Places ascend.
    fn of(&mut self, start: usize) -> u64 {
        let is_end = |at: usize| matches!(self.bytes.get(at), Some(b'\n' | b'\r'));
        let start = (start..).find(|at| !is_end(*at)).unwrap_or(start);
        for at in self.at..start {
            let ends = match self.bytes[at] {
                b'\n' => true,
                b'\r' => self.bytes.get(at + 1) != Some(&b'\n'),
                _ => false,
            };
            self.line += u64::from(ends);
        }
        self.at = start;
        self.line
    }
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
        let bad = |content: &str| error("a.csv", content);
        assert!(bad("text,label\na,x\nb\n").contains("line 3: it has 1 columns, but the first line has 2"));
        // Line ends of Windows, a byte order mark and blank lines.
        assert!(bad("\u{feff}text,label\r\na,x\r\nb\r\n").contains("line 3: "));
        assert!(bad("\u{feff}text,label\r\n\r\n\"a\r\na\",x\r\n\r\nb\r\n").contains("line 6: "));
        assert!(bad("text,label\ra,x\rb\r").contains("line 3: "));
        let lines = rows("a.csv", "\u{feff}text,label\r\na,x\r\n\r\nb,y\r\n").unwrap();
        assert_eq!(lines.iter().map(|row| row.0).collect::<Vec<_>>(), [2, 4]);
        assert!(error("a.csv", "text,text\na,x\n").contains("two columns \"text\""));
        assert!(error("a.jsonl", "{}\n[1]\n").contains("a.jsonl, line 2: it is not a JSON object"));
        assert!(error("a.txt", "text").contains("must end in .jsonl or .csv"));
    }

    #[test]
    fn json_values_keep_their_kind() {
        // Python writes NaN.
        let line = r#"{"a": 3, "b": 0.5, "c": null, "d": true, "e": [1], "f": NaN, "g": 18446744073709551616}"#;
        let row = rows("a.jsonl", line).unwrap().remove(0).1;
        let other = |kind| Some(Field::Other(kind));
        assert_eq!(row.get("a").cloned(), Some(Field::Number(3)));
        assert_eq!(row.get("b").cloned(), other("a number that is not whole"));
        assert_eq!((row.get("c").cloned(), row.get("d").cloned()), (None, other("a boolean")));
        assert!(text(&mut row.clone(), "e").unwrap_err().to_string().contains("\"e\" is a list, but must be text"));
        assert!(text(&mut row.clone(), "a").unwrap_err().to_string().contains("the number 3"));
        assert_eq!(text(&mut row.clone(), "z").unwrap(), None);
    }
}
