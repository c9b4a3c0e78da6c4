//! Rows of a file of records (JSON Lines, JSON, Parquet) or a CSV file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use fsdp_corpus::documents::records;
use fsdp_corpus::format::{CorpusFile, Format};
use minijinja::Value;
use minijinja::value::ValueKind;

use crate::data::MOST_BYTES;
use crate::input::check_data;
use crate::json;

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

/// Calls `each` with the place in the file, such as `line 3`, and the fields of each row. Blank lines are skipped.
///
/// # Errors
/// Fails for a file of text, and for rows of another form. Errors name the file and the place.
pub(super) fn read(path: &Path, mut each: impl FnMut(String, Row) -> Result<()>) -> Result<()> {
    check_data(path)?;
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv")) {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        return comma_separated(path, file, &mut each);
    }
    let file = CorpusFile { format: Format::of_file(path)?, path: path.to_owned() };
    ensure!(
        file.format.has_fields(),
        "{}: the name must end in .jsonl, .json, .parquet or .csv, which says what the file holds",
        path.display()
    );
    for record in records(&file, MOST_BYTES)? {
        let record = record?;
        let row = json::fields(&record.json).with_context(|| record.place.clone())?;
        let fields = row.into_iter().filter_map(|(name, value)| Some((name, field(&value)?))).collect();
        each(record.within(path).to_owned(), fields).with_context(|| record.place.clone())?;
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

fn comma_separated(path: &Path, mut file: impl Read, each: &mut dyn FnMut(String, Row) -> Result<()>) -> Result<()> {
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
        each(format!("line {line}"), fields.collect()).with_context(place)?;
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

    fn rows(name: &str, content: &str) -> Result<Vec<(String, Row)>> {
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
        let fields = |rows: Result<Vec<(String, Row)>>| rows.unwrap().into_iter().map(|row| row.1).collect::<Vec<_>>();
        let (json, csv) = (fields(json), fields(csv));
        assert_eq!(json, csv);
        assert_eq!(json[1]["text"], Field::Text("c\nd".into()));
    }

    #[test]
    fn lines_are_named() {
        assert_eq!(rows("a.csv", "text,label\n\"a\na\",x\nb,y\n").unwrap()[1].0, "line 4");
        let bad = |content: &str| error("a.csv", content);
        assert!(bad("text,label\na,x\nb\n").contains("line 3: it has 1 columns, but the first line has 2"));
        // Line ends of Windows, a byte order mark and blank lines.
        assert!(bad("\u{feff}text,label\r\na,x\r\nb\r\n").contains("line 3: "));
        assert!(bad("\u{feff}text,label\r\n\r\n\"a\r\na\",x\r\n\r\nb\r\n").contains("line 6: "));
        assert!(bad("text,label\ra,x\rb\r").contains("line 3: "));
        let lines = rows("a.csv", "\u{feff}text,label\r\na,x\r\n\r\nb,y\r\n").unwrap();
        assert_eq!(lines.iter().map(|row| &*row.0).collect::<Vec<_>>(), ["line 2", "line 4"]);
        assert!(error("a.csv", "text,text\na,x\n").contains("two columns \"text\""));
        assert!(error("a.jsonl", "{}\n[1]\n").contains("a.jsonl, line 2: it is not a JSON object"));
        assert!(error("a.txt", "text").contains("must end in .jsonl, .json, .parquet or .csv"));
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
