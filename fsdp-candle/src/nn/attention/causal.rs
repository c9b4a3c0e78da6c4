//! Causal attention with grouped-query heads, in the manner of FlashAttention (Dao et al., 2022, arXiv:2205.14135): the
//! matrix of probabilities never exists whole.
//!
//! For query `i` of a head: `p_ij = e^(scale q_i.k_j - L_i)` over the keys `j <= S - T + i`, `o_i = sum_j p_ij v_j`.
//! Forward keeps `L_i`, the logarithm of the sum. Backward has `dv_j = sum_i p_ij do_i`,
//! `ds_ij = scale p_ij (do_i.v_j - do_i.o_i)`, `dq_i = sum_j ds_ij k_j`, `dk_j = sum_i ds_ij q_i`.
//!
//! Queries are taken in blocks of rows; a block's products reach as far as its last query's keys, so of the upper
//! triangle only the corners along the diagonal are computed. Heads are read and written where they lie in
//! `[batch, T, heads * head_dim]`: nothing is transposed.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, D, DType, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::matrix::{Mat, MatMut, Shared, product_here};
use super::super::cpu::parallel::each;
use super::super::cpu::values::{floats, read, same_kind, served, storage, tensor};
use super::softmax_rows::{row_dot, softmax_rows, softmax_rows_back};

/// Queries of a block.
const BLOCK: usize = 64;

/// Causal self-attention: `q` `[batch, T, n_heads * D]` (or `[batch, T, n_heads, D]`), `k` and `v`
/// `[batch, S, n_kv_heads * D]` (or with the heads apart), output `[batch, T, n_heads * D]`. Query head `h` uses key
/// head `h / (n_heads / n_kv_heads)`.
///
/// The queries are the last `T` of the `S >= T` positions, so that with a cache of earlier keys query `i` sees the keys
/// `0..=S - T + i`. `scale` is usually `1 / sqrt(D)`. An error if the shapes or dtypes disagree.
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
    let function = "causal_attention";
    let (batch, queries, q_width) = merged(function, "q", q, n_heads)?;
    let (k_batch, keys, k_width) = merged(function, "k", k, n_kv_heads)?;
    let dim = head_dim(function, q_width, n_heads, n_kv_heads)?;
    if merged(function, "v", v, n_kv_heads)? != (k_batch, keys, k_width)
        || k_batch != batch
        || k_width != n_kv_heads * dim
        || keys < queries
    {
        bail!(
            "{function}: q {:?}, k {:?} and v {:?} do not fit together: with {n_heads} heads of {dim} they must be \
             [batch, T, {q_width}] and twice [batch, S, {}] with S >= T",
            q.dims(),
            k.dims(),
            v.dims(),
            n_kv_heads * dim
        );
    }
    same_kind(function, ("q", q), ("k", k))?;
    same_kind(function, ("q", q), ("v", v))?;
    if !served(q) {
        return composite(q, k, v, n_heads, n_kv_heads, scale);
    }
    let shape = Dims { batch, queries, keys, n_heads, n_kv_heads, dim, scale: scale as f32 };
    q.apply_op3(k, v, Attention { shape, log_sums: OnceLock::new() })
}

/// [`causal_attention`] on queries, keys and values that one layer made: `qkv`
/// `[batch, T, (n_heads + 2 * n_kv_heads) * D]` holds the heads of the queries, then those of the keys, then those of
/// the values, at each position. Output `[batch, T, n_heads * D]`.
///
/// It saves the copies that taking `qkv` apart would cost in forward, and more of them in backward.
pub fn causal_attention_qkv(qkv: &Tensor, n_heads: usize, n_kv_heads: usize, scale: f64) -> Result<Tensor> {
    let function = "causal_attention_qkv";
    let (batch, queries, width) = qkv.dims3()?;
    let heads = n_heads + 2 * n_kv_heads;
    if heads == 0 || !width.is_multiple_of(heads) {
        bail!(
            "{function}: the last dimension of qkv {:?} must be a multiple of {n_heads} + 2 * {n_kv_heads} heads",
            qkv.dims()
        );
    }
    let dim = head_dim(function, width / heads * n_heads, n_heads, n_kv_heads)?;
    if !served(qkv) {
        let (q, kv) = (n_heads * dim, n_kv_heads * dim);
        let (k, v) = (qkv.narrow(2, q, kv)?, qkv.narrow(2, q + kv, kv)?);
        return composite(&qkv.narrow(2, 0, q)?, &k, &v, n_heads, n_kv_heads, scale);
    }
    let shape = Dims { batch, queries, keys: queries, n_heads, n_kv_heads, dim, scale: scale as f32 };
    qkv.apply_op1(Attention { shape, log_sums: OnceLock::new() })
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

/// The same from Candle's operations.
pub(in crate::nn) fn composite(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    scale: f64,
) -> Result<Tensor> {
    let (batch, queries, keys) = (q.dim(0)?, q.dim(1)?, k.dim(1)?);
    let dtype = q.dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let heads = |x: &Tensor, steps: usize, n: usize| -> Result<Tensor> {
        x.to_dtype(wide)?.reshape((batch, steps, n, ()))?.transpose(1, 2)?.contiguous()
    };
    let spread = |x: &Tensor| -> Result<Tensor> {
        let x = heads(x, keys, n_kv_heads)?;
        let dim = x.dim(3)?;
        let x = x.unsqueeze(2)?.broadcast_as((batch, n_kv_heads, n_heads / n_kv_heads, keys, dim))?;
        x.contiguous()?.reshape((batch, n_heads, keys, dim))
    };
    let scores = (heads(q, queries, n_heads)?.matmul(&spread(k)?.t()?.contiguous()?)? * scale)?;
    let mask: Vec<f32> = (0..queries)
        .flat_map(|i| (0..keys).map(move |j| if j <= keys - queries + i { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    let mask = Tensor::from_vec(mask, (1, 1, queries, keys), q.device())?.to_dtype(wide)?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&spread(v)?)?.transpose(1, 2)?.reshape((batch, queries, ()))?.to_dtype(dtype)
}

/// What an attention is over. `queries` and `keys` count positions.
#[derive(Clone, Copy)]
struct Dims {
    batch: usize,
    queries: usize,
    keys: usize,
    n_heads: usize,
    n_kv_heads: usize,
    dim: usize,
    scale: f32,
}

/// Where the heads of one operand lie in its buffer: batch by batch, in each a row for each position.
#[derive(Clone, Copy)]
struct Place {
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

/// A block of one head's queries.
#[derive(Clone, Copy)]
struct Rows {
    first: usize,
    count: usize,
    /// Keys that the first of them sees.
    seen_first: usize,
}

impl Rows {
    /// Keys that the last of them sees.
    fn seen(&self) -> usize {
        self.seen_first + self.count - 1
    }
}

impl Dims {
    fn blocks(self) -> impl Iterator<Item = Rows> {
        (0..self.queries).step_by(BLOCK).map(move |first| Rows {
            first,
            count: BLOCK.min(self.queries - first),
            seen_first: self.keys - self.queries + first + 1,
        })
    }

    /// Elements of a block's scores.
    fn scores(self) -> usize {
        BLOCK.min(self.queries) * self.keys
    }

    /// Rough cost of one head, in elements of elementwise work.
    fn head_cost(self) -> usize {
        self.queries * self.keys * self.dim / 64
    }

    /// Places of q, k and v that are tensors of their own.
    fn apart(self) -> [Place; 3] {
        let place = |steps: usize, heads: usize| Place {
            offset: 0,
            batch_stride: steps * heads * self.dim,
            row_stride: heads * self.dim,
        };
        let kv = place(self.keys, self.n_kv_heads);
        [place(self.queries, self.n_heads), kv, kv]
    }

    /// Places of q, k and v in one tensor.
    fn fused(self) -> [Place; 3] {
        let row_stride = (self.n_heads + 2 * self.n_kv_heads) * self.dim;
        let place =
            |head: usize| Place { offset: head * self.dim, batch_stride: self.queries * row_stride, row_stride };
        [place(0), place(self.n_heads), place(self.n_heads + self.n_kv_heads)]
    }

    /// The matrix of `count` rows of a head.
    fn mat<'a>(self, data: &'a [f32], place: Place, batch: usize, first: usize, count: usize, head: usize) -> Mat<'a> {
        Mat::strided(&data[place.at(batch, first, head, self.dim)..], count, self.dim, place.row_stride, 1)
    }

    /// The attention's output and the logarithms of the sums, `[batch, n_heads, T]`.
    fn forward(self, [q, k, v]: [&[f32]; 3], [qp, kp, vp]: [Place; 3]) -> (Vec<f32>, Vec<f32>) {
        let mut out = vec![0f32; self.batch * self.queries * self.n_heads * self.dim];
        let mut log_sums = vec![0f32; self.batch * self.n_heads * self.queries];
        let [op, ..] = self.apart();
        let (out_all, sums_all) = (Shared::new(&mut out), Shared::new(&mut log_sums));
        let scratch = || vec![0f32; self.scores()];
        each(self.batch * self.n_heads, self.head_cost(), scratch, |task, scratch| {
            let (batch, head) = (task / self.n_heads, task % self.n_heads);
            let kv_head = head / (self.n_heads / self.n_kv_heads);
            for rows in self.blocks() {
                let (count, seen) = (rows.count, rows.seen());
                let scores = Shared::new(&mut scratch[..count * seen]);
                let q = self.mat(q, qp, batch, rows.first, count, head);
                let k = self.mat(k, kp, batch, 0, seen, kv_head);
                let v = self.mat(v, vp, batch, 0, seen, kv_head);
                // SAFETY: the scores are this thread's, and the product is done with them when it returns.
                product_here(unsafe { scores.mat(0, count, seen, seen) }, false, q, k.t());
                // SAFETY: as above; of the sums, these are this task's.
                let (scores, sums) =
                    unsafe { (scores.slice(0, count * seen), sums_all.slice(task * self.queries + rows.first, count)) };
                softmax_rows(scores, sums, seen, rows.seen_first, self.scale);
                // SAFETY: no other task writes this head's columns of the output.
                let o =
                    unsafe { out_all.mat(op.at(batch, rows.first, head, self.dim), count, self.dim, op.row_stride) };
                product_here(o, false, Mat::new(scores, count, seen), v);
            }
        });
        (out, log_sums)
    }

    /// Adds the gradients of q, k and v to `grads`, which may be one buffer three times.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        self,
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
                for rows in self.blocks() {
                    let Rows { first, count, .. } = rows;
                    let seen = rows.seen();
                    let (p, ds) = (&mut p[..count * seen], &mut ds[..count * seen]);
                    let q = self.mat(q, qp, batch, first, count, head);
                    let k = self.mat(k, kp, batch, 0, seen, kv_head);
                    let v = self.mat(v, vp, batch, 0, seen, kv_head);
                    let d_o = self.mat(d_out, op, batch, first, count, head);
                    product_here(MatMut::new(p, count, seen), false, q, k.t());
                    product_here(MatMut::new(ds, count, seen), false, d_o, v.t());
                    for (i, delta) in deltas[..count].iter_mut().enumerate() {
                        let at = op.at(batch, first + i, head, self.dim);
                        *delta = row_dot(&out[at..at + self.dim], &d_out[at..at + self.dim]);
                    }
                    let sums = &log_sums[(batch * self.n_heads + head) * self.queries + first..][..count];
                    softmax_rows_back(p, ds, sums, deltas, seen, rows.seen_first, self.scale);
                    let (p, ds) = (Mat::new(p, count, seen), Mat::new(ds, count, seen));
                    // SAFETY: only this task touches this key head's columns of the gradients, and its query heads'
                    // columns; each product is done when it returns.
                    unsafe {
                        let d = self.dim;
                        product_here(dv.mat(vp.at(batch, 0, kv_head, d), seen, d, vp.row_stride), true, p.t(), d_o);
                        product_here(dk.mat(kp.at(batch, 0, kv_head, d), seen, d, kp.row_stride), true, ds.t(), q);
                        product_here(dq.mat(qp.at(batch, first, head, d), count, d, qp.row_stride), false, ds, k);
                    }
                }
            }
        });
    }
}

struct Attention {
    shape: Dims,
    log_sums: OnceLock<Vec<f32>>,
}

impl Attention {
    fn finish(&self, (out, log_sums): (Vec<f32>, Vec<f32>), dtype: DType) -> Result<(CpuStorage, Shape)> {
        let Dims { batch, queries, n_heads, dim, .. } = self.shape;
        let _ = self.log_sums.set(log_sums);
        Ok((storage(out, dtype)?, Shape::from((batch, queries, n_heads * dim))))
    }

    fn log_sums(&self) -> Result<&[f32]> {
        match self.log_sums.get() {
            Some(log_sums) => Ok(log_sums),
            None => bail!("causal_attention: backward before forward"),
        }
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "causal_attention"
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
        let dtype = q.dtype();
        let (q, k, v) = (floats(q, ql)?, floats(k, kl)?, floats(v, vl)?);
        self.finish(self.shape.forward([&q, &k, &v], self.shape.apart()), dtype)
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
        "causal_attention_qkv"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let values = floats(qkv, layout)?;
        self.finish(self.shape.forward([&values; 3], self.shape.fused()), qkv.dtype())
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
