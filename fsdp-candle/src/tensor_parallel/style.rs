//! How one module is parallel.

/// How an activation lies on the tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationLayout {
    /// Every rank has all of it.
    Replicate,
    /// Each rank has a chunk of this dimension, which must divide evenly; negative ones count from the end. `Shard(1)`
    /// is a part of the sequence, `Shard(-1)` of the features.
    Shard(isize),
}

impl ActivationLayout {
    /// Whether each rank has a part alone.
    pub(crate) fn is_sharded(self) -> bool {
        matches!(self, ActivationLayout::Shard(_))
    }
}

/// A [`Linear`](crate::nn::Linear) cut along its outputs: the weight `[out, in]` and the bias `[out]` along their
/// dimension 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColwiseParallel {
    /// How the input comes: `Replicate` by default. What is sharded is gathered first.
    pub input_layout: ActivationLayout,
    /// How the output goes: `Shard(-1)` by default, each rank its own features.
    pub output_layout: ActivationLayout,
}

impl Default for ColwiseParallel {
    fn default() -> Self {
        ColwiseParallel { input_layout: ActivationLayout::Replicate, output_layout: ActivationLayout::Shard(-1) }
    }
}

/// A [`Linear`](crate::nn::Linear) cut along its inputs: the weight `[out, in]` along dimension 1. The bias is whole,
/// and added once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowwiseParallel {
    /// How the input comes: `Shard(-1)` by default, as a [`ColwiseParallel`] layer leaves it.
    pub input_layout: ActivationLayout,
    /// How the output goes: `Replicate` by default (an all-reduce); `Shard(1)` for a part of the sequence (a
    /// reduce-scatter).
    pub output_layout: ActivationLayout,
}

impl Default for RowwiseParallel {
    fn default() -> Self {
        RowwiseParallel { input_layout: ActivationLayout::Shard(-1), output_layout: ActivationLayout::Replicate }
    }
}

/// A module that works on a part of the sequence, with whole parameters: norms between [`RowwiseParallel`] layers whose
/// output is `Shard(1)` and [`ColwiseParallel`] ones whose input is. Its gradients are summed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceParallel {
    /// The dimension of the input that is cut: 1 by default. It only describes. PyTorch makes a DTensor of the input by
    /// it; here activations are local tensors, parameters' gradients are summed whichever dimension is cut, and nothing
    /// reads it.
    pub sequence_dim: usize,
}

impl Default for SequenceParallel {
    fn default() -> Self {
        SequenceParallel { sequence_dim: 1 }
    }
}

/// An [`Embedding`](crate::nn::Embedding) cut along its vocabulary: the weight `[vocabulary, hidden]` along its
/// dimension 0. PyTorch says `RowwiseParallel` of an `nn.Embedding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabParallel {
    /// How the ids come: `Replicate` by default.
    pub input_layout: ActivationLayout,
    /// How the output goes: `Replicate` by default (an all-reduce); `Shard(1)` for a part of the sequence (a
    /// reduce-scatter).
    pub output_layout: ActivationLayout,
    /// What a head does that shares the weight.
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

/// An [`Embedding`](crate::nn::Embedding) cut along its hidden dimension: the weight `[vocabulary, hidden]` along
/// dimension 1. PyTorch says `ColwiseParallel` of an `nn.Embedding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HiddenParallel {
    /// How the ids come: `Replicate` by default.
    pub input_layout: ActivationLayout,
    /// How the output goes: `Shard(-1)` by default, each rank its own features.
    pub output_layout: ActivationLayout,
    /// What a head does that shares the weight.
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

/// How one module is parallel: PyTorch's `ParallelStyle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParallelStyle {
    /// A linear layer cut along its outputs.
    Colwise(ColwiseParallel),
    /// A linear layer cut along its inputs.
    Rowwise(RowwiseParallel),
    /// A module that works on a part of the sequence.
    Sequence(SequenceParallel),
    /// An embedding cut along its vocabulary.
    Vocab(VocabParallel),
    /// An embedding cut along its hidden dimension.
    Hidden(HiddenParallel),
}

impl From<ColwiseParallel> for ParallelStyle {
    fn from(style: ColwiseParallel) -> Self {
        ParallelStyle::Colwise(style)
    }
}

impl From<RowwiseParallel> for ParallelStyle {
    fn from(style: RowwiseParallel) -> Self {
        ParallelStyle::Rowwise(style)
    }
}

impl From<SequenceParallel> for ParallelStyle {
    fn from(style: SequenceParallel) -> Self {
        ParallelStyle::Sequence(style)
    }
}

impl From<VocabParallel> for ParallelStyle {
    fn from(style: VocabParallel) -> Self {
        ParallelStyle::Vocab(style)
    }
}

impl From<HiddenParallel> for ParallelStyle {
    fn from(style: HiddenParallel) -> Self {
        ParallelStyle::Hidden(style)
    }
}

/// What a style makes of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// The dimension that is cut; whole on every rank else.
    pub(super) cut: Option<usize>,
    /// Whether a rank's gradient is a term of a sum over the ranks.
    pub(super) partial: bool,
}

impl ParallelStyle {
    /// What it makes of its module's parameter that is called `last` there; `None` where it knows of no such.
    pub(super) fn share(self, last: &str, dims: usize) -> Option<Share> {
        let cut = |dim| Some(Share { cut: Some(dim), partial: false });
        match self {
            ParallelStyle::Colwise(_) if dims > 0 => cut(0),
            ParallelStyle::Rowwise(_) if last == "weight" && dims == 2 => cut(1),
            // What is added to a part of the output has a part of the gradient.
            ParallelStyle::Rowwise(style) if last == "bias" => {
                Some(Share { cut: None, partial: style.output_layout.is_sharded() })
            }
            ParallelStyle::Vocab(_) if dims == 2 => cut(0),
            ParallelStyle::Hidden(_) if dims == 2 => cut(1),
            ParallelStyle::Sequence(_) => Some(Share { cut: None, partial: true }),
            _ => None,
        }
    }

    /// What it makes of its module's adapter: of the matrix `A` `[r, in]`, or of `B` `[out, r]`. Each rank has a part
    /// of the inputs, or of the outputs: what is whole has a term of the gradient.
    pub(super) fn share_of_adapter(self, is_up: bool) -> Option<Share> {
        let whole = Share { cut: None, partial: true };
        match (self, is_up) {
            (ParallelStyle::Colwise(_) | ParallelStyle::Vocab(_), true) => Some(Share { cut: Some(0), partial: false }),
            (ParallelStyle::Rowwise(_) | ParallelStyle::Hidden(_), false) => {
                Some(Share { cut: Some(1), partial: false })
            }
            (ParallelStyle::Colwise(_) | ParallelStyle::Vocab(_) | ParallelStyle::Sequence(_), false)
            | (ParallelStyle::Rowwise(_) | ParallelStyle::Hidden(_) | ParallelStyle::Sequence(_), true) => Some(whole),
        }
    }

    /// Whether its layers must know of it: what is cut, or added to a part, makes no sense in one that does not.
    pub(super) fn needs_layer(self) -> bool {
        !matches!(self, ParallelStyle::Sequence(_))
    }

    /// PyTorch's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ParallelStyle::Colwise(_) => "ColwiseParallel",
            ParallelStyle::Rowwise(_) => "RowwiseParallel",
            ParallelStyle::Sequence(_) => "SequenceParallel",
            ParallelStyle::Vocab(_) => "VocabParallel",
            ParallelStyle::Hidden(_) => "HiddenParallel",
        }
    }
}
