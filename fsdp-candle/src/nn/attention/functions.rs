//! The functions that compute attention, and the checks of their arguments.

use candle_core::{Device, Result, Tensor, bail};

use super::context::over_ranks;
use super::documents::Documents;
use super::fused::Checked;
use super::options::AttentionOptions;
use crate::context_parallel::current;
use crate::nn::cpu::same_kind;
use crate::nn::weight::Weight;

/// Returns the library that computes attention on a device where it can, such as `cuDNN 9.26`: `None` if that is this
/// crate.
///
/// cuDNN computes it on GPUs of compute capability 9 and 10, if the program is built with the feature `cudnn` and
/// libcudnn 9.25 or later is on the library path. `FSDP_ATTENTION_BACKEND=own` leaves cuDNN out. With `cudnn`, it is an
/// error if cuDNN can't be used.
///
/// ```
/// # use candle_core::Device;
/// assert_eq!(fsdp_candle::nn::attention_library(&Device::Cpu)?, None);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention_library(device: &Device) -> Result<Option<String>> {
    super::cuda::library(device)
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
    let options = AttentionOptions::causal(scale);
    separate_attention("causal_attention", [q, k, v], n_heads, n_kv_heads, options, None, None)
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
    separate_attention("attention", [q, k, v], n_heads, n_kv_heads, *options, None, None)
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
    separate_attention("attention_in_documents", [q, k, v], n_heads, n_kv_heads, *options, Some(documents), None)
}

/// [`attention()`], or [`attention_in_documents`] with `documents`, in which each head has a sink (arXiv:2508.10925): a
/// score that no key has. It takes part in the softmax, so that a query's weights sum up to less than 1. `sinks` is
/// `[n_heads]`, in q's dtype. Errors: see [`attention_in_documents`]. Also fails for another shape, dtype or device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{AttentionOptions, attention_with_sinks};
///
/// let q = Tensor::zeros((1, 3, 4), DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[1f32, 3., 8.], &Device::Cpu)?.reshape((1, 3, 1))?.broadcast_as((1, 3, 4))?;
/// let sinks = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
/// let y = attention_with_sinks(&q, &q, &v, 1, 1, &AttentionOptions::causal(0.5), None, &sinks)?;
/// // Each score is 0, so the sink has as much weight as a key.
/// let want = [1. / 2., 4. / 3., 12. / 4.];
/// let y = y.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(y.iter().zip(want).all(|(y, want)| (y - want).abs() < 1e-6));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments)]
pub fn attention_with_sinks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: Option<&Documents>,
    sinks: &Tensor,
) -> Result<Tensor> {
    separate_attention("attention_with_sinks", [q, k, v], n_heads, n_kv_heads, *options, documents, Some(sinks))
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

fn separate_attention(
    function: &str,
    [q, k, v]: [&Tensor; 3],
    n_heads: usize,
    n_kv_heads: usize,
    options: AttentionOptions,
    documents: Option<&Documents>,
    sinks: Option<&Tensor>,
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
    let sinks = sinks.map(Weight::in_graph).transpose()?;
    let sinks = sinks.as_ref();
    if let Some(sinks) = sinks {
        same_kind(function, ("q", q), ("the sinks", sinks))?;
        if sinks.dims() != [n_heads] {
            bail!("{function}: the sinks must be [{n_heads}], one for each head, found {:?}", sinks.dims());
        }
    }
    let checked = Checked { function, batch, queries, keys, n_heads, n_kv_heads, dim, options, documents, sinks };
    computed(checked, &[q, k, v])
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
    let keys = queries;
    let checked = Checked { function, batch, queries, keys, n_heads, n_kv_heads, dim, options, documents, sinks: None };
    computed(checked, &[qkv])
}

/// Computes an attention of whole sequences, or of the parts of context-parallel ranks.
fn computed(checked: Checked<'_>, operands: &[&Tensor]) -> Result<Tensor> {
    match current() {
        Some(scope) => over_ranks(checked, &scope, operands),
        None => checked.attention(operands),
    }
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
