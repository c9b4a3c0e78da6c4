//! Fully connected layers.

use candle_core::{Result, Tensor};
use fsdp_core::Buffer;

use super::super::input::{self, Input};
use super::super::weight::Weight;
use super::{Cuda, cuda_node, rows, write_grad};
use crate::collectives::SharedInput;
use crate::float8::{Float8Recipe, LinearProduct};
use crate::kernels::cuda::{Matrix, add_float8_product, add_product, ones, uninit};
use crate::storage::{to_core_dtype, to_tensor, with_slice};

impl Cuda {
    /// Returns the fully connected layer's output `y` as a node of the graph.
    #[allow(clippy::too_many_arguments)]
    pub(in crate::nn) fn affine(
        self,
        function: &'static str,
        input: Input<'_>,
        y: Tensor,
        weight: Weight,
        bias: Option<Weight>,
        in_out: bool,
        float8: Option<Float8Recipe>,
    ) -> Result<Tensor> {
        let arguments = weight.arguments(input.node(), bias.as_ref());
        let op = Affine { shared: input.shared(), weight, bias, in_out, float8 };
        cuda_node(function, &arguments, y, move |x, gradient| op.backward(x, gradient))
    }

    /// Returns the layer's output without a bias, outside of the graph, in 8-bit floats.
    pub(in crate::nn) fn float8_output(
        self,
        x: &Tensor,
        weight: &Tensor,
        in_out: bool,
        recipe: Float8Recipe,
    ) -> Result<Tensor> {
        let outputs = weight.dim(usize::from(in_out))?;
        let mut shape = x.dims().to_vec();
        shape.pop();
        shape.push(outputs);
        let (x, weight) = (rows(x)?, weight.contiguous()?);
        let product = Product { of: LinearProduct::Output, in_out, recipe: Some(recipe) };
        let y = product.of_tensors(&x, &weight, !in_out)?;
        y.reshape(shape)
    }
}

struct Affine {
    /// Input that is read instead of the graph argument.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    /// Whether the weight is `[in, out]`.
    in_out: bool,
    float8: Option<Float8Recipe>,
}

/// One of a layer's products.
#[derive(Clone, Copy)]
struct Product {
    of: LinearProduct,
    in_out: bool,
    recipe: Option<Float8Recipe>,
}

impl Product {
    /// Computes `to += lhs rhs`, or `to = lhs rhs` unless `accumulate`.
    fn add_to(self, to: &mut Buffer, accumulate: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
        match self.recipe.and_then(|recipe| recipe.casts(self.of, self.in_out)) {
            None => add_product(to, accumulate, lhs, rhs),
            // As in torchao: only the output is summed with fewer bits.
            Some(casts) => add_float8_product(to, accumulate, lhs, rhs, casts, self.of == LinearProduct::Output),
        }
    }

    /// Returns `lhs rhs`, or `lhs rhs^T`, of two contiguous matrices.
    fn of_tensors(self, lhs: &Tensor, rhs: &Tensor, is_transposed: bool) -> Result<Tensor> {
        let ((rows, terms), (rhs_rows, rhs_cols)) = (lhs.dims2()?, rhs.dims2()?);
        let cols = if is_transposed { rhs_rows } else { rhs_cols };
        let mut to = uninit(lhs.device(), to_core_dtype(lhs.dtype())?, rows * cols)?;
        with_slice(lhs, |_, left| {
            with_slice(rhs, |_, right| {
                let (left, right) = (Matrix::new(left, rows, terms)?, Matrix::new(right, rhs_rows, rhs_cols)?);
                self.add_to(&mut to, false, left, if is_transposed { right.t() } else { right })
            })
        })?;
        to_tensor(to, &[rows, cols], lhs.device())
    }
}

impl Affine {
    fn product(&self, of: LinearProduct) -> Product {
        Product { of, in_out: self.in_out, recipe: self.float8 }
    }

    fn backward(&self, argument: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let x = input::values(argument, &self.shared);
        let dy = rows(gradient)?;
        let (count, outputs) = dy.dims2()?;
        let dx = input::gradient(argument, &self.shared, || {
            let weight = self.weight.value()?.detach();
            let dx = if self.float8.is_some() {
                self.product(LinearProduct::GradInput).of_tensors(&dy, &weight.contiguous()?, self.in_out)?
            } else {
                dy.matmul(&if self.in_out { weight.t()? } else { weight })?
            };
            dx.reshape(x.shape())
        })?;
        let dw = if self.weight.wants_grad() {
            let x = rows(x)?;
            let inputs = x.dim(1)?;
            write_grad(&self.weight, |buffer, accumulate| {
                with_slice(&x, |_, x| {
                    with_slice(&dy, |_, dy| {
                        let (x, dy) = (Matrix::new(x, count, inputs)?, Matrix::new(dy, count, outputs)?);
                        let (lhs, rhs) = if self.in_out { (x.t(), dy) } else { (dy.t(), x) };
                        self.product(LinearProduct::GradWeight).add_to(buffer, accumulate, lhs, rhs)
                    })
                })
            })?
        } else {
            None
        };
        let db = match &self.bias {
            Some(bias) if bias.wants_grad() => {
                // A matrix product accumulates in f32 for every dtype.
                let ones = ones(dy.device(), dy.dtype(), count)?;
                write_grad(bias, |buffer, accumulate| {
                    with_slice(&ones, |_, ones| {
                        with_slice(&dy, |_, dy| {
                            let (ones, dy) = (Matrix::new(ones, 1, count)?, Matrix::new(dy, count, outputs)?);
                            add_product(buffer, accumulate, ones, dy)
                        })
                    })
                })?
            }
            _ => None,
        };
        Ok([dx, dw, db])
    }
}
