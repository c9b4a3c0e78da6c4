//! A language model's head and its loss in one operation: the logits `[rows, V]` never exist whole.
//!
//! Rows are processed in chunks whose logits stay within a bound. Backward computes a chunk's logits again, replaces
//! them by their gradient, and multiplies that into the gradients of the hidden states and the weight. This is a third
//! more arithmetic than [`cross_entropy`](crate::nn::cross_entropy()) after [`Linear`](crate::nn::Linear), and saves
//! the memory of the logits twice.

use std::borrow::Cow;

use candle_core::{DType, Result, Tensor, bail};

use super::cross_entropy::{CrossEntropyOptions, Statistics, TargetRows, composite};
use crate::collectives::SharedInput;
use crate::kernels::graph_op;
use crate::nn::cpu::matrix::{Mat, MatMut, product};
use crate::nn::cpu::{map_rows, read, same_kind, storage, tensor_like, weight_grad};
#[cfg(feature = "cuda")]
use crate::nn::cuda;
use crate::nn::input::{self, Input};
use crate::nn::linear::affine;
use crate::nn::tensor_parallel::{LinearSharding, TpLayer, colwise_input};
#[cfg(feature = "cuda")]
use crate::nn::weight::on_cuda;
use crate::nn::weight::{Weight, has_cpu_kernels};

/// Logits that exist at a time: 64 MiB of f32.
const LOGITS: usize = 1 << 24;

/// Returns `cross_entropy(hidden W^T, targets)` for hidden states `[.., H]`, the head's weight `[V, H]` and targets
/// (u8, u32 or i64) `[..]`: an f32 scalar (f64 for f64).
///
/// Under a plan ([`crate::parallelize`]) the head's weight is this rank's part of the vocabulary, `[V / N, H]`. The
/// hidden states have the input layout of its style. The loss is over the whole vocabulary, with the same bits on every
/// rank. The ranks exchange three numbers for each row, or four with smoothing.
///
/// Fails if the shapes or dtypes disagree, the input has no rows, or a target is not below `V`.
pub fn linear_cross_entropy(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    linear_cross_entropy_with(hidden, weight, targets, &CrossEntropyOptions::plain())
}

/// [`linear_cross_entropy`] with the options of [`cross_entropy_with`](crate::nn::cross_entropy_with). No logits are
/// computed for ignored rows. Fails if the shapes or dtypes disagree, the input has no rows, a target is neither
/// below `V` nor `ignore_index`, or the smoothing is not from 0 to 1.
pub fn linear_cross_entropy_with(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Tensor> {
    let (columns, width) = weight.dims2()?;
    let parallel = TpLayer::of_linear(weight);
    let (shared, ranks) = match &parallel {
        None => (None, None),
        Some(layer) => {
            let LinearSharding::Colwise(style) = layer.style else {
                bail!(
                    "linear_cross_entropy: the plan shards the head's weight {:?} along its inputs. Use ColwiseParallel, \
                     or the weight of a VocabParallel embedding",
                    weight.dims()
                )
            };
            let input = colwise_input("linear_cross_entropy", hidden, width, style.input_layout, layer.group())?;
            (Some(input), Some(layer.group()))
        }
    };
    let hidden = shared.as_ref().map_or(Input::Plain(hidden), Input::from);
    let fits = hidden.values().dims().split_last() == Some((&width, targets.dims()));
    if !fits || targets.elem_count() == 0 || width == 0 {
        bail!(
            "linear_cross_entropy: hidden {:?} must have the targets' shape {:?} and then {width}, for the weight \
             {:?}, with at least one row and one column",
            hidden.values().dims(),
            targets.dims(),
            weight.dims()
        );
    }
    same_kind("linear_cross_entropy", ("hidden", hidden.values()), ("the weight", weight))?;
    let mut rows = options.rows("linear_cross_entropy", targets, columns, ranks)?;
    #[cfg(feature = "cuda")]
    if on_cuda(hidden.values()) {
        return cuda::linear_cross_entropy("linear_cross_entropy", hidden, Weight::of(weight)?, rows);
    }
    if !has_cpu_kernels(hidden.values()) {
        let logits = affine("linear_cross_entropy", hidden, weight, None, false)?;
        return composite(&logits, &rows);
    }
    let counted = rows.counted();
    rows.targets.retain(Option::is_some);
    let weight = Weight::of(weight)?;
    let chunk = (LOGITS / columns).clamp(1, rows.targets.len().max(1));
    let arguments = weight.arguments(hidden.node(), None);
    let head = Head { shared: hidden.shared(), weight, rows, counted, width, chunk };
    let (losses, log_sums) = head.forward(hidden.values())?;
    let losses = storage(head.for_all_rows(losses, targets.elem_count()), DType::F32)?;
    let shape = head.rows.shape.clone();
    graph_op("linear_cross_entropy", &arguments, losses, shape, move |hidden, _, d_loss| {
        head.backward(hidden[0], &log_sums, d_loss)
    })
}

struct Head {
    /// Input that is read instead of the graph argument.
    shared: Option<SharedInput>,
    weight: Weight,
    /// Rows that are not ignored.
    rows: TargetRows,
    /// Indices of the counted rows, if some are ignored.
    counted: Option<Vec<usize>>,
    width: usize,
    /// Number of rows whose logits exist at a time.
    chunk: usize,
}

impl Head {
    /// Returns the hidden states of the counted rows.
    fn counted_rows<'a>(&self, hidden: Cow<'a, [f32]>) -> Cow<'a, [f32]> {
        match &self.counted {
            Some(counted) => {
                counted.iter().flat_map(|row| &hidden[row * self.width..][..self.width]).copied().collect()
            }
            None => hidden,
        }
    }

    /// Computes the logits of some rows of the hidden states.
    fn logits(&self, scratch: &mut [f32], hidden: &[f32], weight: &[f32]) {
        let (rows, columns) = (hidden.len() / self.width, self.rows.columns);
        let weight = Mat::new(weight, columns, self.width);
        product(MatMut::new(scratch, rows, columns), false, Mat::new(hidden, rows, self.width), weight.t());
    }

    /// Returns the loss, or with 0 for ignored rows the losses of all rows.
    fn for_all_rows(&self, losses: Vec<f32>, rows: usize) -> Vec<f32> {
        let Some(counted) = self.counted.as_ref().filter(|_| !self.rows.combined) else { return losses };
        let mut all = vec![0.; rows];
        counted.iter().zip(losses).for_each(|(row, loss)| all[*row] = loss);
        all
    }

    /// Returns the combined loss or the loss of each counted row, and the logarithm of the sum of each counted row.
    fn forward(&self, hidden: &Tensor) -> Result<(Vec<f32>, Vec<f32>)> {
        read!(values, hidden);
        let hidden = self.counted_rows(values);
        read!(weight, self.weight.value()?);
        let rows = &self.rows;
        let mut scratch = vec![0f32; self.chunk * rows.columns];
        let mut statistics = Statistics::new(rows.targets.len());
        let chunks = hidden.chunks(self.chunk * self.width).zip(rows.targets.chunks(self.chunk));
        for (chunk, (hidden, targets)) in chunks.enumerate() {
            let logits = &mut scratch[..targets.len() * rows.columns];
            self.logits(logits, hidden, &weight);
            statistics.add_rows(chunk * self.chunk, logits, targets, rows);
        }
        statistics.losses(rows)
    }

    fn backward(&self, argument: &Tensor, log_sums: &[f32], d_loss: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (factors, columns) = (self.rows.row_factors(d_loss, self.counted.as_deref())?, self.rows.columns);
        let hidden = input::values(argument, &self.shared);
        read!(values, hidden);
        let values = self.counted_rows(values);
        let mut d_hidden = vec![0f32; values.len()];
        let mut back = |mut dw: Option<(&mut [f32], bool)>| -> Result<()> {
            read!(weight, self.weight.value()?);
            let mut scratch = vec![0f32; self.chunk * columns];
            let step = self.chunk * self.width;
            let chunks = values.chunks(step).zip(d_hidden.chunks_mut(step));
            let labels = self.rows.targets.chunks(self.chunk).zip(log_sums.chunks(self.chunk));
            for (chunk, ((hidden, d_hidden), (targets, log_sums))) in chunks.zip(labels).enumerate() {
                let rows = targets.len();
                let logits = &mut scratch[..rows * columns];
                self.logits(logits, hidden, &weight);
                map_rows(logits, columns, columns, |first, logits| {
                    let rows = first..first + logits.len() / columns;
                    let (row, class) = (chunk * self.chunk + first, self.rows.first);
                    factors.logits_to_gradient(logits, row, &targets[rows.clone()], &log_sums[rows], class);
                });
                let logits = Mat::new(logits, rows, columns);
                let weight = Mat::new(&weight, columns, self.width);
                product(MatMut::new(d_hidden, rows, self.width), false, logits, weight);
                if let Some((dw, accumulate)) = &mut dw {
                    let hidden = Mat::new(hidden, rows, self.width);
                    product(MatMut::new(dw, columns, self.width), *accumulate, logits.t(), hidden);
                    *accumulate = true;
                }
            }
            // No row counts.
            if let Some((dw, false)) = dw {
                dw.fill(0.);
            }
            Ok(())
        };
        let dw = if self.weight.wants_grad() {
            weight_grad(&self.weight, |buffer, accumulate| back(Some((buffer, accumulate))))?
        } else {
            back(None)?;
            None
        };
        let d_hidden = match &self.counted {
            Some(counted) => {
                let mut all = vec![0f32; hidden.elem_count()];
                for (row, d_row) in counted.iter().zip(d_hidden.chunks_exact(self.width)) {
                    all[row * self.width..][..self.width].copy_from_slice(d_row);
                }
                all
            }
            None => d_hidden,
        };
        let d_hidden = tensor_like(d_hidden, hidden)?;
        let d_hidden = match &self.shared {
            Some(shared) => shared.add_gradient(d_hidden)?,
            None => Some(d_hidden),
        };
        Ok([d_hidden, dw])
    }
}
