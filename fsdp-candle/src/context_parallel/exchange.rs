//! The collectives of a sequence's chunks.

use candle_core::{Result, Tensor};
use fsdp_core::ProcessGroup;

use super::Positions;
use crate::autograd::keeps_graph;
use crate::collectives::{check, gathered_together, reduce_scatter_owned};
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
pub(crate) fn whole(parts: [&Tensor; 2], group: &ProcessGroup) -> Result<[Tensor; 2]> {
    parts.iter().try_for_each(|part| check("attention over ranks", part, None, group))?;
    let all = gathered_together(&parts, 1, group)?;
    let in_order = |at: usize| moved(&all[at], 1, group.size(), true);
    Ok([in_order(0)?, in_order(1)?])
}

/// Returns this rank's part of the sum over ranks of gradients `[batch, S, ..]` of whole sequences.
pub(crate) fn own_sum(gradient: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    reduce_scatter_owned(&moved(gradient, 1, group.size(), false)?, 1, group)
}
