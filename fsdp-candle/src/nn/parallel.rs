//! What layers do under a plan of tensor parallelism ([`crate::parallelize`]), which they find by their weight.

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
use crate::tensor_parallel::{ActivationLayout, ColwiseParallel, Parallel, ParallelStyle, RowwiseParallel};

/// The ranks of a layer, and what it is there.
#[derive(Clone)]
pub(in crate::nn) struct ParallelLayer<S> {
    /// Its collectives are about the layer.
    group: ProcessGroup,
    subject: Arc<Subject>,
    pub(in crate::nn) style: S,
}

impl<S: std::fmt::Debug> std::fmt::Debug for ParallelLayer<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} on {} ranks", self.style, self.group.size())
    }
}

/// How a fully connected layer is cut.
#[derive(Clone, Copy, Debug)]
pub(in crate::nn) enum LinearCut {
    Outputs(ColwiseParallel),
    Inputs(RowwiseParallel),
}

impl LinearCut {
    fn of(style: ParallelStyle) -> Option<Self> {
        match style {
            ParallelStyle::Colwise(style) => Some(LinearCut::Outputs(style)),
            ParallelStyle::Vocab(style) => Some(LinearCut::Outputs(style.tied_head)),
            ParallelStyle::Hidden(style) => Some(LinearCut::Inputs(style.tied_head)),
            ParallelStyle::Rowwise(style) => Some(LinearCut::Inputs(style)),
            ParallelStyle::Sequence(_) => None,
        }
    }
}

/// How an embedding is cut, and the layouts of its ids and its output.
#[derive(Clone, Copy, Debug)]
pub(in crate::nn) struct EmbeddingCut {
    pub(in crate::nn) vocabulary: bool,
    pub(in crate::nn) input: ActivationLayout,
    pub(in crate::nn) output: ActivationLayout,
}

impl EmbeddingCut {
    fn of(style: ParallelStyle) -> Option<Self> {
        match style {
            ParallelStyle::Vocab(style) => {
                Some(EmbeddingCut { vocabulary: true, input: style.input_layout, output: style.output_layout })
            }
            ParallelStyle::Hidden(style) => {
                Some(EmbeddingCut { vocabulary: false, input: style.input_layout, output: style.output_layout })
            }
            _ => None,
        }
    }
}

/// An error for a weight of an embedding that the plan cuts as a linear layer's.
pub(in crate::nn) fn check_embedding(weight: &Tensor) -> Result<()> {
    let Some(param) = FsdpParam::of(weight) else { return Ok(()) };
    match param.parallel().map(Parallel::style) {
        Some(style @ (ParallelStyle::Colwise(_) | ParallelStyle::Rowwise(_))) => bail!(
            "parameter `{}`: the plan makes its module {}, which is a linear layer, and it is an embedding: choose \
             VocabParallel, which cuts its vocabulary, or HiddenParallel",
            param.name(),
            style.name()
        ),
        _ => Ok(()),
    }
}

/// Notes that a layer does its part for a parameter that it holds beside its weight.
pub(in crate::nn) fn serve(tensor: &Tensor) {
    if let Some(param) = FsdpParam::of(tensor) {
        param.set_tp_aware();
    }
}

impl ParallelLayer<LinearCut> {
    /// The layer of this weight, if a plan cuts it.
    pub(in crate::nn) fn of_linear(weight: &Tensor) -> Option<Self> {
        Self::of(weight, LinearCut::of)
    }
}

impl ParallelLayer<EmbeddingCut> {
    /// The layer of this weight, if a plan cuts it.
    pub(in crate::nn) fn of_embedding(weight: &Tensor) -> Option<Self> {
        Self::of(weight, EmbeddingCut::of)
    }
}

impl<S> ParallelLayer<S> {
    fn of(weight: &Tensor, known: impl FnOnce(ParallelStyle) -> Option<S>) -> Option<Self> {
        let param = FsdpParam::of(weight)?;
        let style = known(param.parallel()?.style())?;
        param.set_tp_aware();
        let parallel = param.parallel()?;
        let subject = Subject::new(format!("the layer of parameter `{}`", param.name()), []);
        let group = parallel.group().signed(Signature::new(&subject, []));
        Some(ParallelLayer { group, subject, style })
    }

    pub(in crate::nn) fn group(&self) -> &ProcessGroup {
        &self.group
    }
}

impl ParallelLayer<EmbeddingCut> {
    /// The ranks, whose collectives are about these ids: ranks that got other batches hear of it. The host would wait
    /// for ids that are on a device, which are not compared.
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

/// A dimension of a layout, from the front.
fn dim_of(function: &str, dim: isize, x: &Tensor) -> Result<usize> {
    let from_end = if dim < 0 { x.rank() as isize } else { 0 };
    match usize::try_from(dim + from_end) {
        Ok(at) if at < x.rank() => Ok(at),
        _ => bail!("{function}: the plan's layout Shard({dim}) is of a dimension that {:?} does not have", x.dims()),
    }
}

fn last_of(function: &str, x: &Tensor) -> Result<usize> {
    match x.rank().checked_sub(1) {
        Some(last) => Ok(last),
        None => bail!("{function}: the input must have a dimension"),
    }
}

/// What a layer that is cut along its outputs takes of its input, whose last dimension is to be `inputs`.
pub(in crate::nn) fn whole_input(
    function: &str,
    x: &Tensor,
    inputs: usize,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<SharedInput> {
    let last = last_of(function, x)?;
    let (entry, found) = match layout {
        ActivationLayout::Replicate => (Entry::Copy, x.dims()[last]),
        ActivationLayout::Shard(dim) => {
            let dim = dim_of(function, dim, x)?;
            let parts = if dim == last { group.size() } else { 1 };
            (Entry::Gather(dim), parts * x.dims()[last])
        }
    };
    check_input(function, x, found, inputs, group)?;
    SharedInput::of(function, x, entry, group)
}

/// The part of its input that a layer takes which is cut along its inputs, of which it has `inputs` on this rank.
pub(in crate::nn) fn part_of_input(
    function: &str,
    x: &Tensor,
    inputs: usize,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<Part> {
    let last = last_of(function, x)?;
    let dim = match layout {
        ActivationLayout::Replicate => None,
        ActivationLayout::Shard(dim) => Some(dim_of(function, dim, x)?),
    };
    let parts = if dim == Some(last) { 1 } else { group.size() };
    check_input(function, x, x.dims()[last], parts * inputs, group)?;
    match dim {
        None => Ok(Part::Shared(SharedInput::of(function, x, Entry::Split(last), group)?)),
        Some(dim) if dim == last => Ok(Part::Plain(x.clone())),
        Some(dim) => Ok(Part::Plain(all_to_all(x, dim, last, group)?)),
    }
}

/// A part of an input.
pub(in crate::nn) enum Part {
    Plain(Tensor),
    Shared(SharedInput),
}

/// An error before anything moves, unless the input has the length that the weight wants.
fn check_input(function: &str, x: &Tensor, found: usize, wanted: usize, group: &ProcessGroup) -> Result<()> {
    if found != wanted {
        bail!(
            "{function} on {} tensor-parallel ranks: the input {:?} has {found} features in the plan's layout, and the \
             weight takes {wanted}",
            group.size(),
            x.dims()
        );
    }
    Ok(())
}

/// The output of a layer that has a part of the last dimension on each rank, in the layout that the plan wants.
pub(in crate::nn) fn output_of_columns(
    function: &str,
    y: Tensor,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<Tensor> {
    let last = last_of(function, &y)?;
    match layout {
        ActivationLayout::Replicate => all_gather(&y, last, group, Consumers::Same),
        ActivationLayout::Shard(dim) => match dim_of(function, dim, &y)? {
            dim if dim == last => Ok(y),
            dim => all_to_all(&y, last, dim, group),
        },
    }
}

/// The output of a layer that has a term of it on each rank, in the layout that the plan wants. Nobody else reads the
/// term, but a checkpoint that keeps it.
pub(in crate::nn) fn output_of_terms(
    function: &str,
    y: &Tensor,
    layout: ActivationLayout,
    group: &ProcessGroup,
) -> Result<Tensor> {
    let is_kept = is_kept(y);
    match layout {
        ActivationLayout::Replicate if is_kept => all_reduce(y, group),
        ActivationLayout::Replicate => all_reduce_owned(y, group),
        ActivationLayout::Shard(dim) => match dim_of(function, dim, y)? {
            dim if is_kept => reduce_scatter(y, dim, group),
            dim => reduce_scatter_owned(y, dim, group),
        },
    }
}

/// All ids of a tensor of which each rank has a part.
pub(in crate::nn) fn gathered_ids(ids: &Tensor, dim: isize, group: &ProcessGroup) -> Result<Tensor> {
    let dim = dim_of("Embedding", dim, ids)?;
    all_gather(ids, dim, group, Consumers::Same)
}
