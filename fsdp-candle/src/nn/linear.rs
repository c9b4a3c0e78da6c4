//! Fully connected layers: `candle_nn::linear`, `Gpt2Linear`, and low-rank adapters (LoRA) beside both.
//!
//! The layer is `y = x W^T + b`; GPT-2 stores `W` transposed. With `x` of `m` rows: `dx = dy W`, `dW = dy^T x`, and
//! `db` is the column sums of `dy`. Each is one matrix product into its destination. The weight's gradient is
//! accumulated in the parameter's own buffer.
//!
//! An adapter (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685) adds
//! `alpha / r * B A x` with `A` `[r, in]` random and `B` `[out, r]` zero, so that training starts from the base model.

use std::sync::Arc;

use candle_core::{CpuStorage, D, DType, Layout, Module, Result, Shape, Storage, Tensor, bail};
use candle_nn::{Init, VarBuilder, init};
use fsdp_core::ProcessGroup;

use super::cpu::float8::{Rounded, Side};
use super::cpu::matrix::{Mat, MatMut, Operand, product, product_of};
use super::cpu::simd::kernel;
use super::cpu::{
    cpu, floats, map_rows, read, read_rows, same_kind, small_weight_grad, storage, tensor_like, weight_grad,
};
use super::cuda::Cuda;
use super::input::{self, Input};
use super::limits::check_size;
use super::residual;
use super::tensor_parallel::{
    LinearSharding, Part, TpLayer, colwise_input, colwise_output, mark_tp_aware, rowwise_input, rowwise_output,
};
use super::weight::{Weight, has_cpu_kernels, register_layer};
use crate::activation_checkpoint::{Operation, operation};
use crate::adapter::{Adapters, LoraConfig, are_enabled};
use crate::collectives::SharedInput;
use crate::float8::{Float8Recipe, LinearProduct};
use crate::fsdp::FsdpParam;
use crate::graph::{Reads, graph_op};
use crate::kernels::Float8Cast;
use crate::storage::take;
use crate::tensor_parallel::{ColwiseParallel, RowwiseParallel};

/// A fully connected layer `y = x W^T + b`: weight `[out, in]`, optional bias `[out]`, input `[.., in]`, output `[..,
/// out]`.
///
/// Unlike [`candle_nn::Linear`], product and bias are one operation, and the weight's gradient is accumulated in place.
/// Candle's gradient is wrong for an input that is not contiguous. This one is right for any input.
///
/// Under a plan ([`crate::parallelize`]) the weight is this rank's part. Input and output have the layouts of the
/// plan's [`crate::ColwiseParallel`] or [`crate::RowwiseParallel`]. Successive layers that take the same tensor, such
/// as queries, keys and values, share its all-gather and the all-reduce of its gradient.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::Linear;
///
/// let weight = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?;
/// let layer = Linear::new(weight, None);
/// let y = layer.forward(&Tensor::new(&[[10f32, 100.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[210.0, 430.0, 650.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
    parallel: Option<Arc<TpLayer<LinearSharding>>>,
    float8: Option<Float8Recipe>,
}

impl Linear {
    /// Returns a layer with this weight `[out, in]` and bias `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        register_layer(&weight);
        bias.iter().for_each(register_layer);
        let parallel = TpLayer::of_linear(&weight).map(Arc::new);
        if parallel.is_some() {
            bias.iter().for_each(mark_tp_aware);
        }
        let float8 = float8_recipe(&weight);
        Self { weight, bias, adapter: None, parallel, float8 }
    }

    /// Adds the adapter that [`crate::ShardedVarMap::adapt`] configures for this layer, if any. `vb` is the builder of
    /// the layer's `weight`. [`linear`] and its variants call this. Errors: see [`lora`](lora()).
    pub fn with_adapter(mut self, vb: VarBuilder) -> Result<Self> {
        self.adapter = Adapter::configured(&self.weight, false, vb)?;
        if self.parallel.is_some() {
            self.adapter.iter().for_each(Adapter::mark_tp_aware);
        }
        Ok(self)
    }

    /// Returns the weight, `[out, in]`, or this rank's part under a plan.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some(parallel) = &self.parallel else { return self.apply(x, self.bias.as_ref()) };
        match &parallel.style {
            LinearSharding::Colwise(style) => self.forward_colwise(x, style, parallel.group()),
            LinearSharding::Rowwise(style) => self.forward_rowwise(x, style, parallel.group()),
        }
    }
}

impl Linear {
    /// Applies this rank's weight and adapter.
    fn apply<'a>(&self, x: impl Into<Input<'a>>, bias: Option<&Tensor>) -> Result<Tensor> {
        let x = x.into();
        Adapter::add_to(self.adapter.as_ref(), affine("Linear", x, &self.weight, bias, false, self.float8)?, x)
    }

    /// Returns the weight, if the layer is a product with it alone.
    pub(in crate::nn) fn plain_weight(&self) -> Option<&Tensor> {
        (self.bias.is_none() && self.parallel.is_none() && self.is_product()).then_some(&self.weight)
    }

    /// Returns the weight, the bias and the adapter's matrices.
    pub(in crate::nn) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.weight).chain(&self.bias).chain(self.adapter.iter().flat_map(Adapter::weights))
    }

    /// Returns whether the outputs are a product in the tensors' dtype, and a bias: no adapter is added.
    pub(in crate::nn) fn is_product(&self) -> bool {
        self.float8.is_none() && !(self.adapter.is_some() && are_enabled())
    }

    /// Returns the outputs, or this rank's part of the outputs and the ranks that share them.
    pub(in crate::nn) fn vocabulary_logits(&self, x: &Tensor) -> Result<(Tensor, Option<&ProcessGroup>)> {
        let Some(parallel) = &self.parallel else { return Ok((self.forward(x)?, None)) };
        let LinearSharding::Colwise(style) = &parallel.style else { return Ok((self.forward(x)?, None)) };
        let x = colwise_input("Linear", x, self.weight.dim(1)?, style.input_layout, parallel.group())?;
        Ok((self.apply(&x, self.bias.as_ref())?, Some(parallel.group())))
    }

    fn forward_colwise(&self, x: &Tensor, style: &ColwiseParallel, group: &ProcessGroup) -> Result<Tensor> {
        let x = colwise_input("Linear", x, self.weight.dim(1)?, style.input_layout, group)?;
        let y = self.apply(&x, self.bias.as_ref())?;
        colwise_output("Linear", y, style.output_layout, group)
    }

    fn forward_rowwise(&self, x: &Tensor, style: &RowwiseParallel, group: &ProcessGroup) -> Result<Tensor> {
        let outputs = self.weight.dim(0)?;
        if let Some(bias) = &self.bias
            && bias.dims() != [outputs]
        {
            bail!("Linear: the bias {:?} must be [{outputs}], for the weight is {:?}", bias.dims(), self.weight.dims());
        }
        let y = match rowwise_input("Linear", x, self.weight.dim(1)?, style.input_layout, group)? {
            Part::Plain(x) => self.apply(&x, None)?,
            Part::Shared(x) => self.apply(&x, None)?,
        };
        let y = rowwise_output("Linear", &y, style.output_layout, group)?;
        let Some(bias) = &self.bias else { return Ok(y) };
        // Every rank has the whole bias. A rank with a part of the outputs adds the same part of the bias.
        let width = y.dim(D::Minus1)?;
        let first = if width == outputs { 0 } else { group.rank() * width };
        add_bias(&y, bias, first)
    }
}

/// Returns a [`Linear`] layer with a bias, from the tensors `weight` and `bias` of `vb`.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_dim as f64).sqrt();
    let bias = vb.get_with_hints(out_dim, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Linear::new(weight, Some(bias)).with_adapter(vb)
}

/// Returns a [`Linear`] layer without a bias, from the tensor `weight` of `vb`.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    Linear::new(weight, None).with_adapter(vb)
}

/// Calls [`linear`] or [`linear_no_bias`].
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias { linear(in_dim, out_dim, vb) } else { linear_no_bias(in_dim, out_dim, vb) }
}

/// GPT-2's fully connected layer (transformers' `Conv1D`) `y = x W + b`: weight `[in, out]`, bias `[out]`, input `[.., in]`, output `[.., out]`.
#[derive(Clone, Debug)]
pub struct Gpt2Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
    float8: Option<Float8Recipe>,
}

impl Gpt2Linear {
    /// Returns a layer with this weight `[in, out]` and bias `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        register_layer(&weight);
        bias.iter().for_each(register_layer);
        let float8 = float8_recipe(&weight);
        Self { weight, bias, adapter: None, float8 }
    }

    /// See [`Linear::with_adapter`]. Errors: see [`lora`](lora()).
    pub fn with_adapter(mut self, vb: VarBuilder) -> Result<Self> {
        self.adapter = Adapter::configured(&self.weight, true, vb)?;
        Ok(self)
    }

    /// Returns the weight, `[in, out]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Gpt2Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = affine("Gpt2Linear", x, &self.weight, self.bias.as_ref(), true, self.float8)?;
        Adapter::add_to(self.adapter.as_ref(), y, x)
    }
}

/// Returns a [`Gpt2Linear`] layer from the tensors `weight` and `bias` of `vb`. As in GPT-2, the weight starts normal with
/// standard deviation 0.02, and the bias zero.
pub fn gpt2_linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Gpt2Linear> {
    let weight = vb.get_with_hints((in_dim, out_dim), "weight", Init::Randn { mean: 0., stdev: 0.02 })?;
    let bias = vb.get_with_hints(out_dim, "bias", Init::Const(0.))?;
    Gpt2Linear::new(weight, Some(bias)).with_adapter(vb)
}

/// A layer with a low-rank adapter: input `[.., in]`, output `[.., out]`, as the base layer's.
///
/// [`crate::ShardedVarMap::adapt`] adds adapters to the layers of an unmodified model. `Lora` is for your own models.
///
/// The base layer is [`Linear`], [`Gpt2Linear`] or any other module. To train only the adapters, freeze the other
/// parameters before the model is built: `vars.freeze(|name| !is_adapter(name))`. Base and adapter may be in one FSDP
/// unit. Frozen parameters are gathered with the unit, and have neither gradients nor optimizer state.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// let world = World::single().unwrap();
/// let vars = ShardedVarMap::of_world(&world).unwrap();
/// vars.freeze(|name| !nn::is_adapter(name)).unwrap();
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
///     let vb = vb.pp("q_proj");
///     nn::lora(nn::linear(8, 6, vb.clone())?, 8, 6, nn::LoraConfig { rank: 2, alpha: 4. }, vb)
/// })
/// .unwrap();
/// let names = |trainable| {
///     let params = vars.params().into_iter().filter(|param| param.trainable() == trainable);
///     params.map(|param| param.name().to_string()).collect::<Vec<_>>()
/// };
/// assert_eq!(names(true), ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]);
/// assert_eq!(names(false), ["q_proj.weight", "q_proj.bias"]);
/// let x = Tensor::ones((3, 8), DType::F32, &Device::Cpu).unwrap();
/// assert_eq!(model.forward(&x).unwrap().dims(), [3, 6]);
/// ```
#[derive(Clone, Debug)]
pub struct Lora<M> {
    base: M,
    adapter: Adapter,
}

impl<M> Lora<M> {
    /// Returns the base layer.
    pub fn base(&self) -> &M {
        &self.base
    }
}

impl<M: Module> Module for Lora<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Adapter::add_to(Some(&self.adapter), self.base.forward(x)?, x)
    }
}

/// Returns a [`Lora`] around `base`, with the tensors `lora_A.weight` `[rank, in]` and `lora_B.weight` `[out, rank]` of
/// `vb`.
///
/// Pass the `vb` of the base layer. The adapter's tensors are then named as in PEFT's adapter files. The base keeps its
/// own name, so pretrained weights load unchanged: `q_proj.weight`, where PEFT's wrapped model has
/// `q_proj.base_layer.weight`. Fails if the rank is 0 or the adapter exceeds any memory, `alpha` is not finite, a
/// tensor cannot be created, or a plan of tensor parallelism shards the layer.
pub fn lora<M>(base: M, in_dim: usize, out_dim: usize, config: LoraConfig, vb: VarBuilder) -> Result<Lora<M>> {
    let prefix = vb.prefix();
    let adapter = Adapter::new(in_dim, out_dim, config, vb)?;
    if adapter.is_parallel() {
        bail!(
            "lora: the plan of tensor parallelism shards `{prefix}`, but `lora` does not shard adapters. Use \
             `ShardedVarMap::adapt` instead"
        );
    }
    Ok(Lora { base, adapter })
}

/// The term `alpha / r * B A x`, with `A` `[r, in]` and `B` `[out, r]`.
#[derive(Clone, Debug)]
struct Adapter {
    down: Tensor,
    up: Tensor,
    scale: f64,
}

impl Adapter {
    /// Returns the adapter that the map of this weight, `[out, in]` or `[in, out]`, configures, if any.
    fn configured(weight: &Tensor, in_out: bool, vb: VarBuilder) -> Result<Option<Self>> {
        let Some(param) = FsdpParam::of(weight) else { return Ok(None) };
        let of_layer = |adapters: &Arc<Adapters>| adapters.of(param.name());
        let Some(config) = param.spec.adapters.as_ref().and_then(of_layer) else { return Ok(None) };
        let (rows, columns) = param.shape().dims2()?;
        let (inputs, outputs) = if in_out { (rows, columns) } else { (columns, rows) };
        Adapter::new(inputs, outputs, config, vb).map(Some)
    }

    /// Marks both matrices: under a plan, the layer does their collectives. The adapter's output is added before the
    /// layer's collectives. A layer sharded along its outputs has the whole `A`, of whose gradient each rank has a
    /// term, and its part of `B`. A layer sharded along its inputs has its part of `A`, and the whole `B`.
    fn mark_tp_aware(&self) {
        self.weights().into_iter().for_each(mark_tp_aware);
    }

    /// Returns both matrices.
    fn weights(&self) -> [&Tensor; 2] {
        [&self.down, &self.up]
    }

    /// Returns whether a plan shards the adapted layer.
    fn is_parallel(&self) -> bool {
        FsdpParam::of(&self.down).is_some_and(|param| param.parallel().is_some())
    }

    /// Creates the two matrices.
    fn new(in_dim: usize, out_dim: usize, config: LoraConfig, vb: VarBuilder) -> Result<Self> {
        let LoraConfig { rank, alpha } = config;
        if rank == 0 || !alpha.is_finite() {
            bail!(
                "lora: the adapter of `{}` has rank {rank} and alpha = {alpha}: the rank must be at least 1, and alpha \
                 finite",
                vb.prefix()
            );
        }
        let longest = in_dim.max(out_dim).max(1);
        if rank > isize::MAX as usize / longest / vb.dtype().size_in_bytes().max(1) {
            bail!(
                "lora: the adapter of `{}` has rank {rank} on {in_dim} inputs and {out_dim} outputs, which exceeds any \
                 memory. Ranks above {} add nothing",
                vb.prefix(),
                in_dim.min(out_dim)
            );
        }
        // Kaiming-uniform with a = sqrt(5), as in the paper's code and in PEFT.
        let bound = 1. / (in_dim as f64).sqrt();
        let a = vb.pp("lora_A").get_with_hints((rank, in_dim), "weight", Init::Uniform { lo: -bound, up: bound })?;
        let b = vb.pp("lora_B").get_with_hints((out_dim, rank), "weight", Init::Const(0.))?;
        register_layer(&a);
        register_layer(&b);
        Ok(Adapter { down: a, up: b, scale: alpha / rank as f64 })
    }

    /// Adds the adapter's output for `x` to the layer's output `y`.
    fn add_to<'a>(adapter: Option<&Self>, y: Tensor, x: impl Into<Input<'a>>) -> Result<Tensor> {
        let Some(Adapter { down, up, scale }) = adapter.filter(|_| are_enabled()) else { return Ok(y) };
        // Scale the smaller tensor, [.., r].
        let low = (affine("lora_A", x, down, None, false, None)? * *scale)?;
        residual::add(&y, &affine("lora_B", &low, up, None, false, None)?)
    }
}

/// Returns the recipe that the map of this weight configures for its layer, if any.
fn float8_recipe(weight: &Tensor) -> Option<Float8Recipe> {
    let param = FsdpParam::of(weight)?;
    param.spec.float8.as_ref()?.build(param.name())
}

/// Fails unless 8-bit products support a layer.
fn check_float8(function: &str, x: &Tensor, w: &Tensor) -> Result<()> {
    let name = || FsdpParam::of(w).map_or("the weight".into(), |param| format!("`{}`", param.name()));
    let way_out = "Leave its layer out in the filter of `convert_to_float8_training` (`train`: --compute full)";
    if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) || !(x.device().is_cpu() || x.device().is_cuda()) {
        bail!(
            "{function}: 8-bit products take f32, f16 and bf16 on the CPU and on CUDA devices, but {} is {:?} on {:?}. \
             {way_out}",
            name(),
            x.dtype(),
            x.device().location()
        );
    }
    if w.dims().iter().any(|dim| dim % Float8Cast::TERMS != 0) {
        bail!(
            "{function}: 8-bit products take weights whose dimensions are multiples of {}, but {} is {:?}. {way_out}",
            Float8Cast::TERMS,
            name(),
            w.dims()
        );
    }
    Ok(())
}

/// Computes `x W^T + b`, or `x W + b` for a weight stored as `[in, out]`, in 8 bits by a recipe.
pub(in crate::nn) fn affine<'a>(
    function: &'static str,
    input: impl Into<Input<'a>>,
    w: &Tensor,
    bias: Option<&Tensor>,
    in_out: bool,
    float8: Option<Float8Recipe>,
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
    if float8.is_some() {
        check_float8(function, x, w)?;
    }
    let shape = [&x.dims()[..x.rank() - 1], &[outputs]].concat();
    check_size(function, "the output", &shape, x.device())?;
    if let Some(cuda) = Cuda::of(x) {
        let (weight, bias) = (Weight::of(w)?, bias.map(Weight::of).transpose()?);
        let bias_value = bias.as_ref().map(|bias| Ok::<_, candle_core::Error>(bias.value()?.detach())).transpose()?;
        let (x, value) = (x.detach(), weight.value()?.detach());
        let y = match float8 {
            None => composite(&x, &value, bias_value.as_ref(), in_out)?,
            Some(recipe) => {
                let y = cuda.float8_output(&x, &value, in_out, recipe)?;
                if let Some(bias) = &bias_value { y.broadcast_add(bias)? } else { y }
            }
        };
        return cuda.affine(function, input, y, weight, bias, in_out, float8);
    }
    if !has_cpu_kernels(x) {
        let bias = bias.map(Weight::in_graph).transpose()?;
        return composite(&input.in_graph()?, &Weight::in_graph(w)?, bias.as_ref(), in_out);
    }
    operation(Operation::Linear, &shape, |known| {
        let (weight, bias) = (Weight::of(w)?, bias.map(Weight::of).transpose()?);
        let arguments = weight.arguments(input.node(), bias.as_ref());
        let op = Affine { shared: input.shared(), weight, bias, in_out, float8, outputs };
        let y = match known {
            Some((known, _)) => known,
            None => op.forward(x)?,
        };
        let y = graph_op(function, &arguments, y, &shape[..], Reads::Sources, move |x, _, dy| op.backward(x[0], dy))?;
        Ok((y, Arc::new(())))
    })
}

/// The layer as a chain of Candle's operations.
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

/// Calls `f` with a weight as it is stored, and its dimensions. An f32 weight with any strides is read in place.
pub(in crate::nn) fn with_matrix<R>(weight: &Weight, f: impl FnOnce(Mat<'_>, [usize; 2]) -> R) -> Result<R> {
    let value = weight.value()?;
    let (rows, cols) = value.dims2()?;
    let (guard, layout) = value.storage_and_layout();
    let values = cpu(&guard)?;
    let operand;
    let stored = match (values, layout.stride()) {
        (CpuStorage::F32(values), &[row_stride, col_stride]) => {
            let values = values.get(layout.start_offset()..).unwrap_or_default();
            Mat::strided(values, rows, cols, row_stride, col_stride)
        }
        _ => {
            operand = Operand::of(values, layout)?;
            operand.mat()
        }
    };
    Ok(f(stored, [rows, cols]))
}

struct Affine {
    /// Input that is read instead of the graph argument.
    shared: Option<SharedInput>,
    weight: Weight,
    bias: Option<Weight>,
    in_out: bool,
    float8: Option<Float8Recipe>,
    outputs: usize,
}

impl Affine {
    /// Calls `f` with the weight as `[in, out]`.
    fn with_weight<R>(&self, f: impl FnOnce(Mat<'_>) -> R) -> Result<R> {
        with_matrix(&self.weight, |stored, _| f(if self.in_out { stored } else { stored.t() }))
    }

    /// Calls `f` with the operands of a product, rounded as the recipe says.
    fn with_operands<R>(
        &self,
        product: LinearProduct,
        lhs: Mat<'_>,
        rhs: Mat<'_>,
        f: impl FnOnce(Mat<'_>, Mat<'_>) -> R,
    ) -> R {
        match self.float8.and_then(|recipe| recipe.casts(product, self.in_out)) {
            None => f(lhs, rhs),
            Some([left, right]) => {
                let (lhs, rhs) = (Rounded::new(lhs, left, Side::Left), Rounded::new(rhs, right, Side::Right));
                f(lhs.mat(), rhs.mat())
            }
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Storage> {
        read_rows!(x_mat, x);
        let output = LinearProduct::Output;
        let Some(bias) = &self.bias else {
            let y = self.with_weight(|w| self.with_operands(output, x_mat, w, product_of))?;
            return storage(y, x.dtype());
        };
        read!(bias, bias.value()?);
        let mut y = bias.repeat(x_mat.rows());
        let to = MatMut::new(&mut y, x_mat.rows(), self.outputs);
        self.with_weight(|w| self.with_operands(output, x_mat, w, |x, w| product(to, true, x, w)))?;
        storage(y, x.dtype())
    }

    fn backward(&self, argument: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let x = input::values(argument, &self.shared);
        read_rows!(dy_mat, dy);
        let dx = input::gradient(argument, &self.shared, || {
            let dx = |w: Mat<'_>| self.with_operands(LinearProduct::GradInput, dy_mat, w.t(), product_of);
            tensor_like(self.with_weight(dx)?, x)
        })?;
        let dw = weight_grad(&self.weight, |buffer, accumulate| {
            read_rows!(x_mat, x);
            let (lhs, rhs) = if self.in_out { (x_mat.t(), dy_mat) } else { (dy_mat.t(), x_mat) };
            let to = MatMut::new(buffer, lhs.rows(), rhs.cols());
            self.with_operands(LinearProduct::GradWeight, lhs, rhs, |lhs, rhs| product(to, accumulate, lhs, rhs));
            Ok(())
        })?;
        let db = match &self.bias {
            Some(bias) if bias.wants_grad() => {
                read!(grad, dy);
                small_weight_grad(bias, &column_sums(&grad, self.outputs))?
            }
            _ => None,
        };
        Ok([dx, dw, db])
    }
}

/// Returns the sum of each column of a row-major matrix.
pub(in crate::nn) fn column_sums(values: &[f32], cols: usize) -> Vec<f32> {
    let mut sums = vec![0f32; cols];
    // Each thread sums a range of columns.
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

/// Returns `y + bias[first..first + width]` for a bias `[outputs]` and an output `[.., width]`. The result takes `y`'s
/// memory, so nothing else may read `y`. The rest of the bias gets a gradient of zeros.
fn add_bias(y: &Tensor, bias: &Tensor, first: usize) -> Result<Tensor> {
    let (width, outputs) = (y.dim(D::Minus1)?, bias.dim(0)?);
    if !(has_cpu_kernels(y) && y.is_contiguous() && y.layout().start_offset() == 0) {
        return y.broadcast_add(&Weight::in_graph(bias)?.narrow(0, first, width)?);
    }
    let bias = Weight::of(bias)?;
    let arguments = bias.arguments(y, None);
    let sum = add_row(take(y)?, y.shape(), &bias, first, width)?;
    graph_op("add_bias", &arguments, sum, y.shape(), Reads::Nothing, move |_, _, dy| {
        let d_bias = if bias.wants_grad() {
            read!(grad, dy);
            let mut d_bias = vec![0f32; outputs];
            d_bias[first..first + width].copy_from_slice(&column_sums(&grad, width));
            small_weight_grad(&bias, &d_bias)?
        } else {
            None
        };
        Ok([Some(dy.clone()), d_bias])
    })
}

/// Adds `bias[first..first + width]` to each row of a contiguous storage.
fn add_row(output: Storage, shape: &Shape, bias: &Weight, first: usize, width: usize) -> Result<Storage> {
    let dtype = output.dtype();
    let mut sum = match output {
        Storage::Cpu(CpuStorage::F32(values)) => values,
        half => floats(cpu(&half)?, &Layout::contiguous(shape))?.into_owned(),
    };
    read!(bias, bias.value()?);
    let bias = &bias[first..first + width];
    for row in sum.chunks_exact_mut(width.max(1)) {
        row.iter_mut().zip(bias.iter()).for_each(|(y, b)| *y += b);
    }
    storage(sum, dtype)
}
