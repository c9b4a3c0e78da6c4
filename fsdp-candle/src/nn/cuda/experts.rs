//! Mixtures of experts: the device sorts the routes, and the host learns only how many each expert has.
//!
//! Forward gathers the tokens' rows in the order of the experts. All experts' products with gates and ups are one call of
//! cuBLAS, and those with downs another. The graph keeps the outputs of gates and ups, and backward gathers the rows
//! again. With `w` for a route's weight, `g` and `u` for the outputs of gate and up, and `h = silu(g) u`:
//!
//! - `dh = dy W_down`, `dw = dh . h`, `dW_down = dy^T (w h)`
//! - `dg` and `du` as in SwiGLU, times `w`
//! - `dx = dg W_gate + du W_up`, `dW_gate = dg^T x`, `dW_up = du^T x`
//!
//! The gradient of a weight is a product of its own. It fills the device alone, and may be f32 for weights of bf16, which
//! cuBLAS's grouped products can't write.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use fsdp_core::Buffer;

use super::super::cpu::indices;
use super::super::weight::{Weight, are_of_one_unit};
use super::{Cuda, rows, write_grad};
use crate::activation_checkpoint::{Operation, operation};
use crate::graph::{Reads, graph_op};
use crate::kernels::Slice;
use crate::kernels::cuda::{
    Matrix, RowProducts, SortedRoutes, add_product, largest_of_rows, multiply_rows, stretches, swiglu, uninit,
};
use crate::storage::{to_core_dtype, to_dtype, to_storage, to_tensor, with_slice, with_slices};
use crate::upload;

impl Cuda {
    /// Returns the columns of each row's largest values.
    pub(in crate::nn) fn choose_experts(self, probabilities: &Tensor, per_token: usize) -> Result<Tensor> {
        let (tokens, experts) = probabilities.dims2()?;
        let values = probabilities.detach().contiguous()?;
        let chosen = with_slice(&values, |_, values| largest_of_rows(values, experts, per_token))?;
        to_tensor(chosen, &[tokens, per_token], probabilities.device())
    }

    /// Returns whether one operation can compute a mixture of experts with these weights.
    pub(in crate::nn) fn is_one_operation(self, experts: &[[&Tensor; 3]]) -> bool {
        let has_one_shape = |i: usize| experts.iter().all(|weights| weights[i].dims() == experts[0][i].dims());
        (0..3).all(has_one_shape) && are_of_one_unit(experts.iter().flatten().copied())
    }

    /// Computes a mixture of experts, given each expert's weights for gate, up and down.
    pub(in crate::nn) fn mixture(
        self,
        function: &'static str,
        x: &Tensor,
        experts: &[[&Tensor; 3]],
        chosen: &Tensor,
        weights: &Tensor,
    ) -> Result<Tensor> {
        let shape = [x.dim(0)?, experts[0][2].dim(0)?];
        operation(Operation::SwiGlu, &shape, |known| {
            let known = known.and_then(|(y, kept)| Some((y, kept.downcast::<Kept>().ok()?)));
            let experts = Experts::read(experts)?;
            let (y, kept) = match known {
                Some(known) => known,
                None => {
                    let routing = Routing::new(function, chosen, experts.0.len(), x.device())?;
                    let (y, kept) = experts.forward(x, routing, weights)?;
                    (to_storage(y)?, Arc::new(kept))
                }
            };
            let joined = Weight::joined(experts.0.iter().flatten())?;
            let (arguments, of_backward) = ([x.clone(), weights.clone(), joined.node().clone()], kept.clone());
            let y = graph_op(function, &arguments, y, &shape, Reads::Sources, move |arguments, _, dy| {
                let found = experts.backward(&of_backward, arguments[0], arguments[1], dy)?;
                Ok([found.x, found.route_weights, joined.set_gradients(found.weights)?])
            })?;
            Ok((y, kept as _))
        })
    }
}

/// The sorted routes, and each expert's places among them.
struct Routing {
    sorted: SortedRoutes,
    stretches: Vec<Range<usize>>,
}

impl Routing {
    /// Sorts the routes `[tokens, K]`. Fails if the number of an expert is too large.
    fn new(function: &str, chosen: &Tensor, experts: usize, device: &Device) -> Result<Self> {
        let read = || indices(function, "expert", chosen, experts, "number of experts");
        let count = |chosen: Vec<u32>| {
            let mut counts = vec![0; experts];
            chosen.into_iter().for_each(|expert| counts[expert as usize] += 1);
            counts
        };
        let is_integer = matches!(chosen.dtype(), DType::U8 | DType::U32 | DType::I64);
        // Also names another dtype.
        let known = (chosen.device().is_cpu() || !is_integer).then(read).transpose()?.map(count);
        let on_device = upload(&chosen.detach().contiguous()?, device)?;
        let (routes, per_token) = (chosen.elem_count(), chosen.dim(1)?);
        let sorted = with_slice(&on_device, |_, chosen| SortedRoutes::new(chosen, experts, per_token))?;
        let counts = match known {
            Some(counts) => counts,
            None => {
                let counts = sorted.read_counts()?;
                // A route without a place has a wrong number, which is named.
                if counts.iter().sum::<usize>() == routes { counts } else { count(read()?) }
            }
        };
        Ok(Routing { sorted, stretches: stretches(&counts) })
    }
}

/// The values that the graph keeps for backward, with a row for each sorted route.
struct Kept {
    routing: Routing,
    gates: Buffer,
    ups: Buffer,
}

/// The weights of each expert: gate, up and down.
struct Experts(Vec<[Weight; 3]>);

/// The gradients that are wanted.
struct Gradients {
    x: Option<Tensor>,
    route_weights: Option<Tensor>,
    /// The gradients of each expert's gate, up and down.
    weights: Vec<Option<Tensor>>,
}

const GATE: usize = 0;
const UP: usize = 1;
const DOWN: usize = 2;

impl Experts {
    fn read(experts: &[[&Tensor; 3]]) -> Result<Self> {
        let read = |&[gate, up, down]: &[&Tensor; 3]| Ok([Weight::of(gate)?, Weight::of(up)?, Weight::of(down)?]);
        Ok(Experts(experts.iter().map(read).collect::<Result<_>>()?))
    }

    /// Calls `f` with one of each expert's weights. Fails if they are not gathered.
    fn with_values<R>(&self, which: usize, f: impl FnOnce(&[Matrix<'_>]) -> Result<R>) -> Result<R> {
        let values = self.0.iter().map(|weights| weights[which].value()?.detach().contiguous());
        let values = values.collect::<Result<Vec<_>>>()?;
        let (outputs, inputs) = values[0].dims2()?;
        with_slices(&values, |slices| {
            let matrices = slices.into_iter().map(|slice| Matrix::new(slice, outputs, inputs));
            f(&matrices.collect::<Result<Vec<_>>>()?)
        })
    }

    /// Returns the inner width and the width of the output.
    fn widths(&self) -> Result<[usize; 2]> {
        let (outputs, inner) = self.0[0][DOWN].value()?.dims2()?;
        Ok([inner, outputs])
    }

    fn forward(&self, x: &Tensor, routing: Routing, route_weights: &Tensor) -> Result<(Buffer, Kept)> {
        let ([inner, outputs], device) = (self.widths()?, x.device());
        let dtype = to_core_dtype(x.dtype())?;
        let Routing { sorted, stretches } = &routing;
        let routes = route_weights.elem_count();
        let (mut gates, mut ups) = (uninit(device, dtype, routes * inner)?, uninit(device, dtype, routes * inner)?);
        {
            let own = gathered(sorted, x)?;
            let rows = Slice::from(&own);
            self.with_values(GATE, |of_gates| {
                self.with_values(UP, |of_ups| {
                    let (of_gates, of_ups) = (transposed(of_gates), transposed(of_ups));
                    let of_gates = RowProducts { to: &mut gates, rows, matrices: &of_gates };
                    let of_ups = RowProducts { to: &mut ups, rows, matrices: &of_ups };
                    multiply_rows(&mut [of_gates, of_ups], stretches, false)
                })
            })?;
        }
        let mut out = uninit(device, dtype, routes * outputs)?;
        {
            let hidden = swiglu((&gates).into(), (&ups).into())?;
            self.with_values(DOWN, |of_downs| {
                let of_downs = transposed(of_downs);
                let products = RowProducts { to: &mut out, rows: (&hidden).into(), matrices: &of_downs };
                multiply_rows(&mut [products], stretches, false)
            })?;
        }
        let route_weights = wide(route_weights, x.dtype())?;
        let y = with_slice(&route_weights, |_, weights| sorted.combine((&out).into(), Some(weights), outputs))?;
        Ok((y, Kept { routing, gates, ups }))
    }

    fn backward(&self, kept: &Kept, x: &Tensor, route_weights: &Tensor, dy: &Tensor) -> Result<Gradients> {
        let Kept { routing: Routing { sorted, stretches }, gates, ups } = kept;
        let ([inner, outputs], (tokens, inputs)) = (self.widths()?, x.dims2()?);
        let (device, dtype, routes) = (x.device(), to_core_dtype(x.dtype())?, route_weights.elem_count());
        let dy = gathered(sorted, dy)?;
        let found = {
            let mut d_hidden = uninit(device, dtype, routes * inner)?;
            self.with_values(DOWN, |matrices| {
                multiply_rows(&mut [RowProducts { to: &mut d_hidden, rows: (&dy).into(), matrices }], stretches, false)
            })?;
            let route_weights = wide(route_weights, x.dtype())?;
            with_slice(&route_weights, |_, weights| {
                sorted.swiglu_back([gates, ups, &d_hidden].map(Slice::from), weights, inner)
            })?
        };
        let dx = if x.track_op() {
            let mut rows = uninit(device, dtype, routes * inputs)?;
            for (which, grads, accumulate) in [(GATE, &found.gates, false), (UP, &found.ups, true)] {
                self.with_values(which, |matrices| {
                    multiply_rows(
                        &mut [RowProducts { to: &mut rows, rows: grads.into(), matrices }],
                        stretches,
                        accumulate,
                    )
                })?;
            }
            Some(to_tensor(sorted.combine((&rows).into(), None, inputs)?, &[tokens, inputs], device)?)
        } else {
            None
        };
        let mut weights: Vec<Option<Tensor>> = vec![None; 3 * self.0.len()];
        if self.0.iter().flatten().any(Weight::wants_grad) {
            let x = gathered(sorted, x)?;
            let products = [(&found.gates, inner, &x, inputs), (&found.ups, inner, &x, inputs)];
            let products = [products[0], products[1], (&dy, outputs, &found.hidden, inner)];
            // From the last to the first, as backward passes other layers.
            for (expert, (own, stretch)) in self.0.iter().zip(stretches).enumerate().rev() {
                for which in [DOWN, UP, GATE] {
                    let (dy, dy_width, x, x_width) = products[which];
                    let [dy, x] = [(dy, dy_width), (x, x_width)].map(|(from, width)| {
                        let own = Slice::from(from).range(stretch.start * width..stretch.end * width)?;
                        Matrix::new(own, stretch.len(), width)
                    });
                    weights[3 * expert + which] = gradient(&own[which], dy?, x?)?;
                }
            }
        }
        let route_weights = if route_weights.track_op() {
            let found = to_tensor(found.weights, route_weights.dims(), device)?;
            Some(to_dtype(&found, route_weights.dtype())?)
        } else {
            None
        };
        Ok(Gradients { x: dx, route_weights, weights })
    }
}

/// Returns the gradient `dy^T x` of a weight: zeros without rows.
fn gradient(weight: &Weight, dy: Matrix<'_>, x: Matrix<'_>) -> Result<Option<Tensor>> {
    match weight.wants_grad() {
        true => write_grad(weight, |buffer, accumulate| add_product(buffer, accumulate, dy.t(), x)),
        false => Ok(None),
    }
}

/// Returns the row of each sorted route's token.
fn gathered(sorted: &SortedRoutes, x: &Tensor) -> Result<Buffer> {
    let width = x.dim(1)?;
    with_slice(&rows(x)?, |_, rows| sorted.gather(rows, width))
}

fn transposed<'a>(matrices: &[Matrix<'a>]) -> Vec<Matrix<'a>> {
    matrices.iter().map(|matrix| matrix.t()).collect()
}

/// Returns the routes' weights in the dtype of the arithmetic for rows of a dtype.
fn wide(weights: &Tensor, of_rows: DType) -> Result<Tensor> {
    let wide = if of_rows == DType::F64 { DType::F64 } else { DType::F32 };
    to_dtype(&weights.detach(), wide)?.contiguous()
}
