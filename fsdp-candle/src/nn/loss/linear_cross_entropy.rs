//! A language model's head and its loss in one operation, so that the logits `[rows, V]` never exist whole.
//!
//! Rows are taken in stretches that keep the logits of one within a bound. Backward computes the logits of a stretch
//! anew, turns them into their gradient in place, and multiplies that into the gradients of the hidden states and the
//! weight: a third more arithmetic than [`cross_entropy`](crate::nn::cross_entropy()) after
//! [`Linear`](crate::nn::Linear), and less memory by twice the logits.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::matrix::{Mat, MatMut, product};
use super::super::cpu::parallel::map_rows;
use super::super::cpu::values::{floats, indices, read, same_kind, served, storage, tensor, weight_grad};
use super::super::weight::Weight;
use super::cross_entropy::{losses, softmax_minus_onehot_in_place};

/// Logits that exist at a time: 64 MiB of f32.
const LOGITS: usize = 1 << 24;

/// `cross_entropy(hidden W^T, targets)` for hidden states `[.., H]`, the head's weight `[V, H]` and targets (u32)
/// `[..]`: an f32 scalar (f64 for f64).
///
/// An error if the shapes or dtypes disagree, there is no row, or a target is not below `V`.
pub fn linear_cross_entropy(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (vocabulary, width) = weight.dims2()?;
    if hidden.dims().split_last() != Some((&width, targets.dims())) || targets.elem_count() == 0 {
        bail!(
            "linear_cross_entropy: hidden {:?} must be the targets' shape {:?} and {width}, for the weight is {:?}; \
             and there must be a row",
            hidden.dims(),
            targets.dims(),
            weight.dims()
        );
    }
    same_kind("linear_cross_entropy", ("hidden", hidden), ("the weight", weight))?;
    if !served(hidden) {
        let logits = super::super::linear::affine::composite(hidden, &Weight::in_graph(weight)?, None, false)?;
        return super::cross_entropy::composite(&logits, targets);
    }
    let targets = indices("linear_cross_entropy", "target", targets, vocabulary, "number of classes")?;
    let weight = Weight::of(weight)?;
    let node = weight.node().clone();
    let rows = (LOGITS / vocabulary.max(1)).clamp(1, targets.len());
    hidden.apply_op2(&node, Head { weight, targets, vocabulary, width, rows, log_sums: OnceLock::new() })
}

struct Head {
    weight: Weight,
    targets: Vec<u32>,
    vocabulary: usize,
    width: usize,
    /// Rows of a stretch.
    rows: usize,
    log_sums: OnceLock<Vec<f32>>,
}

impl Head {
    /// The logits of some rows of the hidden states.
    fn logits(&self, scratch: &mut [f32], hidden: &[f32], weight: &[f32]) {
        let rows = hidden.len() / self.width;
        let weight = Mat::new(weight, self.vocabulary, self.width);
        product(MatMut::new(scratch, rows, self.vocabulary), false, Mat::new(hidden, rows, self.width), weight.t());
    }
}

impl CustomOp2 for Head {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn cpu_fwd(&self, hidden: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let hidden = floats(hidden, layout)?;
        read!(weight, self.weight.value()?);
        let mut scratch = vec![0f32; self.rows * self.vocabulary];
        let mut log_sums = vec![0f32; self.targets.len()];
        let mut total = 0f64;
        let stretches = hidden.chunks(self.rows * self.width).zip(self.targets.chunks(self.rows));
        for ((hidden, targets), log_sums) in stretches.zip(log_sums.chunks_mut(self.rows)) {
            let logits = &mut scratch[..targets.len() * self.vocabulary];
            self.logits(logits, hidden, &weight);
            total += losses(logits, targets, self.vocabulary, log_sums);
        }
        let _ = self.log_sums.set(log_sums);
        let loss = total / self.targets.len() as f64;
        Ok((storage(vec![loss as f32], DType::F32)?, Shape::from(())))
    }

    fn bwd(
        &self,
        hidden: &Tensor,
        _: &Tensor,
        _: &Tensor,
        d_loss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(log_sums) = self.log_sums.get() else { bail!("linear_cross_entropy: backward before forward") };
        let scale = d_loss.to_scalar::<f32>()? / self.targets.len() as f32;
        read!(values, hidden);
        let mut d_hidden = vec![0f32; values.len()];
        let mut back = |mut dw: Option<(&mut [f32], bool)>| -> Result<()> {
            read!(weight, self.weight.value()?);
            let mut scratch = vec![0f32; self.rows * self.vocabulary];
            let step = self.rows * self.width;
            let stretches = values.chunks(step).zip(d_hidden.chunks_mut(step));
            let labels = self.targets.chunks(self.rows).zip(log_sums.chunks(self.rows));
            for ((hidden, d_hidden), (targets, log_sums)) in stretches.zip(labels) {
                let rows = targets.len();
                let logits = &mut scratch[..rows * self.vocabulary];
                self.logits(logits, hidden, &weight);
                map_rows(logits, self.vocabulary, self.vocabulary, |first, logits| {
                    let rows = first..first + logits.len() / self.vocabulary;
                    softmax_minus_onehot_in_place(logits, &targets[rows.clone()], &log_sums[rows], scale);
                });
                let logits = Mat::new(logits, rows, self.vocabulary);
                let weight = Mat::new(&weight, self.vocabulary, self.width);
                product(MatMut::new(d_hidden, rows, self.width), false, logits, weight);
                if let Some((dw, accumulate)) = &mut dw {
                    let hidden = Mat::new(hidden, rows, self.width);
                    product(MatMut::new(dw, self.vocabulary, self.width), *accumulate, logits.t(), hidden);
                    *accumulate = true;
                }
            }
            Ok(())
        };
        let dw = if self.weight.wants_grad() {
            weight_grad(&self.weight, |buffer, accumulate| back(Some((buffer, accumulate))))?
        } else {
            back(None)?;
            None
        };
        Ok((Some(tensor(d_hidden, hidden.shape(), hidden.dtype())?), dw))
    }
}
