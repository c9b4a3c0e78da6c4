//! A lane: reads and tokenises its blocks ahead, in a thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use anyhow::{Context, Result, anyhow};

use super::{Corpus, LanePlace};
use crate::documents::{Cursor, Documents};
use crate::tokenise::{Tokenise, encode_parts};

/// Bytes of text at which a piece ends.
const PIECE: usize = if cfg!(test) { 300 } else { 128 << 10 };
/// Pieces that a lane is ahead.
const AHEAD: usize = 4;

/// The next documents of a lane.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub(super) segments: Vec<Segment>,
    /// Where the lane continues.
    pub(super) next: LanePlace,
    /// Records without a text.
    pub(super) skipped: u64,
}

/// Tokens of a document, or of parts of it that follow each other.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Segment {
    /// Number of the block in the corpus.
    pub(super) block: u64,
    pub(super) at: Cursor,
    /// Whether the document ends with this segment.
    pub(super) is_last: bool,
    pub(super) ids: Vec<u32>,
}

/// Reads a lane's pieces, epoch after epoch.
pub(super) struct Lane {
    corpus: Arc<Corpus>,
    tokenizer: Arc<dyn Tokenise>,
    seed: Option<u64>,
    lane: usize,
    epoch: u64,
    place: LanePlace,
    /// The block that is being read, with its number and the records skipped so far.
    open: Option<(Documents, u64, u64)>,
}

impl Lane {
    pub(super) fn new(
        corpus: Arc<Corpus>,
        tokenizer: Arc<dyn Tokenise>,
        seed: Option<u64>,
        lane: usize,
        epoch: u64,
        place: LanePlace,
    ) -> Self {
        Lane { corpus, tokenizer, seed, lane, epoch, place, open: None }
    }

    /// Reads ahead in a thread, which ends after an error, or when the receiver is dropped.
    pub(super) fn spawn(mut self) -> Receiver<Result<Piece>> {
        let (pieces, receiver) = sync_channel(AHEAD);
        let name = format!("corpus-{}", self.lane);
        let failed = pieces.clone();
        let run = move || {
            loop {
                let piece = catch_unwind(AssertUnwindSafe(|| self.piece()));
                let piece = piece.unwrap_or_else(|_| Err(anyhow!("reading {} panicked", self.corpus)));
                let is_over = piece.is_err();
                if pieces.send(piece).is_err() || is_over {
                    break;
                }
            }
        };
        if let Err(error) = thread::Builder::new().name(name).spawn(run) {
            let _ = failed.send(Err(error).context("cannot start a thread to read the corpus"));
        }
        receiver
    }

    /// Reads the next piece.
    fn piece(&mut self) -> Result<Piece> {
        if self.place.is_over(self.lane, self.corpus.blocks) {
            self.epoch += 1;
            self.place = LanePlace::default();
        }
        let (mut parts, mut blocks, mut bytes, mut skipped) = (Vec::new(), Vec::new(), 0, 0);
        while bytes < PIECE && !self.place.is_over(self.lane, self.corpus.blocks) {
            let (documents, block, before) = match &mut self.open {
                Some(open) => open,
                None => {
                    let index = self.place.block(self.lane);
                    let (number, source, block) = self.corpus.block_at(index, self.seed, self.epoch);
                    self.open.insert((source.documents(&block, self.place.cursor)?, number, 0))
                }
            };
            let part = documents.next().transpose()?;
            skipped += documents.skipped() - *before;
            *before = documents.skipped();
            match part {
                Some(part) => {
                    self.place.cursor = part.next();
                    bytes += part.text.len();
                    parts.push(part);
                    blocks.push(*block);
                }
                None => {
                    self.open = None;
                    self.place = LanePlace { turn: self.place.turn + 1, cursor: Cursor::default() };
                }
            }
        }
        let encoded = encode_parts(&*self.tokenizer, &parts).with_context(|| match blocks.first() {
            Some(&block) => format!("cannot tokenise {}", self.corpus.path_of(block).display()),
            None => "cannot tokenise".into(),
        })?;
        let mut segments: Vec<Segment> = Vec::with_capacity(parts.len());
        for ((part, ids), block) in parts.into_iter().zip(encoded).zip(blocks) {
            match segments.last_mut() {
                Some(last) if !part.is_first() && last.block == block && last.at.record == part.at.record => {
                    last.ids.extend(ids);
                    last.is_last = part.is_last;
                }
                _ => segments.push(Segment { block, at: part.at, is_last: part.is_last, ids }),
            }
        }
        Ok(Piece { segments, next: self.place, skipped })
    }
}
