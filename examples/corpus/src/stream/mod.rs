//! Streaming: a corpus is read and tokenised while training.
//!
//! The order of documents depends on the seed alone, not on the number of ranks:
//!
//! - A corpus has blocks. Each epoch shuffles them.
//! - [`LANES`] lanes take the blocks in turn: lane l reads the blocks l, l + 16, l + 32 ... of the order.
//! - A round takes one piece of each lane: its next documents, about 128 KiB of text. The documents of a round are
//!   shuffled. Their tokens, round after round, are the stream.
//!
//! Rank r reads and tokenises the lanes l with `l % world_size == r` in background threads, and the ranks exchange the
//! pieces of each round. Every rank then has all tokens of the round, so every rank must consume the same sequences.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use crc_fast::CrcAlgorithm;
use serde::{Deserialize, Serialize};

use crate::documents::{self, Block, Cursor, Source};
use crate::files::{Content, Files};
use crate::permutation::{Permutation, mix};
use crate::sequence::Sequence;
use crate::source::{Mark, described};
use crate::tokenise::{Tokenise, identity};

use lane::{Lane, Piece, Segment};
use message::RoundId;

mod lane;
mod message;

#[cfg(test)]
pub(crate) mod tests;

/// Number of lanes. It is a part of the order, and so of checkpoints.
pub const LANES: usize = 16;
/// Smallest size of a block of JSON Lines.
const SMALLEST_BLOCK: u64 = if cfg!(test) { 500 } else { 64 << 10 };
/// Blocks for each lane that small files are cut into.
const TURNS: u64 = 16;

/// Exchanges bytes: takes the bytes of this rank, and returns the bytes of each rank in the order of ranks.
///
/// All ranks call it at the same points, so it can be a collective.
pub type Exchange<'a> = dyn Fn(Vec<u8>) -> Result<Vec<Vec<u8>>> + 'a;

/// Exchanges the bytes of a single rank.
pub fn alone(bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    Ok(vec![bytes])
}

/// Files of a corpus that are ready to be streamed.
#[derive(Debug)]
pub struct Corpus {
    name: String,
    sources: Vec<Source>,
    marks: Vec<Mark>,
    /// Number of blocks before each source.
    before: Vec<u64>,
    blocks: u64,
    /// Largest number of bytes of a block of lines.
    block: u64,
    field: String,
}

impl Corpus {
    /// Opens the files of a corpus. JSON Lines are cut into smaller blocks than `options` says if the corpus is small, so
    /// that all lanes have some.
    ///
    /// # Errors
    /// The files hold tokens, a file can't be read, or it has no field of this name.
    pub fn open(files: &Files, options: &documents::Options) -> Result<Self> {
        let Content::Documents(found) = &files.content else {
            bail!("{} holds tokens, which need no streaming", files.root.display())
        };
        let marks: Vec<Mark> =
            found.iter().map(|file| Mark::of_file(&file.path, files.name(&file.path))).collect::<Result<_>>()?;
        let total: u64 = marks.iter().map(|mark| mark.size).sum();
        let block = (total / (LANES as u64 * TURNS)).max(SMALLEST_BLOCK).min(options.block);
        let options = documents::Options { block, ..options.clone() };
        let sources: Vec<Source> = found.iter().map(|file| Source::open(file, &options)).collect::<Result<_>>()?;
        let (mut before, mut blocks) = (Vec::new(), 0);
        for source in &sources {
            before.push(blocks);
            blocks += source.num_blocks();
        }
        let name = files.root.display().to_string();
        Ok(Corpus { name, sources, marks, before, blocks, block, field: options.field })
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the number of bytes of the files.
    pub fn size(&self) -> u64 {
        self.sources.iter().map(Source::size).sum()
    }

    /// Returns the marks of the files.
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// Returns the path of the file with a block of this number.
    fn path_of(&self, block: u64) -> &Path {
        self.sources[self.before.partition_point(|&before| before <= block) - 1].path()
    }

    /// Returns the number, the source and the block at a place of an epoch's order.
    fn block_at(&self, index: u64, seed: Option<u64>, epoch: u64) -> (u64, &Source, Block) {
        let number = seed.map_or(index, |seed| Permutation::new(self.blocks, seed, epoch).at(index));
        // Sources without blocks share their number with the next one, which is found.
        let source = self.before.partition_point(|&before| before <= number) - 1;
        let block = self.sources[source].block_at(number - self.before[source]);
        (number, &self.sources[source], block)
    }
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sources.len() {
            1 => write!(f, "{}", self.name),
            files => write!(f, "{files} files of {}", self.name),
        }
    }
}

/// Version of the order of a stream. It rises when the order of the same corpus and seed changes, which no place of an
/// earlier version fits.
pub const ORDER: u32 = 1;

/// Place of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePlace {
    /// Number of blocks read in this epoch.
    pub turn: u64,
    /// Position in the next block.
    pub cursor: Cursor,
}

/// Place in a stream, for a checkpoint. A run continues there at any number of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Epochs completed.
    pub epoch: u64,
    /// Rounds of this epoch completed.
    pub round: u64,
    /// Tokens consumed of the current round.
    pub tokens: u64,
    /// Places of the lanes at the start of the current round.
    pub lanes: Vec<LanePlace>,
    /// Block and record of the document that the previous round ends within, if any.
    pub open: Option<(u64, u64)>,
    /// Tokens, documents and skipped records of the whole run.
    pub counters: Counters,
    /// Seed of the order, if it is shuffled.
    pub seed: Option<u64>,
    /// Checksum of the tokenizer, and its start and end tokens.
    pub tokenizer: String,
    /// Field or column of the texts.
    pub field: String,
    /// Bytes of a block, by which the lanes' places count.
    pub block: u64,
    /// Version of the order ([`ORDER`]).
    pub order: u32,
    /// Marks of the files.
    pub files: Vec<Mark>,
}

/// Counters of a stream since the start of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Tokens consumed.
    pub tokens: u64,
    /// Documents of which the first token was consumed.
    pub documents: u64,
    /// Records without a text, in rounds that were consumed.
    pub skipped: u64,
}

/// Tokens of a corpus in an order that does not depend on the number of ranks.
///
/// ```
/// use std::sync::Arc;
///
/// use fsdp_corpus::documents::Options;
/// use fsdp_corpus::files::Files;
/// use fsdp_corpus::stream::{Corpus, Stream, alone};
/// use fsdp_corpus::tokenise::Bytes;
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("corpus.jsonl");
/// std::fs::write(&path, "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n")?;
/// let corpus = Arc::new(Corpus::open(&Files::find(&path)?, &Options::default())?);
/// let mut stream = Stream::new(corpus, Arc::new(Bytes::with_end()), None, 0, 1)?;
/// let sequence = stream.next_sequence(4, &alone)?;
/// assert_eq!(sequence.ids, [97, 98, 99, 256, 100]);
/// assert_eq!(sequence.starts, [0, 4]);
/// let place = stream.place();
/// let expected = stream.next_sequence(4, &alone)?;
/// stream.resume(&place)?;
/// assert_eq!(stream.next_sequence(4, &alone)?, expected);
/// # anyhow::Ok(())
/// ```
pub struct Stream {
    corpus: Arc<Corpus>,
    tokenizer: Arc<dyn Tokenise>,
    seed: Option<u64>,
    /// Checksum of the files, the tokenizer and the seed, which must be equal on all ranks.
    checksum: u64,
    rank: usize,
    world_size: usize,
    /// Start of the round to read next.
    next: RoundPlace,
    /// Pieces of this rank's lanes, once their threads run.
    pieces: Vec<Option<Receiver<Result<Piece>>>>,
    rounds: VecDeque<Round>,
    /// Tokens of the next round that were consumed before the run was resumed.
    pending: u64,
    counters: Counters,
    /// Whether an epoch has begun without tokens so far.
    is_empty: bool,
    waited: Duration,
    failure: Option<String>,
}

/// Start of a round.
#[derive(Clone, Debug)]
struct RoundPlace {
    epoch: u64,
    round: u64,
    lanes: Vec<LanePlace>,
    open: Option<(u64, u64)>,
}

/// A round that is not consumed yet.
struct Round {
    at: RoundPlace,
    ids: Vec<u32>,
    /// Tokens at which a document starts or continues after another one, and whether it starts.
    starts: Vec<(usize, bool)>,
    consumed: usize,
    skipped: u64,
}

impl RoundPlace {
    fn of_epoch(epoch: u64) -> Self {
        RoundPlace { epoch, round: 0, lanes: vec![LanePlace::default(); LANES], open: None }
    }
}

impl Stream {
    /// Creates a stream from the first epoch on. Shuffles it if there is a seed.
    ///
    /// # Errors
    /// The corpus has no blocks, or the rank is not below the world size.
    pub fn new(
        corpus: Arc<Corpus>,
        tokenizer: Arc<dyn Tokenise>,
        seed: Option<u64>,
        rank: usize,
        world_size: usize,
    ) -> Result<Self> {
        ensure!(rank < world_size, "rank {rank} is not below the world size {world_size}");
        ensure!(corpus.blocks > 0, "{corpus} is empty");
        let common = (&corpus.marks, &corpus.field, corpus.block, ORDER, seed, identity(&*tokenizer));
        let checksum = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &serde_json::to_vec(&common)?);
        Ok(Stream {
            checksum,
            corpus,
            tokenizer,
            seed,
            rank,
            world_size,
            next: RoundPlace::of_epoch(0),
            pieces: (0..LANES).map(|_| None).collect(),
            rounds: VecDeque::new(),
            pending: 0,
            counters: Counters::default(),
            is_empty: true,
            waited: Duration::ZERO,
            failure: None,
        })
    }

    /// Continues at a place, which may be of another number of ranks.
    ///
    /// # Errors
    /// A file is changed, missing or new, or the seed, the tokenizer or the field differs.
    pub fn resume(&mut self, place: &Place) -> Result<()> {
        Mark::compare(&place.files, &self.corpus.marks, "the checkpoint")?;
        let corpus = &self.corpus;
        ensure!(
            place.seed == self.seed,
            "the checkpoint's order of {corpus} has {}, but this run has {}: continue with the same",
            described(place.seed),
            described(self.seed)
        );
        let found = (identity(&*self.tokenizer), &self.corpus.field);
        ensure!(
            (&place.tokenizer, &place.field) == (&found.0, found.1),
            "the checkpoint read the field `{}` of {corpus} with the tokenizer {}, but this run reads `{}` with {}: \
             continue with the same",
            place.field,
            place.tokenizer,
            found.1,
            found.0
        );
        ensure!(
            (place.block, place.order, place.lanes.len()) == (corpus.block, ORDER, LANES),
            "the checkpoint has {corpus} in blocks of {} bytes and the order {}, but this program has {} and {ORDER}: \
             continue with the program that wrote it",
            place.block,
            place.order,
            corpus.block
        );
        self.next = RoundPlace { epoch: place.epoch, round: place.round, lanes: place.lanes.clone(), open: place.open };
        self.rounds.clear();
        self.pieces.iter_mut().for_each(|pieces| *pieces = None);
        self.counters = place.counters;
        // Documents may have been read before.
        self.is_empty = false;
        self.failure = None;
        self.pending = place.tokens;
        Ok(())
    }

    /// Returns the place of the next token. It has the marks of all files, so it is for checkpoints.
    pub fn place(&self) -> Place {
        let (at, tokens) = match self.rounds.front() {
            Some(round) => (&round.at, round.consumed as u64),
            None => (&self.next, self.pending),
        };
        Place {
            epoch: at.epoch,
            round: at.round,
            tokens,
            lanes: at.lanes.clone(),
            open: at.open,
            counters: self.counters,
            seed: self.seed,
            tokenizer: identity(&*self.tokenizer),
            field: self.corpus.field.clone(),
            block: self.corpus.block,
            order: ORDER,
            files: self.corpus.marks.clone(),
        }
    }

    /// Consumes the next `seq_len` tokens. Returns them and one more.
    ///
    /// # Errors
    /// A file can't be read or is damaged, or the exchange fails. An error of reading reaches all ranks.
    pub fn next_sequence(&mut self, seq_len: usize, exchange: &Exchange<'_>) -> Result<Sequence> {
        let sequence = self.peek(seq_len, exchange)?;
        self.consume(seq_len);
        Ok(sequence)
    }

    /// Returns the next `seq_len` tokens and one more, such as for a prompt, without consuming them. All ranks call it.
    ///
    /// # Errors
    /// As [`Stream::next_sequence`].
    pub fn peek(&mut self, seq_len: usize, exchange: &Exchange<'_>) -> Result<Sequence> {
        self.fetch(seq_len + 1, exchange)?;
        let mut sequence = Sequence { ids: Vec::with_capacity(seq_len + 1), starts: Vec::new() };
        for round in &self.rounds {
            let from = round.consumed;
            let to = round.ids.len().min(from + seq_len + 1 - sequence.ids.len());
            let first = round.starts.partition_point(|&(start, _)| start < from);
            let starts = round.starts[first..].iter().map(|&(start, _)| start).take_while(|&start| start < to);
            sequence.starts.extend(starts.map(|start| start - from + sequence.ids.len()));
            sequence.ids.extend_from_slice(&round.ids[from..to]);
        }
        Ok(sequence)
    }

    /// Consumes sequences that another rank trains on.
    ///
    /// # Errors
    /// As [`Stream::next_sequence`].
    pub fn skip(&mut self, sequences: u64, seq_len: usize, exchange: &Exchange<'_>) -> Result<()> {
        for _ in 0..sequences {
            self.fetch(seq_len + 1, exchange)?;
            self.consume(seq_len);
        }
        Ok(())
    }

    /// Returns the number of epochs completed.
    pub fn epoch(&self) -> u64 {
        self.rounds.front().map_or(self.next.epoch, |round| round.at.epoch)
    }

    /// Returns what the stream has given since the start of the run.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the time spent on waiting for data and for other ranks.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Reads rounds until there are this many tokens.
    fn fetch(&mut self, tokens: usize, exchange: &Exchange<'_>) -> Result<()> {
        if let Some(failure) = &self.failure {
            bail!("{failure}");
        }
        while self.rounds.iter().map(|round| round.ids.len() - round.consumed).sum::<usize>() < tokens {
            if let Err(error) = self.fetch_round(exchange) {
                self.failure = Some(format!("{error:#}"));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Reads a round, and exchanges its pieces.
    fn fetch_round(&mut self, exchange: &Exchange<'_>) -> Result<()> {
        let begun = Instant::now();
        let at = RoundId { stream: self.checksum, epoch: self.next.epoch, round: self.next.round };
        let own = self.own_pieces();
        let sent = message::encode(at, &own.map_err(|error| format!("{error:#}")))?;
        let received = exchange(sent).context("cannot exchange the pieces of the corpus")?;
        self.waited += begun.elapsed();
        ensure!(
            received.len() == self.world_size,
            "{} ranks exchanged pieces of the corpus, but {} were expected",
            received.len(),
            self.world_size
        );
        let mut pieces: Vec<Option<Piece>> = (0..LANES).map(|_| None).collect();
        for (rank, bytes) in received.iter().enumerate() {
            let decoded = message::decode(bytes, at).with_context(|| format!("rank {rank}"))?;
            let failed = |failure| match self.world_size {
                1 => anyhow!("{failure}"),
                _ => anyhow!("rank {rank}: {failure}"),
            };
            for (lane, piece) in decoded.map_err(failed)? {
                ensure!(lane < LANES && lane % self.world_size == rank, "rank {rank} sent a piece of lane {lane}");
                pieces[lane] = Some(piece);
            }
        }
        self.push_round(pieces)
    }

    /// Waits for the pieces of this rank's lanes.
    fn own_pieces(&mut self) -> Result<Vec<(usize, Piece)>> {
        let lanes = (self.rank..LANES).step_by(self.world_size);
        let lanes: Vec<usize> =
            lanes.filter(|&lane| !self.next.lanes[lane].is_over(lane, self.corpus.blocks)).collect();
        // All threads start before the first piece is awaited.
        for &lane in &lanes {
            self.pieces[lane].get_or_insert_with(|| {
                let (corpus, tokenizer) = (self.corpus.clone(), self.tokenizer.clone());
                Lane::new(corpus, tokenizer, self.seed, lane, self.next.epoch, self.next.lanes[lane]).spawn()
            });
        }
        let receive = |lane: usize| {
            let piece = self.pieces[lane].as_ref().and_then(|pieces| pieces.recv().ok());
            Ok((lane, piece.with_context(|| format!("the thread that reads {} has ended", self.corpus))??))
        };
        lanes.into_iter().map(receive).collect()
    }

    /// Appends a round.
    fn push_round(&mut self, pieces: Vec<Option<Piece>>) -> Result<()> {
        let at = self.next.clone();
        let (mut segments, mut skipped): (Vec<Segment>, u64) = (Vec::new(), 0);
        for (lane, piece) in pieces.into_iter().enumerate() {
            let is_over = at.lanes[lane].is_over(lane, self.corpus.blocks);
            ensure!(piece.is_some() != is_over, "round {} of epoch {}: lane {lane} is missing", at.round, at.epoch);
            if let Some(piece) = piece {
                self.next.lanes[lane] = piece.next;
                skipped += piece.skipped;
                segments.extend(piece.segments);
            }
        }
        if let Some(seed) = self.seed {
            let order = Permutation::new(segments.len() as u64, mix(seed) ^ mix(at.epoch), at.round);
            let mut shuffled: Vec<Option<Segment>> = segments.into_iter().map(Some).collect();
            segments =
                (0..shuffled.len()).filter_map(|index| shuffled[order.at(index as u64) as usize].take()).collect();
        }
        let mut round = Round { at, ids: Vec::new(), starts: Vec::new(), consumed: 0, skipped };
        for segment in segments {
            let is_continued = segment.at.byte > 0 && self.next.open == Some((segment.block, segment.at.record));
            if !is_continued && !segment.ids.is_empty() {
                round.starts.push((round.ids.len(), segment.at.byte == 0));
            }
            self.next.open = (!segment.is_last).then_some((segment.block, segment.at.record));
            round.ids.extend(segment.ids);
        }
        self.is_empty &= round.ids.is_empty();
        let pending = std::mem::take(&mut self.pending);
        ensure!(
            pending <= round.ids.len() as u64,
            "round {} of epoch {} has {} tokens, but {pending} were consumed: the corpus or the tokenizer has changed",
            round.at.round,
            round.at.epoch,
            round.ids.len()
        );
        round.consumed = pending as usize;
        self.rounds.push_back(round);
        self.next.round += 1;
        let blocks = self.corpus.blocks;
        if self.next.lanes.iter().enumerate().all(|(lane, place)| place.is_over(lane, blocks)) {
            ensure!(!self.is_empty, "{} has no texts to train on", self.corpus);
            self.is_empty = true;
            self.next = RoundPlace { open: self.next.open, ..RoundPlace::of_epoch(self.next.epoch + 1) };
        }
        Ok(())
    }

    /// Consumes tokens that were fetched.
    fn consume(&mut self, tokens: usize) {
        self.counters.tokens += tokens as u64;
        let mut rest = tokens;
        while let Some(round) = self.rounds.front_mut() {
            let from = round.consumed;
            round.consumed = round.ids.len().min(from + rest);
            rest -= round.consumed - from;
            let first = round.starts.partition_point(|&(start, _)| start < from);
            let consumed = round.starts[first..].iter().take_while(|&&(start, _)| start < round.consumed);
            self.counters.documents += consumed.filter(|&&(_, is_document)| is_document).count() as u64;
            if round.consumed < round.ids.len() {
                break;
            }
            self.counters.skipped += round.skipped;
            self.rounds.pop_front();
        }
    }
}

impl LanePlace {
    /// Returns whether a lane has no more blocks in this epoch.
    fn is_over(&self, lane: usize, blocks: u64) -> bool {
        self.block(lane) >= blocks
    }

    /// Returns the place of the lane's next block in the epoch's order.
    fn block(&self, lane: usize) -> u64 {
        self.turn.saturating_mul(LANES as u64).saturating_add(lane as u64)
    }
}
