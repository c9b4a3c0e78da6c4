//! Attention: `candle_nn::attention` with a backward, and this crate's fused attention.
//!
//! `functions` checks arguments. `fused` is the operation on the CPU for f32, f16 and bf16 (`cpu`), and on CUDA devices
//! (`cuda`). Its memory is linear in the number of keys. Other devices, f64 on the CPU, and masks that `fused` does not
//! know run as a chain of Candle's operations (`composite`, `attend`). `context` is the attention of ranks that share
//! sequences, and `whole_keys` gathers what the others hold.

pub(super) mod composite;
mod context;
mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
mod documents;
mod engine;
pub(super) mod functions;
mod fused;
pub(super) mod options;
mod sinks;
mod visible_keys;
mod whole_keys;

use candle_core::{D, DType, Device, Result, Tensor, WithDType, bail};

pub use candle_nn::attention::AttnMask;

pub use documents::Documents;

use super::limits::check_scores_fit;
use super::softmax::softmax_last_dim;
use crate::context_parallel::current;
use composite::repeat_kv_heads;
use functions::attention;
use fused::is_fused;
use options::AttentionOptions;

/// Computes attention of `q` `[batch, T, heads, D]` over `k` and `v` `[batch, S, kv_heads, D]`. The output is `[batch,
/// heads, T, D]`.
///
/// Unlike [`candle_nn::attention::flash_attn`], it has a backward. The output is f32 for one sequence, and has `q`'s
/// dtype for more. For f64, which Candle computes in f32, the output is f64. Several sequences take every mask and
/// dtype. Without a bias, attention without a mask, and causal attention in which every query sees the keys up to its own,
/// run fused. All other masks run as a chain of operations. Fails if shapes or dtypes disagree.
pub fn flash_attn<T>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    attn_mask: AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor>
where
    T: WithDType + num_traits::Float,
{
    if q.dtype() != T::DTYPE {
        bail!("flash_attn: expected q of {:?}, found {:?}", T::DTYPE, q.dtype());
    }
    let batch = q.dim(0)?;
    let dtype = match q.dtype() {
        DType::F64 => DType::F64,
        _ if batch == 1 => DType::F32,
        dtype => dtype,
    };
    masked_attention(q, k, v, softmax_scale, &attn_mask, max_bias, softcap)?.to_dtype(dtype)
}

/// Computes the attention, in any float dtype.
fn masked_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    mask: &AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let (batch, queries, heads, dim) = q.dims4()?;
    let (_, keys, kv_heads, _) = k.dims4()?;
    let max_bias = max_bias.filter(|bias| *bias > 0.0);
    let softcap = softcap.filter(|cap| *cap != 0.0);
    let is_causal = match mask {
        AttnMask::None => Some(false),
        AttnMask::Causal { kv_offset } if kv_offset + queries == keys => Some(true),
        _ => None,
    };
    if let Some(causal) = is_causal
        && max_bias.is_none()
        && softcap.is_none_or(|cap| cap.is_finite() && cap > 0.0)
        && is_fused(q)
        && k.dims() == v.dims()
    {
        let softcap = softcap.map(f64::from);
        let options = AttentionOptions { causal, softcap, ..AttentionOptions::causal(f64::from(scale)) };
        let out = attention(q, k, v, heads, kv_heads, &options)?;
        return out.reshape((batch, queries, heads, dim))?.transpose(1, 2);
    }
    refuse_in_context("flash_attn")?;
    let of_heads = |bias: f32| Tensor::from_vec(alibi_slopes(heads, bias), (1, heads, 1, 1), q.device());
    let (causal_offset, bias) = match mask {
        AttnMask::None => {
            let offset = keys as isize - queries as isize;
            // Without a mask, Candle's adds the bias only for several sequences.
            let bias = max_bias.filter(|_| batch > 1);
            (
                None,
                bias.map(|bias| alibi_bias(&alibi_slopes(heads, bias), queries, keys, offset, q.device()))
                    .transpose()?,
            )
        }
        AttnMask::Causal { kv_offset } => {
            // A single query is the last.
            let offset = if queries == 1 { keys as isize - 1 } else { *kv_offset as isize };
            let bias = max_bias.map(|bias| alibi_bias(&alibi_slopes(heads, bias), queries, keys, offset, q.device()));
            (Some(offset), bias.transpose()?)
        }
        AttnMask::Mask(mask) => {
            let mask = mask.broadcast_as(mask_shape(mask, queries, keys)?)?;
            let mask = match max_bias {
                Some(bias) => mask.to_dtype(DType::F32)?.broadcast_mul(&of_heads(bias)?)?,
                None => mask,
            };
            (None, Some(mask))
        }
    };
    let heads_first = |x: &Tensor| x.transpose(1, 2);
    let scores = ScoreOptions { scale, softcap, causal_offset, window: (None, None), bias };
    attend(&heads_first(q)?, &heads_first(k)?, &heads_first(v)?, &scores)
}

/// Fails in a context-parallel forward.
fn refuse_in_context(function: &str) -> Result<()> {
    if current().is_some() {
        bail!(
            "{function}: in a context-parallel forward, attention takes no mask but a causal one, no bias and no lengths, \
             in f32, bf16 or f16: use `nn::attention`, or `nn::attention_in_documents` for packed documents"
        )
    }
    Ok(())
}

/// Returns the mask's shape with dimensions for batch and heads.
fn mask_shape(mask: &Tensor, queries: usize, keys: usize) -> Result<Vec<usize>> {
    let dims = mask.dims();
    if dims.len() < 2 || dims.len() > 4 || dims[dims.len() - 2..] != [queries, keys] {
        bail!("flash_attn: the mask {dims:?} must end in [{queries}, {keys}], queries and keys");
    }
    Ok([&vec![1; 4 - dims.len()], dims].concat())
}

/// Computes attention over packed sequences: `q` `[total_q, heads, D]`, `k` and `v` `[total_k, kv_heads, D]`, and the
/// lengths of the sequences (u32) `[batch]`. The output is `[total_q, heads, D]`. The queries are the last ones of
/// their sequence.
///
/// Unlike [`candle_nn::attention::flash_attn_varlen_unfused`], it has a backward. Fails if shapes, dtypes or lengths
/// disagree, or there is a window to the right only.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_unfused(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    _max_seqlen_q: usize,
    _max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    refuse_in_context("flash_attn_varlen")?;
    let window = (window_size_left, window_size_right);
    let (total_q, heads, dim) = q.dims3()?;
    let (total_k, ..) = k.dims3()?;
    let lengths = |lengths: &Tensor| lengths.to_dtype(DType::U32)?.to_vec1::<u32>();
    let (of_q, of_k) = (lengths(seqlens_q)?, lengths(seqlens_k)?);
    let sum = |lengths: &[u32]| lengths.iter().map(|length| *length as usize).sum::<usize>();
    if of_q.len() != of_k.len() || sum(&of_q) != total_q || sum(&of_k) != total_k {
        bail!("flash_attn_varlen: lengths {of_q:?} and {of_k:?} must add up to {total_q} queries and {total_k} keys");
    }
    if window.0.is_none() && window.1.is_some() {
        bail!("flash_attn_varlen: a window to the right needs one to the left");
    }
    let slopes = alibi_slopes.map(|slopes| slopes.to_dtype(DType::F32)?.to_vec1::<f32>()).transpose()?;
    if let Some(slopes) = slopes.as_ref().filter(|slopes| slopes.len() != heads) {
        bail!("flash_attn_varlen: {} slopes for {heads} heads", slopes.len());
    }
    let (mut outputs, mut at_q, mut at_k) = (vec![], 0, 0);
    for (queries, keys) in of_q.into_iter().zip(of_k) {
        let (queries, keys) = (queries as usize, keys as usize);
        let (first_q, first_k) = (at_q, at_k);
        (at_q, at_k) = (at_q + queries, at_k + keys);
        if queries == 0 {
            continue;
        }
        if keys == 0 {
            outputs.push(Tensor::zeros((queries, heads, dim), q.dtype(), q.device())?);
            continue;
        }
        let offset = keys as isize - queries as isize;
        if causal && offset < 0 {
            bail!("flash_attn_varlen: a causal sequence has {queries} queries, but only {keys} keys");
        }
        let heads_first = |x: &Tensor, first, count| x.narrow(0, first, count)?.transpose(0, 1)?.unsqueeze(0);
        let bias = slopes.as_ref().map(|slopes| alibi_bias(slopes, queries, keys, offset, q.device())).transpose()?;
        let causal_offset = causal.then_some(offset);
        let scores = ScoreOptions { scale: softmax_scale, softcap: None, causal_offset, window, bias };
        let (k, v) = (heads_first(k, first_k, keys)?, heads_first(v, first_k, keys)?);
        let out = attend(&heads_first(q, first_q, queries)?, &k, &v, &scores)?;
        outputs.push(out.squeeze(0)?.transpose(0, 1)?.to_dtype(q.dtype())?);
    }
    match outputs.is_empty() {
        true => Tensor::zeros((0, heads, dim), q.dtype(), q.device()),
        false => Tensor::cat(&outputs, 0),
    }
}

/// The definition of the scores: `softcap(scale q k) + bias`, and minus infinity for hidden keys.
#[derive(Clone, Default)]
pub(super) struct ScoreOptions {
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    /// Query `i` sees the keys up to `i` plus this offset.
    pub(super) causal_offset: Option<isize>,
    /// Number of visible keys to the left and to the right of the query's own key. The last query's own key is the last
    /// key.
    pub(super) window: (Option<usize>, Option<usize>),
    /// Bias, of a shape that is broadcast over `[batch, heads, T, S]`.
    pub(super) bias: Option<Tensor>,
}

impl ScoreOptions {
    /// Returns the mask of hidden keys, `[T, S]`, if any are hidden, and whether a query sees no key.
    fn mask(&self, queries: usize, keys: usize, dtype: DType, device: &Device) -> Result<Option<(Tensor, bool)>> {
        if self.causal_offset.is_none() && self.window == (None, None) {
            return Ok(None);
        }
        let own = keys as isize - queries as isize;
        let sees = |i: usize, j: usize| {
            let (i, j) = (i as isize, j as isize);
            let (before, after) = (i + own - j, j - i - own);
            self.causal_offset.is_none_or(|offset| j <= i + offset)
                && self.window.0.is_none_or(|left| before <= left as isize)
                // A window without a right side ends at the query.
                && match self.window {
                    (Some(_), None) => after <= 0,
                    (_, right) => right.is_none_or(|right| after <= right as isize),
                }
        };
        let mask: Vec<f32> = (0..queries)
            .flat_map(|i| (0..keys).map(move |j| (i, j)))
            .map(|(i, j)| if sees(i, j) { 0.0 } else { f32::NEG_INFINITY })
            .collect();
        let hides_all = (0..queries).any(|i| (0..keys).all(|j| !sees(i, j)));
        Ok(Some((Tensor::from_vec(mask, (queries, keys), device)?.to_dtype(dtype)?, hides_all)))
    }
}

/// Computes attention of `q` `[batch, heads, T, D]` over `k` `[batch, k_heads, S, D]` and `v` `[batch, v_heads, S,
/// Dv]`. The output is `[batch, heads, T, Dv]`, in f32 (f64 for f64). A query that sees no key gets zeros.
pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: &ScoreOptions) -> Result<Tensor> {
    let (batch, heads, queries, dim) = q.dims4()?;
    let (k_batch, _, keys, k_dim) = k.dims4()?;
    let (v_batch, _, values, _) = v.dims4()?;
    if (k_batch, v_batch, k_dim, values) != (batch, batch, dim, keys) {
        bail!(
            "attention: q {:?}, k {:?} and v {:?} do not fit together: they must be [batch, heads, T, D], \
             [batch, heads, S, D] and [batch, heads, S, Dv]",
            q.dims(),
            k.dims(),
            v.dims()
        );
    }
    let wide = if q.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    // The scores, the powers and the weights. A graph also keeps the product and the shifted scores.
    let copies = if [q, k, v].iter().any(|x| x.track_op()) { 5 } else { 3 };
    check_scores_fit("attention", [batch, heads, queries, keys], copies, wide, q.device())?;
    let (q, k, v) =
        (q.to_dtype(wide)?.contiguous()?, repeat_kv_heads(k, heads, wide)?, repeat_kv_heads(v, heads, wide)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * f64::from(options.scale))?;
    if let Some(cap) = options.softcap {
        scores = ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?;
    }
    if let Some(bias) = &options.bias {
        scores = scores.broadcast_add(&bias.to_dtype(wide)?)?;
    }
    // A bias may hide all keys of a query.
    let mut may_hide_all = options.bias.is_some();
    if let Some((mask, hides_all)) = options.mask(queries, keys, wide, q.device())? {
        scores = scores.broadcast_add(&mask)?;
        may_hide_all |= hides_all;
    }
    if !may_hide_all {
        return softmax_last_dim(&scores)?.matmul(&v);
    }
    // The softmax of no keys would be NaN.
    let sees = scores.max_keepdim(D::Minus1)?.detach().gt(f32::NEG_INFINITY)?.broadcast_as(scores.shape())?;
    let scores = sees.where_cond(&scores, &scores.zeros_like()?)?;
    (softmax_last_dim(&scores)? * sees.to_dtype(wide)?)?.matmul(&v)
}

/// Returns the slopes of ALiBi (Press et al., 2022, arXiv:2108.12409) for this number of heads.
fn alibi_slopes(heads: usize, max_bias: f32) -> Vec<f32> {
    let power = heads.next_power_of_two() as f32;
    (1..=heads).map(|head| 2f32.powf(-max_bias * head as f32 / power)).collect()
}

/// Returns ALiBi's bias `[1, heads, T, S]`: minus the slope times a key's distance from the query's own key. The own
/// key's index is the query's plus `offset`.
fn alibi_bias(slopes: &[f32], queries: usize, keys: usize, offset: isize, device: &Device) -> Result<Tensor> {
    let distance = |i: usize, j: usize| (i as isize + offset - j as isize).unsigned_abs() as f32;
    let places = || (0..queries).flat_map(move |i| (0..keys).map(move |j| distance(i, j)));
    let bias: Vec<f32> = slopes.iter().flat_map(|slope| places().map(move |distance| -slope * distance)).collect();
    Tensor::from_vec(bias, (1, slopes.len(), queries, keys), device)
}

pub use flash_attn_varlen_unfused as flash_attn_varlen_cpu;

/// `candle_nn::attention::varlen`.
pub mod varlen {
    pub use super::flash_attn_varlen_unfused;
}

/// `candle_nn::attention::cpu_flash`, with Candle's names of the functions above.
pub mod cpu_flash {
    use candle_core::{DType, Result, Tensor, WithDType, bail};
    use candle_nn::attention::AttnMask;

    use super::masked_attention;

    pub use super::flash_attn;

    /// Causal attention of one sequence.
    pub mod causal {
        use super::*;

        pub use candle_nn::attention::cpu_flash::causal::causal_decode_f32_interleaved;

        /// Computes causal attention of `q` `[1, T, heads, D]` over `k` and `v` `[1, S, kv_heads, D]`. Query `i` sees
        /// the keys `0..=i + kv_offset`. The output is `[1, heads, T, D]`, f32 (f64 for f64). Candle's has no backward.
        /// Fails if shapes or dtypes disagree, or there is more than one sequence.
        pub fn run_causal_attn_cpu<T>(
            q: &Tensor,
            k: &Tensor,
            v: &Tensor,
            softmax_scale: f32,
            kv_offset: usize,
            max_bias: Option<f32>,
            softcap: Option<f32>,
        ) -> Result<Tensor>
        where
            T: WithDType + num_traits::Float,
        {
            let wide = check_one_sequence("run_causal_attn_cpu", q, T::DTYPE)?;
            let mask = AttnMask::Causal { kv_offset };
            masked_attention(q, k, v, softmax_scale, &mask, max_bias, softcap)?.to_dtype(wide)
        }
    }

    /// Attention of one sequence with a mask tensor.
    pub mod standard {
        use super::*;

        /// Computes attention of `q` `[1, T, heads, D]` over `k` and `v` `[1, S, kv_heads, D]`, with a mask that ends
        /// in `[T, S]`. The output is `[1, heads, T, D]`, f32 (f64 for f64). Candle's has no backward. Fails if shapes
        /// or dtypes disagree, or there is more than one sequence.
        pub fn run_flash_attn_cpu<T>(
            q: &Tensor,
            k: &Tensor,
            v: &Tensor,
            mask: Option<&Tensor>,
            softmax_scale: f32,
            max_bias: Option<f32>,
            softcap: Option<f32>,
        ) -> Result<Tensor>
        where
            T: WithDType,
        {
            let wide = check_one_sequence("run_flash_attn_cpu", q, T::DTYPE)?;
            let mask = mask.map_or(AttnMask::None, |mask| AttnMask::Mask(mask.clone()));
            masked_attention(q, k, v, softmax_scale, &mask, max_bias, softcap)?.to_dtype(wide)
        }
    }

    /// Attention over packed sequences.
    pub mod varlen {
        pub use crate::nn::attention::flash_attn_varlen_cpu;
    }

    /// Returns the output's dtype.
    fn check_one_sequence(function: &str, q: &Tensor, dtype: DType) -> Result<DType> {
        if q.dim(0)? != 1 || q.dtype() != dtype {
            bail!("{function}: q is {:?} of {:?}, not one sequence of {dtype:?}", q.dims(), q.dtype());
        }
        Ok(if dtype == DType::F64 { DType::F64 } else { DType::F32 })
    }
}
