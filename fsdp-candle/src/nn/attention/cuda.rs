//! Attention on CUDA devices.
//!
//! In BF16 and F16, with heads of 64 or 128 elements and without dropout, one kernel computes forward and two compute
//! backward ([`FlashAttention`]), or cuDNN's kernels do, also for other heads. Scores never leave the chip.
//!
//! Otherwise cuBLAS computes the products of a block of queries with all key heads at once, and a kernel the softmax
//! between two products.
//!
//! Operands and results have the tensors' dtype. Scores and sums are F32, or F64 for F64. Forward keeps the output and
//! the logarithms of the sums, and backward computes each block's probabilities again. So memory grows with the length
//! of the sequence, not with its square. Keys and values of grouped heads are not repeated, and no mask is uploaded.
//!
//! Gradients of keys and values are sums over all queries, and over the query heads that share a key head. They are
//! added up in F32, in the order of blocks and heads, and rounded once.

use std::ops::Range;

use candle_core::{Device, Result, Storage, Tensor, bail};
use fsdp_core::{Buffer, DType};

use super::documents::Documents;
use super::engine::{AttentionDims, Engine, HeadLayout};
use super::visible_keys::VisibleKeys;
use crate::context_parallel::Positions;
use crate::error::Error;
use crate::kernels::cuda::{
    self, FlashAttention, Heads, Matrix, MatrixLayout, ScoreBlock, Visibility, add_products, wide,
};
use crate::kernels::{self, Kernels, Rows, Slice, SliceMut};
use crate::nn::weight::on_cuda;
use crate::random::Mask;
use crate::storage::{to_core_dtype, to_storage, to_tensor, with_slice, with_slices};

/// Bytes of a block's products of queries and keys. Larger blocks have fewer launches.
const BLOCK_BYTES: usize = 256 << 20;
/// Most queries of a block. Larger blocks compute more scores that causal queries do not see: with 256 queries and 8192
/// keys, 3 %.
const MOST_QUERIES: usize = 256;
/// Fewest queries of a block, for the products' speed.
const FEWEST_QUERIES: usize = 16;

/// Returns the engine of a tensor's device, if it is a CUDA device and has kernels for the dtype.
pub(super) fn engine(tensor: &Tensor) -> Option<impl Engine + use<>> {
    on_cuda(tensor).then_some(Cuda)
}

/// Returns the library that computes attention on a device, if it is not this one.
pub(super) fn library(device: &Device) -> Result<Option<String>> {
    let version = if device.is_cuda() { cuda::cudnn_version(device)? } else { None };
    Ok(version.map(|version| format!("cuDNN {version}")))
}

/// The engine of CUDA devices.
#[derive(Clone, Copy)]
struct Cuda;

impl Engine for Cuda {
    fn forward(&self, dims: &AttentionDims, operands: &[&Tensor]) -> Result<(Storage, Tensor)> {
        let of = Attention::new(dims, operands[0])?;
        let mut out = of.uninit(of.dtype, dims.batch * of.row_len())?;
        let mut log_sums = of.uninit(of.sums, dims.batch * of.sums_len())?;
        let layouts = dims.layouts(operands);
        let is_flash = with_operands(operands, |slices| {
            if !of.has_flash(layouts, &slices)? {
                return Ok(false);
            }
            of.each_flash(layouts, |flash, rows| {
                let out = SliceMut::from(&mut out).range(of.rows(&rows, of.row_len()))?;
                flash.forward(slices, out, SliceMut::from(&mut log_sums).range(of.rows(&rows, of.sums_len()))?)
            })?;
            Ok(true)
        })?;
        let to_sums = |sums: Buffer| to_tensor(sums, &[dims.batch, dims.n_heads, dims.queries], of.device);
        if is_flash {
            return Ok((to_storage(out)?, to_sums(log_sums)?));
        }
        let mut products = of.uninit(of.sums, of.largest_block())?;
        let mut weights = of.uninit(of.dtype, of.largest_block())?;
        with_operands(operands, |[q, k, v]| {
            let [q_layout, k_layout, v_layout] = layouts;
            let [out_layout, ..] = dims.separate_layouts();
            for batch in 0..dims.batch {
                of.with_bounds(batch, |bounds| {
                    for block in of.blocks(batch) {
                        let keys = |layout| of.keys(layout, batch, block);
                        for member in 0..of.group() {
                            let q = Matrix::strided(q, of.queries(q_layout, batch, block, member));
                            let k = Matrix::strided(k, keys(k_layout));
                            of.product(&mut products, of.scores(block, member), false, q, k.t())?;
                        }
                        let sums = SliceMut::from(&mut log_sums).range(of.sums_of(batch))?;
                        of.score_block(batch, block, bounds).softmax(&products, &mut weights, sums)?;
                        for member in 0..of.group() {
                            let weights = Matrix::strided((&weights).into(), of.scores(block, member));
                            let v = Matrix::strided(v, keys(v_layout));
                            of.product(&mut out, of.queries(out_layout, batch, block, member), false, weights, v)?;
                        }
                    }
                    Ok(())
                })?;
            }
            Ok(())
        })?;
        Ok((to_storage(out)?, to_sums(log_sums)?))
    }

    fn backward(
        &self,
        dims: &AttentionDims,
        operands: &[&Tensor],
        [out, d_out]: [&Tensor; 2],
        log_sums: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let of = Attention::new(dims, operands[0])?;
        let gradients = with_operands(operands, |slices| {
            let outputs = [out.clone(), d_out.contiguous()?, log_sums.clone()];
            with_slices(&outputs, |outputs| {
                let [out, d_out, log_sums] = outputs[..] else { bail!("attention: its outputs are three") };
                let layouts = dims.layouts(operands);
                let lengths = operands.iter().map(|operand| operand.elem_count());
                let [q, k, v] = slices;
                if of.has_flash(layouts, &[q, k, v, d_out])? {
                    let gradients = lengths.map(|length| of.uninit(of.dtype, length));
                    let mut gradients = gradients.collect::<Result<Vec<_>>>()?;
                    of.flash_back(slices, layouts, [out, d_out], log_sums, &mut gradients)?;
                    return Ok(gradients);
                }
                let zeros = lengths.map(|length| of.zeros(of.dtype, length));
                let mut gradients = zeros.collect::<Result<Vec<_>>>()?;
                of.backward(slices, layouts, [out, d_out], log_sums, &mut gradients)?;
                Ok(gradients)
            })
        })?;
        let gradients = gradients.into_iter().zip(operands);
        gradients.map(|(gradient, like)| to_tensor(gradient, like.dims(), like.device()).map(Some)).collect()
    }
}

/// Calls `f` with the elements of q, k and v, which may all be in one tensor.
fn with_operands<R>(operands: &[&Tensor], f: impl FnOnce([Slice<'_>; 3]) -> Result<R>) -> Result<R> {
    let whole = |operand: &Tensor| operand.detach().contiguous();
    match operands {
        [q, k, v] => {
            with_slice(&whole(q)?, |_, q| with_slice(&whole(k)?, |_, k| with_slice(&whole(v)?, |_, v| f([q, k, v]))))
        }
        qkv => with_slice(&whole(qkv[0])?, |_, qkv| f([qkv; 3])),
    }
}

/// Returns the bounds of all rows' documents on a device, U32. A row's begin with 0, and each document ends where the
/// next begins.
fn bounds_on(documents: &Documents, device: &Device) -> Result<Tensor> {
    let of_row = |row: usize| {
        let ends = documents.row(row).iter().scan(0, |end, &length| {
            *end += length as u32;
            Some(*end)
        });
        std::iter::once(0).chain(ends)
    };
    documents.bounds.get(&(0..documents.batch()).flat_map(of_row).collect(), device)
}

/// Queries of a row of the batch that are computed together, and the keys that any of them sees.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    rows: usize,
    first_key: usize,
    keys: usize,
}

/// An attention on a device.
struct Attention<'a> {
    dims: &'a AttentionDims,
    device: &'a Device,
    kernels: &'static dyn Kernels,
    dtype: DType,
    /// Dtype of scores and sums.
    sums: DType,
}

impl<'a> Attention<'a> {
    fn new(dims: &'a AttentionDims, operand: &'a Tensor) -> Result<Self> {
        let dtype = to_core_dtype(operand.dtype())?;
        let kernels = kernels::of_device(operand.device())?;
        Ok(Attention { dims, device: operand.device(), kernels, dtype, sums: wide(dtype) })
    }

    /// Allocates memory that is written before it is read.
    fn uninit(&self, dtype: DType, len: usize) -> Result<Buffer> {
        cuda::uninit(self.device, dtype, len)
    }

    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        Ok(self.kernels.zeros(dtype, len).map_err(Error::from)?)
    }

    /// Returns the number of query heads that share a key head.
    fn group(&self) -> usize {
        self.dims.n_heads / self.dims.n_kv_heads
    }

    /// Returns the elements of the output in a row of the batch.
    fn row_len(&self) -> usize {
        self.dims.queries * self.dims.n_heads * self.dims.dim
    }

    /// Returns the logarithms of sums in a row of the batch.
    fn sums_len(&self) -> usize {
        self.dims.n_heads * self.dims.queries
    }

    fn sums_of(&self, batch: usize) -> Range<usize> {
        batch * self.sums_len()..(batch + 1) * self.sums_len()
    }

    /// Calls `f` with the bounds of the documents in a row of the batch.
    fn with_bounds<R>(&self, batch: usize, f: impl FnOnce(Option<Slice<'_>>) -> Result<R>) -> Result<R> {
        let Some(documents) = &self.dims.documents else { return f(None) };
        let bounds = bounds_on(documents, self.device)?;
        let first = (0..batch).map(|row| documents.row(row).len() + 1).sum();
        let of_row = first..first + documents.row(batch).len() + 1;
        with_slice(&bounds, |_, bounds| f(Some(bounds.range(of_row)?)))
    }

    /// Returns the range of the elements of some rows of the batch.
    fn rows(&self, rows: &Range<usize>, row_len: usize) -> Range<usize> {
        rows.start * row_len..rows.end * row_len
    }

    /// Returns the keys that the queries of a row of the batch see.
    fn visible<'b>(&self, bounds: Option<Slice<'b>>) -> Visibility<'b> {
        let &AttentionDims { queries, keys, options, positions, .. } = self.dims;
        let Positions { first, gap_at, gap } = positions;
        Visibility { queries, keys, first, gap_at, gap, is_causal: options.causal, window: options.window, bounds }
    }

    /// Returns the attention of some rows of the batch, of which there is one if rows have documents.
    fn flash<'b>(
        &self,
        layouts: [HeadLayout; 3],
        rows: &Range<usize>,
        bounds: Option<Slice<'b>>,
    ) -> FlashAttention<'b> {
        FlashAttention {
            batch: rows.len(),
            visible: self.visible(bounds),
            heads: self.dims.n_heads,
            kv_heads: self.dims.n_kv_heads,
            dim: self.dims.dim,
            scale: self.dims.options.scale,
            softcap: self.dims.options.softcap,
            places: layouts.map(|HeadLayout { offset, batch_stride, row_stride }| Heads {
                first: offset + rows.start * batch_stride,
                batch_stride,
                row_stride,
            }),
        }
    }

    /// Returns whether the device has kernels for tensor cores: see [`FlashAttention::supports`].
    fn has_flash(&self, layouts: [HeadLayout; 3], tensors: &[Slice<'_>]) -> Result<bool> {
        Ok(self.dims.mask.is_none() && self.flash(layouts, &(0..self.dims.batch), None).supports(tensors)?)
    }

    /// Calls `f` with the attention of all rows of the batch, or of each row if rows have documents.
    fn each_flash(
        &self,
        layouts: [HeadLayout; 3],
        mut f: impl FnMut(FlashAttention<'_>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let all = 0..self.dims.batch;
        if self.dims.documents.is_none() {
            return f(self.flash(layouts, &all, None), all);
        }
        all.into_iter().try_for_each(|row| {
            let rows = row..row + 1;
            self.with_bounds(row, |bounds| f(self.flash(layouts, &rows, bounds), rows))
        })
    }

    /// Writes the gradients of the operands.
    fn flash_back(
        &self,
        operands: [Slice<'_>; 3],
        layouts: [HeadLayout; 3],
        [out, d_out]: [Slice<'_>; 2],
        log_sums: Slice<'_>,
        gradients: &mut [Buffer],
    ) -> Result<()> {
        let mut deltas = self.uninit(self.sums, self.dims.batch * self.sums_len())?;
        self.each_flash(layouts, |flash, rows| {
            let outputs =
                [out.range(self.rows(&rows, self.row_len()))?, d_out.range(self.rows(&rows, self.row_len()))?];
            let sums = self.rows(&rows, self.sums_len());
            let deltas = SliceMut::from(&mut deltas).range(sums.clone())?;
            flash.backward(operands, outputs, log_sums.range(sums)?, deltas, gradients)
        })
    }

    /// Returns the blocks of a row of the batch, in order.
    fn blocks(&self, batch: usize) -> impl Iterator<Item = Block> {
        let AttentionDims { queries, keys, n_heads, options, positions, documents, .. } = self.dims;
        let parts = options.visible_keys(*queries, *keys, *positions, documents.as_ref(), batch);
        let parts: Vec<VisibleKeys> = parts.collect();
        let row_bytes = (n_heads * keys * self.sums.size()).max(1);
        let most = (BLOCK_BYTES / row_bytes).clamp(FEWEST_QUERIES, MOST_QUERIES);
        (0..*queries).step_by(most).map(move |first| {
            let rows = most.min(queries - first);
            let visible = |query: usize| {
                let part = parts.partition_point(|part| part.queries().start <= query);
                parts[part - 1].of(query)
            };
            // Both ends only grow from query to query.
            let (start, end) = (visible(first).start, visible(first + rows - 1).end);
            Block { first, rows, first_key: start, keys: end - start }
        })
    }

    /// Returns the scores of the largest block.
    fn largest_block(&self) -> usize {
        let blocks = (0..self.dims.batch).flat_map(|batch| self.blocks(batch));
        blocks.map(|block| self.dims.n_heads * block.rows * block.keys).max().unwrap_or(0)
    }

    /// Returns the place of a block's queries, or of their outputs: for each key head, the query head that is this
    /// member of its group.
    fn queries(&self, layout: HeadLayout, batch: usize, block: Block, member: usize) -> MatrixLayout {
        let first = layout.index(batch, block.first, member, self.dims.dim);
        let stride = self.group() * self.dims.dim;
        MatrixLayout { first, rows: block.rows, cols: self.dims.dim, row_stride: layout.row_stride, stride }
    }

    /// Returns the place of a block's keys or values for each key head.
    fn keys(&self, layout: HeadLayout, batch: usize, block: Block) -> MatrixLayout {
        let first = layout.index(batch, block.first_key, 0, self.dims.dim);
        let stride = self.dims.dim;
        MatrixLayout { first, rows: block.keys, cols: self.dims.dim, row_stride: layout.row_stride, stride }
    }

    /// Returns the place of a block's scores `[n_heads, rows, keys]` for the same query heads as [`Self::queries`].
    fn scores(&self, block: Block, member: usize) -> MatrixLayout {
        let Block { rows, keys, .. } = block;
        let len = rows * keys;
        MatrixLayout { first: member * len, rows, cols: keys, row_stride: keys, stride: self.group() * len }
    }

    fn product(&self, to: &mut Buffer, at: MatrixLayout, add: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
        add_products(to.into(), at, self.dims.n_kv_heads, add, lhs, rhs)
    }

    fn score_block<'b>(&self, batch: usize, block: Block, bounds: Option<Slice<'b>>) -> ScoreBlock<'b> {
        let AttentionDims { n_heads, options, mask, .. } = self.dims;
        ScoreBlock {
            heads: *n_heads,
            visible: self.visible(bounds),
            first: block.first,
            rows: block.rows,
            first_key: block.first_key,
            block_keys: block.keys,
            scale: options.scale,
            softcap: options.softcap,
            dropout: mask.map(|Mask(draw)| (draw, batch)),
        }
    }

    /// Writes the gradients of q, k and v to three buffers, or to one.
    fn backward(
        &self,
        [q, k, v]: [Slice<'_>; 3],
        layouts: [HeadLayout; 3],
        [out, d_out]: [Slice<'_>; 2],
        log_sums: Slice<'_>,
        gradients: &mut [Buffer],
    ) -> Result<()> {
        let dims = self.dims;
        let last = gradients.len() - 1;
        let [out_layout, of_sums, _] = dims.separate_layouts();
        let mut products = self.uninit(self.sums, self.largest_block())?;
        let mut d_weights = self.uninit(self.sums, self.largest_block())?;
        let mut weights = self.uninit(self.dtype, self.largest_block())?;
        let mut d_products = self.uninit(self.dtype, self.largest_block())?;
        for batch in 0..dims.batch {
            // Sums of the keys' and the values' gradients, where the gradients' dtype would round each addition.
            let mut key_sums = match self.dtype == self.sums {
                true => None,
                false => {
                    let len = dims.keys * of_sums.row_stride;
                    Some([self.zeros(self.sums, len)?, self.zeros(self.sums, len)?])
                }
            };
            self.with_bounds(batch, |bounds| {
                for block in self.blocks(batch) {
                    let keys = |layout| self.keys(layout, batch, block);
                    for member in 0..self.group() {
                        let scores = self.scores(block, member);
                        let q = Matrix::strided(q, self.queries(layouts[0], batch, block, member));
                        let k = Matrix::strided(k, keys(layouts[1]));
                        self.product(&mut products, scores, false, q, k.t())?;
                        let d_out = Matrix::strided(d_out, self.queries(out_layout, batch, block, member));
                        let v = Matrix::strided(v, keys(layouts[2]));
                        self.product(&mut d_weights, scores, false, d_out, v.t())?;
                    }
                    let row = batch * self.row_len()..(batch + 1) * self.row_len();
                    self.score_block(batch, block, bounds).softmax_back(
                        [&products, &d_weights],
                        [out.range(row.clone())?, d_out.range(row)?],
                        log_sums.range(self.sums_of(batch))?,
                        [&mut weights, &mut d_products],
                    )?;
                    for member in 0..self.group() {
                        let scores = self.scores(block, member);
                        let weights = Matrix::strided((&weights).into(), scores);
                        let d_products = Matrix::strided((&d_products).into(), scores);
                        let q = Matrix::strided(q, self.queries(layouts[0], batch, block, member));
                        let d_out = Matrix::strided(d_out, self.queries(out_layout, batch, block, member));
                        let k = Matrix::strided(k, keys(layouts[1]));
                        let at = self.queries(layouts[0], batch, block, member);
                        self.product(&mut gradients[0], at, false, d_products, k)?;
                        for (which, lhs, rhs) in [(1, d_products.t(), q), (2, weights.t(), d_out)] {
                            match &mut key_sums {
                                Some(sums) => {
                                    let at = self.keys(of_sums, 0, block);
                                    self.product(&mut sums[which - 1], at, true, lhs, rhs)?;
                                }
                                None => {
                                    self.product(&mut gradients[which.min(last)], keys(layouts[which]), true, lhs, rhs)?
                                }
                            }
                        }
                    }
                }
                Ok(())
            })?;
            for (which, sums) in key_sums.into_iter().flatten().enumerate() {
                let (layout, to) = (layouts[which + 1], &mut gradients[(which + 1).min(last)]);
                let mut rounded = self.uninit(self.dtype, sums.len())?;
                self.kernels.cast((&sums).into(), (&mut rounded).into())?;
                let (first, end) = (layout.index(batch, 0, 0, dims.dim), to.len());
                let width = of_sums.row_stride;
                let rows = Rows { count: dims.keys, len: width, from_stride: width, to_stride: layout.row_stride };
                self.kernels.copy_rows((&rounded).into(), SliceMut::from(to).range(first..end)?, rows)?;
            }
        }
        Ok(())
    }
}
