//! Attention on the CPU: a task computes a head, block by block of its queries, and a block tile by tile of its keys.
//!
//! Only a tile's scores exist at once, so they stay in the processor's cache at any length. Forward keeps each query's
//! highest score so far and the sum of its exponentials, as in Milakov and Gimelshein, 2018, arXiv:1805.02867.
//!
//! A block ends where its document ends. Heads are read and written in place in `[batch, T, heads * head_dim]`, without
//! a transpose.

use std::ops::Range;

use candle_core::{Device, Result, Storage, Tensor};

use super::documents::Documents;
use super::engine::{AttentionDims, Engine, HeadLayout};
use super::options::AttentionOptions;
use super::visible_keys::VisibleKeys;
use crate::nn::cpu::matrix::{Mat, MatMut, Shared, product_here};
use crate::nn::cpu::simd::{dot, kernel, max, probability, sum, tanh};
use crate::nn::cpu::{cpu, floats, for_each_task, read, storage, tensor_like};

/// Queries of a block.
const BLOCK: usize = 128;

/// Keys of a tile. Not a power of two, because rows that lie a power of two apart compete for the same places in a
/// cache.
const KEYS: usize = 192;

/// The engine of the CPU.
#[derive(Clone, Copy)]
pub(super) struct Cpu;

impl Engine for Cpu {
    fn forward(&self, dims: &AttentionDims, operands: &[&Tensor]) -> Result<(Storage, Tensor)> {
        let (out, log_sums) = with_values(operands, |values| dims.forward(values, dims.layouts(operands)))?;
        let log_sums = Tensor::from_vec(log_sums, (dims.batch, dims.n_heads, dims.queries), &Device::Cpu)?;
        Ok((storage(out, dims.dtype)?, log_sums))
    }

    fn backward(
        &self,
        dims: &AttentionDims,
        operands: &[&Tensor],
        [out, d_out]: [&Tensor; 2],
        log_sums: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut gradients: Vec<_> = operands.iter().map(|operand| vec![0f32; operand.elem_count()]).collect();
        let shared: Vec<_> = gradients.iter_mut().map(|gradient| Shared::new(gradient)).collect();
        read!(out, out);
        read!(d_out, d_out);
        read!(log_sums, log_sums);
        with_values(operands, |values| {
            dims.backward(values, dims.layouts(operands), &out, &d_out, &log_sums, three(&shared));
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
    /// Returns the blocks of a row of the batch, with all keys that they see. No block crosses the border of a document,
    /// so a document's result has the same bits as if it were alone.
    fn blocks(&self, batch: usize) -> impl Iterator<Item = Tile> {
        let &AttentionDims { queries, keys, positions, .. } = self;
        self.options.visible_keys(queries, keys, positions, self.documents.as_ref(), batch).flat_map(|visible| {
            let queries = visible.queries();
            let firsts = queries.clone().step_by(BLOCK);
            firsts.map(move |first| Tile::of_queries(visible, first, BLOCK.min(queries.end - first)))
        })
    }

    /// Returns the number of elements of a tile's scores, at most.
    fn scores(&self) -> usize {
        BLOCK.min(self.queries) * KEYS.min(self.keys)
    }

    /// Returns the rough cost of one head, in elements of elementwise work.
    fn head_cost(&self) -> usize {
        // Rows without documents have the same blocks, so one row is counted.
        let rows = self.documents.as_ref().map_or(1, Documents::batch);
        let scores = (0..rows).flat_map(|batch| self.blocks(batch)).map(|block| block.count * block.key_count);
        scores.sum::<usize>() / rows * self.dim / 64
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
        let data = &data[layout.index(batch, first, head, self.dim)..];
        Mat::strided(data, count, self.dim, layout.row_stride, 1).as_dtype(self.dtype)
    }

    /// Drops elements of a tile's probabilities, or of their gradients.
    fn drop(&self, values: &mut [f32], batch: usize, head: usize, tile: Tile) {
        let Some(mask) = &self.mask else { return };
        for (i, row) in values.chunks_exact_mut(tile.key_count).enumerate() {
            let query = (batch * self.n_heads + head) * self.queries + tile.first + i;
            mask.apply(query * self.keys + tile.first_key, row);
        }
    }

    /// Returns the attention's output and the logarithms of the sums, `[batch, n_heads, T]`.
    fn forward(&self, [q, k, v]: [&[f32]; 3], [qp, kp, vp]: [HeadLayout; 3]) -> (Vec<f32>, Vec<f32>) {
        let mut out = vec![0f32; self.batch * self.queries * self.n_heads * self.dim];
        let mut log_sums = vec![0f32; self.batch * self.n_heads * self.queries];
        let [op, ..] = self.separate_layouts();
        let (out_all, sums_all) = (Shared::new(&mut out), Shared::new(&mut log_sums));
        let scratch = || (vec![0f32; self.scores()], vec![0f32; BLOCK], vec![0f32; BLOCK]);
        for_each_task(self.batch * self.n_heads, self.head_cost(), scratch, |task, (scores, totals, factors)| {
            let (batch, head) = (task / self.n_heads, task % self.n_heads);
            let kv_head = head / (self.n_heads / self.n_kv_heads);
            for block in self.blocks(batch) {
                let Tile { first, count, .. } = block;
                let q = self.mat(q, qp, batch, first, count, head);
                // SAFETY: no other task writes this head's columns of the output.
                let out =
                    || unsafe { out_all.mat(op.index(batch, first, head, self.dim), count, self.dim, op.row_stride) };
                // SAFETY: only this task writes these sums.
                let highest = unsafe { sums_all.slice(task * self.queries + first, count) };
                let (totals, factors) = (&mut totals[..count], &mut factors[..count]);
                // The distance between two infinities would be NaN.
                highest.fill(f32::MIN);
                totals.fill(0.0);
                for tile in block.tiles() {
                    let k = self.mat(k, kp, batch, tile.first_key, tile.key_count, kv_head);
                    let v = self.mat(v, vp, batch, tile.first_key, tile.key_count, kv_head);
                    let scores = &mut scores[..count * tile.key_count];
                    product_here(MatMut::new(scores, count, tile.key_count), false, q, k.t());
                    exponentials(scores, highest, totals, factors, tile, self.scaling());
                    self.drop(scores, batch, head, tile);
                    let follows = tile.first_key > block.first_key;
                    if follows {
                        scale_rows(&mut out(), factors);
                    }
                    product_here(out(), follows, Mat::new(scores, count, tile.key_count).as_dtype(self.dtype), v);
                }
                for ((sum, total), factor) in highest.iter_mut().zip(&*totals).zip(&mut *factors) {
                    *factor = 1.0 / total;
                    *sum += total.ln();
                }
                scale_rows(&mut out(), factors);
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
                    let Tile { first, count, .. } = block;
                    let q = self.mat(q, qp, batch, first, count, head);
                    let d_o = self.mat(d_out, op, batch, first, count, head);
                    let deltas = &mut deltas[..count];
                    for (i, delta) in deltas.iter_mut().enumerate() {
                        let at = op.index(batch, first + i, head, self.dim);
                        *delta = row_dot(&out[at..at + self.dim], &d_out[at..at + self.dim]);
                    }
                    let sums = &log_sums[(batch * self.n_heads + head) * self.queries + first..][..count];
                    for tile in block.tiles() {
                        let Tile { first_key, key_count, .. } = tile;
                        let (p, ds) = (&mut p[..count * key_count], &mut ds[..count * key_count]);
                        let k = self.mat(k, kp, batch, first_key, key_count, kv_head);
                        let v = self.mat(v, vp, batch, first_key, key_count, kv_head);
                        product_here(MatMut::new(p, count, key_count), false, q, k.t());
                        product_here(MatMut::new(ds, count, key_count), false, d_o, v.t());
                        self.drop(ds, batch, head, tile);
                        softmax_rows_back(p, ds, sums, deltas, tile, self.scaling());
                        self.drop(p, batch, head, tile);
                        let [p, ds] = [p, ds].map(|values| Mat::new(values, count, key_count).as_dtype(self.dtype));
                        let follows = first_key > block.first_key;
                        // SAFETY: only this task accesses this key head's columns of the gradients, and its query
                        // heads' columns. No product uses them after it returns.
                        unsafe {
                            let d = self.dim;
                            let (v_at, k_at) =
                                (vp.index(batch, first_key, kv_head, d), kp.index(batch, first_key, kv_head, d));
                            product_here(dv.mat(v_at, key_count, d, vp.row_stride), true, p.t(), d_o);
                            product_here(dk.mat(k_at, key_count, d, kp.row_stride), true, ds.t(), q);
                            let q_at = qp.index(batch, first, head, d);
                            product_here(dq.mat(q_at, count, d, qp.row_stride), follows, ds, k);
                        }
                    }
                }
            }
        });
    }
}

/// Queries, and a range of the keys that they see.
#[derive(Clone, Copy)]
struct Tile {
    first: usize,
    count: usize,
    first_key: usize,
    /// Number of keys in the range.
    key_count: usize,
    visible: VisibleKeys,
}

impl Tile {
    /// Returns the tile with every key that any of the queries sees.
    fn of_queries(visible: VisibleKeys, first: usize, count: usize) -> Self {
        // Both ends only grow from query to query.
        let (start, end) = (visible.of(first).start, visible.of(first + count - 1).end);
        Tile { first, count, first_key: start, key_count: end - start, visible }
    }

    /// Returns tiles of the same queries with at most [`KEYS`] keys each.
    fn tiles(self) -> impl Iterator<Item = Tile> {
        let end = self.first_key + self.key_count;
        let firsts = (self.first_key..end).step_by(KEYS);
        firsts.map(move |first_key| Tile { first_key, key_count: KEYS.min(end - first_key), ..self })
    }

    /// Returns the tile's visible keys of a query, counted from the tile's first key.
    #[inline(always)]
    fn of(self, row: usize) -> Range<usize> {
        let keys = self.visible.of(self.first + row);
        let from_first = |key: usize| key.saturating_sub(self.first_key).min(self.key_count);
        from_first(keys.start)..from_first(keys.end)
    }
}

/// The scale and the soft cap of scores.
#[derive(Clone, Copy)]
struct Scaling {
    scale: f32,
    softcap: Option<f32>,
}

kernel! {
    /// Replaces rows of scores by the exponentials of their distances from the highest score so far, and adds these to
    /// `totals`. Hidden keys get 0. A rise of `highest` divides what was summed before by the row's factor.
    fn exponentials(
        scores: &mut [f32],
        highest: &mut [f32],
        totals: &mut [f32],
        factors: &mut [f32],
        tile: Tile,
        scaling: Scaling,
    ) {
        let sums = highest.iter_mut().zip(totals).zip(factors);
        for (i, (row, ((highest, total), factor))) in scores.chunks_exact_mut(tile.key_count).zip(sums).enumerate() {
            let visible = tile.of(i);
            row[..visible.start].fill(0.0);
            row[visible.end..].fill(0.0);
            *factor = 1.0;
            if visible.is_empty() {
                continue;
            }
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
            let here = if scale >= 0.0 {
                max(row) * scale
            } else {
                row.iter().fold(f32::NEG_INFINITY, |a, x| a.max(x * scale))
            };
            if here > *highest {
                *factor = probability(*highest - here);
                *highest = here;
            }
            *total = total.mul_add(*factor, sum_exp_in_place(row, scale, *highest));
        }
    }

    /// Multiplies each row by its factor.
    fn scale_rows(rows: &mut MatMut<'_>, factors: &[f32]) {
        for (row, &factor) in rows.rows().zip(factors) {
            if factor != 1.0 {
                row.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }

    /// Replaces rows of scores by probabilities, and rows of the probabilities' gradients by the scores' gradients.
    fn softmax_rows_back(
        p: &mut [f32],
        ds: &mut [f32],
        log_sums: &[f32],
        deltas: &[f32],
        tile: Tile,
        scaling: Scaling,
    ) {
        let both = p.chunks_exact_mut(tile.key_count).zip(ds.chunks_exact_mut(tile.key_count));
        for (i, (((p, ds), &log_sum), &delta)) in both.zip(log_sums).zip(deltas).enumerate() {
            let visible = tile.of(i);
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
