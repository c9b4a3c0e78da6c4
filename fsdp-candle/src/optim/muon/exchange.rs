//! Moving boxes of matrices to the ranks that work on them, and back.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{Allocator, Buffer, DType, ExchangePart, GatherPart, ProcessGroup};

use super::work::{Axis, Class, Place};
use crate::error::{Error, Result};
use crate::kernels::{Kernels, Rows, Slice, SliceMut};
use crate::storage::{Pool, TensorMemory, to_tensor};

/// A box of a matrix with its values in BF16, row-major.
pub(super) struct Piece {
    pub(super) place: Place,
    pub(super) values: Buffer,
}

/// What travels.
const DTYPE: DType = DType::BF16;

/// The way of some of a class's matrices to their owners and back, in one step. Collective.
pub(super) struct Exchange<'a> {
    pub(super) class: &'a Class,
    /// Those that take part, by their positions in the class.
    pub(super) matrices: &'a [usize],
    pub(super) subject: &'a Arc<Subject>,
    pub(super) device: &'a Device,
    pub(super) kernels: &'static dyn Kernels,
    pub(super) memory: Arc<Pool>,
}

impl Exchange<'_> {
    /// What this rank holds of the matrices that go to an owner in line with it, moved to where `update` of whole ones
    /// makes others of them, and back. `own` has the values of this rank's box of a matrix. Returns those of all
    /// matrices, in their order.
    pub(super) fn through(
        &self,
        own: &mut dyn FnMut(usize) -> Result<Buffer>,
        update: &mut dyn FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<(usize, Buffer)>> {
        let (class, at) = (self.class, self.class.own());
        let cuts = class.cuts();
        let places = class.held(self.matrices, &at, 0)?;
        let with_values = |place: Place| Ok(Piece { values: own(place.matrix)?, place });
        let mut pieces = places.into_iter().map(with_values).collect::<Result<Vec<_>>>()?;
        let mut sent = vec![];
        for (last, &axis) in cuts.iter().enumerate() {
            let group = &class.axes[axis].group;
            let goes = |place: &Place, peer: usize| class.matrices[place.matrix].owner[axis] == peer;
            let there: Vec<Place> = pieces.iter().map(|piece| piece.place.clone()).collect();
            let comes = |peer: usize| class.moved(self.matrices, &at, last, peer);
            let comes = (0..group.size()).map(comes).collect::<Result<Vec<_>>>()?;
            pieces = self.exchange(group, pieces, goes, comes, "to their owners")?;
            sent.push(there);
        }
        pieces = self.updated(pieces, update)?;
        for (&axis, there) in cuts.iter().zip(sent).rev() {
            let group = &class.axes[axis].group;
            // Each goes where it came from.
            let goes = |place: &Place, peer: usize| place.from.last() == Some(&peer);
            let went = |at: &usize, peer: usize| class.matrices[there[*at].matrix].owner[axis] == peer;
            let went = |peer: usize| (0..there.len()).filter(move |at| went(at, peer)).collect::<Vec<_>>();
            let order: Vec<Vec<usize>> = (0..group.size()).map(went).collect();
            let comes = order.iter().map(|back| back.iter().map(|&at| there[at].clone()).collect()).collect();
            pieces = self.exchange(group, pieces, goes, comes, "back from their owners")?;
            // As they were before they went: so the ranks of the axes before expect them.
            let mut in_order: Vec<_> = order.into_iter().flatten().zip(pieces).collect();
            in_order.sort_by_key(|(at, _)| *at);
            pieces = in_order.into_iter().map(|(_, piece)| piece).collect();
        }
        self.over_replicas(pieces)
    }

    /// One all-to-all. A piece that comes has the place that is expected of it.
    fn exchange(
        &self,
        group: &ProcessGroup,
        pieces: Vec<Piece>,
        goes: impl Fn(&Place, usize) -> bool,
        comes: Vec<Vec<Place>>,
        how: &str,
    ) -> Result<Vec<Piece>> {
        let elements = |places: &mut dyn Iterator<Item = &Place>| places.map(|place| place.region.elements()).sum();
        let places = || pieces.iter().map(|piece| &piece.place);
        let peers = 0..group.size();
        let send_counts: Vec<usize> =
            peers.clone().map(|peer| elements(&mut places().filter(|place| goes(place, peer)))).collect();
        let recv_counts = comes.iter().map(|places| elements(&mut places.iter())).collect();
        let mut input = self.memory.take(DTYPE, send_counts.iter().sum())?;
        let mut end = 0;
        for peer in peers {
            for piece in pieces.iter().filter(|piece| goes(&piece.place, peer)) {
                end = self.put(&piece.values, &mut input, end)?;
            }
        }
        drop(pieces);
        let group = self.signed(group, how);
        let part = ExchangePart { input, send_counts, recv_counts };
        let output = one(group.all_to_all(vec![part], self.memory.clone()).wait()?)?;
        let mut begin = 0;
        let mut came = vec![];
        for place in comes.into_iter().flatten() {
            let end = begin + place.region.elements();
            came.push(Piece { values: self.cut(&output, begin..end)?, place });
            begin = end;
        }
        self.memory.give(output);
        Ok(came)
    }

    /// Puts the matrices that this rank owns together, updates them, and cuts them into the same pieces.
    fn updated(
        &self,
        mut pieces: Vec<Piece>,
        update: &mut dyn FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Piece>> {
        for &matrix in self.matrices {
            let of_matrix = |piece: &Piece| piece.place.matrix == matrix;
            if !pieces.iter().any(of_matrix) {
                continue;
            }
            let shape = self.class.matrices[matrix].param.shape().dims();
            let mut whole = self.memory.zeros(DTYPE, shape.iter().product())?;
            for piece in pieces.iter().filter(|piece| of_matrix(piece)) {
                let (begin, rows) = lie(piece, shape);
                let room = whole.len();
                let to = SliceMut::from(&mut whole).range(begin..room)?;
                self.kernels.copy_rows(Slice::from(&piece.values), to, rows)?;
            }
            let updated = update(matrix, &to_tensor(whole, shape, self.device)?)?;
            let updated = crate::storage::copied(&updated)?;
            for piece in pieces.iter_mut().filter(|piece| of_matrix(piece)) {
                let (begin, rows) = lie(piece, shape);
                let rows = Rows { from_stride: rows.to_stride, to_stride: rows.from_stride, ..rows };
                let from = Slice::from(&updated).range(begin..updated.len())?;
                self.kernels.copy_rows(from, (&mut piece.values).into(), rows)?;
            }
        }
        Ok(pieces)
    }

    /// What the ranks that hold the same have updated, on all of them.
    fn over_replicas(&self, pieces: Vec<Piece>) -> Result<Vec<(usize, Buffer)>> {
        let mut have: Vec<(usize, Buffer)> =
            pieces.into_iter().map(|piece| (piece.place.matrix, piece.values)).collect();
        let same: Vec<usize> = (0..self.class.axes.len()).filter(|&axis| self.class.axes[axis].cut.is_none()).collect();
        for (number, &axis) in same.iter().enumerate() {
            // Along those before, all have been brought together already.
            let (own, rest) = (self.class.own(), &same[number + 1..]);
            let is_in_line = |matrix: usize| {
                let owner = &self.class.matrices[matrix].owner;
                rest.iter().all(|&axis| owner[axis] == own[axis])
            };
            have = self.over(&self.class.axes[axis], axis, have, is_in_line)?;
        }
        have.sort_by_key(|(matrix, _)| *matrix);
        Ok(have)
    }

    fn over(
        &self,
        Axis { group, .. }: &Axis,
        axis: usize,
        have: Vec<(usize, Buffer)>,
        is_in_line: impl Fn(usize) -> bool,
    ) -> Result<Vec<(usize, Buffer)>> {
        let own = self.class.own();
        let by_peer = |peer: usize| {
            let is_there = |matrix: &usize| self.class.matrices[*matrix].owner[axis] == peer && is_in_line(*matrix);
            self.matrices.iter().copied().filter(is_there).collect::<Vec<_>>()
        };
        let order: Vec<Vec<usize>> = (0..group.size()).map(by_peer).collect();
        let elements = |matrix: usize| Ok(self.class.region(matrix, &own)?.elements());
        let mut counts = vec![];
        for matrices in &order {
            counts.push(matrices.iter().map(|&matrix| elements(matrix)).sum::<Result<usize>>()?);
        }
        let mut input = self.memory.zeros(DTYPE, counts[group.rank()])?;
        let mut end = 0;
        for matrix in &order[group.rank()] {
            let Some((_, values)) = have.iter().find(|(own, _)| own == matrix) else {
                return Err(Error::Argument("a matrix was updated by nobody".into()));
            };
            end = self.put(values, &mut input, end)?;
        }
        drop(have);
        let input = Arc::new(TensorMemory(to_tensor(input, &[counts[group.rank()]], self.device)?));
        let part = GatherPart { input, counts };
        let group = self.signed(group, "to the replicas");
        let output = one(group.all_gather(vec![part], self.memory.clone()).wait()?)?;
        let mut begin = 0;
        let mut all = vec![];
        for matrix in order.into_iter().flatten() {
            let end = begin + elements(matrix)?;
            all.push((matrix, self.cut(&output, begin..end)?));
            begin = end;
        }
        self.memory.give(output);
        Ok(all)
    }

    fn signed(&self, group: &ProcessGroup, how: &str) -> ProcessGroup {
        group.signed(Signature::new(self.subject, self.matrices.iter().copied()).with_how(how))
    }

    /// Copies values to the end of a buffer that is being filled; returns the new end.
    fn put(&self, values: &Buffer, to: &mut Buffer, end: usize) -> Result<usize> {
        let to = SliceMut::from(to).range(end..end + values.len())?;
        self.kernels.copy(values.into(), to)?;
        Ok(end + values.len())
    }

    /// A copy of some of a buffer's elements.
    fn cut(&self, from: &Buffer, elements: std::ops::Range<usize>) -> Result<Buffer> {
        let mut part = self.kernels.zeros(DTYPE, elements.len())?;
        self.kernels.copy(Slice::from(from).range(elements)?, (&mut part).into())?;
        Ok(part)
    }
}

/// Where a piece begins in its matrix, and its rows, from the piece to the matrix.
fn lie(piece: &Piece, shape: &[usize]) -> (usize, Rows) {
    let (region, width) = (&piece.place.region, shape[1]);
    let rows = Rows {
        count: if region.is_empty() { 0 } else { region.sizes[0] },
        len: region.sizes[1],
        from_stride: region.sizes[1],
        to_stride: width,
    };
    let begin = region.offsets[0] * width + region.offsets[1];
    (if region.is_empty() { 0 } else { begin }, rows)
}

fn one(mut buffers: Vec<Buffer>) -> Result<Buffer> {
    buffers.pop().ok_or_else(|| Error::Argument("a collective of one buffer returned none".into()))
}
