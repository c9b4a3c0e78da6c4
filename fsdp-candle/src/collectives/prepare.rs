//! Layouts at the border of a module: PyTorch's `PrepareModuleInput` and `PrepareModuleOutput`.

use candle_core::{Result, Tensor, bail};
use fsdp_core::{Placement, ProcessGroup, ReduceOp};

use super::functions::{Consumers, all_gather, all_reduce, all_to_all, copy, reduce_scatter, split};

/// The input of a module whose ranks compute different things, such as each its heads: from the layout that it has to
/// the one that the module wants. Input and output have the shapes of their layouts: `[.., n, ..]` for `Replicate`,
/// `[.., n / N, ..]` for `Shard(dim)` on `N` ranks. The gradient comes back in the layout that the input had.
///
/// The layers of [`nn`](crate::nn) do this by themselves, by the plan's input layouts; this is for modules that compute
/// otherwise.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fsdp_candle::{Placement, ReduceOp, collectives::{prepare_module_input, prepare_module_output}};
/// use fsdp_core::process_group::local;
///
/// // Each rank has one of two tokens, and multiplies all of them by its own columns of a matrix.
/// local::run(2, |group| {
///     let x = Var::new(&[[1f32 + group.rank() as f32]], &Device::Cpu)?;
///     let column = Tensor::new(&[[10f32 * (1 + group.rank()) as f32]], &Device::Cpu)?;
///     let all = prepare_module_input(&x, Placement::Shard(0), Placement::Replicate, &group)?;
///     let part = all.matmul(&column)?;
///     let y = prepare_module_output(&part, Placement::Shard(1), Placement::Replicate, &group)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[10., 20.], [20., 40.]]);
///     // Of each token: by both columns.
///     assert_eq!(y.sum_all()?.backward()?.remove(&x).unwrap().to_vec2::<f32>()?, [[30.]]);
///     candle_core::Result::Ok(())
/// })
/// .into_iter()
/// .collect::<candle_core::Result<Vec<_>>>()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// For layouts other than `Replicate` and `Shard`, when a dimension does not divide by the ranks, and those of the
/// collective.
pub fn prepare_module_input(x: &Tensor, layout: Placement, desired: Placement, group: &ProcessGroup) -> Result<Tensor> {
    match (layout, desired) {
        (Placement::Replicate, Placement::Replicate) => copy(x, group),
        (Placement::Shard(dim), Placement::Replicate) => all_gather(x, dim, group, Consumers::Differ),
        (Placement::Replicate, Placement::Shard(dim)) => split(x, dim, group),
        (Placement::Shard(from), Placement::Shard(to)) => all_to_all(x, from, to, group),
        _ => bail!("prepare_module_input: from {layout} to {desired}: an input is `Replicate` or `Shard`"),
    }
}

/// The output of a module whose ranks compute different things: from the layout that it has to the one that what
/// follows wants, which all ranks compute alike, or each for its part. Shapes are as for [`prepare_module_input`]; a
/// `Partial(Sum)` has the shape of the whole.
///
/// # Errors
/// For an output to be `Partial` or one that is another reduction than the sum, when a dimension does not divide by the
/// ranks, and those of the collective.
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
