//! The products of an attention, block by block, and their way back.

use super::options::AttentionOptions;
use super::softmax::{Rows, Scores, row_dot, softmax_rows, softmax_rows_back};
use crate::nn::attention::documents::Documents;
use crate::nn::cpu::matrix::{Mat, MatMut, Shared, product_here};
use crate::nn::cpu::parallel::each;
use crate::random::Mask;

/// Queries of a block.
const BLOCK: usize = 64;

/// What an attention is over. `queries` and `keys` count positions.
pub(super) struct Dims {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) dim: usize,
    pub(super) options: AttentionOptions,
    pub(super) documents: Option<Documents>,
    /// Which of the probabilities `[batch, n_heads, T, S]` are dropped.
    pub(super) mask: Option<Mask>,
}

/// Where the heads of one operand lie in its buffer: batch by batch, in each a row for each position.
#[derive(Clone, Copy)]
pub(super) struct Place {
    offset: usize,
    batch_stride: usize,
    row_stride: usize,
}

impl Place {
    /// Index of the first element of a head at a position.
    fn at(&self, batch: usize, position: usize, head: usize, dim: usize) -> usize {
        self.offset + batch * self.batch_stride + position * self.row_stride + head * dim
    }
}

impl Dims {
    /// The blocks of a row of the batch. None reaches over the border of a document, so that a document is computed to
    /// the bit as if it were alone.
    fn blocks(&self, batch: usize) -> impl Iterator<Item = Rows> {
        self.options.sights(self.queries, self.keys, self.documents.as_ref(), batch).flat_map(|sight| {
            let queries = sight.queries();
            let firsts = queries.clone().step_by(BLOCK);
            firsts.map(move |first| Rows::new(sight, first, BLOCK.min(queries.end - first)))
        })
    }

    /// The elements of each block's scores; where rows have the same blocks, those of one row.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let rows = self.documents.as_ref().map_or(1, Documents::batch);
        (0..rows).flat_map(|batch| self.blocks(batch)).map(|rows| rows.count * rows.seen)
    }

    /// Elements of the largest block's scores.
    fn scores(&self) -> usize {
        self.sizes().max().unwrap_or(0)
    }

    /// Rough cost of one head, in elements of elementwise work.
    fn head_cost(&self) -> usize {
        self.sizes().sum::<usize>() / self.documents.as_ref().map_or(1, Documents::batch) * self.dim / 64
    }

    fn how(&self) -> Scores {
        let AttentionOptions { scale, softcap, .. } = self.options;
        Scores { scale: scale as f32, softcap: softcap.map(|cap| cap as f32) }
    }

    /// Places of q, k and v that are tensors of their own.
    pub(super) fn apart(&self) -> [Place; 3] {
        let place = |steps: usize, heads: usize| Place {
            offset: 0,
            batch_stride: steps * heads * self.dim,
            row_stride: heads * self.dim,
        };
        let kv = place(self.keys, self.n_kv_heads);
        [place(self.queries, self.n_heads), kv, kv]
    }

    /// Places of q, k and v in one tensor.
    pub(super) fn fused(&self) -> [Place; 3] {
        let row_stride = (self.n_heads + 2 * self.n_kv_heads) * self.dim;
        let place =
            |head: usize| Place { offset: head * self.dim, batch_stride: self.queries * row_stride, row_stride };
        [place(0), place(self.n_heads), place(self.n_heads + self.n_kv_heads)]
    }

    /// The matrix of `count` rows of a head.
    fn mat<'a>(&self, data: &'a [f32], place: Place, batch: usize, first: usize, count: usize, head: usize) -> Mat<'a> {
        Mat::strided(&data[place.at(batch, first, head, self.dim)..], count, self.dim, place.row_stride, 1)
    }

    /// Drops some of a block's probabilities, or the same of their gradients.
    fn drop(&self, block: &mut [f32], batch: usize, head: usize, rows: Rows) {
        let Some(mask) = &self.mask else { return };
        for (i, row) in block.chunks_exact_mut(rows.seen).enumerate() {
            let query = (batch * self.n_heads + head) * self.queries + rows.first + i;
            mask.apply(query * self.keys + rows.first_key, row);
        }
    }

    /// The attention's output and the logarithms of the sums, `[batch, n_heads, T]`.
    pub(super) fn forward(&self, [q, k, v]: [&[f32]; 3], [qp, kp, vp]: [Place; 3]) -> (Vec<f32>, Vec<f32>) {
        let mut out = vec![0f32; self.batch * self.queries * self.n_heads * self.dim];
        let mut log_sums = vec![0f32; self.batch * self.n_heads * self.queries];
        let [op, ..] = self.apart();
        let (out_all, sums_all) = (Shared::new(&mut out), Shared::new(&mut log_sums));
        let scratch = || vec![0f32; self.scores()];
        each(self.batch * self.n_heads, self.head_cost(), scratch, |task, scratch| {
            let (batch, head) = (task / self.n_heads, task % self.n_heads);
            let kv_head = head / (self.n_heads / self.n_kv_heads);
            for rows in self.blocks(batch) {
                let Rows { first, count, first_key, seen, .. } = rows;
                let scores = Shared::new(&mut scratch[..count * seen]);
                let q = self.mat(q, qp, batch, first, count, head);
                let k = self.mat(k, kp, batch, first_key, seen, kv_head);
                let v = self.mat(v, vp, batch, first_key, seen, kv_head);
                // SAFETY: the scores are this thread's, and the product is done with them when it returns.
                product_here(unsafe { scores.mat(0, count, seen, seen) }, false, q, k.t());
                // SAFETY: as above; of the sums, these are this task's.
                let (scores, sums) =
                    unsafe { (scores.slice(0, count * seen), sums_all.slice(task * self.queries + first, count)) };
                softmax_rows(scores, sums, rows, self.how());
                self.drop(scores, batch, head, rows);
                // SAFETY: no other task writes this head's columns of the output.
                let o = unsafe { out_all.mat(op.at(batch, first, head, self.dim), count, self.dim, op.row_stride) };
                product_here(o, false, Mat::new(scores, count, seen), v);
            }
        });
        (out, log_sums)
    }

    /// Adds the gradients of q, k and v to `grads`, which may be one buffer three times.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn backward(
        &self,
        [q, k, v]: [&[f32]; 3],
        [qp, kp, vp]: [Place; 3],
        out: &[f32],
        d_out: &[f32],
        log_sums: &[f32],
        [dq, dk, dv]: [&Shared<'_>; 3],
    ) {
        let [op, ..] = self.apart();
        let group = self.n_heads / self.n_kv_heads;
        let scratch = || (vec![0f32; self.scores()], vec![0f32; self.scores()], vec![0f32; BLOCK]);
        // A task is a key head with all of its query heads, so that nobody else adds to its gradients.
        each(self.batch * self.n_kv_heads, group * self.head_cost(), scratch, |task, (p, ds, deltas)| {
            let (batch, kv_head) = (task / self.n_kv_heads, task % self.n_kv_heads);
            for head in kv_head * group..(kv_head + 1) * group {
                for rows in self.blocks(batch) {
                    let Rows { first, count, first_key, seen, .. } = rows;
                    let (p, ds) = (&mut p[..count * seen], &mut ds[..count * seen]);
                    let q = self.mat(q, qp, batch, first, count, head);
                    let k = self.mat(k, kp, batch, first_key, seen, kv_head);
                    let v = self.mat(v, vp, batch, first_key, seen, kv_head);
                    let d_o = self.mat(d_out, op, batch, first, count, head);
                    product_here(MatMut::new(p, count, seen), false, q, k.t());
                    product_here(MatMut::new(ds, count, seen), false, d_o, v.t());
                    for (i, delta) in deltas[..count].iter_mut().enumerate() {
                        let at = op.at(batch, first + i, head, self.dim);
                        *delta = row_dot(&out[at..at + self.dim], &d_out[at..at + self.dim]);
                    }
                    let sums = &log_sums[(batch * self.n_heads + head) * self.queries + first..][..count];
                    self.drop(ds, batch, head, rows);
                    softmax_rows_back(p, ds, sums, deltas, rows, self.how());
                    self.drop(p, batch, head, rows);
                    let (p, ds) = (Mat::new(p, count, seen), Mat::new(ds, count, seen));
                    // SAFETY: only this task touches this key head's columns of the gradients, and its query heads'
                    // columns; each product is done when it returns.
                    unsafe {
                        let d = self.dim;
                        let (v_at, k_at) = (vp.at(batch, first_key, kv_head, d), kp.at(batch, first_key, kv_head, d));
                        product_here(dv.mat(v_at, seen, d, vp.row_stride), true, p.t(), d_o);
                        product_here(dk.mat(k_at, seen, d, kp.row_stride), true, ds.t(), q);
                        product_here(dq.mat(qp.at(batch, first, head, d), count, d, qp.row_stride), false, ds, k);
                    }
                }
            }
        });
    }
}
