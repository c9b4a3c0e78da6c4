//! The collectives that have a gradient.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor};
use fsdp_core::ProcessGroup;

use super::moves::{Input, check, exchanged, gathered, own_part, scattered, summed};
use crate::graph::keeps_graph;
use crate::kernels::{Backward, node};
use crate::storage::{copied_storage, take};

/// What is computed from a tensor that every rank holds, which says what its gradients are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumers {
    /// Each rank computes something of its own, such as its heads: each has a term of the gradient.
    Differ,
    /// All ranks compute the same: each has the whole gradient.
    Same,
}

/// The tensor itself, for what differs on the ranks: input and output `[..]`, the same on every rank. Backward adds up
/// the ranks' gradients.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::collectives;
/// use fsdp_core::process_group::local;
///
/// local::run(2, |group| {
///     let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
///     let y = (collectives::copy(&x, &group)? * (group.rank() + 1) as f64)?;
///     let gradient = y.sum_all()?.backward()?.remove(&x).unwrap();
///     assert_eq!(gradient.to_vec1::<f32>()?, [3., 3.]); // 1 from rank 0, 2 from rank 1
///     candle_core::Result::Ok(())
/// })
/// .into_iter()
/// .collect::<candle_core::Result<Vec<_>>>()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the group does not move the tensor's memory. In backward, those of an all-reduce.
pub fn copy(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    check("copy", x, None, group)?;
    if group.size() == 1 || !has_gradient(x) {
        return Ok(if keeps_graph() { x.clone() } else { x.detach() });
    }
    let memory = copied_storage(x)?;
    node(x, memory, x.shape().clone(), Collective { name: "copy", group: group.clone(), way_back: WayBack::Sum })
}

/// The sum of the ranks' tensors: input `[..]`, a term on each rank; output of the same shape on all of them, the same
/// bits. Backward passes the gradient on, of which each rank has the whole.
///
/// # Errors
/// Those of an all-reduce.
pub fn all_reduce(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    reduce(Input::Lent(x), group)
}

/// The ranks' tensors one behind the other: input `[.., n, ..]`, of one shape on all ranks; output `[.., N * n, ..]`
/// for `N` ranks. Backward adds up the ranks' gradients and gives each its part (a reduce-scatter), or takes this
/// rank's part of the gradient, where all ranks have the whole.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::collectives::{Consumers, all_gather, reduce_scatter};
/// use fsdp_core::process_group::local;
///
/// // A part of a sequence on each rank, which becomes whole for a while.
/// local::run(2, |group| {
///     let x = Var::new(&[[1f32 + group.rank() as f32]], &Device::Cpu)?;
///     let all = all_gather(&x, 1, &group, Consumers::Differ)?;
///     assert_eq!(all.to_vec2::<f32>()?, [[1., 2.]]);
///     // Each rank has a term of the result, and takes its part of the sum.
///     let y = reduce_scatter(&(all * 10.)?, 1, &group)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[20. + 20. * group.rank() as f32]]);
///     let gradient = y.sum_all()?.backward()?.remove(&x).unwrap();
///     assert_eq!(gradient.to_vec2::<f32>()?, [[20.]]); // 10 by each rank's term
///     candle_core::Result::Ok(())
/// })
/// .into_iter()
/// .collect::<candle_core::Result<Vec<_>>>()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of an all-gather.
pub fn all_gather<D: Dim>(x: &Tensor, dim: D, group: &ProcessGroup, consumers: Consumers) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "all_gather")?;
    check("all_gather", x, None, group)?;
    let way_back = match consumers {
        Consumers::Differ => WayBack::Scatter(dim),
        Consumers::Same => WayBack::Slice(dim),
    };
    of(x, gathered(x, dim, group)?, "all_gather", group, way_back)
}

/// This rank's part of the sum of the ranks' tensors: input `[.., n, ..]`, a term on each rank; output
/// `[.., n / N, ..]` for `N` ranks. Backward gathers the parts' gradients.
///
/// # Errors
/// When `n` does not divide by `N`, and those of a reduce-scatter.
pub fn reduce_scatter<D: Dim>(x: &Tensor, dim: D, group: &ProcessGroup) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "reduce_scatter")?;
    scatter(Input::Lent(x), dim, group)
}

/// This rank's part of a tensor that all ranks hold: input `[.., n, ..]`, output `[.., n / N, ..]` for `N` ranks.
/// Backward gathers the parts' gradients.
///
/// # Errors
/// When `n` does not divide by `N`. In backward, those of an all-gather.
pub fn split<D: Dim>(x: &Tensor, dim: D, group: &ProcessGroup) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "split")?;
    check("split", x, Some(dim), group)?;
    let part = own_part(x, dim, group)?;
    if group.size() == 1 || !has_gradient(x) {
        return Ok(if keeps_graph() { part } else { part.detach() });
    }
    let memory = copied_storage(&part)?;
    let way_back = WayBack::Gather(dim);
    node(x, memory, part.shape().clone(), Collective { name: "split", group: group.clone(), way_back })
}

/// From a part along one dimension to a part along another, for `N` ranks: input `[.., a, .., b, ..]` and output
/// `[.., N * a, .., b / N, ..]`, where `from` is the dimension of `a` and `to` that of `b`. Backward is the same the
/// other way round. From a dimension to itself it is the tensor as it is.
///
/// # Errors
/// When `b` does not divide by `N`, and those of an all-to-all.
pub fn all_to_all<D: Dim, E: Dim>(x: &Tensor, from: D, to: E, group: &ProcessGroup) -> Result<Tensor> {
    let (from, to) = (from.to_index(x.shape(), "all_to_all")?, to.to_index(x.shape(), "all_to_all")?);
    check("all_to_all", x, (from != to).then_some(to), group)?;
    if from == to {
        return Ok(if keeps_graph() { x.clone() } else { x.detach() });
    }
    of(x, exchanged(x, from, to, group)?, "all_to_all", group, WayBack::Exchange { from: to, to: from })
}

/// [`all_reduce`] in the memory of `x`, which nobody else reads.
pub(crate) fn all_reduce_owned(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    reduce(Input::Taken(x), group)
}

/// [`reduce_scatter`] that uses up the memory of `x`, which nobody else reads.
pub(crate) fn reduce_scatter_owned(x: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    scatter(Input::Taken(x), dim, group)
}

fn reduce(x: Input<'_>, group: &ProcessGroup) -> Result<Tensor> {
    check("all_reduce", x.tensor(), None, group)?;
    let source = x.tensor().clone();
    let sum = summed(x, group)?;
    of(&source, sum, "all_reduce", group, WayBack::AsItIs)
}

fn scatter(x: Input<'_>, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    check("reduce_scatter", x.tensor(), Some(dim), group)?;
    let source = x.tensor().clone();
    let part = scattered(x, dim, group)?;
    of(&source, part, "reduce_scatter", group, WayBack::Gather(dim))
}

fn has_gradient(x: &Tensor) -> bool {
    x.track_op() && keeps_graph()
}

/// `result`, which nobody else reads, after `source` in the graph.
fn of(source: &Tensor, result: Tensor, name: &'static str, group: &ProcessGroup, way_back: WayBack) -> Result<Tensor> {
    if !has_gradient(source) {
        return Ok(result);
    }
    // In a group of one it may be a view of the source.
    let memory = if group.size() == 1 { copied_storage(&result)? } else { take(&result)? };
    node(source, memory, result.shape().clone(), Collective { name, group: group.clone(), way_back })
}

/// How the gradient of a result becomes that of its source.
pub(super) enum WayBack {
    AsItIs,
    Sum,
    Gather(usize),
    Scatter(usize),
    Slice(usize),
    Exchange { from: usize, to: usize },
}

impl WayBack {
    pub(super) fn run(&self, gradient: Input<'_>, group: &ProcessGroup) -> Result<Tensor> {
        match *self {
            WayBack::AsItIs => Ok(gradient.tensor().clone()),
            WayBack::Sum => summed(gradient, group),
            WayBack::Gather(dim) => gathered(gradient.tensor(), dim, group),
            WayBack::Scatter(dim) => scattered(gradient, dim, group),
            WayBack::Slice(dim) => own_part(gradient.tensor(), dim, group),
            WayBack::Exchange { from, to } => exchanged(gradient.tensor(), from, to, group),
        }
    }
}

struct Collective {
    name: &'static str,
    group: ProcessGroup,
    way_back: WayBack,
}

impl Backward for Collective {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = self.way_back.run(Input::Lent(gradient), &self.group);
        Ok(Some(gradient.map_err(|error| error.context(format!("in the backward of {}", self.name)))?))
    }
}
