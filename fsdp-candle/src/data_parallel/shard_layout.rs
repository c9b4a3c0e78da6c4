//! How the shards of a parameter lie in what layers hold of it.

use fsdp_core::Buffer;
use fsdp_core::layout::chunk_range;

use crate::kernels::{self, Rows, Slice, SliceMut};

/// How the shards of a parameter lie in it: it is `outer` rows (one, when dimension 0 is sharded), each cut into a
/// chunk for every rank.
pub(crate) struct ShardLayout {
    outer: usize,
    /// Elements of a row that each rank holds.
    chunks: Vec<usize>,
}

impl ShardLayout {
    /// Of a tensor of this shape, whose dimension `dim` is cut for so many ranks.
    pub(super) fn of(shape: &[usize], dim: usize, ranks: usize) -> Self {
        let inner: usize = shape[dim + 1..].iter().product();
        let chunks = (0..ranks).map(|rank| chunk_range(shape[dim], ranks, rank).len() * inner).collect();
        ShardLayout { outer: shape[..dim].iter().product(), chunks }
    }

    /// How many elements each rank holds.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.chunks.iter().map(|chunk| chunk * self.outer).collect()
    }

    /// Whether the concatenation of all shards is the parameter itself.
    pub(crate) fn is_concatenation(&self) -> bool {
        self.outer <= 1
    }

    /// Turns the concatenation of all shards into the parameter.
    pub(crate) fn unpack(&self, shards: &Buffer, full: &mut Buffer) -> candle_core::Result<()> {
        let kernels = kernels::of_buffer(shards)?;
        self.chunks().try_for_each(|(packed, column, rows)| {
            let from = Slice::from(shards).range(packed..shards.len())?;
            let room = full.len();
            kernels.copy_rows(from, SliceMut::from(&mut *full).range(column..room)?, rows)
        })
    }

    /// Turns the parameter into the concatenation of all shards.
    pub(crate) fn pack(&self, full: &Buffer, shards: &mut Buffer) -> candle_core::Result<()> {
        let kernels = kernels::of_buffer(full)?;
        self.chunks().try_for_each(|(packed, column, rows)| {
            let rows = Rows { from_stride: rows.to_stride, to_stride: rows.from_stride, ..rows };
            let from = Slice::from(full).range(column..full.len())?;
            let room = shards.len();
            kernels.copy_rows(from, SliceMut::from(&mut *shards).range(packed..room)?, rows)
        })
    }

    /// Each rank's chunk: where it begins in the concatenation and in a row of the parameter, and its rows, from there
    /// to here.
    fn chunks(&self) -> impl Iterator<Item = (usize, usize, Rows)> + '_ {
        let row: usize = self.chunks.iter().sum();
        let (mut packed, mut column) = (0, 0);
        self.chunks.iter().map(move |&chunk| {
            let rows = Rows { count: self.outer, len: chunk, from_stride: chunk, to_stride: row };
            let at = (packed, column, rows);
            packed += chunk * self.outer;
            column += chunk;
            at
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_and_unpacking_are_inverse() {
        let layout = ShardLayout { outer: 2, chunks: vec![2, 1, 0] };
        let full = Buffer::from(vec![0f32, 1., 2., 10., 11., 12.]);
        let mut shards = Buffer::zeros(full.dtype(), 6);
        layout.pack(&full, &mut shards).unwrap();
        assert_eq!(shards, Buffer::from(vec![0f32, 1., 10., 11., 2., 12.]));
        let mut back = Buffer::zeros(full.dtype(), 6);
        layout.unpack(&shards, &mut back).unwrap();
        assert_eq!(back, full);
        layout.unpack(&shards, &mut Buffer::zeros(full.dtype(), 5)).unwrap_err();
        layout.pack(&full, &mut Buffer::zeros(fsdp_core::DType::F64, 6)).unwrap_err();
    }
}
