//! Whole records as JSON, for conversations, preference pairs and labelled texts.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::json::Objects;
use super::lines::Lines;
use super::{Options, Records};
use crate::format::{CorpusFile, Format};

/// A record with all of its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// File and line, object or row, for messages.
    pub place: String,
    /// The JSON of an object. It may have what Python's `json` accepts, such as NaN.
    pub json: String,
}

impl Record {
    /// Returns the place without the path of the file.
    pub fn within(&self, path: &Path) -> &str {
        let file = format!("{}, ", path.display());
        self.place.strip_prefix(&*file).unwrap_or(&self.place)
    }
}

/// Records whose bytes are read before they are parsed.
pub(super) trait RawRecords: Records {
    fn next_raw(&mut self) -> Result<Option<&[u8]>>;
}

/// Reads the records of a JSON Lines, JSON or Parquet file one after another, each of at most `limit` bytes. Ends after
/// an error.
///
/// # Errors
/// The file can't be read, or is text.
///
/// ```
/// use fsdp_corpus::documents::records;
/// use fsdp_corpus::format::{CorpusFile, Format};
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("pairs.json");
/// std::fs::write(&path, r#"[{"chosen": "a", "rejected": "b"}]"#)?;
/// let file = CorpusFile { format: Format::of_file(&path)?, path };
/// let record = records(&file, 1 << 20)?.next().unwrap()?;
/// assert_eq!(record.json, r#"{"chosen": "a", "rejected": "b"}"#);
/// assert!(record.place.ends_with("pairs.json, object 1"));
/// # anyhow::Ok(())
/// ```
pub fn records(file: &CorpusFile, limit: usize) -> Result<Box<dyn Iterator<Item = Result<Record>> + Send>> {
    let options = Options { record_limit: limit, ..Options::default() };
    Ok(match file.format {
        Format::JsonLines(compression) => raw(Lines::open(&file.path, compression, 0..u64::MAX, &options)?),
        Format::Json(compression) => raw(Objects::open(&file.path, compression, &options)?),
        #[cfg(feature = "parquet")]
        Format::Parquet => {
            let path = file.path.clone();
            let rows = super::parquet::rows(&path)?.zip(1_u64..);
            Box::new(until_error(rows.map(move |(json, row)| {
                let (json, place) = (json?, format!("{}, row {row}", path.display()));
                anyhow::ensure!(
                    json.len() <= limit,
                    "{place}: the record has {} bytes, but at most {limit} are read: split the record",
                    json.len()
                );
                Ok(Record { json, place })
            })))
        }
        _ => bail!("{} has no records: expected JSON Lines, JSON or Parquet", file.path.display()),
    })
}

fn raw(mut records: impl RawRecords + 'static) -> Box<dyn Iterator<Item = Result<Record>> + Send> {
    let mut next = move || -> Result<Option<Record>> {
        let Some(bytes) = records.next_raw()? else { return Ok(None) };
        let json = String::from_utf8(bytes.to_vec());
        let place = records.place();
        let json = json.with_context(|| format!("{place}: the record is not UTF-8"))?;
        Ok(Some(Record { place, json }))
    };
    Box::new(until_error(std::iter::from_fn(move || next().transpose())))
}

/// Ends an iterator after its first error.
fn until_error(records: impl Iterator<Item = Result<Record>>) -> impl Iterator<Item = Result<Record>> {
    records.scan(false, |has_failed, record| {
        if *has_failed {
            return None;
        }
        *has_failed = record.is_err();
        Some(record)
    })
}
