//! `--data` and `--eval` in the formats of `fsdp-corpus`.
//!
//! [`Corpora`] finds the files. Training reads them by a [`MixedCorpus`], which streams texts and mixes sources.
//! Evaluation reads them by position.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use crc_fast::CrcAlgorithm;
use fsdp_core::ProcessGroup;
use fsdp_corpus::documents;
use fsdp_corpus::files::{Content, Files};
use fsdp_corpus::format::{Compression, CorpusFile, Format};
use fsdp_corpus::memory::InMemory;
use fsdp_corpus::mixture::{Mixture, Source, Weighted, parse};
use fsdp_corpus::sequence::Pack;
use fsdp_corpus::shards::Shards;
use fsdp_corpus::source::{Mark, Sequences};
use fsdp_corpus::stream::{Corpus, Stream};
use fsdp_corpus::tokenise::{Tokenise, identity};
use fsdp_corpus::tokens::{self, Tokens, Width};
use indicatif::{HumanBytes, HumanCount};

use crate::data::text::Text;

mod mixed;
mod tokenizer;

pub use mixed::MixedCorpus;
pub use tokenizer::CorpusTokenizer;

/// Largest text that is read whole, in bytes.
const PLAIN: u64 = if cfg!(test) { 2000 } else { 256 << 20 };
/// Largest number of tokens to evaluate on that are kept in memory.
const EVALUATED: usize = 1 << 25;

/// Settings of a corpus.
#[derive(Clone, Debug)]
pub struct CorpusOptions {
    /// Field or column of the texts, if it was given.
    pub field: Option<String>,
    /// Width of the ids of token files without a header, if it was given.
    pub width: Option<Width>,
    /// Whether tokens attend to tokens of other documents.
    pub pack: Pack,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Number of ids of the model.
    pub vocab_size: usize,
}

/// Files of one or more corpora.
#[derive(Debug)]
pub struct Corpora {
    sources: Vec<(Weighted, Files)>,
    /// Argument of [`Corpora::find`].
    path: PathBuf,
    options: CorpusOptions,
}

/// A corpus to evaluate on.
pub struct EvaluationCorpus {
    pub(in crate::data) sequences: Sequences,
    pub(in crate::data) pack: Pack,
    name: String,
    summary: String,
}

impl Corpora {
    /// Finds the files of a path, a pattern, or a list `PATH:WEIGHT,PATH:WEIGHT`.
    ///
    /// # Errors
    /// The list is not valid, nothing is found, a file can't be read, or the files of a source are of different kinds.
    pub fn find(path: &Path, options: CorpusOptions) -> Result<Self> {
        let named = match path.to_str() {
            Some(text) => parse(text)?,
            // A name that is not UTF-8 can't be in a list.
            None => vec![Weighted { name: path.display().to_string(), weight: 1. }],
        };
        let mut sources = Vec::new();
        for source in named {
            let own = if path.to_str().is_some() { Path::new(&source.name) } else { path };
            let files = Files::find(own)?;
            sources.push((source, files));
        }
        Ok(Corpora { sources, path: path.to_owned(), options })
    }

    /// Returns whether [`Data`](crate::data::Data) reads the files: a file or a directory of text without compression that
    /// is not too large, or of 16-bit ids without a header or an index, if attention may cross documents.
    ///
    /// # Errors
    /// A file can't be read.
    pub fn are_plain(&self) -> Result<bool> {
        let [(_, files)] = &self.sources[..] else { return Ok(false) };
        if self.options.pack == Pack::Documents || files.root != self.path {
            return Ok(false);
        }
        match &files.content {
            Content::Documents(found) => {
                let mut size = 0;
                for CorpusFile { path, format } in found {
                    let status = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
                    size += status.len();
                    if *format != Format::Text(Compression::None) || size > PLAIN {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Content::Tokens(paths) => {
                let raw = paths.iter().map(|path| tokens::is_raw(path)).collect::<Result<Vec<bool>>>()?;
                Ok(self.options.width != Some(Width::U32) && raw.into_iter().all(|is_raw| is_raw))
            }
            Content::Prepared(_) => Ok(false),
        }
    }

    /// Fails if a flag was given that only records or token files use, and the corpora have no such files.
    ///
    /// # Errors
    /// The error names the flag.
    pub fn check_flags(&self) -> Result<()> {
        let has = |is: &dyn Fn(&Content) -> bool| self.sources.iter().any(|(_, files)| is(&files.content));
        let has_fields = |content: &Content| match content {
            Content::Documents(found) => found.iter().any(|file| file.format.has_fields()),
            Content::Tokens(_) | Content::Prepared(_) => false,
        };
        if let Some(field) = self.options.field.as_ref().filter(|_| !has(&has_fields)) {
            bail!(
                "--text-field {field} is for records (.jsonl, .json, .parquet), but --data has only other files: leave the \
                 flag out"
            );
        }
        if self.options.width.is_some() && !has(&|content| matches!(content, Content::Tokens(_))) {
            bail!("--token-bits is for .bin files of token ids, but --data has only other files: leave the flag out");
        }
        Ok(())
    }

    /// Opens the corpora to train on, shuffled in each epoch if there is a seed. `model` is the directory of the
    /// tokenizer. The ranks of `group` exchange the tokens of texts. Does not communicate.
    ///
    /// # Errors
    /// A file can't be read, holds no texts or ids of this model, or the model has no tokenizer.
    pub fn train(
        self,
        text: &Text,
        model: Option<&Path>,
        seed: Option<u64>,
        group: ProcessGroup,
    ) -> Result<MixedCorpus> {
        let Corpora { sources, options, .. } = self;
        let opening = Opening { text, model, options: &options };
        let total: f64 = sources.iter().map(|(source, _)| source.weight).sum();
        let (mut opened, mut described, mut summaries) = (Vec::new(), Vec::new(), Vec::new());
        for (Weighted { name, weight }, files) in sources {
            let share = match total == weight {
                true => String::new(),
                false => format!("{} % ", (1e6 * weight / total).round() / 1e4),
            };
            let (source, marks) = match &files.content {
                Content::Documents(_) => {
                    let corpus = Arc::new(Corpus::open(&files, &opening.documents())?);
                    let (marks, size) = (corpus.marks().to_vec(), HumanBytes(corpus.size()));
                    let files = if marks.len() > 1 { format!("{} files of ", marks.len()) } else { String::new() };
                    described.push(format!("{share}{files}{name} ({size})"));
                    let stream = Stream::new(corpus, opening.tokenizer()?, seed, group.rank(), group.size())?;
                    (Source::Stream(Box::new(stream)), marks)
                }
                Content::Tokens(_) | Content::Prepared(_) => {
                    let sequences = opening.sequences(&files, seed)?;
                    described.push(format!("{share}{name} ({} sequences)", HumanCount(sequences.count())));
                    let marks = sequences.marks().to_vec();
                    (Source::Sequences(sequences), marks)
                }
            };
            summaries.push(format!("{share}{}", summary(&marks)?));
            opened.push((name, weight, source));
        }
        let mixture = Mixture::new(opened, options.seq_len)?;
        Ok(MixedCorpus::new(mixture, &options, group, described.join(", "), summaries.join(", ")))
    }

    /// Opens a corpus to evaluate on. Texts are tokenised and kept in memory.
    ///
    /// # Errors
    /// There are several corpora, or too many texts, or as for training.
    pub fn evaluate(self, text: &Text, model: Option<&Path>) -> Result<EvaluationCorpus> {
        let Corpora { sources, options, .. } = self;
        let opening = Opening { text, model, options: &options };
        let [(_, files)] = &sources[..] else {
            bail!(
                "found a list of {} sources, expected one: pass a pattern, or the sources one after another",
                sources.len()
            )
        };
        let sequences = match &files.content {
            Content::Documents(_) => {
                let tokenizer = opening.tokenizer()?;
                let tokens = InMemory::read(files, &opening.documents(), &*tokenizer, EVALUATED)?;
                Sequences::new(Arc::new(tokens), options.seq_len, None, options.pack)?
            }
            Content::Tokens(_) | Content::Prepared(_) => opening.sequences(files, None)?,
        };
        let summary = summary(sequences.marks())?;
        Ok(EvaluationCorpus { sequences, pack: options.pack, name: files.root.display().to_string(), summary })
    }
}

impl EvaluationCorpus {
    pub(in crate::data) fn summary(&self) -> &str {
        &self.summary
    }
}

/// Formats as `2,561 sequences of eval.parquet`.
impl fmt::Display for EvaluationCorpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sequences of {}", HumanCount(self.sequences.count()), self.name)
    }
}

/// Arguments that every corpus is opened with.
struct Opening<'a> {
    text: &'a Text,
    model: Option<&'a Path>,
    options: &'a CorpusOptions,
}

impl Opening<'_> {
    fn documents(&self) -> documents::Options {
        let default = documents::Options::default();
        documents::Options { field: self.options.field.clone().unwrap_or(default.field), ..default }
    }

    fn tokenizer(&self) -> Result<Arc<CorpusTokenizer>> {
        Ok(Arc::new(CorpusTokenizer::new(self.text, self.model, Some(self.options.vocab_size))?))
    }

    /// Opens token files, or a prepared corpus of the same tokenizer.
    fn sequences(&self, files: &Files, seed: Option<u64>) -> Result<Sequences> {
        let CorpusOptions { width, pack, seq_len, vocab_size, .. } = *self.options;
        // Tokens can be read without a tokenizer.
        let tokenizer = self.tokenizer().ok();
        match &files.content {
            Content::Prepared(directory) => {
                let shards = Shards::open(directory, vocab_size)?;
                if let Some(tokenizer) = tokenizer {
                    let before = &shards.index().inputs;
                    ensure!(
                        before.are_of(&*tokenizer),
                        "{} was prepared with the tokenizer {} ({}, start {:?}, end {:?}), but this model's is {} ({}): \
                         prepare the corpus with --model of this model",
                        directory.display(),
                        before.tokenizer,
                        before.tokenizer_fingerprint,
                        before.start,
                        before.end,
                        tokenizer.name(),
                        identity(&*tokenizer)
                    );
                }
                Sequences::new(Arc::new(shards), seq_len, seed, pack)
            }
            Content::Tokens(paths) => {
                let end = tokenizer.and_then(|tokenizer| tokenizer.end());
                if pack == Pack::Documents && end.is_none() {
                    check_boundaries(paths)?;
                }
                let options = tokens::Options { width: width.unwrap_or(Width::U16), vocab_size, end };
                Sequences::new(Arc::new(Tokens::open(files, options)?), seq_len, seed, pack)
            }
            Content::Documents(_) => bail!("{} holds texts, but tokens were expected", files.root.display()),
        }
    }
}

/// Fails if a token file has no index, and so no document boundaries without a known end token.
fn check_boundaries(paths: &[PathBuf]) -> Result<()> {
    match paths.iter().find(|path| !path.with_extension("idx").exists()) {
        None => Ok(()),
        Some(path) => bail!(
            "--pack documents needs to know where documents of {} end, but the model directory names no end token: add \
             tokenizer_config.json with an eos_token, or leave out --pack documents",
            path.display()
        ),
    }
}

/// Describes files by number, size and checksum, without reading them whole.
fn summary(marks: &[Mark]) -> Result<String> {
    let bytes: u64 = marks.iter().map(|mark| mark.size).sum();
    let listed = serde_json::to_vec(marks).context("cannot list the files of the corpus")?;
    let checksum = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &listed);
    Ok(format!("{} files of {bytes} bytes with checksum {checksum:016x}", marks.len()))
}

#[cfg(test)]
mod tests;
