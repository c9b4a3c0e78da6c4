//! A language model's head and its loss in one operation: the logits `[rows, V]` never exist whole, or only once.
//!
//! Rows are processed in chunks whose logits stay within a bound. On CPUs, forward also computes the gradients for a
//! gradient of the loss of 1, and backward scales them: the gradient of the logits if there are fewer rows than hidden
//! elements and the weight learns, else those of the hidden states, the weight and the bias. This is as much arithmetic
//! as [`cross_entropy`](crate::nn::cross_entropy()) after [`Linear`](crate::nn::Linear). On devices, for losses that
//! are not combined, and over a vocabulary that ranks share, backward computes the logits again. This is a third more
//! arithmetic.

use std::borrow::Cow;

use candle_core::{DType, Result, Tensor, bail};

use super::cross_entropy::{
    CrossEntropyOptions, GradFactors, RowFactors, Statistics, cap_rows, composite, cross_entropy_with,
    vocab_parallel_cross_entropy,
};
use crate::autograd::keeps_graph;
use crate::collectives::SharedInput;
use crate::graph::{Reads, graph_op};
use crate::nn::cpu::matrix::{Mat, MatMut, product};
use crate::nn::cpu::{map_rows, read, same_kind, small_weight_grad, storage, tensor_like, weight_grad};
use crate::nn::cuda::Cuda;
use crate::nn::input::{self, Input};
use crate::nn::linear::{Linear, affine, column_sums, with_matrix};
use crate::nn::target_rows::TargetRows;
use crate::nn::tensor_parallel::{LinearSharding, TpLayer, colwise_input};
use crate::nn::weight::{Weight, has_cpu_kernels};

/// Logits that exist at a time: 64 MiB of f32. Tests compare several chunks.
const LOGITS: usize = if cfg!(test) { 1 << 8 } else { 1 << 24 };

/// Returns `cross_entropy(hidden W^T, targets)` for hidden states `[.., H]`, the head's weight `[V, H]` and targets
/// (u8, u32 or i64) `[..]`: an f32 scalar (f64 for f64).
///
/// Under a plan ([`crate::parallelize`]) the head's weight is this rank's part of the vocabulary, `[V / N, H]`. The
/// hidden states have the input layout of its style. The loss is over the whole vocabulary, with the same bits on every
/// rank. The ranks exchange three numbers for each row, or four with smoothing.
///
/// On CPUs, a combined loss over a whole vocabulary also computes the gradients. To evaluate a model, call it within
/// [`no_grad`](crate::no_grad()), which saves two thirds of that work.
///
/// Fails if the shapes or dtypes disagree, the input has no rows, or a target is not below `V`.
pub fn linear_cross_entropy(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
    linear_cross_entropy_with(hidden, weight, targets, &CrossEntropyOptions::plain())
}

/// [`linear_cross_entropy`] with the options of [`cross_entropy_with`]. No logits are computed for ignored rows. Fails
/// if the shapes or dtypes disagree, the input has no rows, a target is neither below `V` nor `ignore_index`, the
/// smoothing is not from 0 to 1, or the softcap is not positive.
pub fn linear_cross_entropy_with(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Tensor> {
    head_loss(hidden, weight, None, targets, options)
}

impl Linear {
    /// Returns the cross-entropy of this layer's outputs, without all outputs in memory:
    /// [`linear_cross_entropy_with`] of the layer's weight and bias. With an adapter or in 8 bits, the outputs exist whole.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use fsdp_candle::nn::{CrossEntropyOptions, Linear, cross_entropy};
    ///
    /// let head = Linear::new(Tensor::randn(0f32, 1., (8, 4), &Device::Cpu)?, None);
    /// let hidden = Tensor::randn(0f32, 1., (3, 4), &Device::Cpu)?;
    /// let targets = Tensor::new(&[0u32, 7, 2], &Device::Cpu)?;
    /// let loss = head.cross_entropy(&hidden, &targets, &CrossEntropyOptions::default())?;
    /// let expected = cross_entropy(&head.forward(&hidden)?, &targets)?;
    /// assert!((loss.to_scalar::<f32>()? - expected.to_scalar::<f32>()?).abs() < 1e-5);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// Fails as [`linear_cross_entropy_with`] does.
    pub fn cross_entropy(&self, hidden: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
        if self.is_product() {
            return head_loss(hidden, self.weight(), self.bias(), targets, options);
        }
        match self.vocabulary_logits(hidden)? {
            (logits, Some(group)) => vocab_parallel_cross_entropy(&logits, targets, group, options),
            (logits, None) => cross_entropy_with(&logits, targets, options),
        }
    }
}

/// Returns the loss of `hidden W^T + b`.
fn head_loss(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
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
    if let Some(bias) = bias {
        same_kind("linear_cross_entropy", ("the weight", weight), ("the bias", bias))?;
        if bias.dims() != [columns] {
            bail!("linear_cross_entropy: the bias {:?} must be [{columns}], as the weight has rows", bias.dims());
        }
    }
    let mut rows = options.rows("linear_cross_entropy", targets, columns, ranks)?;
    if let Some(cuda) = Cuda::of(hidden.values()) {
        let (weight, bias) = (Weight::of(weight)?, bias.map(Weight::of).transpose()?);
        return cuda.linear_cross_entropy("linear_cross_entropy", hidden, weight, bias, rows);
    }
    if !has_cpu_kernels(hidden.values()) {
        let logits = affine("linear_cross_entropy", hidden, weight, bias, false, None)?;
        return composite(&logits, &rows);
    }
    let counted = rows.counted();
    rows.targets.retain(Option::is_some);
    let (weight, bias) = (Weight::of(weight)?, bias.map(Weight::of).transpose()?);
    let arguments = weight.arguments(hidden.node(), bias.as_ref());
    let learns = keeps_graph() && arguments.iter().any(Tensor::track_op);
    let head = Head { shared: hidden.shared(), weight, bias, rows, counted, width };
    let (losses, kept) = head.forward(hidden.values(), learns)?;
    let losses = storage(head.for_all_rows(losses, targets.elem_count()), DType::F32)?;
    let shape = head.rows.shape.clone();
    graph_op("linear_cross_entropy", &arguments, losses, shape, Reads::Sources, move |hidden, _, d_loss| {
        head.backward(hidden[0], &kept, d_loss)
    })
}

struct Head {
    /// Input that is read instead of the graph argument.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    /// Rows that are not ignored.
    rows: TargetRows,
    /// Indices of the counted rows, if some are ignored.
    counted: Option<Vec<usize>>,
    width: usize,
}

/// Values kept from forward to backward.
enum Kept {
    /// The logarithm of the sum of each row. Backward computes the logits again.
    LogSums(Vec<f32>),
    /// The gradient of all logits, if that of the loss is 1.
    OfLogits(Vec<f32>),
    /// The gradients of the arguments, if that of the loss is 1.
    OfArguments(Gradients<Vec<f32>>),
}

/// Gradients of the counted rows of the hidden states, and of the weight and the bias if those are wanted. The weight's
/// is also a tensor: what `bwd` returns for the weight.
struct Gradients<W> {
    hidden: Vec<f32>,
    weight: Option<W>,
    bias: Option<Vec<f32>>,
}

impl Gradients<Vec<f32>> {
    fn sums(&mut self) -> Sums<'_> {
        Sums {
            hidden: &mut self.hidden,
            weight: self.weight.as_mut().map(|dw| (&mut dw[..], false)),
            bias: self.bias.as_deref_mut(),
        }
    }
}

/// Sums to which the gradients of each chunk are added.
struct Sums<'a> {
    /// Gradient of all counted rows of the hidden states, of which each chunk writes its own.
    hidden: &'a mut [f32],
    /// Gradient of the weight, and whether it already has values.
    weight: Option<(&'a mut [f32], bool)>,
    bias: Option<&'a mut [f32]>,
}

impl Head {
    /// Returns the number of rows whose logits exist at a time.
    fn chunk(&self) -> usize {
        (LOGITS / self.rows.columns).clamp(1, self.rows.targets.len().max(1))
    }

    /// Returns the hidden states of the counted rows.
    fn counted_rows<'a>(&self, hidden: Cow<'a, [f32]>) -> Cow<'a, [f32]> {
        match &self.counted {
            Some(counted) => {
                counted.iter().flat_map(|row| &hidden[row * self.width..][..self.width]).copied().collect()
            }
            None => hidden,
        }
    }

    /// Returns an operand of a product.
    fn mat<'a>(&self, values: &'a [f32], rows: usize, cols: usize) -> Mat<'a> {
        Mat::new(values, rows, cols).as_dtype(self.weight.dtype())
    }

    /// Computes the logits of some rows of the hidden states, after the softcap.
    fn logits(&self, logits: &mut [f32], hidden: &[f32], weight: Mat<'_>) -> Result<()> {
        let (rows, columns) = (hidden.len() / self.width, self.rows.columns);
        if let Some(bias) = &self.bias {
            read!(bias, bias.value()?);
            logits.chunks_exact_mut(columns).for_each(|row| row.copy_from_slice(&bias));
        }
        let hidden = self.mat(hidden, rows, self.width);
        product(MatMut::new(logits, rows, columns), self.bias.is_some(), hidden, weight.t());
        cap_rows(&self.rows, logits);
        Ok(())
    }

    /// Replaces the logits of the rows from `first` on by their gradient.
    fn logits_to_gradient(&self, logits: &mut [f32], first: usize, log_sums: &[f32], factors: &RowFactors) {
        let columns = self.rows.columns;
        let targets = &self.rows.targets[first..first + logits.len() / columns];
        map_rows(logits, columns, columns, |from, logits| {
            let rows = from..from + logits.len() / columns;
            let (targets, log_sums) = (&targets[rows.clone()], &log_sums[rows]);
            factors.logits_to_gradient(logits, first + from, targets, log_sums, self.rows.first);
        });
    }

    /// Adds the gradients of the rows from `first` on, from the gradient of their logits.
    fn add_gradients(&self, first: usize, d_logits: &[f32], hidden: &[f32], weight: Mat<'_>, to: &mut Sums<'_>) {
        let (rows, columns) = (hidden.len() / self.width, self.rows.columns);
        let hidden = self.mat(hidden, rows, self.width);
        if let Some((dw, accumulate)) = &mut to.weight {
            let d_logits = self.mat(d_logits, rows, columns).t();
            product(MatMut::new(dw, columns, self.width), *accumulate, d_logits, hidden);
            *accumulate = true;
        }
        if let Some(db) = &mut to.bias {
            db.iter_mut().zip(column_sums(d_logits, columns)).for_each(|(sum, own)| *sum += own);
        }
        let d_logits = self.mat(d_logits, rows, columns);
        let own = &mut to.hidden[first * self.width..][..rows * self.width];
        product(MatMut::new(own, rows, self.width), false, d_logits, weight);
    }

    /// Returns the loss, or with 0 for ignored rows the losses of all rows.
    fn for_all_rows(&self, losses: Vec<f32>, rows: usize) -> Vec<f32> {
        let Some(counted) = self.counted.as_ref().filter(|_| !self.rows.combined) else { return losses };
        let mut all = vec![0.; rows];
        counted.iter().zip(losses).for_each(|(row, loss)| all[*row] = loss);
        all
    }

    fn wants_bias_grad(&self) -> bool {
        self.bias.as_ref().is_some_and(Weight::wants_grad)
    }

    /// Returns the combined loss or the loss of each counted row, and what backward needs. `learns` says whether
    /// backward will run.
    fn forward(&self, hidden: &Tensor, learns: bool) -> Result<(Vec<f32>, Kept)> {
        read!(values, hidden);
        let hidden = self.counted_rows(values);
        let (rows, columns, count) = (&self.rows, self.rows.columns, self.rows.targets.len());
        // The gradients over several ranks need the sums of all.
        let differentiates = learns && rows.combined && rows.ranks.is_none() && count > 0;
        let learns_weight = self.weight.wants_grad() && self.weight.node().track_op();
        let keeps_logits = differentiates && learns_weight && count < self.width;
        let chunk = if keeps_logits { count } else { self.chunk() };
        let mut kept = (differentiates && !keeps_logits).then(|| Gradients {
            hidden: vec![0.; count * self.width],
            weight: learns_weight.then(|| vec![0.; columns * self.width]),
            bias: self.wants_bias_grad().then(|| vec![0.; columns]),
        });
        let mut sums = kept.as_mut().map(Gradients::sums);
        let factors = RowFactors::All(GradFactors::of(rows, 1.));
        let mut statistics = Statistics::new(count);
        let mut scratch = vec![0f32; chunk * columns];
        let chunks = hidden.chunks(chunk * self.width).zip(rows.targets.chunks(chunk));
        with_matrix(&self.weight, |weight, _| {
            for (first, (hidden, targets)) in (0..).step_by(chunk).zip(chunks) {
                let logits = &mut scratch[..targets.len() * columns];
                self.logits(logits, hidden, weight)?;
                statistics.add_rows(first, logits, targets, rows);
                if differentiates {
                    self.logits_to_gradient(logits, first, &statistics.log_sums(first, targets.len()), &factors);
                }
                if let Some(sums) = &mut sums {
                    self.add_gradients(first, logits, hidden, weight, sums);
                }
            }
            Ok::<_, candle_core::Error>(())
        })??;
        let (losses, log_sums) = statistics.losses(rows)?;
        Ok((
            losses,
            match kept {
                Some(kept) => Kept::OfArguments(kept),
                None if keeps_logits => Kept::OfLogits(scratch),
                None => Kept::LogSums(log_sums),
            },
        ))
    }

    /// Returns the gradients. `add(weight, sums)` adds those of all rows.
    fn gradients(&self, add: impl FnOnce(Mat<'_>, &mut Sums<'_>) -> Result<()>) -> Result<Gradients<Tensor>> {
        let mut hidden = vec![0f32; self.rows.targets.len() * self.width];
        let mut bias = self.wants_bias_grad().then(|| vec![0.; self.rows.columns]);
        let add = |of_weight: Option<(&mut [f32], bool)>| {
            let mut sums = Sums { hidden: &mut hidden, weight: of_weight, bias: bias.as_deref_mut() };
            with_matrix(&self.weight, |weight, _| add(weight, &mut sums))??;
            // No row counts.
            if let Some((dw, false)) = sums.weight {
                dw.fill(0.);
            }
            Ok(())
        };
        let weight = if self.weight.wants_grad() {
            weight_grad(&self.weight, |buffer, accumulate| add(Some((buffer, accumulate))))?
        } else {
            add(None)?;
            None
        };
        Ok(Gradients { hidden, weight, bias })
    }

    fn backward(&self, argument: &Tensor, kept: &Kept, d_loss: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let hidden = input::values(argument, &self.shared);
        let Gradients { hidden: d_hidden, weight: dw, bias: db } = match kept {
            Kept::OfArguments(kept) => {
                let factor = d_loss.to_scalar::<f32>()?;
                let scaled = |values: &[f32]| values.iter().map(|x| x * factor).collect::<Vec<f32>>();
                let dw = weight_grad(&self.weight, |to, accumulate| {
                    let own = kept.weight.iter().flatten();
                    to.iter_mut().zip(own).for_each(|(to, own)| *to = if accumulate { *to } else { 0. } + own * factor);
                    Ok(())
                })?;
                Gradients { hidden: scaled(&kept.hidden), weight: dw, bias: kept.bias.as_deref().map(scaled) }
            }
            Kept::OfLogits(d_logits) => {
                let factor = d_loss.to_scalar::<f32>()?;
                let scale = |values: &mut [f32]| values.iter_mut().for_each(|x| *x *= factor);
                read!(values, hidden);
                let mut values = self.counted_rows(values).into_owned();
                scale(&mut values);
                let mut gradients = self.gradients(|weight, sums| {
                    self.add_gradients(0, d_logits, &values, weight, sums);
                    Ok(())
                })?;
                scale(&mut gradients.hidden);
                gradients.bias.iter_mut().for_each(|db| scale(db));
                gradients
            }
            Kept::LogSums(log_sums) => {
                let factors = RowFactors::of(&self.rows, d_loss, self.counted.as_deref())?;
                let (columns, chunk) = (self.rows.columns, self.chunk());
                read!(values, hidden);
                let values = self.counted_rows(values);
                self.gradients(|weight, sums| {
                    let mut scratch = vec![0f32; chunk * columns];
                    let chunks = values.chunks(chunk * self.width).zip(log_sums.chunks(chunk));
                    for (first, (hidden, log_sums)) in (0..).step_by(chunk).zip(chunks) {
                        let logits = &mut scratch[..log_sums.len() * columns];
                        self.logits(logits, hidden, weight)?;
                        self.logits_to_gradient(logits, first, log_sums, &factors);
                        self.add_gradients(first, logits, hidden, weight, sums);
                    }
                    Ok(())
                })?
            }
        };
        let db = match (&self.bias, db) {
            (Some(bias), Some(db)) => small_weight_grad(bias, &db)?,
            _ => None,
        };
        let dx = input::gradient(argument, &self.shared, || {
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
            tensor_like(d_hidden, hidden)
        })?;
        Ok([dx, dw, db])
    }
}
