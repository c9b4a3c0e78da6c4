//! Records of `train --task classify` and `train --task embed`: texts with a label, and texts that belong together.
//!
//! `table` reads the rows of a file, `labels` knows the classes, and `batches` distributes records over
//! ranks and steps.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use indicatif::HumanCount;

use crate::data::records::labels::Label;
use crate::data::records::table::{Row, listed};
use crate::data::sft::read_json;
use crate::data::text::Text;

mod batches;
mod labels;
mod table;

pub use batches::{RecordBatch, RecordBatches};
pub use labels::Labels;
pub(crate) use labels::SINGLE_LABEL;

/// Texts tokenised in parallel.
const TEXTS: usize = 512;

/// Reader of records for a model.
pub struct RecordReader<'a> {
    /// Tokenizer.
    pub text: &'a Text,
    /// Longest sequence in tokens. Longer ones are cut.
    pub seq_len: usize,
    /// Number of token ids.
    pub vocabulary: usize,
    /// Number of segment types, 0 for models without them.
    pub types: usize,
    /// Number of classes of the head in the model's weights, if there is one.
    pub classes: Option<usize>,
}

/// A sequence before it is tokenised: its place in the file, its text, and the second text of a pair.
struct Sequence {
    place: String,
    text: String,
    pair: Option<String>,
}

/// Tokenised records. Each has the same number of sequences: one, or an anchor with a positive and maybe a negative.
pub struct Records {
    tokens: Vec<u32>,
    /// Segment type of each token, or empty if all are 0.
    types: Vec<u32>,
    /// End of each sequence.
    ends: Vec<usize>,
    columns: usize,
    /// Class of each record. Empty without labels.
    labels: Vec<u32>,
    origin: String,
    cut: usize,
    digest: Digest,
}

const LABELLED: &str = "expected the columns \"text\" and \"label\", and maybe \"text_pair\"";
const PAIRS: &str = "expected the columns \"anchor\" and \"positive\", and maybe \"negative\"";

impl RecordReader<'_> {
    /// Reads texts with labels: the columns `text`, maybe `text_pair`, and `label`. The classes are `known`, or, without
    /// names for them, those of the data.
    ///
    /// # Errors
    /// Fails if the file can't be read, has no records, lacks a column or has a label that is not known. Errors name the
    /// place.
    pub fn labelled(&self, path: &Path, known: Option<&Labels>, fixed: bool) -> Result<(Records, Labels)> {
        let (mut sequences, mut found) = (vec![], vec![]);
        table::read(path, |place, mut row| {
            let columns = names(&row);
            let label = row.remove("label");
            let (Some(text), Some(label)) = (table::text(&mut row, "text")?, label) else {
                bail!("it has the columns {}; {LABELLED}", listed(&columns))
            };
            let pair = table::text(&mut row, "text_pair")?.filter(|pair| !pair.is_empty());
            ensure!(
                pair.is_none() || !self.text.is_bytes(),
                "it has a text_pair, but the model has no tokenizer.json, which says how to join two texts"
            );
            found.push((place.clone(), Label::of(label)?));
            sequences.push(Sequence { place, text, pair });
            Ok(())
        })?;
        ensure!(!sequences.is_empty(), "{} has no records; {LABELLED}", path.display());
        let in_file = || path.display().to_string();
        let labels = match known {
            Some(known) if fixed || !known.are_unnamed() || !known.lack(&found) => known.clone(),
            _ => Labels::of_data(&found, self.classes).with_context(in_file)?,
        };
        let class = |(place, label): &(String, Label)| {
            labels.class(label).with_context(|| format!("{}, {place}", path.display()))
        };
        let classes = found.iter().map(class).collect::<Result<Vec<_>>>()?;
        if let Some(count) = self.classes {
            if let Some(((place, label), class)) =
                found.iter().zip(&classes).find(|(_, class)| **class as usize >= count)
            {
                bail!(
                    "{}, {place}: the label {label} is class {class}, but the head in the model's weights has {count} \
                     classes, 0 to {}: correct the label, or remove the head from the weights to train a new one",
                    path.display(),
                    count.saturating_sub(1)
                );
            }
            ensure!(
                labels.names().len() <= count,
                "{}: the labels are {labels}, but the head in the model's weights has only {count} classes: correct \
                 config.json's id2label, or remove the head from the weights to train a new one",
                path.display()
            );
            ensure!(
                labels.names().len() == count,
                "{}: the labels are {labels}, but the head in the model's weights has {count} classes: name them all in \
                 config.json's id2label",
                path.display()
            );
        }
        let mut records = self.tokenise(path, sequences, 1)?;
        records.digest.update(&classes.iter().flat_map(|class| class.to_le_bytes()).collect::<Vec<_>>());
        records.labels = classes;
        Ok((records, labels))
    }

    /// Reads texts that belong together: the columns `anchor` and `positive`, and maybe `negative`.
    ///
    /// # Errors
    /// Fails if the file can't be read, has no records or lacks a column, or if only some records have a negative.
    /// Errors name the place.
    pub fn pairs(&self, path: &Path) -> Result<Records> {
        let mut sequences = vec![];
        let mut first: Option<(String, bool)> = None;
        table::read(path, |place, mut row| {
            let columns = names(&row);
            let (anchor, positive) = (table::text(&mut row, "anchor")?, table::text(&mut row, "positive")?);
            let (Some(anchor), Some(positive)) = (anchor, positive) else {
                bail!("it has the columns {}; {PAIRS}", listed(&columns))
            };
            let negative = table::text(&mut row, "negative")?;
            let (other, has_negative) = first.get_or_insert_with(|| (place.clone(), negative.is_some()));
            ensure!(
                *has_negative == negative.is_some(),
                "it has {} negative, unlike {other}: all records must have one, or none",
                if *has_negative { "no" } else { "a" }
            );
            let texts = [anchor, positive].into_iter().chain(negative);
            sequences.extend(texts.map(|text| Sequence { place: place.clone(), text, pair: None }));
            Ok(())
        })?;
        let Some((_, has_negative)) = first else { bail!("{} has no records; {PAIRS}", path.display()) };
        self.tokenise(path, sequences, if has_negative { 3 } else { 2 })
    }

    fn tokenise(&self, path: &Path, sequences: Vec<Sequence>, columns: usize) -> Result<Records> {
        let mut records = Records {
            tokens: vec![],
            types: vec![],
            ends: vec![],
            columns,
            labels: vec![],
            origin: path.display().to_string(),
            cut: 0,
            digest: Digest::new(CrcAlgorithm::Crc64Nvme),
        };
        let encoder = self.text.cutting(self.seq_len)?;
        for chunk in sequences.chunks(TEXTS) {
            let texts = chunk.iter().map(|sequence| (sequence.text.as_str(), sequence.pair.as_deref())).collect();
            let encoded = encoder.encode(texts).with_context(|| format!("in {}", path.display()))?;
            for (sequence, encoded) in chunk.iter().zip(encoded) {
                let place = || format!("{}, {}", path.display(), sequence.place);
                ensure!(!encoded.ids.is_empty(), "{}: a text is empty: remove the record, or fill it in", place());
                if let Some(id) = encoded.ids.iter().find(|&&id| id as usize >= self.vocabulary) {
                    bail!(
                        "{} has a token with id {id}, but the model's vocabulary has {} ids. {}",
                        place(),
                        self.vocabulary,
                        self.text.advice()
                    );
                }
                if let Some(kind) = encoded.types.iter().find(|&&kind| self.types > 0 && kind as usize >= self.types) {
                    bail!(
                        "{}: the tokenizer gives the segment type {kind}, but config.json's type_vocab_size is {}",
                        place(),
                        self.types
                    );
                }
                records.push(&encoded.ids, &encoded.types, self.types > 0);
                records.cut += usize::from(encoded.is_cut);
            }
        }
        Ok(records)
    }
}

fn names(row: &Row) -> Vec<String> {
    row.keys().cloned().collect()
}

impl Records {
    fn push(&mut self, ids: &[u32], types: &[u32], has_types: bool) {
        self.digest.update(&(ids.len() as u64).to_le_bytes());
        self.digest.update(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        if has_types && (!self.types.is_empty() || types.iter().any(|&kind| kind != 0)) {
            self.types.resize(self.tokens.len(), 0);
            self.types.extend_from_slice(types);
            self.digest.update(&types.iter().flat_map(|kind| kind.to_le_bytes()).collect::<Vec<_>>());
        }
        self.tokens.extend_from_slice(ids);
        self.ends.push(self.tokens.len());
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.ends.len() / self.columns
    }

    /// Returns whether there are no records, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the number of sequences of each record.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of tokens in the longest sequence.
    pub fn longest(&self) -> usize {
        (0..self.ends.len()).map(|sequence| self.range(sequence).len()).max().unwrap_or(0)
    }

    /// Returns the token ids of a record's sequence.
    pub fn ids(&self, record: usize, column: usize) -> &[u32] {
        &self.tokens[self.range(record * self.columns + column)]
    }

    fn types(&self, record: usize, column: usize) -> &[u32] {
        let range = self.range(record * self.columns + column);
        if self.types.is_empty() { &[] } else { &self.types[range] }
    }

    fn range(&self, sequence: usize) -> std::ops::Range<usize> {
        sequence.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[sequence]
    }

    /// Describes the data by size and checksum, for comparison.
    pub fn summary(&self) -> String {
        format!("{} records with checksum {:016x}", self.len(), self.digest.finalize())
    }

    /// Describes how many texts were cut, if any.
    pub fn warning(&self) -> Option<String> {
        let (cut, all) = (self.cut, self.ends.len());
        (cut > 0).then(|| {
            format!("{cut} of the {all} texts in {} are longer than --seq-len and were cut to it", self.origin)
        })
    }
}

/// Formats as `300 records of reviews.csv`.
impl fmt::Display for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} records of {}", HumanCount(self.len() as u64), self.origin)
    }
}

/// Returns the id of the padding token in `tokenizer_config.json` of a model directory, if it names one.
pub fn padding_token(model: Option<&Path>, text: &Text) -> Result<Option<u32>> {
    let Some(config) = read_json(model, "tokenizer_config.json")? else { return Ok(None) };
    let token = &config["pad_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).and_then(|token| text.id_of(token)))
}

#[cfg(test)]
mod tests;
