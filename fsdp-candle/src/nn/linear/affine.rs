//! The affine map of a fully connected layer, `y = x W^T + b`, also with `W` stored transposed, as GPT-2 does.
//!
//! With `x` of `m` rows: `dx = dy W`, `dW = dy^T x`, `db` = the column sums of `dy`. Each is one matrix product into
//! its destination; the weight's gradient is accumulated where the parameter keeps it.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, bail};

use super::super::cpu::matrix::{Mat, MatMut, product};
use super::super::cpu::parallel::map_rows;
use super::super::cpu::simd::kernel;
use super::super::cpu::values::{
    cpu, floats, read, same_kind, served, small_weight_grad, storage, tensor, weight_grad,
};
use super::super::cpu::weighted_op::weighted_op;
#[cfg(feature = "cuda")]
use super::super::cuda::{self, on_cuda};
use super::super::input::{self, Input};
use super::super::limits::countable;
use super::super::weight::Weight;
use crate::activation_checkpoint::{Operation, operation};
use crate::collectives::SharedInput;

/// `x W^T + b`, or `x W + b` for a weight stored as `[in, out]`.
pub(in crate::nn) fn affine<'a>(
    function: &'static str,
    input: impl Into<Input<'a>>,
    w: &Tensor,
    bias: Option<&Tensor>,
    in_out: bool,
) -> Result<Tensor> {
    let (rows, cols) = w.dims2()?;
    let (inputs, outputs) = if in_out { (rows, cols) } else { (cols, rows) };
    let input = input.into();
    let x = input.values();
    if x.rank() == 0 || x.dims()[x.rank() - 1] != inputs {
        bail!("{function}: the input {:?} must end in {inputs}, for the weight is {:?}", x.dims(), w.dims());
    }
    if let Some(bias) = bias
        && bias.dims() != [outputs]
    {
        bail!("{function}: the bias {:?} must be [{outputs}], for the weight is {:?}", bias.dims(), w.dims());
    }
    same_kind(function, ("the input", x), ("the weight", w))?;
    if let Some(bias) = bias {
        same_kind(function, ("the input", x), ("the bias", bias))?;
    }
    let shape = [&x.dims()[..x.rank() - 1], &[outputs]].concat();
    countable(function, "the output", &shape, x.device())?;
    #[cfg(feature = "cuda")]
    if on_cuda(x) {
        let (weight, bias) = (Weight::of(w)?, bias.map(Weight::of).transpose()?);
        let bias_value = bias.as_ref().map(|bias| Ok::<_, candle_core::Error>(bias.value()?.detach())).transpose()?;
        let y = composite(&x.detach(), &weight.value()?.detach(), bias_value.as_ref(), in_out)?;
        return cuda::linear::affine(function, input, y, weight, bias, in_out);
    }
    if !served(x) {
        let bias = bias.map(Weight::in_graph).transpose()?;
        return composite(&input.in_graph()?, &Weight::in_graph(w)?, bias.as_ref(), in_out);
    }
    let (x, shared) = (input.node(), input.shared());
    operation(Operation::Linear, &shape, |known| {
        let weight = Weight::of(w)?;
        let (node, bias) = (weight.node().clone(), bias.map(Weight::of).transpose()?);
        let bias_node = bias.as_ref().map(|bias| bias.node().clone());
        let known = Mutex::new(known.map(|(storage, _)| (storage, Shape::from(shape.as_slice()))));
        let op = Affine { function, shared, weight, bias, in_out, inputs, outputs, known };
        let y = match bias_node {
            None => x.apply_op2(&node, op),
            Some(bias) => x.apply_op3(&node, &bias, op),
        };
        Ok((y?, Arc::new(())))
    })
}

/// The same from Candle's operations.
pub(in crate::nn) fn composite(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, in_out: bool) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let inputs = shape.pop().unwrap_or(1);
    let w = if in_out { w.clone() } else { w.t()? };
    shape.push(w.dim(1)?);
    let y = x.reshape(((), inputs))?.matmul(&w)?.reshape(shape)?;
    match bias {
        None => Ok(y),
        Some(bias) => y.broadcast_add(bias),
    }
}

struct Affine {
    function: &'static str,
    /// What is read in the argument's place, if anything.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    in_out: bool,
    inputs: usize,
    outputs: usize,
    /// The output, where it was computed before.
    known: Mutex<Option<(Storage, Shape)>>,
}

impl Affine {
    /// The weight's values and strides in the graph's direction, `[in, out]`; f32 weights with any strides are used
    /// where they lie.
    fn with_weight<R>(&self, f: impl FnOnce(Mat<'_>) -> R) -> Result<R> {
        let (guard, layout) = self.weight.value()?.storage_and_layout();
        let values = cpu(&guard)?;
        let (rows, cols) = if self.in_out { (self.inputs, self.outputs) } else { (self.outputs, self.inputs) };
        let dense;
        let stored = match (values, layout.stride()) {
            (CpuStorage::F32(values), &[row_stride, col_stride]) => Mat::strided(
                values.get(layout.start_offset()..).unwrap_or_default(),
                rows,
                cols,
                row_stride,
                col_stride,
            ),
            _ => {
                dense = floats(values, layout)?;
                Mat::new(&dense, rows, cols)
            }
        };
        Ok(f(if self.in_out { stored } else { stored.t() }))
    }

    fn forward(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if let Some((Storage::Cpu(known), shape)) = self.known.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Ok((known, shape));
        }
        let Some(shared) = &self.shared else { return self.output(x, layout) };
        let (guard, layout) = shared.values().storage_and_layout();
        self.output(cpu(&guard)?, layout)
    }

    fn output(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut shape = layout.dims().to_vec();
        shape.pop();
        shape.push(self.outputs);
        let dtype = x.dtype();
        let x = floats(x, layout)?;
        let rows = x.len() / self.inputs.max(1);
        let mut y = vec![0f32; rows * self.outputs];
        if let Some(bias) = &self.bias {
            read!(bias, bias.value()?);
            y.chunks_exact_mut(self.outputs.max(1)).for_each(|row| row.copy_from_slice(&bias));
        }
        let accumulate = self.bias.is_some();
        self.with_weight(|w| {
            product(MatMut::new(&mut y, rows, self.outputs), accumulate, Mat::new(&x, rows, self.inputs), w);
        })?;
        Ok((storage(y, dtype)?, shape.into()))
    }

    fn backward(&self, argument: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let x = input::values(argument, &self.shared);
        read!(grad, dy);
        let rows = grad.len() / self.outputs.max(1);
        let dy_mat = Mat::new(&grad, rows, self.outputs);
        let dx = input::gradient(argument, &self.shared, || {
            let mut dx = vec![0f32; rows * self.inputs];
            self.with_weight(|w| product(MatMut::new(&mut dx, rows, self.inputs), false, dy_mat, w.t()))?;
            tensor(dx, x.shape(), x.dtype())
        })?;
        let dw = weight_grad(&self.weight, |buffer, accumulate| {
            read!(values, x);
            let x_mat = Mat::new(&values, rows, self.inputs);
            if self.in_out {
                product(MatMut::new(buffer, self.inputs, self.outputs), accumulate, x_mat.t(), dy_mat);
            } else {
                product(MatMut::new(buffer, self.outputs, self.inputs), accumulate, dy_mat.t(), x_mat);
            }
            Ok(())
        })?;
        let db = match &self.bias {
            Some(bias) if bias.wants_grad() => small_weight_grad(bias, &column_sums(&grad, self.outputs))?,
            _ => None,
        };
        Ok([dx, dw, db])
    }
}

weighted_op!(Affine);

/// The sum of each column of a row-major matrix.
pub(super) fn column_sums(values: &[f32], cols: usize) -> Vec<f32> {
    let mut sums = vec![0f32; cols];
    // Each thread takes a strip of columns.
    map_rows(&mut sums, 1, values.len() / cols.max(1), |first, sums| add_columns(values, cols, first, sums));
    sums
}

kernel! {
    fn add_columns(values: &[f32], cols: usize, first: usize, sums: &mut [f32]) {
        for row in values.chunks_exact(cols) {
            for (sum, x) in sums.iter_mut().zip(&row[first..]) {
                *sum += x;
            }
        }
    }
}
