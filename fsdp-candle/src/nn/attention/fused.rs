//! Attention with grouped-query heads, in the manner of FlashAttention (Dao et al., 2022, arXiv:2205.14135): the matrix
//! of probabilities never exists whole.
//!
//! For query `i` of a head: `p_ij = e^(s_ij - L_i)` with `s_ij = scale q_i.k_j` over the visible keys `j`, and
//! `o_i = sum_j p_ij v_j`. Forward keeps `L_i`, the logarithm of the sum. Backward has `dv_j = sum_i p_ij do_i`,
//! `ds_ij = scale p_ij (do_i.v_j - do_i.o_i)`, `dq_i = sum_j ds_ij k_j`, `dk_j = sum_i ds_ij q_i`. Capped scores are
//! `s_ij = cap t_ij` with `t_ij = tanh(scale q_i.k_j / cap)`, and `ds_ij` gets a factor `1 - t_ij^2`. Dropout
//! multiplies `p_ij` by `m_ij` in the product with `v_j`, and `do_i.v_j` in backward; `do_i.o_i` does not change.
//!
//! Queries are processed in blocks of rows. A block's products cover the keys from its first query's first key to its
//! last query's last key, so the only hidden scores that are computed lie in corners along the diagonal. A block ends
//! where its document ends. Heads are read and written in place in `[batch, T, heads * head_dim]`, without a transpose.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use parking_lot::Mutex;

use super::documents::Documents;
use super::repeat_kv_heads;
use crate::activation_checkpoint::{Operation, operation};
use crate::kernels::graph_op;
use crate::nn::cpu::matrix::{Mat, MatMut, Shared, product_here};
use crate::nn::cpu::simd::{dot, kernel, max, probability, sum};
use crate::nn::cpu::{cpu, floats, for_each_task, read, same_kind, storage, tensor_like};
use crate::nn::limits::check_scores_fit;
use crate::nn::ops::{check_probability, drop_elements, softmax_composite};
use crate::nn::weight::has_cpu_kernels;
use crate::random::Mask;

/// Settings of an attention besides its heads.
///
/// ```
/// use fsdp_candle::nn::AttentionOptions;
///
/// let full = AttentionOptions::causal(0.125);
/// let local = AttentionOptions { window: Some(4096), ..full };
/// assert!(local.causal && full.window.is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys, usually `1 / sqrt(D)`.
    pub scale: f64,
    /// Whether a query sees no key after its own position.
    pub causal: bool,
    /// A query sees only keys that are fewer positions than this away. At least 1, which is its own position.
    pub window: Option<usize>,
    /// Scores `s` become `cap * tanh(s / cap)`, as in Gemma 2. Above 0.
    pub softcap: Option<f64>,
    /// Probability in `[0, 1)` with which a query's weight of a key becomes 0 after the softmax. Set it to 0 in
    /// evaluation. The dropped weights follow from this thread's [random state](crate::random), with one draw for the
    /// weights `[batch, heads, T, S]`. No mask is kept.
    pub dropout: f64,
}

impl AttentionOptions {
    /// Returns options with which every query sees itself and all keys before it.
    pub fn causal(scale: f64) -> Self {
        AttentionOptions { scale, causal: true, window: None, softcap: None, dropout: 0. }
    }

    /// Returns options with which every query sees all keys.
    pub fn bidirectional(scale: f64) -> Self {
        AttentionOptions { causal: false, ..Self::causal(scale) }
    }

    /// Returns whether the visible keys depend on a query's position.
    fn depends_on_position(&self) -> bool {
        self.causal || self.window.is_some()
    }

    fn check(&self, function: &str) -> Result<()> {
        if self.window == Some(0) {
            bail!("{function}: a window of 0 hides all keys. It must be at least 1");
        }
        check_probability(function, self.dropout)?;
        match self.softcap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                bail!("{function}: the cap of the scores must be above 0, found {cap}")
            }
            _ => Ok(()),
        }
    }

    /// Returns the keys that queries see in a row of the batch, for each document, or for the whole row without
    /// documents.
    fn visible_keys(
        &self,
        queries: usize,
        keys: usize,
        documents: Option<&Documents>,
        row: usize,
    ) -> impl Iterator<Item = VisibleKeys> {
        let &AttentionOptions { causal, window, .. } = self;
        let window = window.unwrap_or(usize::MAX);
        let (lengths, whole) = match documents {
            Some(documents) => (documents.row(row), None),
            None => (&[][..], Some((queries, keys))),
        };
        let parts = whole.into_iter().chain(lengths.iter().map(|&length| (length, length)));
        parts.scan(0, move |next, (queries, keys)| {
            let start = *next;
            *next += queries;
            Some(VisibleKeys { causal, window, start, queries, keys, before: keys.saturating_sub(queries) })
        })
    }
}

/// The visible keys of a document's queries, or of a whole row's. All of them are in the same document.
#[derive(Clone, Copy)]
struct VisibleKeys {
    causal: bool,
    window: usize,
    /// First query, which is also the first key.
    start: usize,
    queries: usize,
    keys: usize,
    /// Keys before the first query's own.
    before: usize,
}

impl VisibleKeys {
    /// Returns the queries.
    fn queries(self) -> Range<usize> {
        self.start..self.start + self.queries
    }

    /// Returns the keys that a query sees.
    #[inline(always)]
    fn of(self, query: usize) -> Range<usize> {
        let position = self.before + query - self.start;
        let end = if self.causal { position + 1 } else { position.saturating_add(self.window).min(self.keys) };
        self.start + (position + 1).saturating_sub(self.window)..self.start + end
    }
}

/// Computes causal self-attention: [`attention()`] in which a query sees itself and all keys before it. `scale` is
/// usually `1 / sqrt(D)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::causal_attention;
///
/// let q = Tensor::zeros((1, 3, 8), DType::F32, &Device::Cpu)?; // 2 heads of 4
/// let v = Tensor::new(&[1f32, 3., 8.], &Device::Cpu)?.reshape((1, 3, 1))?.broadcast_as((1, 3, 8))?;
/// let y = causal_attention(&q, &q, &v, 2, 2, 0.5)?;
/// assert_eq!(y.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?, [1., 2., 4.]); // means of the visible values
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    scale: f64,
) -> Result<Tensor> {
    separate_attention("causal_attention", q, k, v, n_heads, n_kv_heads, AttentionOptions::causal(scale), None)
}

/// Computes attention.
///
/// `q` is `[batch, T, n_heads * D]` or `[batch, T, n_heads, D]`. `k` and `v` are `[batch, S, n_kv_heads * D]`, or have
/// separate heads as well. The output is `[batch, T, n_heads * D]`. Query head `h` uses key head
/// `h / (n_heads / n_kv_heads)`.
///
/// The queries are the last `T` of the `S >= T` positions. With a cache of earlier keys, a causal query `i` sees the
/// keys `0..=S - T + i`. If every query sees every key, `S` may be any number from 1. Fails if the shapes or dtypes
/// disagree, or an option is out of range.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{AttentionOptions, attention};
///
/// let q = Tensor::zeros((1, 3, 8), DType::F32, &Device::Cpu)?; // 2 heads of 4
/// let v = Tensor::new(&[1f32, 3., 8.], &Device::Cpu)?.reshape((1, 3, 1))?.broadcast_as((1, 3, 8))?;
/// let local = AttentionOptions { window: Some(2), ..AttentionOptions::causal(0.5) };
/// let y = attention(&q, &q, &v, 2, 2, &local)?;
/// assert_eq!(y.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?, [1., 2., 5.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
) -> Result<Tensor> {
    separate_attention("attention", q, k, v, n_heads, n_kv_heads, *options, None)
}

/// [`attention()`] within packed documents: a query sees only keys of its own document. There are as many queries as
/// keys. Errors: see [`attention()`]. Also fails if the documents have another number of rows or tokens.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{AttentionOptions, Documents, attention_in_documents};
///
/// let q = Tensor::zeros((1, 3, 4), DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[1f32, 3., 8.], &Device::Cpu)?.reshape((1, 3, 1))?.broadcast_as((1, 3, 4))?;
/// let documents = Documents::new(vec![vec![1, 2]])?;
/// let y = attention_in_documents(&q, &q, &v, 1, 1, &AttentionOptions::causal(0.5), &documents)?;
/// assert_eq!(y.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?, [1., 3., 5.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention_in_documents(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: &Documents,
) -> Result<Tensor> {
    separate_attention("attention_in_documents", q, k, v, n_heads, n_kv_heads, *options, Some(documents))
}

/// [`causal_attention`] on the output of one layer for queries, keys and values. `qkv` `[batch, T, (n_heads + 2 *
/// n_kv_heads) * D]` holds at each position the heads of the queries, then of the keys, then of the values. The output
/// is `[batch, T, n_heads * D]`.
///
/// This saves the copies of splitting `qkv` in forward, and more copies in backward.
pub fn causal_attention_qkv(qkv: &Tensor, n_heads: usize, n_kv_heads: usize, scale: f64) -> Result<Tensor> {
    packed_attention("causal_attention_qkv", qkv, n_heads, n_kv_heads, AttentionOptions::causal(scale), None)
}

/// [`attention()`] on the output of one layer for queries, keys and values, as in [`causal_attention_qkv`].
pub fn attention_qkv(qkv: &Tensor, n_heads: usize, n_kv_heads: usize, options: &AttentionOptions) -> Result<Tensor> {
    packed_attention("attention_qkv", qkv, n_heads, n_kv_heads, *options, None)
}

/// [`attention_in_documents`] on the output of one layer for queries, keys and values, as in [`causal_attention_qkv`].
///
/// # Errors
/// See [`attention_in_documents`].
pub fn attention_qkv_in_documents(
    qkv: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: &Documents,
) -> Result<Tensor> {
    packed_attention("attention_qkv_in_documents", qkv, n_heads, n_kv_heads, *options, Some(documents))
}

#[allow(clippy::too_many_arguments)]
fn separate_attention(
    function: &str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: AttentionOptions,
    documents: Option<&Documents>,
) -> Result<Tensor> {
    options.check(function)?;
    let (batch, queries, q_width) = merged_dims(function, "q", q, n_heads)?;
    let (k_batch, keys, k_width) = merged_dims(function, "k", k, n_kv_heads)?;
    let dim = head_dim(function, q_width, n_heads, n_kv_heads)?;
    let fewest = if options.depends_on_position() { queries } else { queries.min(1) };
    if merged_dims(function, "v", v, n_kv_heads)? != (k_batch, keys, k_width)
        || k_batch != batch
        || k_width != n_kv_heads * dim
        || keys < fewest
    {
        bail!(
            "{function}: q {:?}, k {:?} and v {:?} do not fit together: with {n_heads} heads of {dim} they must be \
             [batch, T, {q_width}] and twice [batch, S, {}] with S >= {}",
            q.dims(),
            k.dims(),
            v.dims(),
            n_kv_heads * dim,
            if options.depends_on_position() { "T" } else { "1" }
        );
    }
    same_kind(function, ("q", q), ("k", k))?;
    same_kind(function, ("q", q), ("v", v))?;
    if let Some(documents) = documents {
        documents.check(function, batch, queries)?;
        documents.check(function, batch, keys)?;
    }
    if !has_cpu_kernels(q) {
        return composite(q, k, v, n_heads, n_kv_heads, &options, documents);
    }
    let documents = documents.cloned();
    let mask = dropout_mask(&options, [batch, n_heads, queries, keys])?;
    let dims = AttentionDims { batch, queries, keys, n_heads, n_kv_heads, dim, options, documents, mask };
    fused(dims, &[q, k, v])
}

fn packed_attention(
    function: &str,
    qkv: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: AttentionOptions,
    documents: Option<&Documents>,
) -> Result<Tensor> {
    options.check(function)?;
    let (batch, queries, width) = qkv.dims3()?;
    let heads = n_heads + 2 * n_kv_heads;
    if heads == 0 || !width.is_multiple_of(heads) {
        bail!(
            "{function}: the last dimension of qkv {:?} must be a multiple of {n_heads} + 2 * {n_kv_heads} heads",
            qkv.dims()
        );
    }
    let dim = head_dim(function, width / heads * n_heads, n_heads, n_kv_heads)?;
    if let Some(documents) = documents {
        documents.check(function, batch, queries)?;
    }
    if !has_cpu_kernels(qkv) {
        let (q, kv) = (n_heads * dim, n_kv_heads * dim);
        let (k, v) = (qkv.narrow(2, q, kv)?, qkv.narrow(2, q + kv, kv)?);
        return composite(&qkv.narrow(2, 0, q)?, &k, &v, n_heads, n_kv_heads, &options, documents);
    }
    let documents = documents.cloned();
    let mask = dropout_mask(&options, [batch, n_heads, queries, queries])?;
    let dims = AttentionDims { batch, queries, keys: queries, n_heads, n_kv_heads, dim, options, documents, mask };
    fused(dims, &[qkv])
}

/// Draws the dropout mask of the probabilities `[batch, n_heads, T, S]`.
fn dropout_mask(options: &AttentionOptions, dims: [usize; 4]) -> Result<Option<Mask>> {
    (options.dropout > 0.).then(|| Mask::draw(options.dropout, &dims)).transpose()
}

/// Returns the batch size, the positions and the elements at a position of `[batch, positions, heads * D]` or `[batch,
/// positions, heads, D]`.
fn merged_dims(function: &str, name: &str, x: &Tensor, heads: usize) -> Result<(usize, usize, usize)> {
    match *x.dims() {
        [batch, steps, width] => Ok((batch, steps, width)),
        [batch, steps, h, dim] if h == heads => Ok((batch, steps, h * dim)),
        _ => bail!(
            "{function}: {name} must be [batch, positions, {heads} * D] or [batch, positions, {heads}, D], found {:?}",
            x.dims()
        ),
    }
}

fn head_dim(function: &str, width: usize, n_heads: usize, n_kv_heads: usize) -> Result<usize> {
    if n_heads == 0 || n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
        bail!(
            "{function}: the number of heads, {n_heads}, must be a multiple of the number of key heads, {n_kv_heads}"
        );
    }
    if width == 0 || !width.is_multiple_of(n_heads) {
        bail!("{function}: the width of q, {width}, must be a multiple of the number of heads, {n_heads}");
    }
    Ok(width / n_heads)
}

/// Computes an attention of separate q, k and v, or of one tensor that holds all three. Reuses the output that an
/// activation checkpoint kept.
fn fused(dims: AttentionDims, operands: &[&Tensor]) -> Result<Tensor> {
    let out = [dims.batch, dims.queries, dims.n_heads * dims.dim];
    operation(Operation::Attention, &out, |known| {
        let kept = known.map(|(memory, log_sums)| Some((memory, log_sums.downcast::<Vec<f32>>().ok()?)));
        let (memory, log_sums) = match kept.flatten() {
            Some(kept) => kept,
            None => {
                let (out, log_sums) = with_values(operands, |values| dims.forward(values, dims.layouts(operands)))?;
                (storage(out, operands[0].dtype())?, Arc::new(log_sums))
            }
        };
        let kept = log_sums.clone();
        let name = if operands.len() == 1 { "attention_qkv" } else { "attention" };
        let y = graph_op(name, operands, memory, &out, move |operands, out, d_out| {
            let mut gradients: Vec<_> = operands.iter().map(|operand| vec![0f32; operand.elem_count()]).collect();
            let shared: Vec<_> = gradients.iter_mut().map(|gradient| Shared::new(gradient)).collect();
            read!(out, out);
            read!(d_out, d_out);
            with_values(operands, |values| {
                dims.backward(values, dims.layouts(operands), &out, &d_out, &log_sums, three(&shared));
            })?;
            let gradients = gradients.into_iter().zip(operands);
            gradients.map(|(gradient, like)| tensor_like(gradient, like).map(Some)).collect::<Result<Vec<_>>>()
        })?;
        Ok((y, kept))
    })
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

/// [`attention()`] on checked operands as a chain of Candle's operations, for other devices and for f64.
pub(in crate::nn) fn composite(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: Option<&Documents>,
) -> Result<Tensor> {
    let (batch, queries, keys) = (q.dim(0)?, q.dim(1)?, k.dim(1)?);
    let dtype = q.dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let has_graph = [q, k, v].iter().any(|x| x.track_op());
    check_scores_fit("attention", [batch, n_heads, queries, keys], copies(options, has_graph), wide, q.device())?;
    let heads = |x: &Tensor, steps: usize, n: usize| -> Result<Tensor> {
        x.to_dtype(wide)?.reshape((batch, steps, n, ()))?.transpose(1, 2)?.contiguous()
    };
    let spread = |x: &Tensor| repeat_kv_heads(&heads(x, keys, n_kv_heads)?, n_heads, wide);
    let scores = (heads(q, queries, n_heads)?.matmul(&spread(k)?.t()?.contiguous()?)? * options.scale)?;
    let scores = match options.softcap {
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        None => scores,
    };
    let mask = match documents {
        Some(_) => mask(options, queries, keys, documents, q.device())?,
        None => cached_mask(options, queries, keys, q.device())?,
    };
    let mask = mask.to_dtype(wide)?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = drop_elements(&softmax_composite(&scores, D::Minus1)?, options.dropout)?;
    weights.matmul(&spread(v)?)?.transpose(1, 2)?.reshape((batch, queries, ()))?.to_dtype(dtype)
}

/// Returns the number of score matrices that exist at a time in forward. A graph keeps each matrix: the product,
/// scaled, capped, masked, shifted, the powers, the weights, and with dropout the mask and the dropped weights. Without
/// a graph, the product and the shifted scores are freed before the weights are computed.
fn copies(options: &AttentionOptions, has_graph: bool) -> usize {
    match has_graph {
        true => 6 + if options.softcap.is_some() { 3 } else { 0 } + if options.dropout > 0. { 2 } else { 0 },
        false => 4,
    }
}

/// Returns the mask of hidden keys, `[rows, 1, T, S]`, f32. Without documents, all rows of a batch share one.
fn mask(
    options: &AttentionOptions,
    queries: usize,
    keys: usize,
    documents: Option<&Documents>,
    device: &Device,
) -> Result<Tensor> {
    let rows = documents.map_or(1, Documents::batch);
    let mask: Vec<f32> = (0..rows)
        .flat_map(|row| options.visible_keys(queries, keys, documents, row))
        .flat_map(|visible| visible.queries().map(move |i| visible.of(i)))
        .flat_map(|visible| (0..keys).map(move |j| if visible.contains(&j) { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (rows, 1, queries, keys), device)
}

/// Number of cached masks: as many as a model has kinds of layers.
const CACHED_MASKS: usize = 4;

/// [`mask`] without documents, cached for a device. Successive layers use the same mask, and a copy to the device takes
/// time.
fn cached_mask(options: &AttentionOptions, queries: usize, keys: usize, device: &Device) -> Result<Tensor> {
    if device.is_cpu() {
        return mask(options, queries, keys, None, device);
    }
    static MASKS: Mutex<Vec<(AttentionOptions, Tensor)>> = Mutex::new(vec![]);
    let mut masks = MASKS.lock();
    let fits = |(of, mask): &&(AttentionOptions, Tensor)| {
        (of.causal, of.window) == (options.causal, options.window)
            && mask.dims()[2..] == [queries, keys]
            && mask.device().same_device(device)
    };
    if let Some((_, mask)) = masks.iter().find(fits) {
        return Ok(mask.clone());
    }
    let mask = mask(options, queries, keys, None, device)?;
    if masks.len() == CACHED_MASKS {
        masks.remove(0);
    }
    masks.push((*options, mask.clone()));
    Ok(mask)
}

/// Queries of a block.
const BLOCK: usize = 64;

/// The dimensions of an attention. `queries` and `keys` count positions.
struct AttentionDims {
    batch: usize,
    queries: usize,
    keys: usize,
    n_heads: usize,
    n_kv_heads: usize,
    dim: usize,
    options: AttentionOptions,
    documents: Option<Documents>,
    /// Dropout mask of the probabilities `[batch, n_heads, T, S]`.
    mask: Option<Mask>,
}

/// The layout of one operand's heads in its buffer: batch by batch, with a row for each position.
#[derive(Clone, Copy)]
struct HeadLayout {
    offset: usize,
    batch_stride: usize,
    row_stride: usize,
}

impl HeadLayout {
    /// Returns the index of the first element of a head at a position.
    fn index(&self, batch: usize, position: usize, head: usize, dim: usize) -> usize {
        self.offset + batch * self.batch_stride + position * self.row_stride + head * dim
    }
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

    /// Returns the layouts of q, k and v in separate tensors, or in one.
    fn layouts(&self, operands: &[&Tensor]) -> [HeadLayout; 3] {
        if operands.len() == 1 { self.packed_layouts() } else { self.separate_layouts() }
    }

    /// Returns the layouts of q, k and v as separate tensors.
    fn separate_layouts(&self) -> [HeadLayout; 3] {
        let layout = |steps: usize, heads: usize| HeadLayout {
            offset: 0,
            batch_stride: steps * heads * self.dim,
            row_stride: heads * self.dim,
        };
        let kv = layout(self.keys, self.n_kv_heads);
        [layout(self.queries, self.n_heads), kv, kv]
    }

    /// Returns the layouts of q, k and v in one tensor.
    fn packed_layouts(&self) -> [HeadLayout; 3] {
        let row_stride = (self.n_heads + 2 * self.n_kv_heads) * self.dim;
        let layout =
            |head: usize| HeadLayout { offset: head * self.dim, batch_stride: self.queries * row_stride, row_stride };
        [layout(0), layout(self.n_heads), layout(self.n_heads + self.n_kv_heads)]
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

/// Computes tanh by a rational function, within 4 units in the last place: Eigen's `ptanh`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn tanh(x: f32) -> f32 {
    const BOUND: f32 = 7.905_311_1;
    let x = if x < -BOUND { -BOUND } else { x };
    let x = if x > BOUND { BOUND } else { x };
    let square = x * x;
    let p = square.mul_add(-2.760_768_477_42e-16, 2.000_187_904_82e-13);
    let p = square.mul_add(p, -8.604_671_522_14e-11);
    let p = square.mul_add(p, 5.122_297_090_37e-8);
    let p = square.mul_add(p, 1.485_722_357_18e-5);
    let p = square.mul_add(p, 6.372_619_288_75e-4);
    let p = square.mul_add(p, 4.893_524_558_92e-3);
    let q = square.mul_add(1.198_258_394_67e-6, 1.185_347_056_87e-4);
    let q = square.mul_add(q, 2.268_434_632_44e-3);
    let q = square.mul_add(q, 4.893_525_185_54e-3);
    x * p / q
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
