//! The cross-entropy loss of a language model, of whole rows of logits or of parts on tensor-parallel ranks.

use candle_core::{D, DType, Result, Tensor, bail};
use fsdp_core::{ProcessGroup, ReduceOp};

use crate::collectives::{all_reduce, check, largest, reduced_values};
use crate::graph::{Reads, graph_op};
use crate::nn::cpu::simd::{kernel, max, probability, sum, sum_exp, tanh};
use crate::nn::cpu::{indices_or_none, map_rows, read, storage, tensor_like, to_vec};
use crate::nn::cuda::Cuda;
use crate::nn::limits::check_size;
use crate::nn::target_rows::TargetRows;
use crate::nn::weight::has_cpu_kernels;

/// The target of an ignored row in tensors of u32, like PyTorch's -100.
pub const IGNORED: u32 = u32::MAX;

/// How the losses of rows are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over the rows that are not ignored. If all rows are ignored, the loss is NaN and all gradients are 0,
    /// as in PyTorch.
    Mean,
    /// The sum over the rows that are not ignored, or 0 if all are ignored. Ranks with unequal numbers of counted rows
    /// divide the sum by the count of all ranks.
    Sum,
    /// Not combined: the loss of each row, and 0 for ignored rows. The result has the targets' shape.
    None,
}

/// PyTorch's `ignore_index`, `label_smoothing` and `reduction` of `cross_entropy`, and the softcap of Gemma 2.
///
/// ```
/// use fsdp_candle::nn::{CrossEntropyOptions, IGNORED, Reduction};
///
/// let options = CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() };
/// assert_eq!((options.ignore_index, options.reduction), (Some(IGNORED.into()), Reduction::Mean));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions {
    /// Rows with this target are ignored, and their logits get no gradient. Default: [`IGNORED`].
    pub ignore_index: Option<i64>,
    /// Part of a target's probability that is spread over all classes, from 0 to 1. Default: 0.
    pub label_smoothing: f64,
    /// The loss is of `softcap * tanh(logits / softcap)`. Default: `None`.
    pub softcap: Option<f64>,
    /// How the rows' losses are combined. Default: [`Reduction::Mean`].
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions {
            ignore_index: Some(IGNORED.into()),
            label_smoothing: 0.,
            softcap: None,
            reduction: Reduction::Mean,
        }
    }
}

impl CrossEntropyOptions {
    /// Returns options with which every row counts equally.
    pub(super) fn plain() -> Self {
        CrossEntropyOptions { ignore_index: None, ..Default::default() }
    }

    /// Returns the rows for these targets, of logits of all classes or of this rank's part of the classes.
    pub(in crate::nn) fn rows(
        &self,
        function: &str,
        targets: &Tensor,
        columns: usize,
        ranks: Option<&ProcessGroup>,
    ) -> Result<TargetRows> {
        let ranks = ranks.filter(|group| group.size() > 1).cloned();
        let (first, classes) = match &ranks {
            Some(group) => (group.rank() * columns, group.size() * columns),
            None => (0, columns),
        };
        let smoothing = self.label_smoothing;
        if !(0. ..=1.).contains(&smoothing) {
            bail!("{function}: label_smoothing is {smoothing}; it must be from 0 to 1");
        }
        let softcap = self.softcap;
        if let Some(cap) = softcap.filter(|cap| !(*cap > 0. && cap.is_finite())) {
            bail!("{function}: softcap is {cap}; it must be positive and finite");
        }
        if classes == 0 {
            bail!("{function}: the number of classes is 0, but must be at least 1");
        }
        let shape = if self.reduction == Reduction::None { targets.dims().to_vec() } else { vec![] };
        let targets = indices_or_none(function, "target", targets, classes, "number of classes", self.ignore_index)?;
        let divisor = match self.reduction {
            Reduction::Mean => targets.iter().flatten().count() as f64,
            Reduction::Sum | Reduction::None => 1.,
        };
        let combined = self.reduction != Reduction::None;
        Ok(TargetRows { targets, columns, first, classes, ranks, smoothing, softcap, divisor, combined, shape })
    }
}

/// The factors of the gradient of a row's logits: `scale * softmax - uniform`, less `hit` at the target.
#[derive(Clone, Copy)]
pub(super) struct GradFactors {
    pub(super) scale: f32,
    pub(super) uniform: f32,
    pub(super) hit: f32,
    /// Reciprocal of the softcap, or 0 without one.
    pub(super) inverse_cap: f32,
}

impl GradFactors {
    pub(super) fn of(rows: &TargetRows, d_loss: f32) -> Self {
        let scale = d_loss / rows.divisor as f32;
        let smoothing = rows.smoothing as f32;
        GradFactors {
            scale,
            uniform: scale * smoothing / rows.classes as f32,
            hit: scale * (1. - smoothing),
            inverse_cap: rows.softcap.map_or(0., |cap| 1. / cap as f32),
        }
    }
}

/// The factors of all rows, or of each row.
pub(super) enum RowFactors {
    All(GradFactors),
    Each(Vec<GradFactors>),
}

impl RowFactors {
    /// Returns the factors for the gradient of the result. `counted` lists the rows that are left, if not all are.
    pub(super) fn of(rows: &TargetRows, d_loss: &Tensor, counted: Option<&[usize]>) -> Result<Self> {
        if rows.combined {
            return Ok(RowFactors::All(GradFactors::of(rows, d_loss.to_scalar::<f32>()?)));
        }
        let slopes = to_vec(d_loss)?;
        Ok(RowFactors::Each(match counted {
            Some(counted) => counted.iter().map(|row| GradFactors::of(rows, slopes[*row])).collect(),
            None => slopes.into_iter().map(|slope| GradFactors::of(rows, slope)).collect(),
        }))
    }

    /// Replaces the logits of the rows from `first` on, after the softcap, by the gradient of the logits before it.
    pub(super) fn logits_to_gradient(
        &self,
        logits: &mut [f32],
        first: usize,
        targets: &[Option<u32>],
        log_sums: &[f32],
        first_class: usize,
    ) {
        match self {
            RowFactors::All(factors) => logits_to_gradient(logits, targets, log_sums, first_class, *factors),
            RowFactors::Each(factors) => {
                let columns = logits.len() / targets.len().max(1);
                let rows = logits.chunks_exact_mut(columns.max(1)).zip(targets.chunks(1)).zip(log_sums.chunks(1));
                for (((logits, target), log_sum), factors) in rows.zip(&factors[first..]) {
                    logits_to_gradient(logits, target, log_sum, first_class, *factors);
                }
            }
        }
    }
}

/// Replaces logits by `softcap * tanh(logits / softcap)`, if there is a softcap.
pub(super) fn cap_rows(rows: &TargetRows, logits: &mut [f32]) {
    if let Some(cap) = rows.softcap {
        map_rows(logits, rows.columns, rows.columns, |_, logits| cap_logits(logits, cap as f32));
    }
}

/// Returns the mean cross-entropy of `logits` `[.., V]` against `targets` (u8, u32 or i64) `[..]`: an f32 scalar for
/// every dtype of the logits (f64 for f64).
///
/// Fails if the shapes disagree, the input has no rows, or a target is not below `V`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::cross_entropy;
///
/// let logits = Tensor::zeros((3, 8), DType::F32, &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &Tensor::new(&[0u32, 7, 2], &Device::Cpu)?)?;
/// assert!((loss.to_scalar::<f32>()? - 8f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, &CrossEntropyOptions::plain())
}

/// [`cross_entropy`](cross_entropy()) with ignored targets, smoothed labels, a softcap, or the sum instead of the mean.
///
/// As in PyTorch, with a smoothing of `e` a row's loss is `(1 - e)` times its loss without smoothing, plus `e` times
/// the mean of the losses for each of the `V` classes. Fails if the shapes disagree, the input has no rows, a
/// target is neither below `V` nor `ignore_index`, the smoothing is not from 0 to 1, or the softcap is not positive.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{CrossEntropyOptions, IGNORED, Reduction, cross_entropy_with};
///
/// // A rank's part of a mean over the counted tokens of all ranks.
/// let logits = Tensor::zeros((3, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, IGNORED, 2], &Device::Cpu)?;
/// let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
/// let sum = cross_entropy_with(&logits, &targets, &options)?;
/// assert!((sum.to_scalar::<f32>()? - 2. * 8f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy_with(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
    loss("cross_entropy", logits, targets, options, None)
}

/// Computes the loss of logits of all classes, or of this rank's part of the classes.
fn loss(
    function: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
    ranks: Option<&ProcessGroup>,
) -> Result<Tensor> {
    let Some((&columns, rows)) = logits.dims().split_last() else {
        bail!("{function}: the logits must have at least one dimension");
    };
    if targets.dims() != rows || targets.elem_count() == 0 {
        bail!(
            "{function}: the targets {:?} must have the shape of the logits {:?} without its last dimension, and at \
             least one row",
            targets.dims(),
            logits.dims()
        );
    }
    let rows = options.rows(function, targets, columns, ranks)?;
    if let Some(cuda) = Cuda::of(logits) {
        return cuda.cross_entropy(function, logits, rows);
    }
    if !has_cpu_kernels(logits) {
        check_size(function, "the logits", logits.dims(), logits.device())?;
        return composite(logits, &rows);
    }
    let mut statistics = Statistics::new(rows.targets.len());
    {
        read!(logits, logits);
        let logits = match rows.softcap {
            None => logits,
            Some(_) => {
                let mut capped = logits.into_owned();
                cap_rows(&rows, &mut capped);
                capped.into()
            }
        };
        statistics.add_rows(0, &logits, &rows.targets, &rows);
    }
    let (losses, log_sums) = statistics.losses(&rows)?;
    let shape = rows.shape.clone();
    graph_op(function, &[logits], storage(losses, DType::F32)?, shape, Reads::Sources, move |logits, _, d_loss| {
        let factors = RowFactors::of(&rows, d_loss, None)?;
        let mut grad = to_vec(logits[0])?;
        cap_rows(&rows, &mut grad);
        map_rows(&mut grad, columns, columns, |first, grad| {
            let own = first..first + grad.len() / columns;
            factors.logits_to_gradient(grad, first, &rows.targets[own.clone()], &log_sums[own], rows.first);
        });
        Ok([Some(tensor_like(grad, logits[0])?)])
    })
}

/// The loss as a chain of Candle's operations.
pub(in crate::nn) fn composite(logits: &Tensor, rows: &TargetRows) -> Result<Tensor> {
    let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mut logits = logits.reshape(((), rows.columns))?.to_dtype(wide)?;
    if let Some(cap) = rows.softcap {
        logits = ((logits / cap)?.tanh()? * cap)?;
    }
    let device = logits.device().clone();
    let targets: Vec<u32> = rows.targets.iter().flatten().copied().collect();
    if targets.is_empty() {
        // The mean of no rows is 0 / 0. The factor of 0 is a tensor, because a plain number would cut the graph.
        let sum = if rows.combined { logits.sum_all()? } else { logits.sum(1)?.reshape(rows.shape.as_slice())? };
        return (&sum * sum.zeros_like()?)? + 0. / rows.divisor;
    }
    let counted = match rows.counted() {
        Some(counted) => Some(Tensor::new(counted.into_iter().map(|row| row as u32).collect::<Vec<_>>(), &device)?),
        None => None,
    };
    if let Some(counted) = &counted {
        logits = logits.index_select(counted, 0)?;
    }
    let columns: Vec<Option<usize>> = targets.iter().map(|target| rows.column(*target)).collect();
    let places: Vec<u32> = columns.iter().map(|column| column.unwrap_or(0) as u32).collect();
    let places = Tensor::new(places, &device)?.unsqueeze(1)?;
    let highest = logits.max_keepdim(D::Minus1)?.detach();
    let losses = match &rows.ranks {
        None => {
            let shifted = logits.broadcast_sub(&highest)?;
            let log_sums = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
            let mean = (rows.smoothing > 0.).then(|| shifted.mean_keepdim(D::Minus1)).transpose()?;
            smoothed(log_sums, &shifted.gather(&places, 1)?, mean.as_ref(), rows)?
        }
        Some(ranks) => {
            let ranks = ranks.signed(rows.signature());
            let shifted = logits.broadcast_sub(&largest(&highest, &ranks)?)?;
            let here: Vec<u8> = columns.iter().map(|column| u8::from(column.is_some())).collect();
            let here = Tensor::new(here, &device)?.unsqueeze(1)?;
            let log_sums = all_reduce(&shifted.exp()?.sum_keepdim(D::Minus1)?, &ranks)?.log()?;
            let picked = shifted.gather(&places, 1)?;
            let picked = all_reduce(&here.where_cond(&picked, &picked.zeros_like()?)?, &ranks)?;
            let mean = (rows.smoothing > 0.)
                .then(|| all_reduce(&shifted.sum_keepdim(D::Minus1)?, &ranks)? / rows.classes as f64)
                .transpose()?;
            smoothed(log_sums, &picked, mean.as_ref(), rows)?
        }
    };
    if rows.combined {
        return losses.sum_all()? / rows.divisor;
    }
    let losses = match &counted {
        Some(counted) => {
            Tensor::zeros((rows.targets.len(), 1), losses.dtype(), &device)?.index_add(counted, &losses, 0)?
        }
        None => losses,
    };
    losses.reshape(rows.shape.as_slice())
}

/// Returns the rows' losses.
fn smoothed(log_sums: Tensor, picked: &Tensor, mean: Option<&Tensor>, rows: &TargetRows) -> Result<Tensor> {
    let losses = (&log_sums - picked)?;
    match mean {
        Some(mean) => (losses * (1. - rows.smoothing))? + ((log_sums - mean)? * rows.smoothing)?,
        None => Ok(losses),
    }
}

#[inline(always)]
fn logit_grad(x: f32, log_sum: f32, factors: GradFactors) -> f32 {
    probability(x - log_sum).mul_add(factors.scale, -factors.uniform) * cap_slope(x, factors)
}

/// Returns the slope of the softcap where it returns `x`, or 1 without a softcap.
#[inline(always)]
fn cap_slope(x: f32, factors: GradFactors) -> f32 {
    // A masked logit, of minus infinity, times 0 is NaN.
    let ratio = if factors.inverse_cap > 0.0 { x * factors.inverse_cap } else { 0.0 };
    1.0 - ratio * ratio
}

kernel! {
    fn cap_logits(logits: &mut [f32], cap: f32) {
        let inverse = 1.0 / cap;
        logits.iter_mut().for_each(|x| *x = cap * tanh(*x * inverse));
    }
}

kernel! {
    /// Replaces logits, to which the softcap was applied, by the gradient of the logits without it. There is one row per
    /// target, with classes from `first` on. Ignored rows become 0.
    fn logits_to_gradient(
        logits: &mut [f32],
        targets: &[Option<u32>],
        log_sums: &[f32],
        first: usize,
        factors: GradFactors,
    ) {
        if targets.is_empty() {
            return;
        }
        let classes = logits.len() / targets.len();
        for ((row, target), &log_sum) in logits.chunks_exact_mut(classes).zip(targets).zip(log_sums) {
            match target {
                Some(target) => {
                    let column = (*target as usize).wrapping_sub(first);
                    let hit = row.get(column).map(|x| factors.hit * cap_slope(*x, factors));
                    for x in row.iter_mut() {
                        *x = logit_grad(*x, log_sum, factors);
                    }
                    if let (Some(x), Some(hit)) = (row.get_mut(column), hit) {
                        *x -= hit;
                    }
                }
                None => row.fill(0.),
            }
        }
    }
}

/// [`cross_entropy_with`](crate::nn::cross_entropy_with) for logits whose classes are sharded over ranks: `[.., V / N]`
/// on each of `N` ranks, in rank order. The targets (u8, u32 or i64) `[..]` are below `V`, and the same on every rank.
/// The result is an f32 scalar (f64 for f64) with the same bits on every rank. Each rank gets the gradient of its own
/// logits. This is PyTorch's `loss_parallel`.
///
/// A head under [`crate::ColwiseParallel`] returns such logits. The collectives exchange only each row's largest logit,
/// and two sums (three with smoothing). Errors: see [`cross_entropy_with`](crate::nn::cross_entropy_with). Also fails
/// if ranks have other targets or another number of classes, the group does not support the logits' device, or an
/// all-reduce fails.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{CrossEntropyOptions, vocab_parallel_cross_entropy};
/// use fsdp_core::process_group::local;
///
/// // Eight classes, four on each rank.
/// local::try_run(2, |group| {
///     let logits = Tensor::zeros((3, 4), DType::F32, &Device::Cpu)?;
///     let targets = Tensor::new(&[0u32, 7, 2], &Device::Cpu)?;
///     let loss = vocab_parallel_cross_entropy(&logits, &targets, &group, &CrossEntropyOptions::default())?;
///     assert!((loss.to_scalar::<f32>()? - 8f32.ln()).abs() < 1e-6);
///     candle_core::Result::Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn vocab_parallel_cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    group: &ProcessGroup,
    options: &CrossEntropyOptions,
) -> Result<Tensor> {
    check("vocab_parallel_cross_entropy", logits, None, group)?;
    loss("vocab_parallel_cross_entropy", logits, targets, options, Some(group))
}

/// Statistics of a row: the largest logit, the sum of `e^(logit - largest)`, the target's logit, the sum of the logits.
const NUMBERS: usize = 4;

/// Returns a row's `log sum exp`.
fn log_sum(numbers: &[f32]) -> f32 {
    numbers[0] + numbers[1].ln()
}

/// The statistics of each row, zeros for ignored rows.
pub(super) struct Statistics(Vec<f32>);

impl Statistics {
    pub(super) fn new(rows: usize) -> Self {
        Statistics(vec![0.; NUMBERS * rows])
    }

    /// Computes the statistics of one row of logits per target, starting with row `first`.
    pub(super) fn add_rows(&mut self, first: usize, logits: &[f32], targets: &[Option<u32>], rows: &TargetRows) {
        let own = &mut self.0[NUMBERS * first..][..NUMBERS * targets.len()];
        let (columns, smooths) = (rows.columns, rows.smoothing > 0.);
        map_rows(own, NUMBERS, columns, |first, own| {
            row_statistics(own, &logits[first * columns..], &targets[first..], columns, smooths);
        });
        for (row, (numbers, target)) in own.chunks_exact_mut(NUMBERS).zip(targets).enumerate() {
            if let Some(column) = target.and_then(|target| rows.column(target)) {
                numbers[2] = logits[row * columns + column];
            }
        }
    }

    /// Returns the `log sum exp` of each of `count` rows from `first` on, over this rank's classes.
    pub(super) fn log_sums(&self, first: usize, count: usize) -> Vec<f32> {
        self.0[NUMBERS * first..][..NUMBERS * count].chunks_exact(NUMBERS).map(log_sum).collect()
    }

    /// Returns the combined loss or the loss of each row, and each row's `log sum exp` over all classes.
    pub(super) fn losses(mut self, rows: &TargetRows) -> Result<(Vec<f32>, Vec<f32>)> {
        if let Some(ranks) = &rows.ranks {
            self.reduce(rows, ranks)?;
        }
        let smoothed = |hit: f64, spread: f64| {
            if rows.smoothing > 0. { (1. - rows.smoothing) * hit + rows.smoothing * spread } else { hit }
        };
        let (mut hits, mut spreads, mut losses) = (0f64, 0f64, vec![]);
        let numbers = self.0.chunks_exact(NUMBERS).zip(&rows.targets);
        let log_sums = numbers.map(|(numbers, target)| {
            let (mut log_sum, mut hit, mut spread) = (0., 0., 0.);
            if target.is_some() {
                log_sum = self::log_sum(numbers);
                hit = f64::from(log_sum - numbers[2]);
                spread = f64::from(log_sum - numbers[3] / rows.classes as f32);
            }
            match rows.combined {
                true => (hits, spreads) = (hits + hit, spreads + spread),
                false => losses.push(smoothed(hit, spread) as f32),
            }
            log_sum
        });
        let log_sums = log_sums.collect();
        if rows.combined {
            losses.push((smoothed(hits, spreads) / rows.divisor) as f32);
        }
        Ok((losses, log_sums))
    }

    /// Combines the statistics of all ranks: the maximum of the largest logits, and the sums of the rest.
    fn reduce(&mut self, rows: &TargetRows, ranks: &ProcessGroup) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let ranks = ranks.signed(rows.signature());
        let own: Vec<f32> = self.0.chunks_exact(NUMBERS).map(|numbers| numbers[0]).collect();
        let largest = reduced_values(own, ReduceOp::Max, &ranks)?;
        let sums = if rows.smoothing > 0. { NUMBERS - 1 } else { NUMBERS - 2 };
        let mut terms = Vec::with_capacity(sums * largest.len());
        for (numbers, largest) in self.0.chunks_exact(NUMBERS).zip(&largest) {
            let of_part = if numbers[1] == 0. { 0. } else { numbers[1] * (numbers[0] - largest).exp() };
            terms.push(of_part);
            terms.extend_from_slice(&numbers[2..=sums]);
        }
        let terms = reduced_values(terms, ReduceOp::Sum, &ranks)?;
        for ((numbers, largest), terms) in self.0.chunks_exact_mut(NUMBERS).zip(largest).zip(terms.chunks_exact(sums)) {
            numbers[0] = largest;
            numbers[1..=sums].copy_from_slice(terms);
        }
        Ok(())
    }
}

kernel! {
    /// Computes all statistics except the target's logit.
    fn row_statistics(numbers: &mut [f32], logits: &[f32], targets: &[Option<u32>], columns: usize, smooths: bool) {
        let rows = numbers.chunks_exact_mut(NUMBERS).zip(logits.chunks_exact(columns));
        for ((numbers, row), target) in rows.zip(targets) {
            if target.is_some() {
                let largest = max(row);
                numbers[0] = largest;
                // All logits of a rank's part of the vocabulary may be masked.
                let masked = largest == f32::NEG_INFINITY && row.iter().all(|x| *x == f32::NEG_INFINITY);
                numbers[1] = if masked { 0. } else { sum_exp(row, 1.0, largest) };
                if smooths {
                    numbers[3] = sum(row);
                }
            }
        }
    }
}
