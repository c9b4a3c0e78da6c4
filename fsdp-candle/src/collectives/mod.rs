//! Differentiable collectives over tensors.
//!
//! The layers of [`nn`](crate::nn) use them under tensor parallelism; other modules may call them directly.
//! A tensor of a group of ranks has a layout, a [`Placement`]: every rank holds the same elements
//! (`Replicate`), a part of one dimension (`Shard(dim)`), or a term of a sum (`Partial(Sum)`). So does its gradient.
//!
//! | | from | to | backward |
//! |---|---|---|---|
//! | [`copy`] | `Replicate` | `Replicate`, for computations that differ on the ranks | all-reduce |
//! | [`all_reduce`] | `Partial` | `Replicate` | identity |
//! | [`all_gather`] | `Shard` | `Replicate` | reduce-scatter, or this rank's part |
//! | [`reduce_scatter`] | `Partial` | `Shard` | all-gather |
//! | [`split`] | `Replicate` | `Shard` | all-gather |
//! | [`all_to_all`] | `Shard` | `Shard` of another dimension | all-to-all |
//! | [`all_to_all_v`] | rows of each rank | rows for each rank | all-to-all |
//!
//! [`prepare_module_input`] and [`prepare_module_output`] choose a function by two layouts.
//!
//! Every rank of the group calls the same functions in the same order and runs the same backward. Each function waits
//! for its collective, so forward and backward issue collectives in the order of the graph. The number of ranks
//! must divide a split dimension, except in [`all_to_all_v`]; each function checks it before any communication. If
//! shapes or dtypes differ, every rank gets [`fsdp_core::Error::Mismatch`]. Half-precision sums are accumulated in f32
//! and rounded once, except by NCCL. On a device, the group must move that device's memory, as the groups of a
//! [`World`](crate::World) do.

mod shared_input;
mod without_grad;

use candle_core::shape::Dim;
use candle_core::{Result, Tensor, bail};
use fsdp_core::{Placement, ProcessGroup, ReduceOp};

use crate::autograd::keeps_graph;
use crate::error::Error;
use crate::graph::{Reads, graph_op};
use crate::storage::{copied_storage, take};
use without_grad::{Input, exchanged, gathered, own_part, scattered, start_scatter, summed};

pub(crate) use shared_input::{Entry, SharedInput, scope};
pub(crate) use without_grad::{Pending, check, exchanged_rows, largest, reduced_values, start_gather};

/// How ranks use a tensor that every rank holds. It decides each rank's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumers {
    /// Ranks compute different things, such as their own heads. Each rank has a term of the gradient.
    Differ,
    /// All ranks compute the same. Each rank has the whole gradient.
    Same,
}

/// Returns the tensor itself, for computations that differ on the ranks. Input and output `[..]` are the same on every
/// rank. Backward sums the ranks' gradients. Fails if the group does not move the tensor's memory.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::collectives;
/// use fsdp_core::process_group::local;
///
/// local::try_run(2, |group| {
///     let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
///     let y = (collectives::copy(&x, &group)? * (group.rank() + 1) as f64)?;
///     let gradient = y.sum_all()?.backward()?.remove(&x).unwrap();
///     assert_eq!(gradient.to_vec1::<f32>()?, [3., 3.]); // 1 from rank 0, 2 from rank 1
///     candle_core::Result::Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn copy(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    check("copy", x, None, group)?;
    if group.size() == 1 || !has_gradient(x) {
        return Ok(if keeps_graph() { x.clone() } else { x.detach() });
    }
    graph_node(x, x.detach().force_contiguous()?, "copy", group, BackwardCollective::Sum)
}

/// Sums the ranks' tensors. Input `[..]` is a term on each rank; the output of the same shape has the same bits on all
/// ranks. Backward passes the gradient on, which every rank holds.
pub fn all_reduce(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    reduce(Input::Borrowed(x), group)
}

/// Concatenates the ranks' tensors: input `[.., n, ..]` of one shape on all ranks, output `[.., N * n, ..]` for `N`
/// ranks. Backward is a reduce-scatter, or takes this rank's part of the gradient if all ranks compute the same.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::collectives::{Consumers, all_gather, reduce_scatter};
/// use fsdp_core::process_group::local;
///
/// // Each rank has a part of a sequence, which is gathered and scattered.
/// local::try_run(2, |group| {
///     let x = Var::new(&[[1f32 + group.rank() as f32]], &Device::Cpu)?;
///     let all = all_gather(&x, 1, &group, Consumers::Differ)?;
///     assert_eq!(all.to_vec2::<f32>()?, [[1., 2.]]);
///     // Each rank has a term of the result and takes its part of the sum.
///     let y = reduce_scatter(&(all * 10.)?, 1, &group)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[20. + 20. * group.rank() as f32]]);
///     let gradient = y.sum_all()?.backward()?.remove(&x).unwrap();
///     assert_eq!(gradient.to_vec2::<f32>()?, [[20.]]); // 10 by each rank's term
///     candle_core::Result::Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn all_gather<D: Dim>(x: &Tensor, dim: D, group: &ProcessGroup, consumers: Consumers) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "all_gather")?;
    check("all_gather", x, None, group)?;
    let backward = match consumers {
        Consumers::Differ => BackwardCollective::Scatter(dim),
        Consumers::Same => BackwardCollective::Slice(dim),
    };
    graph_node(x, gathered(x, dim, group)?, "all_gather", group, backward)
}

/// Returns this rank's part of the sum of the ranks' tensors: input `[.., n, ..]`, a term on each rank; output `[.., n
/// / N, ..]` for `N` ranks. Backward gathers the parts' gradients. Fails if `N` does not divide `n`.
pub fn reduce_scatter<D: Dim>(x: &Tensor, dim: D, group: &ProcessGroup) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "reduce_scatter")?;
    scatter(Input::Borrowed(x), dim, group)
}

/// Returns this rank's part of a tensor that all ranks hold: input `[.., n, ..]`, output `[.., n / N, ..]` for `N`
/// ranks. Backward gathers the parts' gradients. Fails if `N` does not divide `n`.
pub fn split<D: Dim>(x: &Tensor, dim: D, group: &ProcessGroup) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "split")?;
    check("split", x, Some(dim), group)?;
    let part = own_part(x, dim, group)?;
    if group.size() == 1 || !has_gradient(x) {
        return Ok(if keeps_graph() { part } else { part.detach() });
    }
    graph_node(x, part.detach().force_contiguous()?, "split", group, BackwardCollective::Gather(dim))
}

/// Exchanges a part along one dimension for a part along another: input `[.., a, .., b, ..]`, output `[.., N * a, .., b
/// / N, ..]` for `N` ranks, where `from` is the dimension of `a` and `to` that of `b`. Backward is the inverse. If
/// `from` is `to`, returns the tensor. Fails if `N` does not divide `b`.
pub fn all_to_all<D: Dim, E: Dim>(x: &Tensor, from: D, to: E, group: &ProcessGroup) -> Result<Tensor> {
    let (from, to) = (from.to_index(x.shape(), "all_to_all")?, to.to_index(x.shape(), "all_to_all")?);
    check("all_to_all", x, (from != to).then_some(to), group)?;
    if from == to {
        return Ok(if keeps_graph() { x.clone() } else { x.detach() });
    }
    graph_node(
        x,
        exchanged(x, from, to, group)?,
        "all_to_all",
        group,
        BackwardCollective::Exchange { from: to, to: from },
    )
}

/// Sends rows to other ranks: input `[n, ..]`, of which the first `send_counts[0]` rows are for rank 0, the next
/// `send_counts[1]` for rank 1, and so on; output `[m, ..]` with `recv_counts[0]` rows of rank 0, then those of rank 1,
/// and so on. PyTorch's `all_to_all_single` with `input_split_sizes` and `output_split_sizes`. Rows have the same shape
/// on all ranks; any count may be 0. Backward is the inverse. [`exchange_counts`] returns `recv_counts` where a rank
/// does not know them.
///
/// Fails for counts that do not fit the input or the group. If the counts of two ranks disagree, every rank gets
/// [`fsdp_core::Error::Mismatch`].
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::collectives::{all_to_all_v, exchange_counts};
/// use fsdp_core::process_group::local;
///
/// // Rank 0 sends one row to rank 1 and keeps two; rank 1 keeps one.
/// local::try_run(2, |group| {
///     let (rows, send) = [(3, [2, 1]), (1, [0, 1])][group.rank()];
///     let x = Var::from_tensor(&Tensor::full(group.rank() as f32, (rows, 1), &Device::Cpu)?)?;
///     let recv = exchange_counts(&send, &group)?;
///     let y = all_to_all_v(&x, &send, &recv, &group)?;
///     let values: Vec<f32> = y.flatten_all()?.to_vec1()?;
///     assert_eq!(values, [[0., 0.], [0., 1.]][group.rank()]);
///     // The gradient of each row comes from the rank that got it.
///     let gradient = (y * (1. + group.rank() as f64))?.sum_all()?.backward()?.remove(&x).unwrap();
///     let gradient: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
///     assert_eq!(gradient, [&[1., 1., 2.][..], &[2.]][group.rank()]);
///     candle_core::Result::Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn all_to_all_v(x: &Tensor, send_counts: &[usize], recv_counts: &[usize], group: &ProcessGroup) -> Result<Tensor> {
    check("all_to_all_v", x, None, group)?;
    let (rank, size) = (group.rank(), group.size());
    let rows = if x.rank() == 0 { 0 } else { x.dims()[0] };
    let sent: usize = send_counts.iter().sum();
    if x.rank() == 0 || sent != rows || send_counts.len() != size || recv_counts.len() != size {
        bail!(
            "all_to_all_v on rank {rank}: {} send_counts with a sum of {sent} and {} recv_counts do not fit the tensor {:?} \
             and the {size} ranks of group \"{}\": both must have {size} numbers, and send_counts the sum {rows}",
            send_counts.len(),
            recv_counts.len(),
            x.dims(),
            group.name()
        )
    }
    if send_counts[rank] != recv_counts[rank] {
        let (sent, received) = (send_counts[rank], recv_counts[rank]);
        bail!(
            "all_to_all_v on rank {rank}: send_counts[{rank}] is {sent} but recv_counts[{rank}] is {received}: a rank \
             receives the rows that it keeps, so make them equal"
        )
    }
    let backward = BackwardCollective::Rows { send: recv_counts.into(), recv: send_counts.into() };
    let result = exchanged_rows(x, send_counts, recv_counts, group)?;
    graph_node(x, result, "all_to_all_v", group, backward)
}

/// Returns how many rows each rank sends to this one, if this one sends `send_counts[r]` rows to each rank `r`. Fails
/// unless there is a count for each rank.
pub fn exchange_counts(send_counts: &[usize], group: &ProcessGroup) -> Result<Vec<usize>> {
    let size = group.size();
    if send_counts.len() != size {
        bail!(
            "exchange_counts on rank {}: {} counts for the {size} ranks of group \"{}\"",
            group.rank(),
            send_counts.len(),
            group.name()
        )
    }
    let counts = send_counts.iter().map(|&count| count as i64).collect();
    Ok(group.exchange_values(counts).map_err(Error::from)?.into_iter().map(|count| count as usize).collect())
}

/// [`all_reduce`] in the memory of `x`, which has no other reader.
pub(crate) fn all_reduce_owned(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    reduce(Input::Owned(x), group)
}

/// [`reduce_scatter`] that consumes the memory of `x`, which has no other reader.
pub(crate) fn reduce_scatter_owned(x: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    scatter(Input::Owned(x), dim, group)
}

/// Issues a [`reduce_scatter`] of several tensors on one device, outside of the graph, that consumes their memory.
pub(crate) fn start_reduce_scatter_owned(
    tensors: &[Tensor],
    dim: usize,
    group: &ProcessGroup,
) -> Result<Pending<Vec<Tensor>>> {
    tensors.iter().try_for_each(|x| check("reduce_scatter", x, Some(dim), group))?;
    start_scatter(tensors.iter().map(Input::Owned).collect(), dim, group)
}

fn reduce(x: Input<'_>, group: &ProcessGroup) -> Result<Tensor> {
    check("all_reduce", x.tensor(), None, group)?;
    let source = x.tensor().clone();
    let sum = summed(x, group)?;
    graph_node(&source, sum, "all_reduce", group, BackwardCollective::Identity)
}

fn scatter(x: Input<'_>, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    check("reduce_scatter", x.tensor(), Some(dim), group)?;
    let source = x.tensor().clone();
    let part = scattered(x, dim, group)?;
    graph_node(&source, part, "reduce_scatter", group, BackwardCollective::Gather(dim))
}

fn has_gradient(x: &Tensor) -> bool {
    x.track_op() && keeps_graph()
}

/// Adds `result`, which has no other reader, to the graph after `source`.
fn graph_node(
    source: &Tensor,
    result: Tensor,
    name: &'static str,
    group: &ProcessGroup,
    backward: BackwardCollective,
) -> Result<Tensor> {
    if !has_gradient(source) {
        return Ok(result);
    }
    // In a group of one rank, the result may be a view of the source.
    let memory = if group.size() == 1 { copied_storage(&result)? } else { take(&result)? };
    let group = group.clone();
    graph_op(name, &[source], memory, result.shape(), Reads::Nothing, move |_, _, gradient| {
        let gradient = backward.run(Input::Borrowed(gradient), &group);
        Ok([Some(gradient.map_err(|error| error.context(format!("in the backward of {name}")))?)])
    })
}

/// The collective that turns the gradient of a result into the gradient of its source.
enum BackwardCollective {
    Identity,
    Sum,
    Gather(usize),
    Scatter(usize),
    Slice(usize),
    Exchange { from: usize, to: usize },
    Rows { send: Box<[usize]>, recv: Box<[usize]> },
}

impl BackwardCollective {
    fn run(&self, gradient: Input<'_>, group: &ProcessGroup) -> Result<Tensor> {
        match self {
            BackwardCollective::Rows { send, recv } => exchanged_rows(gradient.tensor(), send, recv, group),
            BackwardCollective::Identity => Ok(gradient.tensor().clone()),
            BackwardCollective::Sum => summed(gradient, group),
            BackwardCollective::Gather(dim) => gathered(gradient.tensor(), *dim, group),
            BackwardCollective::Scatter(dim) => scattered(gradient, *dim, group),
            BackwardCollective::Slice(dim) => own_part(gradient.tensor(), *dim, group),
            BackwardCollective::Exchange { from, to } => exchanged(gradient.tensor(), *from, *to, group),
        }
    }
}

/// Converts the input of a module whose ranks compute different things, such as their own heads, to the layout that the
/// module wants: PyTorch's `PrepareModuleInput`. Shapes follow from layouts: `[.., n, ..]` for `Replicate`, `[.., n /
/// N, ..]` for `Shard(dim)` on `N` ranks. The gradient has the layout of the input.
///
/// The layers of [`nn`](crate::nn) do this by the plan's input layouts. Use this function for other modules. Fails for
/// layouts other than `Replicate` and `Shard`, and if the number of ranks does not divide a dimension.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::{Placement, ReduceOp, collectives::{prepare_module_input, prepare_module_output}};
/// use fsdp_core::process_group::local;
///
/// // Each rank has one of two tokens and multiplies both by its column of a matrix.
/// local::try_run(2, |group| {
///     let x = Var::new(&[[1f32 + group.rank() as f32]], &Device::Cpu)?;
///     let column = Tensor::new(&[[10f32 * (1 + group.rank()) as f32]], &Device::Cpu)?;
///     let all = prepare_module_input(&x, Placement::Shard(0), Placement::Replicate, &group)?;
///     let part = all.matmul(&column)?;
///     let y = prepare_module_output(&part, Placement::Shard(1), Placement::Replicate, &group)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[10., 20.], [20., 40.]]);
///     // Each token meets both columns.
///     assert_eq!(y.sum_all()?.backward()?.remove(&x).unwrap().to_vec2::<f32>()?, [[30.]]);
///     candle_core::Result::Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn prepare_module_input(x: &Tensor, layout: Placement, desired: Placement, group: &ProcessGroup) -> Result<Tensor> {
    match (layout, desired) {
        (Placement::Replicate, Placement::Replicate) => copy(x, group),
        (Placement::Shard(dim), Placement::Replicate) => all_gather(x, dim, group, Consumers::Differ),
        (Placement::Replicate, Placement::Shard(dim)) => split(x, dim, group),
        (Placement::Shard(from), Placement::Shard(to)) => all_to_all(x, from, to, group),
        _ => bail!("prepare_module_input: from {layout} to {desired}: an input is `Replicate` or `Shard`"),
    }
}

/// Converts the output of a module whose ranks compute different things to another layout: PyTorch's
/// `PrepareModuleOutput`. Shapes are as for [`prepare_module_input`]; a `Partial(Sum)` has the shape of the whole.
/// Fails if `desired` is `Partial`, for reductions other than the sum, and if the number of ranks does not divide
/// a dimension.
pub fn prepare_module_output(
    x: &Tensor,
    layout: Placement,
    desired: Placement,
    group: &ProcessGroup,
) -> Result<Tensor> {
    match (layout, desired) {
        (Placement::Replicate, Placement::Replicate) => Ok(x.clone()),
        (Placement::Shard(dim), Placement::Replicate) => all_gather(x, dim, group, Consumers::Same),
        (Placement::Replicate, Placement::Shard(dim)) => split(x, dim, group),
        (Placement::Shard(from), Placement::Shard(to)) => all_to_all(x, from, to, group),
        (Placement::Partial(ReduceOp::Sum), Placement::Replicate) => all_reduce(x, group),
        (Placement::Partial(ReduceOp::Sum), Placement::Shard(dim)) => reduce_scatter(x, dim, group),
        _ => bail!(
            "prepare_module_output: from {layout} to {desired}: an output is `Replicate`, `Shard` or \
             `Partial(ReduceOp::Sum)`, and becomes `Replicate` or `Shard`"
        ),
    }
}
