//! Attention with grouped-query heads, in the manner of FlashAttention (Dao et al., 2022, arXiv:2205.14135): the matrix
//! of probabilities never exists whole.
//!
//! For query `i` of a head: `p_ij = e^(s_ij - L_i)` with `s_ij = scale q_i.k_j` over the keys `j` that it sees, and
//! `o_i = sum_j p_ij v_j`. Forward keeps `L_i`, the logarithm of the sum. Backward has `dv_j = sum_i p_ij do_i`,
//! `ds_ij = scale p_ij (do_i.v_j - do_i.o_i)`, `dq_i = sum_j ds_ij k_j`, `dk_j = sum_i ds_ij q_i`. Capped scores are
//! `s_ij = cap t_ij` with `t_ij = tanh(scale q_i.k_j / cap)`, and `ds_ij` gets a factor `1 - t_ij^2`.
//!
//! Dropout multiplies `p_ij` by `m_ij` where it meets `v_j`, and `do_i.v_j` in backward; `do_i.o_i` is what it was.
//!
//! Queries are taken in blocks of rows; a block's products reach from its first query's first key to its last query's
//! last one, so that of what nobody sees only corners along the diagonals are computed. A block ends where its document
//! ends. Heads are read and written
//! where they lie in `[batch, T, heads * head_dim]`: nothing is transposed.

mod composite;
mod dims;
mod options;
mod softmax;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail};

pub(in crate::nn) use composite::composite;
use dims::Dims;
pub use options::AttentionOptions;

use super::documents::Documents;
use crate::activation_checkpoint::{Operation, operation};
use crate::nn::cpu::matrix::Shared;
use crate::nn::cpu::values::{floats, read, same_kind, served, storage, tensor};
use crate::random::Mask;

/// Causal self-attention: [`attention()`] where a query sees itself and all keys before it. `scale` is usually
/// `1 / sqrt(D)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::causal_attention;
///
/// let q = Tensor::zeros((1, 3, 8), DType::F32, &Device::Cpu)?; // 2 heads of 4
/// let v = Tensor::new(&[1f32, 3., 8.], &Device::Cpu)?.reshape((1, 3, 1))?.broadcast_as((1, 3, 8))?;
/// let y = causal_attention(&q, &q, &v, 2, 2, 0.5)?;
/// assert_eq!(y.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?, [1., 2., 4.]); // means of what each may see
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
    of_three("causal_attention", q, k, v, n_heads, n_kv_heads, AttentionOptions::causal(scale), None)
}

/// Attention: `q` `[batch, T, n_heads * D]` (or `[batch, T, n_heads, D]`), `k` and `v` `[batch, S, n_kv_heads * D]` (or
/// with the heads apart), output `[batch, T, n_heads * D]`. Query head `h` uses key head `h / (n_heads / n_kv_heads)`.
///
/// The queries are the last `T` of the `S >= T` positions, so that with a cache of earlier keys a causal query `i` sees
/// the keys `0..=S - T + i`. Where every query sees every key, any `S >= 1` will do. An error if the shapes or dtypes
/// disagree, or the options make no sense.
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
    of_three("attention", q, k, v, n_heads, n_kv_heads, *options, None)
}

/// [`attention()`] within documents that lie packed in rows: a query sees only keys of its own document, as if each
/// were alone. There are as many queries as keys.
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
///
/// # Errors
/// Those of [`attention()`], and when the documents are of another number of rows or tokens.
pub fn attention_in_documents(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: &Documents,
) -> Result<Tensor> {
    of_three("attention_in_documents", q, k, v, n_heads, n_kv_heads, *options, Some(documents))
}

/// [`causal_attention`] on queries, keys and values that one layer made: `qkv`
/// `[batch, T, (n_heads + 2 * n_kv_heads) * D]` holds the heads of the queries, then those of the keys, then those of
/// the values, at each position. Output `[batch, T, n_heads * D]`.
///
/// It saves the copies that taking `qkv` apart would cost in forward, and more of them in backward.
pub fn causal_attention_qkv(qkv: &Tensor, n_heads: usize, n_kv_heads: usize, scale: f64) -> Result<Tensor> {
    of_one("causal_attention_qkv", qkv, n_heads, n_kv_heads, AttentionOptions::causal(scale), None)
}

/// [`attention()`] on queries, keys and values that one layer made, as [`causal_attention_qkv`] takes them.
pub fn attention_qkv(qkv: &Tensor, n_heads: usize, n_kv_heads: usize, options: &AttentionOptions) -> Result<Tensor> {
    of_one("attention_qkv", qkv, n_heads, n_kv_heads, *options, None)
}

/// [`attention_in_documents`] on queries, keys and values that one layer made, as [`causal_attention_qkv`] takes them.
///
/// # Errors
/// Those of [`attention_in_documents`].
pub fn attention_qkv_in_documents(
    qkv: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: &Documents,
) -> Result<Tensor> {
    of_one("attention_qkv_in_documents", qkv, n_heads, n_kv_heads, *options, Some(documents))
}

#[allow(clippy::too_many_arguments)]
fn of_three(
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
    let (batch, queries, q_width) = merged(function, "q", q, n_heads)?;
    let (k_batch, keys, k_width) = merged(function, "k", k, n_kv_heads)?;
    let dim = head_dim(function, q_width, n_heads, n_kv_heads)?;
    let fewest = if options.has_places() { queries } else { queries.min(1) };
    if merged(function, "v", v, n_kv_heads)? != (k_batch, keys, k_width)
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
            if options.has_places() { "T" } else { "1" }
        );
    }
    same_kind(function, ("q", q), ("k", k))?;
    same_kind(function, ("q", q), ("v", v))?;
    if let Some(documents) = documents {
        documents.check(function, batch, queries)?;
        documents.check(function, batch, keys)?;
    }
    if !served(q) {
        return composite(q, k, v, n_heads, n_kv_heads, &options, documents);
    }
    let documents = documents.cloned();
    let mask = mask(&options, [batch, n_heads, queries, keys])?;
    let shape = Dims { batch, queries, keys, n_heads, n_kv_heads, dim, options, documents, mask };
    once(shape, |op| q.apply_op3(k, v, op))
}

fn of_one(
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
    if !served(qkv) {
        let (q, kv) = (n_heads * dim, n_kv_heads * dim);
        let (k, v) = (qkv.narrow(2, q, kv)?, qkv.narrow(2, q + kv, kv)?);
        return composite(&qkv.narrow(2, 0, q)?, &k, &v, n_heads, n_kv_heads, &options, documents);
    }
    let documents = documents.cloned();
    let mask = mask(&options, [batch, n_heads, queries, queries])?;
    let shape = Dims { batch, queries, keys: queries, n_heads, n_kv_heads, dim, options, documents, mask };
    once(shape, |op| qkv.apply_op1(op))
}

/// Draws the dropout mask of the probabilities `[batch, n_heads, T, S]`.
fn mask(options: &AttentionOptions, dims: [usize; 4]) -> Result<Option<Mask>> {
    (options.dropout > 0.).then(|| Mask::draw(options.dropout, &dims)).transpose()
}

/// Batch, positions and elements at a position of `[batch, positions, heads * D]` or `[batch, positions, heads, D]`.
fn merged(function: &str, name: &str, x: &Tensor, heads: usize) -> Result<(usize, usize, usize)> {
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

/// Applies an attention, or takes what a checkpointed closure kept of it.
fn once(shape: Dims, apply: impl FnOnce(Attention) -> Result<Tensor>) -> Result<Tensor> {
    let out = [shape.batch, shape.queries, shape.n_heads * shape.dim];
    operation(Operation::Attention, &out, |known| {
        let (known, log_sums) = match known {
            Some((storage, log_sums)) => (Some(storage), log_sums.downcast::<OnceLock<Vec<f32>>>().unwrap_or_default()),
            None => (None, Arc::default()),
        };
        let y = apply(Attention { shape, log_sums: log_sums.clone(), known: Mutex::new(known) })?;
        Ok((y, log_sums))
    })
}

struct Attention {
    shape: Dims,
    log_sums: Arc<OnceLock<Vec<f32>>>,
    /// The output, where it was computed before.
    known: Mutex<Option<Storage>>,
}

impl Attention {
    fn output(
        &self,
        dtype: DType,
        compute: impl FnOnce() -> Result<(Vec<f32>, Vec<f32>)>,
    ) -> Result<(CpuStorage, Shape)> {
        let Dims { batch, queries, n_heads, dim, .. } = self.shape;
        let shape = Shape::from((batch, queries, n_heads * dim));
        if let Some(Storage::Cpu(known)) = self.known.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Ok((known, shape));
        }
        let (out, log_sums) = compute()?;
        let _ = self.log_sums.set(log_sums);
        Ok((storage(out, dtype)?, shape))
    }

    fn log_sums(&self) -> Result<&[f32]> {
        match self.log_sums.get() {
            Some(log_sums) => Ok(log_sums),
            None => bail!("attention: backward before forward"),
        }
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.output(q.dtype(), || {
            let (q, k, v) = (floats(q, ql)?, floats(k, kl)?, floats(v, vl)?);
            Ok(self.shape.forward([&q, &k, &v], self.shape.apart()))
        })
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        read!(q_values, q);
        read!(k_values, k);
        read!(v_values, v);
        read!(out_values, out);
        read!(grad, d_out);
        let mut dq = vec![0f32; q_values.len()];
        let mut dk = vec![0f32; k_values.len()];
        let mut dv = vec![0f32; v_values.len()];
        self.shape.backward(
            [&q_values, &k_values, &v_values],
            self.shape.apart(),
            &out_values,
            &grad,
            self.log_sums()?,
            [&Shared::new(&mut dq), &Shared::new(&mut dk), &Shared::new(&mut dv)],
        );
        let made = |values: Vec<f32>, like: &Tensor| tensor(values, like.shape(), like.dtype()).map(Some);
        Ok((made(dq, q)?, made(dk, k)?, made(dv, v)?))
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "attention_qkv"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.output(qkv.dtype(), || {
            let values = floats(qkv, layout)?;
            Ok(self.shape.forward([&values; 3], self.shape.fused()))
        })
    }

    fn bwd(&self, qkv: &Tensor, out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        read!(values, qkv);
        read!(out_values, out);
        read!(grad, d_out);
        let mut d_qkv = vec![0f32; values.len()];
        let shared = Shared::new(&mut d_qkv);
        self.shape.backward([&values; 3], self.shape.fused(), &out_values, &grad, self.log_sums()?, [&shared; 3]);
        Ok(Some(tensor(d_qkv, qkv.shape(), qkv.dtype())?))
    }
}
