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
//! last query's last key, so the only hidden scores that are computed lie in corners along the diagonal. Heads are read
//! and written in place in `[batch, T, heads * head_dim]`, without a transpose.
//!
//! Each kind of device has an [`Engine`]: `cpu` and `cuda`.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::composite::composite;
use super::cpu::Cpu;
use super::cuda;
use super::documents::Documents;
use super::engine::{AttentionDims, Engine};
use super::options::AttentionOptions;
use crate::activation_checkpoint::{Operation, operation};
use crate::graph::{Reads, graph_op};
use crate::nn::cpu::same_kind;
use crate::nn::weight::has_cpu_kernels;
use crate::random::Mask;

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
    if !is_fused(q) {
        return composite(q, k, v, n_heads, n_kv_heads, &options, documents);
    }
    let documents = documents.cloned();
    let mask = dropout_mask(&options, [batch, n_heads, queries, keys])?;
    let dtype = q.dtype();
    let dims = AttentionDims { batch, queries, keys, n_heads, n_kv_heads, dim, dtype, options, documents, mask };
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
    if !is_fused(qkv) {
        let (q, kv) = (n_heads * dim, n_kv_heads * dim);
        let (k, v) = (qkv.narrow(2, q, kv)?, qkv.narrow(2, q + kv, kv)?);
        return composite(&qkv.narrow(2, 0, q)?, &k, &v, n_heads, n_kv_heads, &options, documents);
    }
    let documents = documents.cloned();
    let mask = dropout_mask(&options, [batch, n_heads, queries, queries])?;
    let (keys, dtype) = (queries, qkv.dtype());
    let dims = AttentionDims { batch, queries, keys, n_heads, n_kv_heads, dim, dtype, options, documents, mask };
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

/// Returns whether an engine computes on this tensor.
pub(super) fn is_fused(tensor: &Tensor) -> bool {
    has_cpu_kernels(tensor) || cuda::engine(tensor).is_some()
}

/// Computes an attention of separate q, k and v, or of one tensor that holds all three.
fn fused(dims: AttentionDims, operands: &[&Tensor]) -> Result<Tensor> {
    match cuda::engine(operands[0]) {
        Some(engine) => node(engine, dims, operands),
        None => node(Cpu, dims, operands),
    }
}

/// Returns the attention as a node of the graph. Reuses the output that an activation checkpoint kept.
fn node<E: Engine>(engine: E, dims: AttentionDims, operands: &[&Tensor]) -> Result<Tensor> {
    let out = [dims.batch, dims.queries, dims.n_heads * dims.dim];
    operation(Operation::Attention, &out, |known| {
        let kept = known.map(|(memory, log_sums)| Some((memory, log_sums.downcast::<E::LogSums>().ok()?)));
        let (memory, log_sums) = match kept.flatten() {
            Some(kept) => kept,
            None => {
                let (memory, log_sums) = engine.forward(&dims, operands)?;
                (memory, Arc::new(log_sums))
            }
        };
        let kept = log_sums.clone();
        let name = if operands.len() == 1 { "attention_qkv" } else { "attention" };
        let y = graph_op(name, operands, memory, &out, Reads::SourcesAndOutput, move |operands, out, d_out| {
            engine.backward(&dims, operands, [out, d_out], &log_sums)
        })?;
        Ok((y, kept))
    })
}
