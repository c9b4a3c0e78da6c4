//! Pieces of a rank's lanes as bytes.
//!
//! The length of a JSON header (32-bit little-endian), the header, and the ids of all segments (32-bit little-endian).

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::LanePlace;
use super::lane::{Piece, Segment};
use crate::documents::Cursor;

/// Pieces with their lanes, or the message of a failure.
pub(super) type Outcome = Result<Vec<(usize, Piece)>, String>;

/// Round of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RoundId {
    /// Checksum of the files, the tokenizer and the order.
    pub(super) stream: u64,
    pub(super) epoch: u64,
    pub(super) round: u64,
}

#[derive(Serialize, Deserialize)]
struct Header {
    at: RoundId,
    pieces: Result<Vec<PieceHeader>, String>,
}

#[derive(Serialize, Deserialize)]
struct PieceHeader {
    lane: usize,
    next: LanePlace,
    skipped: u64,
    /// Block, position, whether the document ends, and the number of ids of each segment.
    segments: Vec<(u64, Cursor, bool, usize)>,
}

/// Encodes the outcome of a round.
pub(super) fn encode(at: RoundId, outcome: &Outcome) -> Result<Vec<u8>> {
    let of_piece = |(lane, piece): &(usize, Piece)| PieceHeader {
        lane: *lane,
        next: piece.next,
        skipped: piece.skipped,
        segments: piece
            .segments
            .iter()
            .map(|segment| (segment.block, segment.at, segment.is_last, segment.ids.len()))
            .collect(),
    };
    let pieces = outcome.as_ref().map(|pieces| pieces.iter().map(of_piece).collect()).map_err(String::clone);
    let header = serde_json::to_vec(&Header { at, pieces })?;
    let mut bytes = u32::try_from(header.len())?.to_le_bytes().to_vec();
    bytes.extend(header);
    for (_, piece) in outcome.as_ref().unwrap_or(&Vec::new()) {
        bytes.reserve(piece.segments.iter().map(|segment| 4 * segment.ids.len()).sum());
        for segment in &piece.segments {
            bytes.extend(segment.ids.iter().flat_map(|id| id.to_le_bytes()));
        }
    }
    Ok(bytes)
}

/// Decodes another rank's outcome of this round.
pub(super) fn decode(bytes: &[u8], at: RoundId) -> Result<Outcome> {
    let cut = "the exchanged bytes are cut off";
    let (len, rest) = bytes.split_first_chunk().context(cut)?;
    let (header, ids) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).context(cut)?;
    let header: Header = serde_json::from_slice(header).context("the exchanged bytes are damaged")?;
    ensure!(
        header.at.stream == at.stream,
        "its files, tokenizer or seed are others than this rank's: all ranks must read the same corpus"
    );
    ensure!(
        header.at == at,
        "it is at round {} of epoch {}, but this rank is at round {} of epoch {}: all ranks must consume the same \
         sequences",
        header.at.round,
        header.at.epoch,
        at.round,
        at.epoch
    );
    let pieces = match header.pieces {
        Ok(pieces) => pieces,
        Err(failure) => return Ok(Err(failure)),
    };
    let (mut ids, _) = ids.as_chunks::<4>();
    let mut decoded = Vec::new();
    for piece in pieces {
        let mut segments = Vec::with_capacity(piece.segments.len());
        for (block, at, is_last, len) in piece.segments {
            let (own, rest) = ids.split_at_checked(len).context(cut)?;
            ids = rest;
            segments.push(Segment { block, at, is_last, ids: own.iter().map(|&id| u32::from_le_bytes(id)).collect() });
        }
        decoded.push((piece.lane, Piece { segments, next: piece.next, skipped: piece.skipped }));
    }
    ensure!(ids.is_empty(), "the exchanged bytes have {} ids too many", ids.len());
    Ok(Ok(decoded))
}
