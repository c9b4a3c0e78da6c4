//! Attention on the CPU: a task computes a head, block by block of its queries.
//!
//! A block ends where its document ends. Heads are read and written in place in `[batch, T, heads * head_dim]`, without
//! a transpose.

use std::ops::Range;

use candle_core::{Result, Storage, Tensor};

use super::documents::Documents;
use super::fused::{AttentionDims, AttentionOptions, Engine, HeadLayout, VisibleKeys};
use crate::nn::cpu::matrix::{Mat, MatMut, Shared, product_here};
use crate::nn::cpu::simd::{dot, kernel, max, probability, sum, tanh};
use crate::nn::cpu::{cpu, floats, for_each_task, read, storage, tensor_like};

/// Queries of a block.
const BLOCK: usize = 64;

/// The engine of the CPU.
#[derive(Clone, Copy)]
pub(super) struct Cpu;

impl Engine for Cpu {
    /// `[batch, n_heads, T]`.
    type LogSums = Vec<f32>;

    fn forward(self, dims: &AttentionDims, operands: &[&Tensor]) -> Result<(Storage, Vec<f32>)> {
        let (out, log_sums) = with_values(operands, |values| dims.forward(values, dims.layouts(operands)))?;
        Ok((storage(out, operands[0].dtype())?, log_sums))
    }

    fn backward(
        self,
        dims: &AttentionDims,
        operands: &[&Tensor],
        [out, d_out]: [&Tensor; 2],
        log_sums: &Vec<f32>,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut gradients: Vec<_> = operands.iter().map(|operand| vec![0f32; operand.elem_count()]).collect();
        let shared: Vec<_> = gradients.iter_mut().map(|gradient| Shared::new(gradient)).collect();
        read!(out, out);
        read!(d_out, d_out);
        with_values(operands, |values| {
            dims.backward(values, dims.layouts(operands), &out, &d_out, log_sums, three(&shared));
        })?;
        let gradients = gradients.into_iter().zip(operands);
        gradients.map(|(gradient, like)| tensor_like(gradient, like).map(Some)).collect()
    }
}

/// Returns the items for q, k and v, which may all be one item.
fn three<T>(items: &[T]) -> [&T; 3] {
    std::array::from_fn(|i| &items[i.min(items.len() - 1)])
}

/// Calls `f` with the values of q, k and v.
fn with_values<R>(operands: &[&Tensor], f: impl FnOnce([&[f32]; 3]) -> R) -> Result<R> {
    let storages: Vec<_> = operands.iter().map(|operand| operand.storage_and_layout()).collect();
    let values = storages.iter().map(|(storage, layout)| floats(cpu(storage)?, layout)).collect::<Result<Vec<_>>>()?;
    Ok(f(three(&values).map(|values| &values[..])))
}

impl AttentionDims {
    /// Returns the blocks of a row of the batch. No block crosses the border of a document, so a document's result has
    /// the same bits as if it were alone.
    fn blocks(&self, batch: usize) -> impl Iterator<Item = QueryBlock> {
        self.options.visible_keys(self.queries, self.keys, self.documents.as_ref(), batch).flat_map(|visible| {
            let queries = visible.queries();
            let firsts = queries.clone().step_by(BLOCK);
            firsts.map(move |first| QueryBlock::new(visible, first, BLOCK.min(queries.end - first)))
        })
    }

    /// Returns the number of elements of each block's scores. Rows without documents have the same blocks, so one row
    /// is counted.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let rows = self.documents.as_ref().map_or(1, Documents::batch);
        (0..rows).flat_map(|batch| self.blocks(batch)).map(|block| block.count * block.key_count)
    }

    /// Returns the elements of the largest block's scores.
    fn scores(&self) -> usize {
        self.sizes().max().unwrap_or(0)
    }

    /// Returns the rough cost of one head, in elements of elementwise work.
    fn head_cost(&self) -> usize {
        self.sizes().sum::<usize>() / self.documents.as_ref().map_or(1, Documents::batch) * self.dim / 64
    }

    fn scaling(&self) -> Scaling {
        let AttentionOptions { scale, softcap, .. } = self.options;
        Scaling { scale: scale as f32, softcap: softcap.map(|cap| cap as f32) }
    }

    /// Returns the matrix of `count` rows of a head.
    fn mat<'a>(
        &self,
        data: &'a [f32],
        layout: HeadLayout,
        batch: usize,
        first: usize,
        count: usize,
        head: usize,
    ) -> Mat<'a> {
        Mat::strided(&data[layout.index(batch, first, head, self.dim)..], count, self.dim, layout.row_stride, 1)
    }

    /// Drops elements of a block's probabilities, or of their gradients.
    fn drop(&self, values: &mut [f32], batch: usize, head: usize, block: QueryBlock) {
        let Some(mask) = &self.mask else { return };
        for (i, row) in values.chunks_exact_mut(block.key_count).enumerate() {
            let query = (batch * self.n_heads + head) * self.queries + block.first + i;
            mask.apply(query * self.keys + block.first_key, row);
        }
    }

    /// Returns the attention's output and the logarithms of the sums, `[batch, n_heads, T]`.
    fn forward(&self, [q, k, v]: [&[f32]; 3], [qp, kp, vp]: [HeadLayout; 3]) -> (Vec<f32>, Vec<f32>) {
        let mut out = vec![0f32; self.batch * self.queries * self.n_heads * self.dim];
        let mut log_sums = vec![0f32; self.batch * self.n_heads * self.queries];
        let [op, ..] = self.separate_layouts();
        let (out_all, sums_all) = (Shared::new(&mut out), Shared::new(&mut log_sums));
        let scratch = || vec![0f32; self.scores()];
        for_each_task(self.batch * self.n_heads, self.head_cost(), scratch, |task, scratch| {
            let (batch, head) = (task / self.n_heads, task % self.n_heads);
            let kv_head = head / (self.n_heads / self.n_kv_heads);
            for block in self.blocks(batch) {
                let QueryBlock { first, count, first_key, key_count, .. } = block;
                let scores = Shared::new(&mut scratch[..count * key_count]);
                let q = self.mat(q, qp, batch, first, count, head);
                let k = self.mat(k, kp, batch, first_key, key_count, kv_head);
                let v = self.mat(v, vp, batch, first_key, key_count, kv_head);
                // SAFETY: the scores belong to this thread, and the product does not use them after it returns.
                product_here(unsafe { scores.mat(0, count, key_count, key_count) }, false, q, k.t());
                // SAFETY: as above. Only this task writes these sums.
                let (scores, sums) =
                    unsafe { (scores.slice(0, count * key_count), sums_all.slice(task * self.queries + first, count)) };
                softmax_rows(scores, sums, block, self.scaling());
                self.drop(scores, batch, head, block);
                // SAFETY: no other task writes this head's columns of the output.
                let o = unsafe { out_all.mat(op.index(batch, first, head, self.dim), count, self.dim, op.row_stride) };
                product_here(o, false, Mat::new(scores, count, key_count), v);
            }
        });
        (out, log_sums)
    }

    /// Adds the gradients of q, k and v to three buffers, or to one buffer that is passed three times.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &self,
        [q, k, v]: [&[f32]; 3],
        [qp, kp, vp]: [HeadLayout; 3],
        out: &[f32],
        d_out: &[f32],
        log_sums: &[f32],
        [dq, dk, dv]: [&Shared<'_>; 3],
    ) {
        let [op, ..] = self.separate_layouts();
        let group = self.n_heads / self.n_kv_heads;
        let scratch = || (vec![0f32; self.scores()], vec![0f32; self.scores()], vec![0f32; BLOCK]);
        // A task is a key head with all of its query heads, so that no other task adds to its gradients.
        for_each_task(self.batch * self.n_kv_heads, group * self.head_cost(), scratch, |task, (p, ds, deltas)| {
            let (batch, kv_head) = (task / self.n_kv_heads, task % self.n_kv_heads);
            for head in kv_head * group..(kv_head + 1) * group {
                for block in self.blocks(batch) {
                    let QueryBlock { first, count, first_key, key_count, .. } = block;
                    let (p, ds) = (&mut p[..count * key_count], &mut ds[..count * key_count]);
                    let q = self.mat(q, qp, batch, first, count, head);
                    let k = self.mat(k, kp, batch, first_key, key_count, kv_head);
                    let v = self.mat(v, vp, batch, first_key, key_count, kv_head);
                    let d_o = self.mat(d_out, op, batch, first, count, head);
                    product_here(MatMut::new(p, count, key_count), false, q, k.t());
                    product_here(MatMut::new(ds, count, key_count), false, d_o, v.t());
                    for (i, delta) in deltas[..count].iter_mut().enumerate() {
                        let at = op.index(batch, first + i, head, self.dim);
                        *delta = row_dot(&out[at..at + self.dim], &d_out[at..at + self.dim]);
                    }
                    let sums = &log_sums[(batch * self.n_heads + head) * self.queries + first..][..count];
                    self.drop(ds, batch, head, block);
                    softmax_rows_back(p, ds, sums, deltas, block, self.scaling());
                    self.drop(p, batch, head, block);
                    let (p, ds) = (Mat::new(p, count, key_count), Mat::new(ds, count, key_count));
                    // SAFETY: only this task accesses this key head's columns of the gradients, and its query heads'
                    // columns. No product uses them after it returns.
                    unsafe {
                        let d = self.dim;
                        let (v_at, k_at) =
                            (vp.index(batch, first_key, kv_head, d), kp.index(batch, first_key, kv_head, d));
                        product_here(dv.mat(v_at, key_count, d, vp.row_stride), true, p.t(), d_o);
                        product_here(dk.mat(k_at, key_count, d, kp.row_stride), true, ds.t(), q);
                        product_here(dq.mat(qp.index(batch, first, head, d), count, d, qp.row_stride), false, ds, k);
                    }
                }
            }
        });
    }
}

/// A block of queries, and the range of keys that any of them sees.
#[derive(Clone, Copy)]
struct QueryBlock {
    first: usize,
    count: usize,
    first_key: usize,
    /// Number of keys in the range.
    key_count: usize,
    visible: VisibleKeys,
}

impl QueryBlock {
    fn new(visible: VisibleKeys, first: usize, count: usize) -> Self {
        // Both ends only grow from query to query.
        let (start, end) = (visible.of(first).start, visible.of(first + count - 1).end);
        QueryBlock { first, count, first_key: start, key_count: end - start, visible }
    }

    /// Returns the visible keys of a query of the block, counted from the first key of the range.
    #[inline(always)]
    fn of(self, row: usize) -> Range<usize> {
        let keys = self.visible.of(self.first + row);
        keys.start - self.first_key..keys.end - self.first_key
    }
}

/// The scale and the soft cap of scores.
#[derive(Clone, Copy)]
struct Scaling {
    scale: f32,
    softcap: Option<f32>,
}

kernel! {
    /// Replaces rows of scores by probabilities. The probabilities of hidden keys become 0.
    fn softmax_rows(scores: &mut [f32], log_sums: &mut [f32], block: QueryBlock, scaling: Scaling) {
        for (i, (row, log_sum)) in scores.chunks_exact_mut(block.key_count).zip(log_sums).enumerate() {
            let visible = block.of(i);
            row[..visible.start].fill(0.0);
            row[visible.end..].fill(0.0);
            let row = &mut row[visible];
            let scale = match scaling.softcap {
                Some(cap) => {
                    let inner = scaling.scale / cap;
                    row.iter_mut().for_each(|x| *x = cap * tanh(*x * inner));
                    1.0
                }
                None => scaling.scale,
            };
            // The largest scaled score, for either sign of the scale.
            let highest = if scale >= 0.0 {
                max(row) * scale
            } else {
                row.iter().fold(f32::NEG_INFINITY, |a, x| a.max(x * scale))
            };
            let total = sum_exp_in_place(row, scale, highest);
            let inverse = 1.0 / total;
            row.iter_mut().for_each(|x| *x *= inverse);
            *log_sum = highest + total.ln();
        }
    }

    /// Replaces rows of scores by probabilities, and rows of the probabilities' gradients by the scores' gradients.
    fn softmax_rows_back(
        p: &mut [f32],
        ds: &mut [f32],
        log_sums: &[f32],
        deltas: &[f32],
        block: QueryBlock,
        scaling: Scaling,
    ) {
        let both = p.chunks_exact_mut(block.key_count).zip(ds.chunks_exact_mut(block.key_count));
        for (i, (((p, ds), &log_sum), &delta)) in both.zip(log_sums).zip(deltas).enumerate() {
            let visible = block.of(i);
            for row in [&mut *p, &mut *ds] {
                row[..visible.start].fill(0.0);
                row[visible.end..].fill(0.0);
            }
            let both = p[visible.clone()].iter_mut().zip(&mut ds[visible]);
            if let Some(cap) = scaling.softcap {
                let inner = scaling.scale / cap;
                for (p, ds) in both {
                    let t = tanh(*p * inner);
                    *p = probability(t.mul_add(cap, -log_sum));
                    *ds = *p * (*ds - delta) * (1.0 - t * t) * scaling.scale;
                }
            } else {
                for (p, ds) in both {
                    *p = probability(p.mul_add(scaling.scale, -log_sum));
                    *ds = *p * (*ds - delta) * scaling.scale;
                }
            }
        }
    }

    fn row_dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b, 0.0)
    }
}

/// Replaces each x by e^(scale x - shift), and returns the sum.
#[inline(always)]
fn sum_exp_in_place(row: &mut [f32], scale: f32, shift: f32) -> f32 {
    row.iter_mut().for_each(|x| *x = probability(x.mul_add(scale, -shift)));
    sum(row)
}
