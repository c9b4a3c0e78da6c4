//! Tokenising a corpus once, into shards.
//!
//! A reader gives batches of text to workers, which tokenise them in parallel. A writer puts the ids into shards in the
//! order of the corpus, so the result does not depend on the number of threads. Queues between them are bounded.
//!
//! Every finished shard is recorded in `unfinished.json`. After a kill, preparing again continues there.

use std::fs::{self, File, TryLockError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::documents::{self, Cursor, Part, Source};
use crate::files::{Content, Files};
use crate::shards::{FORMAT, INDEX, Index, Inputs, Shard, UNFINISHED, VERSION, read_index};
use crate::source::Mark;
use crate::tokenise::{Tokenise, encode_parts};

use shard::ShardWriter;

mod shard;

#[cfg(test)]
mod tests;

/// Bytes of text in a batch.
const BATCH: usize = if cfg!(test) { 1000 } else { 1 << 20 };
/// Largest number of parts in a batch.
const PARTS: usize = 4096;
/// Name of the file that a running preparation locks.
const LOCK: &str = "lock";

/// Settings of a preparation.
#[derive(Clone, Debug)]
pub struct Options {
    /// Settings of reading.
    pub documents: documents::Options,
    /// A shard ends with the document that reaches this number of tokens.
    pub shard_tokens: u64,
    /// Number of threads that tokenise.
    pub threads: usize,
}

/// Shards of 2^28 tokens, and a thread for each core.
impl Default for Options {
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        Options { documents: documents::Options::default(), shard_tokens: 1 << 28, threads }
    }
}

/// State of a preparation, for a progress bar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Documents written, including documents of earlier runs.
    pub documents: u64,
    /// Tokens written, including tokens of earlier runs.
    pub tokens: u64,
    /// Bytes of text written by this run.
    pub text_bytes: u64,
    /// Bytes of the files that were read completely or block by block.
    pub file_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Shards finished, including shards of earlier runs.
    pub shards: usize,
    /// Time since this run began.
    pub elapsed: Duration,
    /// Tokens written by this run.
    pub new_tokens: u64,
}

impl Progress {
    /// Returns the tokens per second of this run.
    pub fn rate(&self) -> f64 {
        self.new_tokens as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Outcome of a preparation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Description of the corpus.
    pub index: Index,
    /// Shards that an earlier run had finished.
    pub reused: usize,
}

/// Position in a corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    file: usize,
    block: u64,
    cursor: Cursor,
}

/// Content of `unfinished.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Unfinished {
    index: Index,
    /// First document of the next shard.
    next: Position,
    /// Bytes of a block, by which `next` counts.
    block: u64,
}

/// Parts that are tokenised together.
struct Batch {
    parts: Vec<Part>,
    /// Origin of each part.
    origins: Vec<Origin>,
    /// Records without a text after the last part.
    skipped: u64,
    file_bytes: u64,
}

/// Where a part was read.
struct Origin {
    file: usize,
    block: u64,
    /// Records without a text since the part before.
    skipped: u64,
}

type Encoded = Result<(Batch, Vec<Vec<u32>>)>;

/// Tokenises a corpus into shards in the directory `out`.
///
/// Continues an earlier run that was killed. Does nothing if `out` already holds this corpus. `progress` is called after
/// each batch of about 1 MiB of text; its error stops the preparation, which can be continued.
///
/// # Errors
/// A file can't be read or is damaged, another process prepares the same directory, `out` holds something else, or the
/// files or the tokenizer differ from the run to continue.
///
/// ```
/// use fsdp_corpus::files::Files;
/// use fsdp_corpus::prepare::{Options, prepare};
/// use fsdp_corpus::tokenise::Bytes;
///
/// let directory = tempfile::tempdir()?;
/// let corpus = directory.path().join("corpus.txt");
/// std::fs::write(&corpus, "a document")?;
/// let out = directory.path().join("tokens");
/// let prepared =
///     prepare(&Files::find(&corpus)?, &out, &Bytes::with_end(), &Options::default(), &mut |progress| {
///         println!("{} documents, {:.0} tokens/s", progress.documents, progress.rate());
///         Ok(())
///     })?;
/// assert_eq!((prepared.index.documents, prepared.index.tokens), (1, 11));
/// # anyhow::Ok(())
/// ```
pub fn prepare(
    files: &Files,
    out: &Path,
    tokenizer: &dyn Tokenise,
    options: &Options,
    progress: &mut dyn FnMut(&Progress) -> Result<()>,
) -> Result<Prepared> {
    let Content::Documents(found) = &files.content else {
        bail!("{} already holds tokens, so there is nothing to prepare", files.root.display())
    };
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    ensure!(
        !files.root.is_dir() || !absolute(out).starts_with(absolute(&files.root)),
        "{} is in the corpus {}, and would be read as a part of it: choose another directory",
        out.display(),
        files.root.display()
    );
    let sources: Vec<Source> =
        found.iter().map(|file| Source::open(file, &options.documents)).collect::<Result<_>>()?;
    let marks = found.iter().map(|file| Mark::of_file(&file.path, files.name(&file.path))).collect::<Result<_>>()?;
    let inputs = Inputs::new(tokenizer, &options.documents.field, options.shard_tokens, marks);
    let _lock = lock(out)?;
    let mut unfinished = match begin(out, inputs, options.documents.block)? {
        Begun::Complete(index) => {
            let reused = index.shards.len();
            return Ok(Prepared { index, reused });
        }
        Begun::Unfinished(unfinished) => unfinished,
    };
    let reused = unfinished.index.shards.len();
    // The first run decides about the size of shards.
    let options = &Options { shard_tokens: unfinished.index.inputs.shard_tokens, ..options.clone() };
    write(&sources, out, tokenizer, options, &mut unfinished, progress)?;
    ensure!(unfinished.index.documents > 0, "{} has no texts, so there is nothing to prepare", files.root.display());
    replace(&out.join(INDEX), &unfinished.index)?;
    fs::remove_file(out.join(UNFINISHED)).with_context(|| format!("cannot clean {}", out.display()))?;
    Ok(Prepared { index: unfinished.index, reused })
}

/// Creates and locks the directory.
fn lock(out: &Path) -> Result<File> {
    let cannot = || format!("cannot write to {}", out.display());
    fs::create_dir_all(out).with_context(cannot)?;
    let is_ours = |name: &str| [INDEX, UNFINISHED, LOCK].iter().any(|own| out.join(own).exists() || name == *own);
    for entry in fs::read_dir(out).with_context(cannot)? {
        let name = entry.with_context(cannot)?.file_name();
        ensure!(
            is_ours(&name.to_string_lossy()),
            "{} holds {}, which is not of a preparation: choose an empty directory",
            out.display(),
            name.display()
        );
    }
    let lock = File::options().create(true).truncate(false).write(true).open(out.join(LOCK)).with_context(cannot)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => {
            bail!("another process prepares {}: wait for it, or choose another directory", out.display())
        }
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", out.display())),
    }
}

enum Begun {
    Complete(Index),
    Unfinished(Unfinished),
}

/// Reads the state of an earlier run, or starts a new one.
fn begin(out: &Path, inputs: Inputs, block: u64) -> Result<Begun> {
    if out.join(INDEX).exists() {
        let index = read_index(out)?;
        index.inputs.compare(&inputs, out)?;
        return Ok(Begun::Complete(index));
    }
    let path = out.join(UNFINISHED);
    if path.exists() {
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let unfinished: Unfinished = serde_json::from_slice(&text).with_context(|| {
            format!("{} is damaged: remove {}, and prepare the corpus again", path.display(), out.display())
        })?;
        ensure!(
            unfinished.index.format == FORMAT && unfinished.index.version == VERSION,
            "{} is of another version: remove {}, and prepare the corpus again",
            path.display(),
            out.display()
        );
        unfinished.index.inputs.compare(&inputs, out)?;
        ensure!(
            unfinished.block == block,
            "{} was begun with blocks of {} bytes, but this run has {block}. Use the same, or another directory",
            out.display(),
            unfinished.block
        );
        return Ok(Begun::Unfinished(unfinished));
    }
    let index = Index {
        format: FORMAT.into(),
        version: VERSION,
        tokens: 0,
        documents: 0,
        skipped: 0,
        inputs,
        shards: Vec::new(),
    };
    let unfinished = Unfinished { index, next: Position::default(), block };
    replace(&path, &unfinished)?;
    Ok(Begun::Unfinished(unfinished))
}

/// Replaces a file atomically.
fn replace(path: &Path, content: &impl Serialize) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let new = path.with_extension("json.new");
    fs::write(&new, serde_json::to_vec(content)?).with_context(cannot)?;
    File::open(&new).and_then(|file| file.sync_all()).with_context(cannot)?;
    fs::rename(&new, path).with_context(cannot)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    File::open(directory).and_then(|directory| directory.sync_all()).with_context(cannot)
}

/// Reads, tokenises and writes the rest of a corpus.
fn write(
    sources: &[Source],
    out: &Path,
    tokenizer: &dyn Tokenise,
    options: &Options,
    unfinished: &mut Unfinished,
    progress: &mut dyn FnMut(&Progress) -> Result<()>,
) -> Result<()> {
    let threads = options.threads.max(1);
    let from = unfinished.next;
    // Dropping the receivers ends the threads, so an error of the writer does not hang.
    let (work, batches) = sync_channel::<(Batch, SyncSender<Encoded>)>(threads);
    let (order, results) = sync_channel::<Result<Receiver<Encoded>>>(2 * threads);
    let batches = Arc::new(Mutex::new(batches));
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut give = |batch: Batch| {
                let (result, encoded) = sync_channel(1);
                order.send(Ok(encoded)).is_ok() && work.send((batch, result)).is_ok()
            };
            let outcome = catch_unwind(AssertUnwindSafe(|| read(sources, from, &mut give)));
            if let Err(error) = outcome.unwrap_or_else(|_| Err(anyhow!("reading the corpus panicked"))) {
                let _ = order.send(Err(error));
            }
        });
        for _ in 0..threads {
            let batches = batches.clone();
            scope.spawn(move || {
                loop {
                    let next = batches.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((batch, result)) = next else { break };
                    let encode = || encode_parts(tokenizer, &batch.parts);
                    let encoded = catch_unwind(AssertUnwindSafe(encode));
                    let encoded = encoded.unwrap_or_else(|_| Err(anyhow!("the tokenizer panicked")));
                    let encoded = encoded.with_context(|| place(sources, &batch));
                    let _ = result.send(encoded.map(|ids| (batch, ids)));
                }
            });
        }
        drop(batches);
        let mut writer = Writer::new(out, unfinished, options.shard_tokens, sources);
        for encoded in results {
            let encoded = encoded?.recv().map_err(|_| anyhow!("a thread that tokenises has ended"))?;
            let (batch, ids) = encoded?;
            writer.write(&batch, &ids)?;
            progress(&writer.progress)?;
        }
        writer.finish()
    })
}

/// Names the documents of a batch, for messages.
fn place(sources: &[Source], batch: &Batch) -> String {
    match (batch.parts.first(), batch.origins.first()) {
        (Some(part), Some(origin)) => {
            format!("cannot tokenise {}, near record {}", sources[origin.file].path().display(), part.at.record)
        }
        _ => "cannot tokenise".into(),
    }
}

/// Reads batches from a position on. Ends when `give` returns false.
fn read(sources: &[Source], from: Position, give: &mut dyn FnMut(Batch) -> bool) -> Result<()> {
    let empty = || Batch { parts: Vec::new(), origins: Vec::new(), skipped: 0, file_bytes: 0 };
    let (mut batch, mut bytes, mut skipped) = (empty(), 0, 0);
    for (file, source) in sources.iter().enumerate().skip(from.file) {
        let first = if file == from.file { from.block } else { 0 };
        for number in first..source.num_blocks() {
            let cursor = if (file, number) == (from.file, from.block) { from.cursor } else { Cursor::default() };
            let block = source.block_at(number);
            let mut documents = source.documents(&block, cursor)?;
            let mut counted = 0;
            while let Some(part) = documents.next() {
                let part = part?;
                bytes += part.text.len();
                batch.parts.push(part);
                skipped += documents.skipped() - counted;
                counted = documents.skipped();
                batch.origins.push(Origin { file, block: number, skipped: std::mem::take(&mut skipped) });
                if bytes >= BATCH || batch.parts.len() >= PARTS {
                    bytes = 0;
                    if !give(std::mem::replace(&mut batch, empty())) {
                        return Ok(());
                    }
                }
            }
            skipped += documents.skipped() - counted;
            batch.file_bytes += source.block_size(&block);
        }
    }
    batch.skipped = skipped;
    give(batch);
    Ok(())
}

/// Writes ids into shards in order.
struct Writer<'a> {
    out: &'a Path,
    unfinished: &'a mut Unfinished,
    shard: Option<ShardWriter>,
    shard_tokens: u64,
    /// Records without a text since the last finished shard.
    skipped: u64,
    /// Records without a text after the last document of the corpus.
    trailing: u64,
    /// Position after the document written last.
    next: Position,
    begun: Instant,
    progress: Progress,
}

impl<'a> Writer<'a> {
    fn new(out: &'a Path, unfinished: &'a mut Unfinished, shard_tokens: u64, sources: &[Source]) -> Self {
        let Unfinished { index: Index { documents, tokens, ref shards, .. }, next, .. } = *unfinished;
        let in_file = |source: &Source| (0..next.block).map(|at| source.block_size(&source.block_at(at))).sum::<u64>();
        let progress = Progress {
            documents,
            tokens,
            shards: shards.len(),
            file_bytes: sources.iter().take(next.file).map(Source::size).sum::<u64>()
                + sources.get(next.file).map_or(0, in_file),
            total_bytes: sources.iter().map(Source::size).sum(),
            ..Progress::default()
        };
        Writer {
            out,
            unfinished,
            shard: None,
            shard_tokens,
            skipped: 0,
            trailing: 0,
            next,
            begun: Instant::now(),
            progress,
        }
    }

    fn write(&mut self, batch: &Batch, ids: &[Vec<u32>]) -> Result<()> {
        for ((part, ids), &Origin { file, block, skipped }) in batch.parts.iter().zip(ids).zip(&batch.origins) {
            self.skipped += skipped;
            let shard = match &mut self.shard {
                Some(shard) => shard,
                None => {
                    let (number, width) = (self.unfinished.index.shards.len(), self.unfinished.index.inputs.width());
                    self.shard.insert(ShardWriter::create(self.out, number, width)?)
                }
            };
            shard.push(ids)?;
            self.progress.tokens += ids.len() as u64;
            self.progress.new_tokens += ids.len() as u64;
            self.progress.text_bytes += part.text.len() as u64;
            if part.is_last {
                shard.end_document()?;
                self.progress.documents += 1;
                self.next = Position { file, block, cursor: part.next() };
                if shard.tokens() >= self.shard_tokens {
                    self.finish_shard()?;
                }
            }
        }
        self.trailing += batch.skipped;
        self.progress.file_bytes += batch.file_bytes;
        self.progress.elapsed = self.begun.elapsed();
        Ok(())
    }

    /// Ends a shard, and records it.
    fn finish_shard(&mut self) -> Result<()> {
        let Some(shard) = self.shard.take() else { return Ok(()) };
        let shard: Shard = shard.finish()?;
        let index = &mut self.unfinished.index;
        index.tokens += shard.tokens;
        index.documents += shard.documents;
        index.skipped += std::mem::take(&mut self.skipped);
        index.shards.push(shard);
        self.progress.shards += 1;
        self.unfinished.next = self.next;
        replace(&self.out.join(UNFINISHED), &self.unfinished)
    }

    fn finish(mut self) -> Result<()> {
        self.finish_shard()?;
        self.unfinished.index.skipped += self.skipped + self.trailing;
        Ok(())
    }
}
