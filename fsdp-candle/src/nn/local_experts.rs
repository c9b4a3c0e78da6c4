//! A mixture of the experts that a rank has.

use std::sync::Arc;

use candle_core::{Device, Module, Result, Tensor};

use super::cpu::matrix::Mat;
use super::cpu::{indices, read, storage, tensor_like};
use super::cuda::Cuda;
use super::moe::{gather, scatter};
use super::swiglu::{Projections, RowWeights, SwiGlu, backward, forward, read_weights};
use super::weight::{Weight, has_cpu_kernels};
use crate::activation_checkpoint::{Operation, operation};
use crate::graph::{Reads, graph_op};
use crate::upload;

/// The function in messages.
pub(super) const FUNCTION: &str = "mixture_of_experts";

/// [`mixture_of_experts`](super::mixture_of_experts) of experts that this rank has.
pub(super) fn local_mixture(x: &Tensor, experts: &[SwiGlu], chosen: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let per_token = chosen.dim(1)?;
    let plain: Option<Vec<_>> = experts.iter().map(|expert| expert.plain_weights(x)).collect();
    if let (Some(cuda), Some(experts)) = (Cuda::of(x), &plain)
        && cuda.is_one_operation(experts)
    {
        return cuda.mixture(FUNCTION, x, experts, chosen, weights);
    }
    let chosen = indices(FUNCTION, "expert", chosen, experts.len(), "number of experts")?;
    let mut routes = vec![Routes::default(); experts.len()];
    for (route, expert) in (0u32..).zip(chosen) {
        let of_expert = &mut routes[expert as usize];
        of_expert.tokens.push(route / per_token as u32);
        of_expert.numbers.push(route);
    }
    let is_fused = |weights: &Vec<[&Tensor; 3]>| {
        has_cpu_kernels(x) && weights.iter().all(|of| of[2].dims() == weights[0][2].dims())
    };
    match plain.filter(is_fused) {
        Some(experts) => fused(x, &experts, routes, weights),
        None => composite(x, experts, routes, weights),
    }
}

/// The routes to one expert.
#[derive(Clone, Default)]
struct Routes {
    /// Tokens of the routes.
    tokens: Vec<u32>,
    /// Numbers of the routes, token by token.
    numbers: Vec<u32>,
}

/// The mixture as a chain of operations.
fn composite(x: &Tensor, experts: &[SwiGlu], mut routes: Vec<Routes>, weights: &Tensor) -> Result<Tensor> {
    let tokens = weights.dim(0)?;
    // An expert without tokens computes a row of zeros, which no token uses. Its gradients are zeros, whatever the
    // tokens are.
    let zeros = Tensor::zeros((1, x.dim(1)?), x.dtype(), x.device())?;
    let x = if routes.iter().any(|of| of.tokens.is_empty()) { Tensor::cat(&[x, &zeros], 0)? } else { x.contiguous()? };
    // The row of each route in the concatenated outputs.
    let mut places = vec![0; weights.elem_count()];
    let mut end = 0;
    for Routes { tokens: of_expert, numbers } in &mut routes {
        numbers.iter().zip(end..).for_each(|(&route, place)| places[route as usize] = place);
        if of_expert.is_empty() {
            of_expert.push(tokens as u32);
        }
        end += of_expert.len() as u32;
    }
    let outputs = experts.iter().zip(&routes);
    let outputs = outputs.map(|(expert, Routes { tokens, .. })| expert.forward(&selected(&x, tokens)?));
    combined(&Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, 0)?, &places, weights)
}

/// Returns rows of a tensor, as a node of the graph.
pub(super) fn selected(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    x.index_select(&upload(&Tensor::new(rows, &Device::Cpu)?, x.device())?, 0)
}

/// Returns for each token the sum of its routes' outputs, each times its weight. `places` has the row of each route in
/// `outputs`.
pub(super) fn combined(outputs: &Tensor, places: &[u32], weights: &Tensor) -> Result<Tensor> {
    let ((tokens, per_token), width) = (weights.dims2()?, outputs.dim(1)?);
    let outputs = selected(outputs, places)?.reshape((tokens, per_token, width))?;
    outputs.broadcast_mul(&weights.to_dtype(outputs.dtype())?.unsqueeze(2)?)?.sum(1)
}

/// The mixture as one operation.
fn fused(x: &Tensor, experts: &[[&Tensor; 3]], routes: Vec<Routes>, weights: &Tensor) -> Result<Tensor> {
    let ((tokens, inputs), outputs) = (x.dims2()?, experts[0][2].dim(0)?);
    let shape = [tokens, outputs];
    operation(Operation::SwiGlu, &shape, |known| {
        let known = known.and_then(|(y, projections)| Some((y, projections.downcast::<Vec<Projections>>().ok()?)));
        let (of_experts, y, projections) = match known {
            Some((y, projections)) => {
                (experts.iter().map(|&expert| read_weights(expert)).collect::<Result<Vec<_>>>()?, y, projections)
            }
            None => {
                read!(values, x);
                read!(weights, weights);
                let mut y = vec![0f32; tokens * outputs];
                let (mut of_experts, mut projections) = (vec![], vec![]);
                for (&expert, routes) in experts.iter().zip(&routes) {
                    let rows = gather(&values, inputs, &routes.tokens);
                    let rows = Mat::new(&rows, routes.tokens.len(), inputs).as_dtype(x.dtype());
                    let (of_expert, of_rows, mut out) = forward(expert, rows, x.dtype())?;
                    for (out, &route) in out.chunks_exact_mut(outputs.max(1)).zip(&routes.numbers) {
                        out.iter_mut().for_each(|out| *out *= weights[route as usize]);
                    }
                    scatter(&out, outputs, &routes.tokens, &mut y);
                    of_experts.push(of_expert);
                    projections.push(of_rows);
                }
                (of_experts, storage(y, x.dtype())?, Arc::new(projections))
            }
        };
        let joined = Weight::joined(of_experts.iter().flatten())?;
        let (arguments, kept) = ([x.clone(), weights.clone(), joined.node().clone()], projections.clone());
        let y = graph_op(FUNCTION, &arguments, y, &shape, Reads::Sources, move |arguments, _, dy| {
            let (x, weights) = (arguments[0], arguments[1]);
            read!(values, x);
            read!(row_weights, weights);
            read!(grad, dy);
            let mut dx = x.track_op().then(|| vec![0f32; values.len()]);
            let mut d_weights = vec![0f32; row_weights.len()];
            let mut gradients = vec![];
            // From the last to the first, as backward passes other layers.
            for ((expert, projections), routes) in of_experts.iter().zip(&*projections).zip(&routes).rev() {
                let rows = gather(&values, inputs, &routes.tokens);
                let dy = gather(&grad, outputs, &routes.tokens);
                let of_rows: Vec<f32> = routes.numbers.iter().map(|&route| row_weights[route as usize]).collect();
                let mut d_of_rows = vec![0f32; of_rows.len()];
                let of_rows = RowWeights { values: &of_rows, gradients: &mut d_of_rows };
                let rows = Mat::new(&rows, routes.tokens.len(), inputs).as_dtype(x.dtype());
                let dy = Mat::new(&dy, routes.tokens.len(), outputs).as_dtype(x.dtype());
                let found = backward(expert, projections, rows, dy, Some(of_rows), dx.is_some())?;
                if let (Some(dx), Some(d_rows)) = (&mut dx, found.x) {
                    scatter(&d_rows, inputs, &routes.tokens, dx);
                }
                routes.numbers.iter().zip(d_of_rows).for_each(|(&route, d)| d_weights[route as usize] = d);
                gradients.push(found.weights);
            }
            let d_weights = weights.track_op().then(|| tensor_like(d_weights, weights)).transpose()?;
            let of_weights = joined.set_gradients(gradients.into_iter().rev().flatten())?;
            Ok([dx.map(|dx| tensor_like(dx, x)).transpose()?, d_weights, of_weights])
        })?;
        Ok((y, kept))
    })
}
