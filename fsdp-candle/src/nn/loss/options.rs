//! What counts of a cross-entropy, and how its rows add up.

use candle_core::{Result, Tensor, bail};
use fsdp_core::ProcessGroup;

use super::super::cpu::values::indices_or_none;

/// A target that stands for none, in tensors of u32: what PyTorch's -100 is.
pub const IGNORED: u32 = u32::MAX;

/// How the losses of rows become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over the rows that are not ignored. Where all are, it is not a number, and all gradients are 0, as in
    /// PyTorch.
    Mean,
    /// The sum over the rows that are not ignored; 0 where all are. Ranks whose rows count for unequal shares of a
    /// batch divide it by the count of all ranks.
    Sum,
}

/// `ignore_index`, `label_smoothing` and `reduction` of PyTorch's `cross_entropy`.
///
/// ```
/// use fsdp_candle::nn::{CrossEntropyOptions, IGNORED, Reduction};
///
/// let options = CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() };
/// assert_eq!((options.ignore_index, options.reduction), (Some(IGNORED.into()), Reduction::Mean));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions {
    /// Rows with this target count for nothing, and their logits get no gradient. [`IGNORED`] at first.
    pub ignore_index: Option<i64>,
    /// How much of a target's probability is spread over all classes, from 0 to 1. 0 at first.
    pub label_smoothing: f64,
    /// [`Reduction::Mean`] at first.
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: Some(IGNORED.into()), label_smoothing: 0., reduction: Reduction::Mean }
    }
}

impl CrossEntropyOptions {
    /// Every row counts, and as much as any other.
    pub(super) fn plain() -> Self {
        CrossEntropyOptions { ignore_index: None, ..Default::default() }
    }

    /// The rows that these targets make of logits of all classes, or of a part of them that this rank holds.
    pub(in crate::nn) fn rows(
        &self,
        function: &str,
        targets: &Tensor,
        columns: usize,
        ranks: Option<&ProcessGroup>,
    ) -> Result<Rows> {
        let ranks = ranks.filter(|group| group.size() > 1).cloned();
        let (first, classes) = match &ranks {
            Some(group) => (group.rank() * columns, group.size() * columns),
            None => (0, columns),
        };
        let smoothing = self.label_smoothing;
        if !(0. ..=1.).contains(&smoothing) {
            bail!("{function}: label_smoothing is {smoothing}; it must be from 0 to 1");
        }
        if classes == 0 {
            bail!("{function}: there must be a class, but the number of classes is 0");
        }
        let targets = indices_or_none(function, "target", targets, classes, "number of classes", self.ignore_index)?;
        let divisor = match self.reduction {
            Reduction::Mean => targets.iter().flatten().count() as f64,
            Reduction::Sum => 1.,
        };
        Ok(Rows { targets, columns, first, classes, ranks, smoothing, divisor })
    }
}

/// The rows of logits that a loss is made of.
pub(in crate::nn) struct Rows {
    /// Of each row; `None` where it is ignored.
    pub(super) targets: Vec<Option<u32>>,
    /// Of the logits that are here, and the class that the first one stands for.
    pub(super) columns: usize,
    pub(super) first: usize,
    /// Of the vocabulary.
    pub(super) classes: usize,
    /// The ranks that hold parts of the vocabulary, where there are several.
    pub(super) ranks: Option<ProcessGroup>,
    pub(super) smoothing: f64,
    /// What the sum of the rows' losses is divided by.
    pub(super) divisor: f64,
}

/// The gradient of a row's logits: `scale * softmax - uniform`, less `hit` at the target.
#[derive(Clone, Copy)]
pub(super) struct Slopes {
    pub(super) scale: f32,
    pub(super) uniform: f32,
    pub(super) hit: f32,
}

impl Rows {
    pub(super) fn slopes(&self, d_loss: f32) -> Slopes {
        let scale = d_loss / self.divisor as f32;
        let smoothing = self.smoothing as f32;
        Slopes { scale, uniform: scale * smoothing / self.classes as f32, hit: scale * (1. - smoothing) }
    }

    /// The column of a target, if it is here.
    pub(super) fn column(&self, target: u32) -> Option<usize> {
        (target as usize).checked_sub(self.first).filter(|column| *column < self.columns)
    }

    /// Which rows count, where some do not.
    pub(super) fn counted(&self) -> Option<Vec<usize>> {
        let counts = |(row, target): (usize, &Option<u32>)| target.map(|_| row);
        self.targets.contains(&None).then(|| self.targets.iter().enumerate().filter_map(counts).collect())
    }
}
