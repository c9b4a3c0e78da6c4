//! The layers' own operations on CUDA devices. Forward is Candle's. Backward accumulates the gradients of weights in the
//! parameters' buffers.
//!
//! Layers that a model has many of are here: fully connected layers, embeddings, and norms. With Candle's own
//! operations, the full weight would be in the graph, and its gradient would take three times the weight. Norms are
//! computed again in backward, so that the graph keeps only their input. Other layers (convolutions, batch and group
//! norms, PReLU) put the full weight into Candle's graph.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, Var, bail,
};
use parking_lot::Mutex;

use super::input::{self, Input};
use super::weight::Weight;
use crate::collectives::SharedInput;
use crate::kernels::{self, Matrix, add_product, add_rows};
use crate::storage::{scalar, take, with_slice};

/// The gradients of an operation's inputs, of which there are at most three.
type Gradients = [Option<Tensor>; 3];

/// The backward of an operation on CUDA devices.
trait CudaBackward: Send + Sync + 'static {
    /// Returns the operation's name in Candle's messages.
    fn name(&self) -> &'static str;

    /// Returns the gradients of the inputs, in order. `x` is the first input. The others are read through their
    /// [`Weight`]s.
    fn backward(&self, x: &Tensor, gradient: &Tensor) -> Result<Gradients>;
}

/// Returns `result` as a node of the graph after these inputs. Nothing else may hold `result`.
fn cuda_node(inputs: &[&Tensor], result: Tensor, backward: impl CudaBackward) -> Result<Tensor> {
    let is_whole = result.is_contiguous() && result.layout().start_offset() == 0;
    let result = if is_whole { result } else { result.force_contiguous()? };
    let shape = result.shape().clone();
    let operation = CudaNode { result: Mutex::new(Some((take(&result)?, shape))), backward };
    match inputs {
        [x] => x.apply_op1(operation),
        [x, a] => x.apply_op2(a, operation),
        [x, a, b] => x.apply_op3(a, b, operation),
        _ => bail!("{}: expected 1 to 3 inputs, found {}", operation.backward.name(), inputs.len()),
    }
}

struct CudaNode<B> {
    result: Mutex<Option<(Storage, Shape)>>,
    backward: B,
}

impl<B: CudaBackward> CudaNode<B> {
    fn result(&self) -> Result<(CudaStorage, Shape)> {
        match self.result.lock().take() {
            Some((Storage::Cuda(storage), shape)) => Ok((storage, shape)),
            Some(_) => bail!("{}: the result is not on a CUDA device", self.backward.name()),
            None => bail!("{} ran twice", self.backward.name()),
        }
    }

    fn on_cpu<T>(&self) -> Result<T> {
        bail!("{}: an input is on the CPU", self.backward.name())
    }
}

impl<B: CudaBackward> CustomOp1 for CudaNode<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [dx, _, _] = self.backward.backward(x, gradient)?;
        Ok(dx)
    }
}

impl<B: CudaBackward> CustomOp2 for CudaNode<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, da, _] = self.backward.backward(x, gradient)?;
        Ok((dx, da))
    }
}

impl<B: CudaBackward> CustomOp3 for CudaNode<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(
        &self,
        x: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, da, db] = self.backward.backward(x, gradient)?;
        Ok((dx, da, db))
    }
}

/// Returns the fully connected layer's output `y` as a node of the graph.
pub(super) fn affine(
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
    cuda_node(&inputs, y, Affine { function, shared: input.shared(), weight, bias, in_out })
}

struct Affine {
    function: &'static str,
    /// Input that is read instead of the graph argument.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    /// Whether the weight is `[in, out]`.
    in_out: bool,
}

/// Returns the tensor as rows of its last dimension.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    let width = tensor.dims().last().copied().unwrap_or(1);
    let rows = tensor.elem_count().checked_div(width).unwrap_or(0);
    tensor.detach().contiguous()?.reshape((rows, width))
}

impl CudaBackward for Affine {
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
            self.weight.write_device_grad(|buffer, accumulate| {
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
                // A matrix product accumulates in f32 for every dtype.
                let ones = Tensor::ones((1, count), dy.dtype(), dy.device())?;
                bias.write_device_grad(|buffer, accumulate| {
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

/// Returns `found`, the table's rows for these ids, as a node of the graph. Backward adds the gradient's rows to the
/// parameter's buffer.
pub(super) fn lookup(found: Tensor, weight: Weight, ids: &Tensor) -> Result<Tensor> {
    let node = weight.node().clone();
    cuda_node(&[&node], found, Lookup { weight, ids: to_u32(ids)? })
}

/// Converts ids to U32, whose largest number stands for no row.
fn to_u32(ids: &Tensor) -> Result<Tensor> {
    let ids = ids.detach().flatten_all()?.contiguous()?;
    let words = ids.to_dtype(DType::U32)?;
    match ids.dtype() {
        DType::U8 => ids.eq(u8::MAX)?.where_cond(&words.ones_like()?.affine(f64::from(u32::MAX), 0.)?, &words),
        _ => Ok(words),
    }
}

struct Lookup {
    weight: Weight,
    ids: Tensor,
}

impl CudaBackward for Lookup {
    fn name(&self) -> &'static str {
        "Embedding"
    }

    fn backward(&self, _: &Tensor, gradient: &Tensor) -> Result<Gradients> {
        if !self.weight.wants_grad() {
            return Ok([None, None, None]);
        }
        let width = gradient.dims().last().copied().unwrap_or(1);
        let gradient = gradient.detach().contiguous()?;
        let grad = self.weight.write_device_grad(|buffer, accumulate| {
            with_slice(&self.ids, |_, ids| {
                with_slice(&gradient, |_, rows| add_rows(ids, rows, buffer, accumulate, width))
            })
        })?;
        Ok([grad, None, None])
    }
}

type Compute = dyn Fn(&Tensor, &[Tensor]) -> Result<Tensor> + Send + Sync;

/// Returns `compute(x, weights)` for up to two weights. The graph keeps only `x`; backward runs `compute` once more.
pub(super) fn recomputed(
    function: &'static str,
    x: &Tensor,
    weights: Vec<Weight>,
    compute: impl Fn(&Tensor, &[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let values = weights.iter().map(|weight| Ok(weight.value()?.detach())).collect::<Result<Vec<_>>>()?;
    let y = compute(&x.detach(), &values)?;
    let mut inputs = vec![x.clone()];
    inputs.extend(weights.iter().map(|weight| weight.node().clone()));
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    cuda_node(&inputs, y, Recomputed { function, weights, compute: Box::new(compute) })
}

struct Recomputed {
    function: &'static str,
    weights: Vec<Weight>,
    compute: Box<Compute>,
}

/// Returns a variable with the tensor's values, or the detached tensor if no gradient is wanted.
fn leaf(tensor: &Tensor, wants_grad: bool) -> Result<Tensor> {
    let tensor = tensor.detach();
    if wants_grad { Ok(Var::from_tensor(&tensor)?.into_inner()) } else { Ok(tensor) }
}

impl CudaBackward for Recomputed {
    fn name(&self) -> &'static str {
        self.function
    }

    fn backward(&self, x: &Tensor, gradient: &Tensor) -> Result<Gradients> {
        let own = leaf(x, x.track_op())?;
        let values = self.weights.iter().map(|weight| leaf(weight.value()?, weight.wants_grad()));
        let values = values.collect::<Result<Vec<_>>>()?;
        let y = (self.compute)(&own, &values)?;
        let given = GivenGradient { name: self.function, gradient: gradient.detach() };
        let root = kernels::node(&y, scalar(y.device())?, Shape::from(()), given)?;
        let mut gradients = root.backward()?;
        let dx = gradients.remove(&own).filter(|_| x.track_op());
        let mut of_weights = self.weights.iter().zip(&values).map(|(weight, value)| match gradients.remove(value) {
            Some(gradient) => weight.add_grad(&gradient),
            None => Ok(None),
        });
        let (a, b) = (of_weights.next().transpose()?.flatten(), of_weights.next().transpose()?.flatten());
        Ok([dx, a, b])
    }
}

/// A node from a tensor to a scalar without meaning. Its backward returns a given gradient.
struct GivenGradient {
    name: &'static str,
    gradient: Tensor,
}

impl kernels::Backward for GivenGradient {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}
