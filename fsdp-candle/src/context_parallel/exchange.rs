//! The collectives of a sequence's chunks.

use candle_core::{Result, Tensor};
use fsdp_core::ProcessGroup;

use super::Positions;
use crate::autograd::keeps_graph;
use crate::collectives::{Pending, check, start_gather, start_reduce_scatter_owned};
use crate::graph::{Reads, graph_op};
use crate::storage::take;

/// Returns a tensor whose dimension has the ranks' parts one after another with the chunks in the sequence's order.
pub(crate) fn in_order(x: &Tensor, dim: usize, ranks: usize) -> Result<Tensor> {
    permuted(x, dim, ranks, true)
}

/// Returns the inverse of [`in_order`].
pub(crate) fn by_rank(x: &Tensor, dim: usize, ranks: usize) -> Result<Tensor> {
    permuted(x, dim, ranks, false)
}

fn permuted(x: &Tensor, dim: usize, ranks: usize, to_order: bool) -> Result<Tensor> {
    if ranks == 1 {
        return Ok(x.clone());
    }
    let y = moved(x, dim, ranks, to_order)?;
    if !(keeps_graph() && x.track_op()) {
        return Ok(y);
    }
    graph_op("sequence-order", &[x], take(&y)?, x.shape(), Reads::Nothing, move |_, _, dy| {
        Ok([Some(moved(dy, dim, ranks, !to_order)?)])
    })
}

/// Moves the chunks, outside of the graph.
fn moved(x: &Tensor, dim: usize, ranks: usize, to_order: bool) -> Result<Tensor> {
    let x = x.detach();
    let steps = x.dims()[dim] / ranks;
    let chunk = steps / 2;
    // The chunks' numbers, rank by rank.
    let numbers = (0..ranks).flat_map(|rank| {
        let positions = Positions::of_rank(rank, ranks, steps);
        [0, chunk].map(|token| positions.of(token) / chunk.max(1))
    });
    let mut order: Vec<usize> = numbers.collect();
    if to_order {
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, number)| places[*number] = place);
        order = places;
    }
    let chunks = order.into_iter().map(|at| x.narrow(dim, at * chunk, chunk)).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&chunks, dim)?.contiguous()
}

/// Gathers the ranks' parts `[batch, T, ..]` of keys and values by one collective, in order, outside of the graph.
pub(crate) fn start_whole(parts: [&Tensor; 2], group: &ProcessGroup) -> Result<Pending<[Tensor; 2]>> {
    parts.iter().try_for_each(|part| check("attention over ranks", part, None, group))?;
    let ranks = group.size();
    let in_order = move |all: Vec<Tensor>| Ok([moved(&all[0], 1, ranks, true)?, moved(&all[1], 1, ranks, true)?]);
    Ok(start_gather(&parts, 1, group)?.then(in_order))
}

/// Reduces gradients `[batch, S, ..]` of whole sequences, by one collective, to this rank's part of their sums over
/// ranks.
pub(crate) fn start_own_sums(gradients: [&Tensor; 2], group: &ProcessGroup) -> Result<Pending<Vec<Tensor>>> {
    let by_rank = |gradient: &Tensor| moved(gradient, 1, group.size(), false);
    start_reduce_scatter_owned(&[by_rank(gradients[0])?, by_rank(gradients[1])?], 1, group)
}
