//! Rotary position embedding with given cosines and sines: `candle_nn::rotary_emb`, each function with a backward.

use candle_core::{Result, Tensor, bail};

use super::cpu::simd::kernel;
use super::cpu::{same_kind, to_vec};
use super::cuda::Cuda;
use super::rotary::{rotate_heads, rotate_rows};
use super::weight::has_cpu_kernels;
use crate::context_parallel::{ContextParallel, current};
use crate::kernels::Rotation;

/// Rotates the pairs of a head's first and second half. `xs` is `[batch, heads, T, D]`; `cos` and `sin` are `[>= T, D /
/// 2]` or `[batch, >= T, D / 2]`; the output is as `xs`. Candle's has no backward, and takes contiguous tensors only.
/// Fails if shapes, dtypes or devices disagree.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn::rotary_emb::rope;
///
/// let x = Tensor::new(&[[[[1f32, 2.]]]], &Device::Cpu)?; // one head of two elements at one position
/// let (cos, sin) = (Tensor::new(&[[0f32]], &Device::Cpu)?, Tensor::new(&[[1f32]], &Device::Cpu)?);
/// assert_eq!(rope(&x, &cos, &sin)?.flatten_all()?.to_vec1::<f32>()?, [-2., 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate("rope", xs, cos, sin, Order { heads_first: true, interleaved: false })
}

/// [`rope`] with interleaved pairs: elements 0 and 1, 2 and 3, and so on.
pub fn rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate("rope_i", xs, cos, sin, Order { heads_first: true, interleaved: true })
}

/// [`rope`] on `[batch, T, heads, D]`.
pub fn rope_thd(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate("rope_thd", xs, cos, sin, Order { heads_first: false, interleaved: false })
}

/// [`rope`] by Candle's operations: [`candle_nn::rotary_emb::rope_slow`].
pub fn rope_slow(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (cos, sin) = own_tables("rope_slow", x.dim(2)?, [cos, sin])?;
    candle_nn::rotary_emb::rope_slow(x, &cos, &sin)
}

/// [`rope_i`] by Candle's operations: [`candle_nn::rotary_emb::rope_i_slow`].
pub fn rope_i_slow(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (cos, sin) = own_tables("rope_i_slow", x.dim(2)?, [cos, sin])?;
    candle_nn::rotary_emb::rope_i_slow(x, &cos, &sin)
}

/// The order of dimensions and of pairs.
#[derive(Clone, Copy)]
struct Order {
    /// Whether the input is `[batch, heads, T, D]`, else `[batch, T, heads, D]`.
    heads_first: bool,
    /// Whether the elements of a pair are adjacent, else one is in each half.
    interleaved: bool,
}

fn rotate(function: &'static str, x: &Tensor, cos: &Tensor, sin: &Tensor, order: Order) -> Result<Tensor> {
    let (batch, second, third, dim) = x.dims4()?;
    let (heads, steps) = if order.heads_first { (second, third) } else { (third, second) };
    let (cos, sin) = &own_tables(function, steps, [cos, sin])?;
    for (name, table) in [("cos", cos), ("sin", sin)] {
        let fits = match *table.dims() {
            [positions, half] => positions >= steps && 2 * half == dim,
            [tables, positions, half] => tables == batch && positions >= steps && 2 * half == dim,
            _ => false,
        };
        if !fits || table.dims() != cos.dims() {
            bail!(
                "{function}: {name} {:?} must be [positions, {}] or [{batch}, positions, {}] with at least {steps} \
                 positions for the input {:?}, and cos and sin must have one shape",
                table.dims(),
                dim / 2,
                dim / 2,
                x.dims()
            );
        }
        same_kind(function, ("the input", x), (name, table))?;
    }
    // Candle computes the gradient of learned tables.
    let is_learned = cos.track_op() || sin.track_op();
    if let Some(cuda) = Cuda::of(x).filter(|_| !is_learned && x.elem_count() > 0) {
        let (heads, rows) = if order.heads_first { (1, heads * steps) } else { (heads, steps) };
        let tables = if cos.rank() == 3 { Some((rows, cos.dim(1)?)) } else { None };
        let rotation = Rotation { heads, dim, half: dim / 2, offset: 0, steps, tables, interleaved: order.interleaved };
        return cuda.rotate(function, x, [cos.contiguous()?, sin.contiguous()?], None, rotation);
    }
    if !has_cpu_kernels(x) || is_learned {
        return composite(x, cos, sin, order);
    }
    // Elements of the tables for one element of the batch. A table may be shared.
    let batch_stride = if cos.rank() == 3 { cos.dim(1)? * (dim / 2) } else { 0 };
    let (cos, sin) = (to_vec(cos)?, to_vec(sin)?);
    rotate_rows(function, x, dim, move |row, y, x, sign| {
        let (batch, within) = (row / (heads * steps), row % (heads * steps));
        let step = if order.heads_first { within % steps } else { within / heads };
        let at = batch * batch_stride + step * (dim / 2);
        let (cos, sin) = (&cos[at..at + dim / 2], &sin[at..at + dim / 2]);
        match order.interleaved {
            true => rotate_pairs(y, x, cos, sin, sign),
            false => rotate_heads(y, x, dim, cos, sin, sign),
        }
    })
}

/// Returns the tables, or in a context-parallel forward their rows for this rank's tokens.
fn own_tables(function: &str, steps: usize, [cos, sin]: [&Tensor; 2]) -> Result<(Tensor, Tensor)> {
    match current() {
        Some(scope) => {
            let own = |table| own_rows(function, table, steps, scope.context());
            Ok((own(cos)?, own(sin)?))
        }
        None => Ok((cos.clone(), sin.clone())),
    }
}

/// Returns the rows of a table for the tokens of a context-parallel rank.
fn own_rows(function: &str, table: &Tensor, steps: usize, context: &ContextParallel) -> Result<Tensor> {
    let whole = steps * context.group().size();
    match table.rank().checked_sub(2) {
        Some(dim) if table.dims()[dim] >= whole => context.split(&table.narrow(dim, 0, whole)?, dim),
        _ => bail!(
            "{function}: in a context-parallel forward, cos and sin have the rows of the whole sequence, from which those \
             of this rank are chosen: expected at least {whole}, found {:?}",
            table.dims()
        ),
    }
}

/// The rotation as a chain of Candle's operations.
fn composite(x: &Tensor, cos: &Tensor, sin: &Tensor, order: Order) -> Result<Tensor> {
    let (batch, second, third, dim) = x.dims4()?;
    let steps = if order.heads_first { third } else { second };
    let half = dim / 2;
    let spread = |table: &Tensor| -> Result<Tensor> {
        let table = if table.rank() == 2 { table.unsqueeze(0)? } else { table.clone() };
        table.narrow(1, 0, steps)?.contiguous()?.unsqueeze(if order.heads_first { 1 } else { 2 })
    };
    let (cos, sin) = (spread(cos)?, spread(sin)?);
    let (a, b) = if order.interleaved {
        let pairs = x.reshape((batch, second, third, half, 2))?;
        (pairs.narrow(4, 0, 1)?.squeeze(4)?, pairs.narrow(4, 1, 1)?.squeeze(4)?)
    } else {
        (x.narrow(3, 0, half)?, x.narrow(3, half, half)?)
    };
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    if order.interleaved {
        Tensor::stack(&[first, second], 4)?.reshape(x.shape())
    } else {
        Tensor::cat(&[first, second], 3)
    }
}

kernel! {
    /// Rotates the adjacent pairs of a head, or rotates back for a negative sign.
    fn rotate_pairs(y: &mut [f32], x: &[f32], cos: &[f32], sin: &[f32], sign: f32) {
        for (((y, x), cos), sin) in y.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(cos).zip(sin) {
            let s = sin * sign;
            y[0] = x[0] * cos - x[1] * s;
            y[1] = x[1] * cos + x[0] * s;
        }
    }
}
