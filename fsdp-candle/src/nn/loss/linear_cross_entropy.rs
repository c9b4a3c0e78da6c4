//! A language model's head and its loss in one operation, so that the logits `[rows, V]` never exist whole.
//!
//! Rows are taken in stretches that keep the logits of one within a bound. Backward computes the logits of a stretch
//! anew, turns them into their gradient in place, and multiplies that into the gradients of the hidden states and the
//! weight: a third more arithmetic than [`cross_entropy`](crate::nn::cross_entropy()) after
//! [`Linear`](crate::nn::Linear), and less memory by twice the logits.

use std::borrow::Cow;
use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::matrix::{Mat, MatMut, product};
use super::super::cpu::parallel::map_rows;
use super::super::cpu::values::{cpu, floats, read, same_kind, served, storage, tensor, weight_grad};
use super::super::input::{self, Input};
use super::super::linear::affine::affine;
use super::super::parallel::{LinearCut, ParallelLayer, whole_input};
use super::super::weight::Weight;
use super::cross_entropy::gradient_in_place;
use super::options::{CrossEntropyOptions, Rows};
use super::statistics::Statistics;
use crate::collectives::SharedInput;

/// Logits that exist at a time: 64 MiB of f32.
const LOGITS: usize = 1 << 24;

/// `cross_entropy(hidden W^T, targets)` for hidden states `[.., H]`, the head's weight `[V, H]` and targets (u8, u32 or
/// i64) `[..]`: an f32 scalar (f64 for f64).
///
/// Under a plan ([`crate::parallelize`]) the head's weight is this rank's part of the vocabulary, `[V / N, H]`, and the
/// hidden states have the input layout of its style. The loss is that of the whole vocabulary, the same bits on every
/// rank: of each row three numbers travel, or four with smoothing.
///
/// An error if the shapes or dtypes disagree, there is no row, or a target is not below `V`.
pub fn linear_cross_entropy(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    linear_cross_entropy_with(hidden, weight, targets, &CrossEntropyOptions::plain())
}

/// As [`linear_cross_entropy`], with the options of [`cross_entropy_with`](crate::nn::cross_entropy_with). Of rows that
/// are ignored no logits are computed.
///
/// # Errors
/// When the shapes or dtypes disagree, there is no row, a target is neither below `V` nor the one that is ignored, or
/// the smoothing is not from 0 to 1.
pub fn linear_cross_entropy_with(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Tensor> {
    let (columns, width) = weight.dims2()?;
    let parallel = ParallelLayer::of_linear(weight);
    let (shared, ranks) = match &parallel {
        None => (None, None),
        Some(layer) => {
            let LinearCut::Outputs(style) = layer.style else {
                bail!(
                    "linear_cross_entropy: the plan cuts the head's weight {:?} along its inputs: a head is \
                     ColwiseParallel, or the weight of a VocabParallel embedding",
                    weight.dims()
                )
            };
            let input = whole_input("linear_cross_entropy", hidden, width, style.input_layout, layer.group())?;
            (Some(input), Some(layer.group()))
        }
    };
    let hidden = shared.as_ref().map_or(Input::Plain(hidden), Input::from);
    let fits = hidden.values().dims().split_last() == Some((&width, targets.dims()));
    if !fits || targets.elem_count() == 0 || width == 0 {
        bail!(
            "linear_cross_entropy: hidden {:?} must be the targets' shape {:?} and {width}, for the weight is {:?}; \
             and there must be a row, and a column",
            hidden.values().dims(),
            targets.dims(),
            weight.dims()
        );
    }
    same_kind("linear_cross_entropy", ("hidden", hidden.values()), ("the weight", weight))?;
    let mut rows = options.rows("linear_cross_entropy", targets, columns, ranks)?;
    if !served(hidden.values()) {
        let logits = affine("linear_cross_entropy", hidden, weight, None, false)?;
        return super::cross_entropy::composite(&logits, &rows);
    }
    let counted = rows.counted();
    rows.targets.retain(Option::is_some);
    let weight = Weight::of(weight)?;
    let node = weight.node().clone();
    let stretch = (LOGITS / columns).clamp(1, rows.targets.len().max(1));
    let shared = hidden.shared();
    hidden.node().apply_op2(&node, Head { shared, weight, rows, counted, width, stretch, log_sums: OnceLock::new() })
}

struct Head {
    /// What is read in the argument's place, if anything.
    shared: Option<SharedInput>,
    weight: Weight,
    /// Those that count.
    rows: Rows,
    /// Where they are among the hidden states, unless those are all.
    counted: Option<Vec<usize>>,
    width: usize,
    /// Rows of which the logits exist at a time.
    stretch: usize,
    log_sums: OnceLock<Vec<f32>>,
}

impl Head {
    /// The hidden states of the rows that count.
    fn those_that_count<'a>(&self, hidden: Cow<'a, [f32]>) -> Cow<'a, [f32]> {
        match &self.counted {
            Some(counted) => {
                counted.iter().flat_map(|row| &hidden[row * self.width..][..self.width]).copied().collect()
            }
            None => hidden,
        }
    }

    /// The logits of some rows of the hidden states.
    fn logits(&self, scratch: &mut [f32], hidden: &[f32], weight: &[f32]) {
        let (rows, columns) = (hidden.len() / self.width, self.rows.columns);
        let weight = Mat::new(weight, columns, self.width);
        product(MatMut::new(scratch, rows, columns), false, Mat::new(hidden, rows, self.width), weight.t());
    }
}

impl Head {
    fn loss(&self, hidden: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let hidden = self.those_that_count(floats(hidden, layout)?);
        read!(weight, self.weight.value()?);
        let rows = &self.rows;
        let mut scratch = vec![0f32; self.stretch * rows.columns];
        let mut statistics = Statistics::new(rows.targets.len());
        let stretches = hidden.chunks(self.stretch * self.width).zip(rows.targets.chunks(self.stretch));
        for (stretch, (hidden, targets)) in stretches.enumerate() {
            let logits = &mut scratch[..targets.len() * rows.columns];
            self.logits(logits, hidden, &weight);
            statistics.look(stretch * self.stretch, logits, targets, rows);
        }
        let (total, log_sums) = statistics.losses(rows)?;
        let _ = self.log_sums.set(log_sums);
        Ok((storage(vec![(total / rows.divisor) as f32], DType::F32)?, Shape::from(())))
    }
}

impl CustomOp2 for Head {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn cpu_fwd(&self, hidden: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some(shared) = &self.shared else { return self.loss(hidden, layout) };
        let (guard, layout) = shared.values().storage_and_layout();
        self.loss(cpu(&guard)?, layout)
    }

    fn bwd(
        &self,
        argument: &Tensor,
        _: &Tensor,
        _: &Tensor,
        d_loss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(log_sums) = self.log_sums.get() else { bail!("linear_cross_entropy: backward before forward") };
        let (slopes, columns) = (self.rows.slopes(d_loss.to_scalar::<f32>()?), self.rows.columns);
        let hidden = input::values(argument, &self.shared);
        read!(values, hidden);
        let values = self.those_that_count(values);
        let mut d_hidden = vec![0f32; values.len()];
        let mut back = |mut dw: Option<(&mut [f32], bool)>| -> Result<()> {
            read!(weight, self.weight.value()?);
            let mut scratch = vec![0f32; self.stretch * columns];
            let step = self.stretch * self.width;
            let stretches = values.chunks(step).zip(d_hidden.chunks_mut(step));
            let labels = self.rows.targets.chunks(self.stretch).zip(log_sums.chunks(self.stretch));
            for ((hidden, d_hidden), (targets, log_sums)) in stretches.zip(labels) {
                let rows = targets.len();
                let logits = &mut scratch[..rows * columns];
                self.logits(logits, hidden, &weight);
                map_rows(logits, columns, columns, |first, logits| {
                    let rows = first..first + logits.len() / columns;
                    gradient_in_place(logits, &targets[rows.clone()], &log_sums[rows], self.rows.first, slopes);
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
        let d_hidden = tensor(d_hidden, hidden.shape(), hidden.dtype())?;
        Ok((
            match &self.shared {
                Some(shared) => shared.add_gradient(d_hidden)?,
                None => Some(d_hidden),
            },
            dw,
        ))
    }
}
