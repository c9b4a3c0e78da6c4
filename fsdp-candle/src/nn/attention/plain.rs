//! Attention from Candle's differentiable operations, with everything that scores may be subject to.

use candle_core::{D, DType, Device, Result, Tensor, bail};

use crate::nn::{limits::scores_fit, softmax};

/// How scores come to be: `softcap(scale q k) + bias`, and minus infinity where a query does not see a key.
#[derive(Clone, Default)]
pub(in crate::nn) struct Scores {
    pub(in crate::nn) scale: f32,
    pub(in crate::nn) softcap: Option<f32>,
    /// Query `i` sees the keys up to `i` plus this.
    pub(in crate::nn) causal_offset: Option<isize>,
    /// How many keys a query sees to the left and to the right of its own, which is the one at the end of the keys for
    /// the last query.
    pub(in crate::nn) window: (Option<usize>, Option<usize>),
    /// Is added; of a shape that is broadcast over `[batch, heads, T, S]`.
    pub(in crate::nn) bias: Option<Tensor>,
}

impl Scores {
    /// What hides keys from queries, `[T, S]`, if anything does, and whether some query sees none.
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
                // A window to the left alone ends at the query.
                && match self.window {
                    (Some(_), None) => after <= 0,
                    (_, right) => right.is_none_or(|right| after <= right as isize),
                }
        };
        let mask: Vec<f32> = (0..queries)
            .flat_map(|i| (0..keys).map(move |j| (i, j)))
            .map(|(i, j)| if sees(i, j) { 0.0 } else { f32::NEG_INFINITY })
            .collect();
        let is_blind = (0..queries).any(|i| (0..keys).all(|j| !sees(i, j)));
        Ok(Some((Tensor::from_vec(mask, (queries, keys), device)?.to_dtype(dtype)?, is_blind)))
    }
}

/// Attention of `q` `[batch, heads, T, D]` over `k` `[batch, k_heads, S, D]` and `v` `[batch, v_heads, S, Dv]`: output
/// `[batch, heads, T, Dv]`, in f32 (f64 for f64). A query that sees no key gets zeros.
pub(in crate::nn) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, how: &Scores) -> Result<Tensor> {
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
    // The scores, the powers and the weights; a graph keeps the product and what is shifted as well.
    let copies = if [q, k, v].iter().any(|x| x.track_op()) { 5 } else { 3 };
    scores_fit("attention", [batch, heads, queries, keys], copies, wide, q.device())?;
    let (q, k, v) = (q.to_dtype(wide)?.contiguous()?, spread(k, heads, wide)?, spread(v, heads, wide)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * f64::from(how.scale))?;
    if let Some(cap) = how.softcap {
        scores = ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?;
    }
    if let Some(bias) = &how.bias {
        scores = scores.broadcast_add(&bias.to_dtype(wide)?)?;
    }
    // Whether a bias hides all keys of a query is not known.
    let mut may_be_blind = how.bias.is_some();
    if let Some((mask, is_blind)) = how.mask(queries, keys, wide, q.device())? {
        scores = scores.broadcast_add(&mask)?;
        may_be_blind |= is_blind;
    }
    if !may_be_blind {
        return softmax::softmax_last_dim(&scores)?.matmul(&v);
    }
    // The softmax of nothing would not be a number.
    let sees = scores.max_keepdim(D::Minus1)?.detach().gt(f32::NEG_INFINITY)?.broadcast_as(scores.shape())?;
    let scores = sees.where_cond(&scores, &scores.zeros_like()?)?;
    (softmax::softmax_last_dim(&scores)? * sees.to_dtype(wide)?)?.matmul(&v)
}

/// Each key head for all of its query heads, in the dtype that is computed in.
fn spread(x: &Tensor, heads: usize, dtype: DType) -> Result<Tensor> {
    let (batch, own, keys, dim) = x.dims4()?;
    if own == 0 || !heads.is_multiple_of(own) {
        bail!("attention: {heads} query heads can't share {own} key or value heads evenly");
    }
    let x = x.to_dtype(dtype)?;
    if own == heads {
        return x.contiguous();
    }
    let x = x.unsqueeze(2)?.broadcast_as((batch, own, heads / own, keys, dim))?;
    x.contiguous()?.reshape((batch, heads, keys, dim))
}

/// The slopes of ALiBi (Press et al., 2022, arXiv:2108.12409) for so many heads.
pub(in crate::nn) fn slopes(heads: usize, max_bias: f32) -> Vec<f32> {
    let power = heads.next_power_of_two() as f32;
    (1..=heads).map(|head| 2f32.powf(-max_bias * head as f32 / power)).collect()
}

/// ALiBi's bias `[1, heads, T, S]`: minus the slope times a key's distance from the query, whose own key is `offset`
/// after its number.
pub(in crate::nn) fn alibi(
    slopes: &[f32],
    queries: usize,
    keys: usize,
    offset: isize,
    device: &Device,
) -> Result<Tensor> {
    let distance = |i: usize, j: usize| (i as isize + offset - j as isize).unsigned_abs() as f32;
    let places = || (0..queries).flat_map(move |i| (0..keys).map(move |j| distance(i, j)));
    let bias: Vec<f32> = slopes.iter().flat_map(|slope| places().map(move |distance| -slope * distance)).collect();
    Tensor::from_vec(bias, (1, slopes.len(), queries, keys), device)
}
