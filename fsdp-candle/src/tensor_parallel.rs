//! Parallel plans: the modules that are parallel, and the dimension of each parameter that they split. The
//! layers of [`nn`](crate::nn) implement the computation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::{DeviceMesh, ProcessGroup};

use crate::adapter::adapter_of;
use crate::error::{Error, Result};
use crate::pattern::NamePattern;

/// The layout of an activation on the tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationLayout {
    /// Every rank holds the whole activation.
    Replicate,
    /// Each rank holds a chunk of this dimension, which must divide evenly. Negative dimensions count from the end:
    /// `Shard(1)` is a part of the sequence, `Shard(-1)` of the features.
    Shard(isize),
}

impl ActivationLayout {
    /// Returns whether each rank holds only a part.
    pub(crate) fn is_sharded(self) -> bool {
        matches!(self, ActivationLayout::Shard(_))
    }
}

/// A [`Linear`](crate::nn::Linear) split along its outputs: the weight `[out, in]` and the bias `[out]` along dimension
/// 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColwiseParallel {
    /// Layout of the input, `Replicate` by default. A sharded input is gathered first.
    pub input_layout: ActivationLayout,
    /// Layout of the output: `Shard(-1)` by default, each rank its own features.
    pub output_layout: ActivationLayout,
}

impl Default for ColwiseParallel {
    fn default() -> Self {
        ColwiseParallel { input_layout: ActivationLayout::Replicate, output_layout: ActivationLayout::Shard(-1) }
    }
}

/// A [`Linear`](crate::nn::Linear) split along its inputs: the weight `[out, in]` along dimension 1. The bias is whole
/// and added once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowwiseParallel {
    /// Layout of the input: `Shard(-1)` by default, as a [`ColwiseParallel`] layer outputs it.
    pub input_layout: ActivationLayout,
    /// Layout of the output: `Replicate` by default (an all-reduce); `Shard(1)` for a part of the sequence (a
    /// reduce-scatter).
    pub output_layout: ActivationLayout,
}

impl Default for RowwiseParallel {
    fn default() -> Self {
        RowwiseParallel { input_layout: ActivationLayout::Shard(-1), output_layout: ActivationLayout::Replicate }
    }
}

/// A module on a part of the sequence, with whole parameters: norms between [`RowwiseParallel`] layers with output
/// `Shard(1)` and [`ColwiseParallel`] layers with that input. Its gradients are summed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceParallel {
    /// Split dimension of the input, 1 by default. Informative only: activations are local tensors here, and gradients
    /// are summed whichever dimension is split.
    pub sequence_dim: usize,
}

impl Default for SequenceParallel {
    fn default() -> Self {
        SequenceParallel { sequence_dim: 1 }
    }
}

/// An [`Embedding`](crate::nn::Embedding) split along its vocabulary: the weight `[vocabulary, hidden]` along dimension
/// 0. PyTorch's `RowwiseParallel` of an `nn.Embedding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabParallel {
    /// Layout of the ids, `Replicate` by default.
    pub input_layout: ActivationLayout,
    /// Layout of the output: `Replicate` by default (an all-reduce); `Shard(1)` for a part of the sequence (a
    /// reduce-scatter).
    pub output_layout: ActivationLayout,
    /// Style of a head that shares the weight.
    pub tied_head: ColwiseParallel,
}

impl Default for VocabParallel {
    fn default() -> Self {
        VocabParallel {
            input_layout: ActivationLayout::Replicate,
            output_layout: ActivationLayout::Replicate,
            tied_head: ColwiseParallel::default(),
        }
    }
}

/// An [`Embedding`](crate::nn::Embedding) split along its hidden dimension: the weight `[vocabulary, hidden]` along
/// dimension 1. PyTorch's `ColwiseParallel` of an `nn.Embedding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HiddenParallel {
    /// Layout of the ids, `Replicate` by default.
    pub input_layout: ActivationLayout,
    /// Layout of the output: `Shard(-1)` by default, each rank its own features.
    pub output_layout: ActivationLayout,
    /// Style of a head that shares the weight.
    pub tied_head: RowwiseParallel,
}

impl Default for HiddenParallel {
    fn default() -> Self {
        HiddenParallel {
            input_layout: ActivationLayout::Replicate,
            output_layout: ActivationLayout::Shard(-1),
            tied_head: RowwiseParallel::default(),
        }
    }
}

/// A list of experts, such as `model.layers.*.mlp.experts`, that live on different ranks: expert `e`, with all parameters
/// below `<list>.<e>`, on rank `e mod N` of `N`. torchtitan's `ExpertParallel`. The experts are
/// [`SwiGlu`](crate::nn::SwiGlu) layers, and [`mixture_of_experts`](crate::nn::mixture_of_experts) sends each token to
/// the ranks of its experts and back. See [`parallelize`](crate::parallelize) for the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertParallel;

/// The style of one module: PyTorch's `ParallelStyle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParallelStyle {
    /// A linear layer split along its outputs.
    Colwise(ColwiseParallel),
    /// A linear layer split along its inputs.
    Rowwise(RowwiseParallel),
    /// A module on a part of the sequence.
    Sequence(SequenceParallel),
    /// An embedding split along its vocabulary.
    Vocab(VocabParallel),
    /// An embedding split along its hidden dimension.
    Hidden(HiddenParallel),
    /// A list of experts that live on different ranks.
    Expert(ExpertParallel),
}

macro_rules! from_styles {
    ($($style:ident: $variant:ident),*) => {$(
        impl From<$style> for ParallelStyle {
            fn from(style: $style) -> Self {
                ParallelStyle::$variant(style)
            }
        }
    )*};
}
from_styles!(
    ColwiseParallel: Colwise,
    RowwiseParallel: Rowwise,
    SequenceParallel: Sequence,
    VocabParallel: Vocab,
    HiddenParallel: Hidden,
    ExpertParallel: Expert
);

/// The effect of a style on a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    /// Split dimension; `None` for a parameter that every rank holds.
    shard_dim: Option<usize>,
    /// Whether a rank's gradient is a term of a sum over the ranks. Any other gradient is the rank's own part, or has
    /// the same bits on all ranks, since all-reduces give all ranks the same bits.
    partial: bool,
}

impl ParallelStyle {
    /// Returns the effect on the module's parameter `last`, or `None` if the style does not know it.
    fn share(self, last: &str, dims: usize) -> Option<Share> {
        let split = |dim| Some(Share { shard_dim: Some(dim), partial: false });
        match self {
            ParallelStyle::Colwise(_) if dims > 0 => split(0),
            ParallelStyle::Rowwise(_) if last == "weight" && dims == 2 => split(1),
            // A bias that is added to a part of the output has a part of the gradient.
            ParallelStyle::Rowwise(style) if last == "bias" => {
                Some(Share { shard_dim: None, partial: style.output_layout.is_sharded() })
            }
            ParallelStyle::Vocab(_) if dims == 2 => split(0),
            ParallelStyle::Hidden(_) if dims == 2 => split(1),
            ParallelStyle::Sequence(_) => Some(Share { shard_dim: None, partial: true }),
            _ => None,
        }
    }

    /// Returns the effect on the module's adapter: on the matrix `A` `[r, in]`, or on `B` `[out, r]`. Each rank holds a
    /// part of the inputs or of the outputs, so a whole matrix has a term of the gradient.
    fn share_of_adapter(self, is_up: bool) -> Option<Share> {
        let whole = Share { shard_dim: None, partial: true };
        match (self, is_up) {
            (ParallelStyle::Colwise(_) | ParallelStyle::Vocab(_), true) => {
                Some(Share { shard_dim: Some(0), partial: false })
            }
            (ParallelStyle::Rowwise(_) | ParallelStyle::Hidden(_), false) => {
                Some(Share { shard_dim: Some(1), partial: false })
            }
            (ParallelStyle::Expert(_), _) => None,
            (ParallelStyle::Colwise(_) | ParallelStyle::Vocab(_) | ParallelStyle::Sequence(_), false)
            | (ParallelStyle::Rowwise(_) | ParallelStyle::Hidden(_) | ParallelStyle::Sequence(_), true) => Some(whole),
        }
    }

    /// Returns whether layers must implement the style. Split parameters are wrong in a layer that does not.
    fn needs_layer(self) -> bool {
        !matches!(self, ParallelStyle::Sequence(_))
    }

    /// Returns PyTorch's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ParallelStyle::Colwise(_) => "ColwiseParallel",
            ParallelStyle::Rowwise(_) => "RowwiseParallel",
            ParallelStyle::Sequence(_) => "SequenceParallel",
            ParallelStyle::Vocab(_) => "VocabParallel",
            ParallelStyle::Hidden(_) => "HiddenParallel",
            ParallelStyle::Expert(_) => "ExpertParallel",
        }
    }
}

/// Styles of modules by patterns of their FQNs ([`NamePattern`]), for [`parallelize`](crate::parallelize): PyTorch's
/// `parallelize_plan`.
///
/// A style belongs to the module that owns the parameters, such as `model.layers.0.mlp.up_proj` for
/// `model.layers.0.mlp.up_proj.weight`. Modules without a matching pattern are whole on every rank.
///
/// ```
/// use fsdp_candle::{ActivationLayout, ColwiseParallel, ParallelPlan, RowwiseParallel, SequenceParallel};
///
/// let sequence = ActivationLayout::Shard(1);
/// let plan = ParallelPlan::new()
///     .module("model.layers.*.*_layernorm", SequenceParallel::default())
///     .module("model.layers.*.self_attn.[qkv]_proj", ColwiseParallel { input_layout: sequence, ..Default::default() })
///     .module("model.layers.*.self_attn.o_proj", RowwiseParallel { output_layout: sequence, ..Default::default() });
/// # let _ = plan;
/// ```
#[derive(Clone, Debug, Default)]
pub struct ParallelPlan {
    modules: Vec<(String, ParallelStyle)>,
}

impl ParallelPlan {
    /// Makes a plan without modules.
    pub fn new() -> Self {
        ParallelPlan::default()
    }

    /// Adds a style for the modules whose FQN matches the pattern.
    pub fn module(mut self, pattern: impl Into<String>, style: impl Into<ParallelStyle>) -> Self {
        self.modules.push((pattern.into(), style.into()));
        self
    }

    /// Returns the patterns and styles.
    pub(crate) fn modules(&self) -> &[(String, ParallelStyle)] {
        &self.modules
    }
}

/// A plan for the ranks of a mesh.
pub(crate) struct BoundPlan {
    mesh: DeviceMesh,
    rules: Vec<Rule>,
}

struct Rule {
    pattern: NamePattern,
    style: ParallelStyle,
    /// Whether a module with parameters has matched.
    matched: AtomicBool,
}

impl BoundPlan {
    /// Parses the plan's patterns. The mesh has one dimension.
    pub(crate) fn new(mesh: &DeviceMesh, plan: &ParallelPlan) -> Result<Self> {
        let rule = |(text, style): &(String, ParallelStyle)| {
            Ok(Rule { pattern: NamePattern::new(text)?, style: *style, matched: AtomicBool::new(false) })
        };
        Ok(BoundPlan { mesh: mesh.clone(), rules: plan.modules.iter().map(rule).collect::<Result<_>>()? })
    }

    /// Returns the ranks of the mesh.
    pub(crate) fn ranks(&self) -> Option<&ProcessGroup> {
        self.mesh.group(0).ok()
    }

    /// Returns the patterns that no module has matched so far.
    pub(crate) fn unmatched(&self) -> impl Iterator<Item = &NamePattern> {
        self.rules.iter().filter(|rule| !rule.matched.load(Ordering::Relaxed)).map(|rule| &rule.pattern)
    }

    /// Returns the effect on a parameter of this name and shape, or `None` if no pattern matches its module. Fails if
    /// two patterns match, the style does not know the parameter, or the split dimension does not divide evenly.
    pub(crate) fn of(&self, name: &str, shape: &[usize]) -> Result<Option<Arc<Parallel>>> {
        let fail = |message: String| Error::parameter(name, message);
        let adapter = adapter_of(name);
        let (module, last) = match adapter {
            Some((module, _)) => (module, ""),
            None => name.rsplit_once('.').unwrap_or(("", name)),
        };
        let mut matching = self.rules.iter().filter(|rule| rule.pattern.matches(module));
        let Some(rule) = matching.next() else { return Ok(None) };
        if let Some(other) = matching.next() {
            return Err(fail(format!(
                "the patterns `{}` and `{}` of the plan both match its module `{module}`: remove one",
                rule.pattern, other.pattern
            )));
        }
        rule.matched.store(true, Ordering::Relaxed);
        let share = match adapter {
            Some((_, is_up)) => rule.style.share_of_adapter(is_up),
            None => rule.style.share(last, shape.len()),
        };
        let style = rule.style.name();
        let Some(share) = share else {
            return Err(fail(format!(
                "`{}` of the plan makes its module {style}, which has no such parameter of shape {shape:?}: a linear \
                 layer has a 2-D weight and a 1-D bias, an embedding a 2-D weight. Remove the module from the plan",
                rule.pattern
            )));
        };
        let ranks = self.mesh.size();
        if let Some(dim) = share.shard_dim
            && !shape[dim].is_multiple_of(ranks)
        {
            return Err(fail(format!(
                "{style} splits dimension {dim} of its shape {shape:?}, whose size {} does not divide evenly over the \
                 {ranks} ranks of the mesh {}: use a number of ranks that divides it, or remove `{}` from the plan",
                shape[dim],
                self.mesh.layout(),
                rule.pattern
            )));
        }
        Ok(Some(Arc::new(Parallel {
            name: self.mesh.layout().names()[0].clone(),
            group: self.mesh.group(0)?.clone(),
            style: rule.style,
            shard_dim: share.shard_dim,
            is_partial: share.partial,
        })))
    }
}

/// A parameter of a module in a plan.
pub(crate) struct Parallel {
    /// Name of the mesh dimension of the tensor-parallel ranks.
    pub(crate) name: String,
    /// The tensor-parallel ranks.
    pub(crate) group: ProcessGroup,
    pub(crate) style: ParallelStyle,
    /// Dimension that ranks split into equal chunks; `None` for a parameter that every rank holds.
    pub(crate) shard_dim: Option<usize>,
    /// Whether each rank's gradient is a term, which the reduction sums over the ranks.
    pub(crate) is_partial: bool,
}

impl Parallel {
    /// Returns whether the layer must implement the style.
    pub(crate) fn needs_layer(&self) -> bool {
        self.style.needs_layer()
    }

    /// Returns the shape that layers hold of a parameter of this shape.
    pub(crate) fn local(&self, shape: &[usize]) -> Vec<usize> {
        let mut local = shape.to_vec();
        if let Some(size) = self.shard_dim.and_then(|dim| local.get_mut(dim)) {
            *size /= self.group.size();
        }
        local
    }
}
