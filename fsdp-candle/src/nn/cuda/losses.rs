//! Cross-entropy on a device. The gradient of the logits is computed from the logits and each row's `log sum exp`. For
//! a head, the logits of a stretch of rows exist at a time, in f32 for half floats; backward computes them again.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use fsdp_core::Buffer;

use super::super::input::{self, Input};
use super::super::target_rows::TargetRows;
use super::super::weight::Weight;
use super::{Cuda, rows, write_grad};
use crate::collectives::{SharedInput, all_reduce, largest};
use crate::graph::{Reads, graph_op};
use crate::kernels::cuda::{
    LossOptions, Matrix, add_product, logits_back, losses, ones, rescale_powers, row_statistics, uninit, write_product,
};
use crate::kernels::{Slice, SliceMut};
use crate::storage::{take, to_core_dtype, to_storage, to_tensor, with_slice, with_slice_mut};
use crate::upload;

/// Logits of a head that exist at a time: 256 MiB of f32. Tests compare several stretches.
const LOGITS: usize = if cfg!(test) { 1 << 9 } else { 1 << 26 };
/// Stretches of more rows are a multiple of this, which suits matrix products.
const ROWS: usize = 128;

/// The rows of a loss on a device.
struct LossRows {
    rows: TargetRows,
    /// Targets, U32. `u32::MAX` stands for an ignored row.
    targets: Tensor,
    options: LossOptions,
    /// Dtype of the losses.
    wide: DType,
}

impl LossRows {
    fn new(rows: TargetRows, logits: DType, device: &Device) -> Result<Self> {
        let targets: Vec<u32> = rows.targets.iter().map(|target| target.unwrap_or(u32::MAX)).collect();
        let targets = upload(&Tensor::from_slice(&targets, targets.len(), &Device::Cpu)?, device)?;
        let options = LossOptions {
            columns: rows.columns,
            first_class: rows.first,
            classes: rows.classes,
            smoothing: rows.smoothing,
            softcap: rows.softcap,
            divisor: rows.divisor,
            combined: rows.combined,
        };
        let wide = if logits == DType::F64 { DType::F64 } else { DType::F32 };
        Ok(LossRows { rows, targets, options, wide })
    }

    fn count(&self) -> usize {
        self.rows.targets.len()
    }

    /// Returns the losses, and the logarithm of each row's sum. `add_statistics(largest, terms)` computes the
    /// statistics of all rows.
    fn losses(&self, add_statistics: impl FnOnce(&mut Buffer, &mut Buffer) -> Result<()>) -> Result<[Buffer; 2]> {
        let (count, terms, device) = (self.count(), self.options.terms(), self.targets.device());
        let dtype = to_core_dtype(self.wide)?;
        let (mut own, mut numbers) = (uninit(device, dtype, count)?, uninit(device, dtype, count * terms)?);
        add_statistics(&mut own, &mut numbers)?;
        let whole = |largest: Slice<'_>, numbers: Slice<'_>| {
            with_slice(&self.targets, |_, targets| losses(largest, numbers, targets, &self.options))
        };
        let Some(ranks) = &self.rows.ranks else { return whole((&own).into(), (&numbers).into()) };
        let ranks = ranks.signed(self.rows.signature());
        let own = to_tensor(own, &[count], device)?;
        let highest = largest(&own, &ranks)?;
        with_slice(&own, |_, own| {
            with_slice(&highest, |_, highest| rescale_powers(own, highest, (&mut numbers).into(), &self.options))
        })?;
        let numbers = all_reduce(&to_tensor(numbers, &[count * terms], device)?, &ranks)?;
        with_slice(&highest, |_, highest| with_slice(&numbers, |_, numbers| whole(highest, numbers)))
    }

    /// Computes the statistics of a stretch of rows.
    fn add_statistics(
        &self,
        logits: Slice<'_>,
        stretch: Range<usize>,
        largest: &mut Buffer,
        terms: &mut Buffer,
    ) -> Result<()> {
        let each = self.options.terms();
        let largest = SliceMut::from(largest).range(stretch.clone())?;
        let terms = SliceMut::from(terms).range(stretch.start * each..stretch.end * each)?;
        with_slice(&self.targets, |_, targets| {
            row_statistics(logits, targets.range(stretch)?, largest, terms, &self.options)
        })
    }

    /// Returns the gradient of a stretch's logits in a dtype.
    fn logits_back(
        &self,
        logits: Slice<'_>,
        dtype: DType,
        stretch: Range<usize>,
        log_sums: &Tensor,
        d_loss: &Tensor,
    ) -> Result<Buffer> {
        let dtype = to_core_dtype(dtype)?;
        with_slice(&self.targets, |_, targets| {
            with_slice(log_sums, |_, log_sums| {
                with_slice(d_loss, |_, d_loss| {
                    let d_loss = if self.options.combined { d_loss } else { d_loss.range(stretch.clone())? };
                    let (targets, log_sums) = (targets.range(stretch.clone())?, log_sums.range(stretch)?);
                    logits_back(logits, dtype, targets, log_sums, d_loss, &self.options)
                })
            })
        })
    }
}

impl Cuda {
    /// Computes the loss of logits, of all classes or of this rank's part of the classes.
    pub(in crate::nn) fn cross_entropy(
        self,
        function: &'static str,
        logits: &Tensor,
        rows: TargetRows,
    ) -> Result<Tensor> {
        let (shape, loss) = (rows.shape.clone(), LossRows::new(rows, logits.dtype(), logits.device())?);
        let all = 0..loss.count();
        let found = with_slice(&logits.detach().contiguous()?, |_, logits| {
            loss.losses(|largest, terms| loss.add_statistics(logits, all.clone(), largest, terms))
        });
        let [losses, log_sums] = found?;
        let log_sums = to_tensor(log_sums, &[all.end], logits.device())?;
        graph_op(function, &[logits], to_storage(losses)?, shape, Reads::Sources, move |sources, _, d_loss| {
            let (logits, d_loss) = (sources[0].detach().contiguous()?, d_loss.detach().contiguous()?);
            let grads = with_slice(&logits, |_, values| {
                loss.logits_back(values, logits.dtype(), all.clone(), &log_sums, &d_loss)
            })?;
            Ok([Some(to_tensor(grads, logits.dims(), logits.device())?)])
        })
    }

    /// Computes the loss of a head: of `hidden W^T + b`, with this rank's rows of `W`.
    pub(in crate::nn) fn linear_cross_entropy(
        self,
        function: &'static str,
        hidden: Input<'_>,
        weight: Weight,
        bias: Option<Weight>,
        mut rows: TargetRows,
    ) -> Result<Tensor> {
        let (values, all) = (hidden.values(), rows.targets.len());
        let (dtype, device) = (values.dtype(), values.device());
        // If no row counts, all are computed, and have no gradient.
        let counted = rows.counted().filter(|counted| !counted.is_empty());
        if counted.is_some() {
            rows.targets.retain(Option::is_some);
        }
        let counted = counted.map(|counted| CountedRows::new(&counted, all, device)).transpose()?;
        let (shape, arguments) = (rows.shape.clone(), weight.arguments(hidden.node(), bias.as_ref()));
        let head = Head { shared: hidden.shared(), weight, bias, loss: LossRows::new(rows, dtype, device)?, counted };
        let [losses, log_sums] = head.forward(values)?;
        let log_sums = to_tensor(log_sums, &[head.loss.count()], device)?;
        let losses = match head.counted.as_ref().filter(|_| !head.loss.options.combined) {
            Some(counted) => counted.spread(&to_tensor(losses, &[head.loss.count(), 1], device)?)?,
            None => {
                let count = losses.len();
                to_tensor(losses, &[count], device)?
            }
        };
        graph_op(function, &arguments, take(&losses)?, shape, Reads::Sources, move |sources, _, d_loss| {
            head.backward(sources[0], &log_sums, d_loss)
        })
    }
}

/// The rows that are not ignored.
struct CountedRows {
    /// Index of each counted row, U32.
    rows: Tensor,
    /// Place of each row among the counted rows, U32. `u32::MAX` stands for none, whose row is 0.
    places: Tensor,
}

impl CountedRows {
    fn new(counted: &[usize], all: usize, device: &Device) -> Result<Self> {
        let rows: Vec<u32> = counted.iter().map(|row| *row as u32).collect();
        let mut places = vec![u32::MAX; all];
        (0..).zip(counted).for_each(|(place, row)| places[*row] = place);
        Ok(CountedRows {
            rows: upload(&Tensor::from_slice(&rows, rows.len(), &Device::Cpu)?, device)?,
            places: upload(&Tensor::from_slice(&places, all, &Device::Cpu)?, device)?,
        })
    }

    /// Returns the counted rows of a matrix.
    fn of(&self, all: &Tensor) -> Result<Tensor> {
        all.index_select(&self.rows, 0)
    }

    /// Returns all rows, with 0 for ignored rows.
    fn spread(&self, counted: &Tensor) -> Result<Tensor> {
        counted.index_select(&self.places, 0)
    }
}

struct Head {
    /// Input that is read instead of the graph argument.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    loss: LossRows,
    /// The rows that are not ignored, if some are.
    counted: Option<CountedRows>,
}

impl Head {
    /// Returns the counted rows of the hidden states.
    fn hidden(&self, hidden: &Tensor) -> Result<Tensor> {
        let all = rows(hidden)?;
        match &self.counted {
            Some(counted) => counted.of(&all),
            None => Ok(all),
        }
    }

    fn weight_value(&self) -> Result<Tensor> {
        self.weight.value()?.detach().contiguous()
    }

    /// Returns the bias, and a one for each row of a stretch. Products with the ones add the bias to the logits, and sum
    /// the bias's gradient.
    fn bias_value(&self) -> Result<Option<[Tensor; 2]>> {
        let Some(bias) = &self.bias else { return Ok(None) };
        let bias = bias.value()?.detach().contiguous()?;
        let ones = ones(bias.device(), bias.dtype(), self.step().min(self.loss.count()))?;
        Ok(Some([bias, ones]))
    }

    /// Returns the number of rows whose logits exist at a time.
    fn step(&self) -> usize {
        let most = (LOGITS / self.loss.options.columns.max(1)).max(1);
        if most > ROWS { most / ROWS * ROWS } else { most }
    }

    /// Returns stretches of the rows, whose logits exist at a time.
    fn stretches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (count, step) = (self.loss.count(), self.step());
        (0..count).step_by(step).map(move |start| start..(start + step).min(count))
    }

    /// Returns the logits of a stretch's hidden states.
    fn logits(&self, hidden: Matrix<'_>, weight: Slice<'_>, bias: Option<&[Tensor; 2]>) -> Result<Buffer> {
        let (rows, width) = hidden.dims();
        let columns = self.loss.options.columns;
        let mut logits = uninit(self.loss.targets.device(), to_core_dtype(self.loss.wide)?, rows * columns)?;
        if let Some([bias, ones]) = bias {
            with_slice(bias, |_, bias| {
                with_slice(ones, |_, ones| {
                    let ones = Matrix::new(ones.range(0..rows)?, rows, 1)?;
                    add_product(&mut logits, false, ones, Matrix::new(bias, 1, columns)?)
                })
            })?;
        }
        add_product(&mut logits, bias.is_some(), hidden, Matrix::new(weight, columns, width)?.t())?;
        Ok(logits)
    }

    fn forward(&self, hidden: &Tensor) -> Result<[Buffer; 2]> {
        let (hidden, weight, bias) = (self.hidden(hidden)?, self.weight_value()?, self.bias_value()?);
        let width = hidden.dim(1)?;
        self.loss.losses(|largest, terms| {
            with_slice(&hidden, |_, hidden| {
                with_slice(&weight, |_, weight| {
                    for stretch in self.stretches() {
                        let own = hidden.range(stretch.start * width..stretch.end * width)?;
                        let logits = self.logits(Matrix::new(own, stretch.len(), width)?, weight, bias.as_ref())?;
                        self.loss.add_statistics((&logits).into(), stretch, largest, terms)?;
                    }
                    Ok(())
                })
            })
        })
    }

    fn backward(&self, argument: &Tensor, log_sums: &Tensor, d_loss: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let d_loss = d_loss.detach().contiguous()?.flatten_all()?;
        let d_loss = match self.counted.as_ref().filter(|_| !self.loss.options.combined) {
            Some(counted) => counted.of(&d_loss)?,
            None => d_loss,
        };
        let all = input::values(argument, &self.shared);
        let hidden = self.hidden(all)?;
        let (count, width) = hidden.dims2()?;
        let (dtype, device) = (hidden.dtype(), hidden.device());
        let wants_dx = self.shared.is_some() || argument.track_op();
        let d_hidden = to_tensor(uninit(device, to_core_dtype(dtype)?, count * width)?, &[count, width], device)?;
        let back = |mut dw: Option<Sum<'_>>, mut db: Option<Sum<'_>>| {
            let (columns, weight, bias) = (self.loss.options.columns, self.weight_value()?, self.bias_value()?);
            with_slice(&hidden, |_, hidden| {
                with_slice(&weight, |_, weight| {
                    for stretch in self.stretches() {
                        let (rows, elements) = (stretch.len(), stretch.start * width..stretch.end * width);
                        let own = Matrix::new(hidden.range(elements.clone())?, rows, width)?;
                        let logits = self.logits(own, weight, bias.as_ref())?;
                        let grads = self.loss.logits_back((&logits).into(), dtype, stretch, log_sums, &d_loss)?;
                        drop(logits);
                        let grads = Matrix::new((&grads).into(), rows, columns)?;
                        if wants_dx {
                            let weight = Matrix::new(weight, columns, width)?;
                            with_slice_mut(&d_hidden, |_, to| {
                                write_product(to.range(elements)?, false, grads, weight)
                            })?;
                        }
                        if let Some(dw) = &mut dw {
                            dw.add(grads.t(), own)?;
                        }
                        if let (Some(db), Some([_, ones])) = (&mut db, &bias) {
                            with_slice(ones, |_, ones| db.add(Matrix::new(ones.range(0..rows)?, 1, rows)?, grads))?;
                        }
                    }
                    Ok(())
                })
            })
        };
        let mut db = None;
        let mut back_with_bias = |dw: Option<Sum<'_>>| match self.bias.as_ref().filter(|bias| bias.wants_grad()) {
            Some(bias) => {
                db = write_grad(bias, |buffer, accumulate| back(dw, Some(Sum { buffer, accumulate })))?;
                Ok(())
            }
            None => back(dw, None),
        };
        let dw = if self.weight.wants_grad() {
            write_grad(&self.weight, |buffer, accumulate| back_with_bias(Some(Sum { buffer, accumulate })))?
        } else {
            back_with_bias(None)?;
            None
        };
        let dx = input::gradient(argument, &self.shared, || {
            let d_hidden = match &self.counted {
                Some(counted) => counted.spread(&d_hidden)?,
                None => d_hidden,
            };
            d_hidden.reshape(all.shape())
        })?;
        Ok([dx, dw, db])
    }
}

/// A gradient to which products are added.
struct Sum<'a> {
    buffer: &'a mut Buffer,
    /// Whether the buffer has values.
    accumulate: bool,
}

impl Sum<'_> {
    fn add(&mut self, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
        add_product(self.buffer, self.accumulate, lhs, rhs)?;
        self.accumulate = true;
        Ok(())
    }
}
