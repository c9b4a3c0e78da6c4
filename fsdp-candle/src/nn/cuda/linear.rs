//! A fully connected layer: backward multiplies the weight's gradient into the parameter's own buffer.

use candle_core::{Result, Tensor};

use super::super::input::{self, Input};
use super::super::weight::Weight;
use super::node::{Backward, Gradients, node};
use crate::collectives::SharedInput;
use crate::kernels::{Matrix, add_product};
use crate::storage::with_slice;

/// `y` as the layer's output for the input, in the graph.
pub(in crate::nn) fn affine(
    function: &'static str,
    input: Input<'_>,
    y: Tensor,
    weight: Weight,
    bias: Option<Weight>,
    in_out: bool,
) -> Result<Tensor> {
    let mut inputs = vec![input.node().clone(), weight.node().clone()];
    inputs.extend(bias.as_ref().map(|bias| bias.node().clone()));
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    node(&inputs, y, Affine { function, shared: input.shared(), weight, bias, in_out })
}

struct Affine {
    function: &'static str,
    /// What is read in the argument's place, if anything.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    /// Whether the weight is `[in, out]`.
    in_out: bool,
}

/// As rows of the last dimension.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    let width = tensor.dims().last().copied().unwrap_or(1);
    let rows = tensor.elem_count().checked_div(width).unwrap_or(0);
    tensor.detach().contiguous()?.reshape((rows, width))
}

impl Backward for Affine {
    fn name(&self) -> &'static str {
        self.function
    }

    fn backward(&self, argument: &Tensor, gradient: &Tensor) -> Result<Gradients> {
        let x = input::values(argument, &self.shared);
        let dy = rows(gradient)?;
        let (count, outputs) = dy.dims2()?;
        let dx = input::gradient(argument, &self.shared, || {
            let weight = self.weight.value()?.detach();
            let weight = if self.in_out { weight.t()? } else { weight };
            dy.matmul(&weight)?.reshape(x.shape())
        })?;
        let dw = if self.weight.wants_grad() {
            let x = rows(x)?;
            let inputs = x.dim(1)?;
            self.weight.grad_in(|buffer, accumulate| {
                with_slice(&x, |_, x| {
                    with_slice(&dy, |_, dy| {
                        let (x, dy) = (Matrix::new(x, count, inputs)?, Matrix::new(dy, count, outputs)?);
                        let (lhs, rhs) = if self.in_out { (x.t(), dy) } else { (dy.t(), x) };
                        add_product(buffer, accumulate, lhs, rhs)
                    })
                })
            })?
        } else {
            None
        };
        let db = match &self.bias {
            Some(bias) if bias.wants_grad() => {
                // A product adds up in f32, whatever the dtype.
                let ones = Tensor::ones((1, count), dy.dtype(), dy.device())?;
                bias.grad_in(|buffer, accumulate| {
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
