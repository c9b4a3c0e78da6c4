//! Parquet: one column, by row group.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::vec;

use anyhow::{Context, Result, anyhow, bail, ensure};
use parquet::basic::{Compression, ConvertedType, LogicalType, Type as Physical};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;

use super::fields::missing;
use super::{Options, Records};

/// Rows that are decoded at once. They refer to the bytes of their pages.
const ROWS: usize = 32;

/// Rows of one column of a row group.
pub(super) struct Rows {
    path: PathBuf,
    group: usize,
    limit: usize,
    column: ColumnReaderImpl<ByteArrayType>,
    /// Whether values can be null.
    is_optional: bool,
    /// Rows of the footer, and the number of rows given.
    rows: u64,
    next: u64,
    decoded: vec::IntoIter<Option<ByteArray>>,
}

/// Returns the sizes in bytes of the row groups of a file with a column of texts.
pub(super) fn row_groups(path: &Path, field: &str) -> Result<Vec<u64>> {
    let file = open(path)?;
    let (column, _) = find_column(&file, path, field)?;
    let groups = file.metadata().row_groups().iter();
    let codecs = groups.clone().filter_map(|group| group.columns().get(column)).map(|column| column.compression());
    for codec in codecs {
        ensure!(
            !matches!(codec, Compression::BROTLI(_) | Compression::LZO),
            "{} is compressed with {codec}, which is not supported: write it again, with zstd or snappy",
            path.display()
        );
    }
    Ok(groups.map(|group| u64::try_from(group.compressed_size()).unwrap_or(0)).collect())
}

fn open(path: &Path) -> Result<SerializedFileReader<File>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let what = || format!("{} is damaged or cut off: expected a Parquet file", path.display());
    guarded(|| SerializedFileReader::new(file)).with_context(what)
}

/// Returns the index of a column of texts, and whether they can be null.
fn find_column(file: &SerializedFileReader<File>, path: &Path, field: &str) -> Result<(usize, bool)> {
    let schema = file.metadata().file_metadata().schema_descr();
    let is_wanted = |parts: &[String]| matches!(parts, [name] if name == field);
    let Some(index) = schema.columns().iter().position(|column| is_wanted(column.path().parts())) else {
        let fields: Vec<String> = schema.root_schema().get_fields().iter().map(|field| field.name().into()).collect();
        ensure!(
            !fields.iter().any(|name| name == field),
            "{}: the column `{field}` is a list or a struct, but texts were expected",
            path.display()
        );
        return Err(missing(field, &fields)).with_context(|| path.display().to_string());
    };
    let column = schema.column(index);
    let is_text = column.physical_type() == Physical::BYTE_ARRAY
        && matches!(column.logical_type_ref(), None | Some(LogicalType::String | LogicalType::Enum))
        && matches!(column.converted_type(), ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::ENUM);
    if !is_text || column.max_rep_level() > 0 {
        let kind = column.logical_type_ref().map(|logical| format!(" ({logical:?})")).unwrap_or_default();
        bail!(
            "{}: the column `{field}` holds {}{kind}, but texts were expected",
            path.display(),
            column.physical_type()
        );
    }
    Ok((index, column.max_def_level() > 0))
}

impl Rows {
    pub(super) fn open(path: &Path, group: usize, options: &Options) -> Result<Self> {
        let file = open(path)?;
        let (index, is_optional) = find_column(&file, path, &options.field)?;
        ensure!(
            group < file.num_row_groups(),
            "{} has {} row groups, but row group {group} was to be read: the file has changed",
            path.display(),
            file.num_row_groups()
        );
        let rows = u64::try_from(file.metadata().row_group(group).num_rows()).unwrap_or(0);
        let column = guarded(|| file.get_row_group(group)?.get_column_reader(index));
        let column = match column.with_context(|| damaged(path, group))? {
            ColumnReader::ByteArrayColumnReader(column) => column,
            _ => bail!("{}: the column `{}` does not hold texts", path.display(), options.field),
        };
        let limit = options.record_limit;
        let decoded = Vec::new().into_iter();
        Ok(Rows { path: path.to_owned(), group, limit, column, is_optional, rows, next: 0, decoded })
    }

    /// Decodes the next rows.
    fn decode(&mut self) -> Result<()> {
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let column = &mut self.column;
        let read = guarded(|| column.read_records(ROWS, Some(&mut levels), None, &mut values));
        let (records, _, _) = read.with_context(|| damaged(&self.path, self.group))?;
        let mut values = values.into_iter();
        let rows: Vec<Option<ByteArray>> = match self.is_optional {
            true => levels.iter().map(|&level| if level > 0 { values.next() } else { None }).collect(),
            false => values.map(Some).collect(),
        };
        ensure!(
            rows.len() == records,
            "{}: expected {records} values, found {}",
            damaged(&self.path, self.group),
            rows.len()
        );
        self.decoded = rows.into_iter();
        Ok(())
    }
}

impl Records for Rows {
    fn next(&mut self) -> Result<Option<Option<String>>> {
        let mut row = self.decoded.next();
        if row.is_none() {
            self.decode()?;
            row = self.decoded.next();
        }
        let Some(value) = row else {
            ensure!(
                self.next == self.rows,
                "{}: the footer says {} rows, but the column has {}. Download the file again",
                damaged(&self.path, self.group),
                self.rows,
                self.next
            );
            return Ok(None);
        };
        self.next += 1;
        let Some(value) = value else { return Ok(Some(None)) };
        ensure!(
            value.len() <= self.limit,
            "{}: the text has {} bytes, but at most {} are read: split the record",
            self.place(),
            value.len(),
            self.limit
        );
        match str::from_utf8(value.data()) {
            Ok(text) => Ok(Some(Some(text.to_owned()))),
            Err(error) => bail!("{}: the text is not UTF-8 at byte {}", self.place(), error.valid_up_to()),
        }
    }

    fn skip(&mut self, records: u64) -> Result<()> {
        let wanted = usize::try_from(records)?;
        let column = &mut self.column;
        let skipped = guarded(|| column.skip_records(wanted)).with_context(|| damaged(&self.path, self.group))?;
        ensure!(
            skipped == wanted,
            "{}, row group {}: there are {skipped} rows where reading was to continue after {records}: the file has \
             changed",
            self.path.display(),
            self.group
        );
        self.next = records;
        Ok(())
    }

    fn place(&self) -> String {
        format!("{}, row group {}, row {}", self.path.display(), self.group, self.next)
    }
}

/// Opens a file to read whole rows as JSON.
pub(super) fn rows(path: &Path) -> Result<impl Iterator<Item = Result<String>> + Send + use<>> {
    let mut rows = RowIter::from_file_into(Box::new(open(path)?));
    let path = path.to_owned();
    let mut number = 0;
    Ok(std::iter::from_fn(move || {
        let row = guarded(|| rows.next().transpose());
        number += 1;
        let json = row.map(|row| row.map(|row| row.to_json_value().to_string()));
        json.with_context(|| format!("{} is damaged at row {number}", path.display())).transpose()
    }))
}

fn damaged(path: &Path, group: usize) -> String {
    format!("{} is damaged in row group {group}", path.display())
}

/// Runs code of the library. A damaged file may make it panic.
fn guarded<T>(run: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(outcome) => Ok(outcome?),
        Err(_) => Err(anyhow!("the Parquet reader panicked")),
    }
}
