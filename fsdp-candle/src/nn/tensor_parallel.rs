//! Layers under a plan of tensor parallelism ([`crate::parallelize`]). A layer finds its part of the plan by its
//! weight.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Signature, Subject};

use crate::activation_checkpoint::is_kept;
use crate::collectives::{
    Consumers, Entry, SharedInput, all_gather, all_reduce, all_reduce_owned, all_to_all, reduce_scatter,
    reduce_scatter_owned,
};
use crate::fsdp::FsdpParam;
use crate::tensor_parallel::{ActivationLayout, ColwiseParallel, ParallelStyle, RowwiseParallel};

/// A layer that a plan shards: its ranks, and how it is sharded.
#[derive(Clone)]
pub(in crate::nn) struct TpLayer<S> {
    /// Its collectives name the layer in their signatures.
    group: ProcessGroup,
    subject: Arc<Subject>,
    pub(in crate::nn) style: S,
}

impl<S: std::fmt::Debug> std::fmt::Debug for TpLayer<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} on {} ranks", self.style, self.group.size())
    }
}

/// How a fully connected layer is sharded.
#[derive(Clone, Copy, Debug)]
pub(in crate::nn) enum LinearSharding {
    Colwise(ColwiseParallel),
    Rowwise(RowwiseParallel),
}

impl LinearSharding {
    fn of(style: ParallelStyle) -> Option<Self> {
        match style {
            ParallelStyle::Colwise(style) => Some(LinearSharding::Colwise(style)),
            ParallelStyle::Vocab(style) => Some(LinearSharding::Colwise(style.tied_head)),
            ParallelStyle::Hidden(style) => Some(LinearSharding::Rowwise(style.tied_head)),
            ParallelStyle::Rowwise(style) => Some(LinearSharding::Rowwise(style)),
            ParallelStyle::Sequence(_) | ParallelStyle::Expert(_) => None,
        }
    }
}

/// How an embedding is sharded, and the layouts of its ids and its output.
#[derive(Clone, Copy, Debug)]
pub(in crate::nn) struct EmbeddingSharding {
    pub(in crate::nn) vocab: bool,
    pub(in crate::nn) input: ActivationLayout,
    pub(in crate::nn) output: ActivationLayout,
}

impl EmbeddingSharding {
    fn of(style: ParallelStyle) -> Option<Self> {
        match style {
            ParallelStyle::Vocab(style) => {
                Some(EmbeddingSharding { vocab: true, input: style.input_layout, output: style.output_layout })
            }
            ParallelStyle::Hidden(style) => {
                Some(EmbeddingSharding { vocab: false, input: style.input_layout, output: style.output_layout })
            }
            _ => None,
        }
    }
}

/// Fails if the plan shards an embedding's weight as a linear layer.
pub(in crate::nn) fn check_embedding(weight: &Tensor) -> Result<()> {
    let Some(param) = FsdpParam::of(weight) else { return Ok(()) };
    match param.parallel().map(|parallel| parallel.style) {
        Some(style @ (ParallelStyle::Colwise(_) | ParallelStyle::Rowwise(_))) => bail!(
            "parameter `{}`: the plan shards an embedding as {}, a style of linear layers. Use VocabParallel or \
             HiddenParallel",
            param.name(),
            style.name()
        ),
        _ => Ok(()),
    }
}

/// Marks a parameter that a layer holds beside its weight: the layer does the parameter's collectives.
pub(in crate::nn) fn mark_tp_aware(tensor: &Tensor) {
    if let Some(param) = FsdpParam::of(tensor) {
        param.set_tp_aware();
    }
}

impl TpLayer<LinearSharding> {
    /// Returns the layer of this weight, if a plan shards it.
    pub(in crate::nn) fn of_linear(weight: &Tensor) -> Option<Self> {
        Self::of(weight, LinearSharding::of)
    }
}

impl TpLayer<EmbeddingSharding> {
    /// Returns the layer of this weight, if a plan shards it.
    pub(in crate::nn) fn of_embedding(weight: &Tensor) -> Option<Self> {
        Self::of(weight, EmbeddingSharding::of)
    }
}

impl<S> TpLayer<S> {
    fn of(weight: &Tensor, sharding: impl FnOnce(ParallelStyle) -> Option<S>) -> Option<Self> {
        let param = FsdpParam::of(weight)?;
        let style = sharding(param.parallel()?.style)?;
        param.set_tp_aware();
        let parallel = param.parallel()?;
        let subject = Subject::new(format!("the layer of parameter `{}`", param.name()), []);
        let group = parallel.group.signed(Signature::new(&subject, []));
        Some(TpLayer { group, subject, style })
    }

    pub(in crate::nn) fn group(&self) -> &ProcessGroup {
        &self.group
    }
}

impl TpLayer<EmbeddingSharding> {
    /// Returns the ranks with a signature that has a hash of the ids, so that ranks with different batches get an
    /// error. Ids on a device are not compared, because the host would have to wait for them.
    pub(in crate::nn) fn group_for(&self, ids: &Tensor) -> Result<ProcessGroup> {
        if !ids.device().is_cpu() {
            return Ok(self.group.clone());
        }
        let mut hash = DefaultHasher::new();
        ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?.hash(&mut hash);
        let signature = Signature::new(&self.subject, [])
            .with_how(format!(", with ids of hash {:016x}", hash.finish()))
            .with_advice("Ranks that hold parts of one vocabulary must get the same batch");
        Ok(self.group.signed(signature))
    }
}

/// Returns a layout's dimension as an index from the front.
fn layout_dim(function: &str, dim: isize, x: &Tensor) -> Result<usize> {
    let from_end = if dim < 0 { x.rank() as isize } else { 0 };
    match usize::try_from(dim + from_end) {
        Ok(at) if at < x.rank() => Ok(at),
        _ => {
            bail!("{function}: the plan's layout is Shard({dim}), but the tensor {:?} has no such dimension", x.dims())
        }
    }
}

fn last_dim(function: &str, x: &Tensor) -> Result<usize> {
    match x.rank().checked_sub(1) {
        Some(last) => Ok(last),
        None => bail!("{function}: the input must have a dimension"),
    }
}

/// Returns the whole input of a layer that is sharded along its outputs. The input's last dimension must be `inputs`.
pub(in crate::nn) fn colwise_input(
    function: &str,
    x: &Tensor,
    inputs: usize,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<SharedInput> {
    let last = last_dim(function, x)?;
    let (entry, found) = match layout {
        ActivationLayout::Replicate => (Entry::Copy, x.dims()[last]),
        ActivationLayout::Shard(dim) => {
            let dim = layout_dim(function, dim, x)?;
            let parts = if dim == last { group.size() } else { 1 };
            (Entry::Gather(dim), parts * x.dims()[last])
        }
    };
    check_input(function, x, found, inputs, group)?;
    SharedInput::of(function, x, entry, group)
}

/// Returns this rank's part of the input of a layer that is sharded along its inputs. This rank's weight has `inputs`.
pub(in crate::nn) fn rowwise_input(
    function: &str,
    x: &Tensor,
    inputs: usize,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<Part> {
    let last = last_dim(function, x)?;
    let dim = match layout {
        ActivationLayout::Replicate => None,
        ActivationLayout::Shard(dim) => Some(layout_dim(function, dim, x)?),
    };
    let parts = if dim == Some(last) { 1 } else { group.size() };
    check_input(function, x, x.dims()[last], parts * inputs, group)?;
    match dim {
        None => Ok(Part::Shared(SharedInput::of(function, x, Entry::Split(last), group)?)),
        Some(dim) if dim == last => Ok(Part::Plain(x.clone())),
        Some(dim) => Ok(Part::Plain(all_to_all(x, dim, last, group)?)),
    }
}

/// A rank's part of an input.
pub(in crate::nn) enum Part {
    Plain(Tensor),
    Shared(SharedInput),
}

/// Fails before the first collective if the input's length is not the weight's.
fn check_input(function: &str, x: &Tensor, found: usize, wanted: usize, group: &ProcessGroup) -> Result<()> {
    if found != wanted {
        bail!(
            "{function} on {} tensor-parallel ranks: the input {:?} has {found} features in the plan's layout, but \
             the weight takes {wanted}",
            group.size(),
            x.dims()
        );
    }
    Ok(())
}

/// Returns a layer's output in the plan's layout, if each rank has a part of its last dimension.
pub(in crate::nn) fn colwise_output(
    function: &str,
    y: Tensor,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<Tensor> {
    let last = last_dim(function, &y)?;
    match layout {
        ActivationLayout::Replicate => all_gather(&y, last, group, Consumers::Same),
        ActivationLayout::Shard(dim) => match layout_dim(function, dim, &y)? {
            dim if dim == last => Ok(y),
            dim => all_to_all(&y, last, dim, group),
        },
    }
}

/// Returns a layer's output in the plan's layout, if each rank has a term of the sum. The collective may overwrite the
/// term, unless an activation checkpoint keeps it.
pub(in crate::nn) fn rowwise_output(
    function: &str,
    y: &Tensor,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<Tensor> {
    let is_kept = is_kept(y);
    match layout {
        ActivationLayout::Replicate if is_kept => all_reduce(y, group),
        ActivationLayout::Replicate => all_reduce_owned(y, group),
        ActivationLayout::Shard(dim) => match layout_dim(function, dim, y)? {
            dim if is_kept => reduce_scatter(y, dim, group),
            dim => reduce_scatter_owned(y, dim, group),
        },
    }
}

/// Gathers the ids of all ranks.
pub(in crate::nn) fn gather_ids(ids: &Tensor, dim: isize, group: &ProcessGroup) -> Result<Tensor> {
    let dim = layout_dim("Embedding", dim, ids)?;
    all_gather(ids, dim, group, Consumers::Same)
}
