//! Mixtures of experts: `candle_nn::moe`, whose kernels are for CUDA only and have no backward.
//!
//! A token is routed to `topk` experts. A *route* is one token's way to one expert; routes are numbered token by token,
//! and sorted by expert. Without route weights, a product takes one row for each token. With them it takes a row for
//! each route.

use candle_core::quantized::QTensor;
use candle_core::{DType, Result, Storage, Tensor, bail};

use super::cpu::matrix::{Mat, MatMut, product, product_of};
use super::cpu::{indices, read, same_kind, storage, tensor_like, weight_grad};
use super::weight::{Weight, has_cpu_kernels};
use crate::graph::{Reads, graph_op};

/// Multiplies each route's row by its expert's matrix. `input` is `[tokens, in]`, or `[tokens * topk, in]` with
/// `topk_weights`. `weights` is `[experts, out, in]`. `sorted_token_ids` and `experts_ids` (u32, `[tokens * topk]`) are
/// the routes' numbers sorted by expert, and these experts. The output is `[tokens * topk, out]`, in the order of the
/// routes' numbers. With `topk_weights` (f32, `[tokens, topk]`) each row is multiplied by its route's weight.
///
/// Unlike [`candle_nn::moe::moe_gemm`], it runs on every device and for every float dtype, and has gradients for input,
/// weights and route weights. Fails if shapes or dtypes disagree, or a number is out of range.
pub fn moe_gemm(
    input: &Tensor,
    weights: &Tensor,
    topk_weights: &Option<Tensor>,
    sorted_token_ids: &Tensor,
    experts_ids: &Tensor,
    topk: usize,
    _is_prefill: bool,
) -> Result<Tensor> {
    let function = "moe_gemm";
    let (rows, inputs) = input.dims2()?;
    let (experts, outputs, of_expert) = weights.dims3()?;
    let routes = if topk_weights.is_some() { rows } else { rows * topk };
    if of_expert != inputs || topk == 0 {
        bail!(
            "{function}: the input {:?} does not fit the weights {:?} for {topk} experts",
            input.dims(),
            weights.dims()
        );
    }
    same_kind(function, ("the input", input), ("the weights", weights))?;
    let order = indices(function, "route", sorted_token_ids, routes, "number of routes")?;
    let experts_of = indices(function, "expert", experts_ids, experts, "number of experts")?;
    if order.len() != experts_of.len() {
        bail!("{function}: {} routes have {} experts", order.len(), experts_of.len());
    }
    let divisor = if topk_weights.is_some() { 1 } else { topk as u32 };
    let mut groups = vec![Routes::default(); experts];
    for (route, expert) in order.into_iter().zip(experts_of) {
        let group = &mut groups[expert as usize];
        group.from.push(route / divisor);
        group.to.push(route);
    }
    let y = if has_cpu_kernels(input) {
        let op = Experts { weight: Weight::of(weights)?, groups, routes, inputs, outputs };
        let arguments = op.weight.arguments(input, None);
        graph_op(function, &arguments, op.forward(input)?, (routes, outputs), Reads::Sources, move |x, _, dy| {
            op.backward(x[0], dy)
        })?
    } else {
        composite(input, &Weight::in_graph(weights)?, &groups, routes)?
    };
    match topk_weights {
        None => Ok(y),
        Some(of_routes) => {
            let of_routes = of_routes.reshape((routes, 1))?;
            y.to_dtype(of_routes.dtype())?.broadcast_mul(&of_routes)?.to_dtype(input.dtype())
        }
    }
}

/// [`moe_gemm`] with quantized weights `[experts, out, in]`. They are dequantized to `dtype`, and get no gradient. The
/// output is f32. Errors: see [`moe_gemm`].
#[allow(clippy::too_many_arguments)]
pub fn moe_gemm_gguf(
    input: &Tensor,
    weights: &QTensor,
    topk_weights: &Option<Tensor>,
    sorted_token_ids: &Tensor,
    experts_ids: &Tensor,
    topk: usize,
    is_prefill: bool,
    dtype: DType,
) -> Result<Tensor> {
    let weights = weights.dequantize(input.device())?.to_dtype(dtype)?;
    let input = input.to_dtype(dtype)?;
    moe_gemm(&input, &weights, topk_weights, sorted_token_ids, experts_ids, topk, is_prefill)?.to_dtype(DType::F32)
}

/// The routes of an expert: their rows of the input, and of the output.
#[derive(Clone, Default)]
struct Routes {
    from: Vec<u32>,
    to: Vec<u32>,
}

/// The products as a chain of Candle's operations.
fn composite(input: &Tensor, weights: &Tensor, groups: &[Routes], routes: usize) -> Result<Tensor> {
    let device = input.device();
    let input = input.contiguous()?;
    let (experts, outputs, _) = weights.dims3()?;
    if routes == 0 && experts > 0 {
        // Input and weights get gradients of zeros.
        return input.matmul(&weights.narrow(0, 0, 1)?.squeeze(0)?.t()?);
    }
    let mut y = Tensor::zeros((routes, outputs), input.dtype(), device)?;
    for (expert, group) in groups.iter().enumerate().filter(|(_, group)| !group.to.is_empty()) {
        let rows = input.index_select(&Tensor::new(&group.from[..], device)?, 0)?;
        let weight = weights.narrow(0, expert, 1)?.squeeze(0)?.t()?.contiguous()?;
        y = y.index_add(&Tensor::new(&group.to[..], device)?, &rows.matmul(&weight)?, 0)?;
    }
    Ok(y)
}

struct Experts {
    weight: Weight,
    groups: Vec<Routes>,
    routes: usize,
    inputs: usize,
    outputs: usize,
}

/// Returns the rows with these numbers, one after another.
pub(super) fn gather(values: &[f32], width: usize, rows: &[u32]) -> Vec<f32> {
    rows.iter().flat_map(|&row| &values[row as usize * width..(row as usize + 1) * width]).copied().collect()
}

/// Adds rows to the rows of `to` with these numbers.
pub(super) fn scatter(from: &[f32], width: usize, rows: &[u32], to: &mut [f32]) {
    for (from, &row) in from.chunks_exact(width.max(1)).zip(rows) {
        to[row as usize * width..(row as usize + 1) * width].iter_mut().zip(from).for_each(|(to, from)| *to += from);
    }
}

impl Experts {
    /// Returns the experts that have routes, with the ranges of their matrices.
    fn active(&self) -> impl Iterator<Item = (std::ops::Range<usize>, &Routes)> {
        let size = self.inputs * self.outputs;
        let all = self.groups.iter().enumerate().map(move |(i, group)| (i * size..(i + 1) * size, group));
        all.filter(|(_, group)| !group.to.is_empty())
    }

    fn forward(&self, x: &Tensor) -> Result<Storage> {
        read!(values, x);
        read!(weights, self.weight.value()?);
        let mut y = vec![0f32; self.routes * self.outputs];
        for (at, group) in self.active() {
            let rows = gather(&values, self.inputs, &group.from);
            let count = group.to.len();
            let weight = Mat::new(&weights[at], self.outputs, self.inputs).as_dtype(x.dtype());
            let rows = Mat::new(&rows, count, self.inputs).as_dtype(x.dtype());
            scatter(&product_of(rows, weight.t()), self.outputs, &group.to, &mut y);
        }
        storage(y, x.dtype())
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        read!(values, x);
        read!(grad, dy);
        let mut dx = vec![0f32; values.len()];
        {
            read!(weights, self.weight.value()?);
            for (at, group) in self.active() {
                let dy = gather(&grad, self.outputs, &group.to);
                let count = group.to.len();
                let weight = Mat::new(&weights[at], self.outputs, self.inputs).as_dtype(x.dtype());
                let dy = Mat::new(&dy, count, self.outputs).as_dtype(x.dtype());
                scatter(&product_of(dy, weight), self.inputs, &group.from, &mut dx);
            }
        }
        let dw = weight_grad(&self.weight, |buffer, accumulate| {
            if !accumulate {
                buffer.fill(0.0);
            }
            for (at, group) in self.active() {
                let (dy, x) = (gather(&grad, self.outputs, &group.to), gather(&values, self.inputs, &group.from));
                let rows = group.to.len();
                let [dy, x] = [Mat::new(&dy, rows, self.outputs), Mat::new(&x, rows, self.inputs)]
                    .map(|it| it.as_dtype(self.weight.dtype()));
                product(MatMut::new(&mut buffer[at], self.outputs, self.inputs), true, dy.t(), x);
            }
            Ok(())
        })?;
        Ok([Some(tensor_like(dx, x)?), dw])
    }
}
