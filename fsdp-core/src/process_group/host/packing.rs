//! Packing: lists of buffers as one stream of bytes, cut into chunks.

use std::ops::Range;

use crate::DType;

/// Alignment of parts in a stream, so that elements of every dtype are aligned in a slot and never cut.
pub(crate) const ALIGN: usize = 64;

/// A range of bytes of one part, at a position of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    start: usize,
    part: usize,
    bytes: Range<usize>,
}

/// Byte ranges of parts, concatenated with aligned starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stream {
    stretches: Vec<Stretch>,
    len: usize,
}

/// The overlap of a chunk with a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the part.
    pub(crate) part: usize,
    /// Bytes of the part.
    pub(crate) bytes: Range<usize>,
    /// Position in the chunk.
    pub(crate) chunk: Range<usize>,
}

impl Stream {
    /// Creates a stream of the given bytes of each part.
    pub(crate) fn new(parts: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut stream = Stream::default();
        parts.into_iter().enumerate().for_each(|(part, bytes)| stream.push(part, bytes));
        stream
    }

    fn push(&mut self, part: usize, bytes: Range<usize>) {
        if !bytes.is_empty() {
            let len = bytes.len();
            self.stretches.push(Stretch { start: self.len, part, bytes });
            self.len = (self.len + len).next_multiple_of(ALIGN);
        }
    }

    /// Concatenates streams of the same parts.
    pub(crate) fn joined(streams: impl IntoIterator<Item = Stream>) -> Self {
        let mut all = Stream::default();
        for stream in streams {
            let start = all.len;
            all.stretches.extend(stream.stretches.into_iter().map(|it| Stretch { start: start + it.start, ..it }));
            all.len += stream.len;
        }
        all
    }

    /// Creates the streams of all ranks' bytes of each part, a concatenation by rank with these counts.
    pub(crate) fn by_rank<'a>(ranks: usize, parts: impl IntoIterator<Item = (DType, &'a [usize])>) -> Vec<Self> {
        let mut streams = vec![Stream::default(); ranks];
        for (part, (dtype, counts)) in parts.into_iter().enumerate() {
            let mut start = 0;
            for (stream, count) in streams.iter_mut().zip(counts) {
                let end = start + count * dtype.size();
                stream.push(part, start..end);
                start = end;
            }
        }
        streams
    }

    /// Creates a stream of some of the parts.
    pub(crate) fn of_parts(&self, is_one: impl Fn(usize) -> bool) -> Self {
        let mut some = Stream::default();
        for stretch in self.stretches.iter().filter(|stretch| is_one(stretch.part)) {
            some.stretches.push(Stretch { start: some.len, ..stretch.clone() });
            some.len = some.end().next_multiple_of(ALIGN);
        }
        some
    }

    /// Returns the end of the last part in the stream, without padding.
    pub(crate) fn end(&self) -> usize {
        self.stretches.last().map_or(0, |stretch| stretch.start + stretch.bytes.len())
    }

    /// Returns the length of the stream in bytes, with padding.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the `index`-th chunk of `chunk` bytes as a stream of the same parts.
    pub(crate) fn slice(&self, index: usize, chunk: usize) -> Stream {
        let mut parts: Vec<Range<usize>> = Vec::new();
        for piece in self.pieces(index, chunk) {
            parts.resize(piece.part, 0..0);
            parts.push(piece.bytes);
        }
        Stream::new(parts)
    }

    /// Splits the stream evenly over `ranks` ranks, and returns each rank's share.
    pub(crate) fn shares(&self, ranks: usize) -> impl Fn(usize) -> Stream + use<'_> {
        let chunk = self.len.div_ceil(ranks.max(1)).next_multiple_of(ALIGN).max(ALIGN);
        move |rank| self.slice(rank, chunk)
    }

    /// Returns the number of chunks of `chunk` bytes.
    pub(crate) fn chunks(&self, chunk: usize) -> usize {
        self.len.div_ceil(chunk)
    }

    /// Returns the index of the last chunk with bytes of a part.
    fn last_chunk(&self, part: usize, chunk: usize) -> Option<usize> {
        let index = self.stretches.binary_search_by_key(&part, |stretch| stretch.part).ok()?;
        let stretch = &self.stretches[index];
        Some((stretch.start + stretch.bytes.len() - 1) / chunk)
    }

    /// Returns the pieces in the `index`-th chunk of `chunk` bytes, which must be a multiple of [`ALIGN`].
    pub(crate) fn pieces(&self, index: usize, chunk: usize) -> impl Iterator<Item = Piece> + '_ {
        debug_assert!(chunk.is_multiple_of(ALIGN));
        let start = index.saturating_mul(chunk);
        let end = start.saturating_add(chunk);
        let first = self.stretches.partition_point(|stretch| stretch.start + stretch.bytes.len() <= start);
        self.stretches[first..].iter().take_while(move |stretch| stretch.start < end).map(move |stretch| {
            let from = start.max(stretch.start);
            let to = end.min(stretch.start + stretch.bytes.len());
            let offset = stretch.bytes.start + (from - stretch.start);
            Piece { part: stretch.part, bytes: offset..offset + (to - from), chunk: from - start..to - start }
        })
    }
}

/// Returns the index of the last chunk with bytes of a part, in any of the streams.
pub(crate) fn last_chunk(streams: &[Stream], part: usize, chunk: usize) -> usize {
    streams.iter().filter_map(|stream| stream.last_chunk(part, chunk)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_every_byte_once_in_order(
            parts in proptest::collection::vec((0usize..500, 0usize..500), 0..6),
            chunk in (1usize..6).prop_map(|n| n * ALIGN),
        ) {
            let stream = Stream::new(parts.iter().map(|&(start, len)| start..start + len));
            let mut seen: Vec<Vec<usize>> = vec![Vec::new(); parts.len()];
            for index in 0..stream.chunks(chunk) {
                let mut at = 0;
                for piece in stream.pieces(index, chunk) {
                    prop_assert!(piece.chunk.start >= at && piece.chunk.end <= chunk && !piece.bytes.is_empty());
                    prop_assert_eq!(piece.chunk.len(), piece.bytes.len());
                    prop_assert!(piece.chunk.start.is_multiple_of(8));
                    at = piece.chunk.end;
                    seen[piece.part].extend(piece.bytes);
                }
            }
            prop_assert!(stream.pieces(stream.chunks(chunk), chunk).next().is_none());
            let slices = (0..=stream.chunks(chunk)).map(|index| stream.slice(index, chunk));
            let whole = usize::MAX / ALIGN * ALIGN;
            let of_slices: Vec<_> = slices.flat_map(|slice| {
                slice.pieces(0, whole).map(|piece| (piece.part, piece.bytes)).collect::<Vec<_>>()
            }).collect();
            let in_chunks = (0..stream.chunks(chunk)).flat_map(|index| stream.pieces(index, chunk));
            prop_assert_eq!(of_slices, in_chunks.map(|piece| (piece.part, piece.bytes)).collect::<Vec<_>>());
            for ((start, len), seen) in parts.into_iter().zip(seen) {
                prop_assert_eq!(seen, (start..start + len).collect::<Vec<_>>());
            }
        }
    }
}
