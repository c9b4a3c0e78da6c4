//! The state that an optimizer keeps for a parameter: a step count and moments, in full or in 8 bits.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use fsdp_core::{DType as CoreDType, Readable, Writable};

use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::kernels::{self, EightBits, STATE_BLOCK};
use crate::storage::{TensorMemory, copy_tensor, to_core_dtype, to_tensor, with_slice, with_slice_mut};

/// The state of one parameter: a step count, and tensors of its shard's shape by PyTorch's names. State dicts name them
/// `state.<fqn>.<name>`.
#[derive(Clone, Debug)]
pub struct ParamState {
    /// The parameter.
    pub param: Arc<FsdpParam>,
    /// Number of steps that the parameter has taken.
    pub step: u64,
    /// Whether a state dict may lack the step count, as PyTorch's of this optimizer do.
    pub(crate) may_lack_step: bool,
    /// Index of the parameter's group in its optimizer.
    pub(super) group: usize,
    pub(super) moments: Vec<(&'static str, Moment)>,
}

impl ParamState {
    /// Makes the state before the first step. The tensors are contiguous and have the shape of the parameter's shard.
    /// They are shared: writing to them changes the state, as loading a checkpoint does.
    pub fn new(param: Arc<FsdpParam>, tensors: Vec<(&'static str, Tensor)>) -> Self {
        let moments = tensors.into_iter().map(|(name, tensor)| (name, Moment::Full(tensor))).collect();
        ParamState::of(param, 0, moments, false)
    }

    pub(super) fn of(
        param: Arc<FsdpParam>,
        group: usize,
        moments: Vec<(&'static str, Moment)>,
        may_lack_step: bool,
    ) -> Self {
        ParamState { param, step: 0, may_lack_step, group, moments }
    }

    /// Returns the names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.moments.iter().map(|(name, _)| *name)
    }

    /// Returns the tensor of a name such as `exp_avg`: the state itself, or an f32 copy of 8-bit state. Fails if the
    /// state has no such tensor, or there is not enough memory for a copy.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.moments.iter().find(|(own, _)| *own == name) {
            Some((_, moment)) => Ok(moment.tensor()?),
            None => {
                let names: Vec<_> = self.names().collect();
                Err(self.param.error(format!("its optimizer has no `{name}`; it has {names:?}")))
            }
        }
    }

    /// Returns the bytes of the tensors on this rank.
    pub fn bytes(&self) -> usize {
        self.moments.iter().map(|(_, moment)| moment.bytes()).sum()
    }

    pub(crate) fn moments(&self) -> impl Iterator<Item = (&'static str, &Moment)> + '_ {
        self.moments.iter().map(|(name, moment)| (*name, moment))
    }
}

/// Memory that a checkpoint reads and fills.
pub(crate) trait Memory: Readable + Writable {}
impl<T: Readable + Writable> Memory for T {}

/// A state tensor of a shard's shape.
#[derive(Clone, Debug)]
pub enum Moment {
    /// In the parameter's dtype.
    Full(Tensor),
    /// In 8 bits.
    Quantized(Quantized),
}

impl Moment {
    /// Returns zeros of a shard's shape and dtype.
    pub(super) fn zeros(param: &FsdpParam) -> Result<Self> {
        let shard = param.var().as_tensor();
        Ok(Moment::Full(zeros(param, "the optimizer's state", shard.dtype(), shard.dims())?))
    }

    /// Returns zeros of a shard's shape in 8 bits.
    pub(super) fn quantized(param: &FsdpParam, of: Encoding) -> Result<Self> {
        let shape = param.var().dims();
        let elements: usize = shape.iter().product();
        let codes = zeros(param, "the optimizer's state", DType::U8, &[elements])?;
        let scales = zeros(param, "the optimizer's state", DType::F32, &[elements.div_ceil(STATE_BLOCK)])?;
        Ok(Moment::Quantized(Quantized { codes, scales, shape: shape.to_vec(), of }))
    }

    /// Returns the values: the memory itself, or a decoded copy.
    pub(crate) fn tensor(&self) -> candle_core::Result<Tensor> {
        match self {
            Moment::Full(tensor) => Ok(tensor.clone()),
            Moment::Quantized(quantized) => quantized.tensor(),
        }
    }

    /// Returns the dtype of the values.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Moment::Full(tensor) => tensor.dtype(),
            Moment::Quantized(_) => DType::F32,
        }
    }

    /// Copies the values of a tensor of the same shape and dtype.
    pub(crate) fn set(&self, values: &Tensor) -> candle_core::Result<()> {
        match self {
            Moment::Full(tensor) => copy_tensor(values, tensor),
            Moment::Quantized(quantized) => quantized.set(values),
        }
    }

    /// Returns the values as a checkpoint reads and fills them.
    pub(crate) fn memory(&self) -> Arc<dyn Memory> {
        match self {
            Moment::Full(tensor) => Arc::new(TensorMemory(tensor.clone())),
            Moment::Quantized(quantized) => Arc::new(quantized.clone()),
        }
    }

    /// Returns a tensor that is not finite if a value is not.
    pub(super) fn overflow_witness(&self) -> &Tensor {
        match self {
            Moment::Full(tensor) => tensor,
            Moment::Quantized(quantized) => quantized.parts()[1],
        }
    }

    /// Returns the tensors that a step writes to.
    pub(super) fn parts(&self) -> Vec<&Tensor> {
        match self {
            Moment::Full(tensor) => vec![tensor],
            Moment::Quantized(quantized) => quantized.parts().to_vec(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.parts().iter().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }
}

/// Makes zeros of a shard's device. An error names the parameter and `what` they are for.
pub(super) fn zeros(param: &FsdpParam, what: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let device = param.var().device();
    let fail = |error: fsdp_core::Error| param.error(format!("{what}: {error}"));
    let zeros = kernels::of_device(device)?.zeros(to_core_dtype(dtype)?, shape.iter().product()).map_err(fail)?;
    Ok(to_tensor(zeros, shape, device)?)
}

/// Encoding of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// The values.
    Values,
    /// The square roots of values that are not negative, which keeps the relative precision of a step's denominator.
    SquareRoots,
}

/// F32 values in 8 bits, with a scale for each block. Reads decode into temporary memory.
#[derive(Clone, Debug)]
pub struct Quantized {
    codes: Tensor,
    scales: Tensor,
    shape: Vec<usize>,
    of: Encoding,
}

impl Quantized {
    fn bits(&self) -> EightBits {
        match self.of {
            Encoding::Values => EightBits::Signed,
            Encoding::SquareRoots => EightBits::Unsigned,
        }
    }

    /// Returns the codes and the scales.
    pub(super) fn parts(&self) -> [&Tensor; 2] {
        [&self.codes, &self.scales]
    }

    /// Returns the decoded values.
    pub(super) fn tensor(&self) -> candle_core::Result<Tensor> {
        let device = self.codes.device();
        let kernels = kernels::of_device(device)?;
        let zeros = kernels.zeros(CoreDType::F32, self.codes.elem_count()).map_err(Error::from)?;
        let values = to_tensor(zeros, &self.shape, device)?;
        with_slice_mut(&values, |kernels, values| {
            with_slice(&self.codes, |_, codes| {
                with_slice(&self.scales, |_, scales| {
                    kernels.dequantise(self.bits(), STATE_BLOCK, codes, scales, values)
                })
            })
        })?;
        match self.of {
            Encoding::SquareRoots if values.elem_count() > 0 => values.sqr(),
            _ => Ok(values),
        }
    }

    /// Encodes the values of an F32 tensor in 8 bits.
    pub(super) fn set(&self, values: &Tensor) -> candle_core::Result<()> {
        if values.elem_count() == 0 {
            return Ok(());
        }
        let values = values.to_device(self.codes.device())?.to_dtype(DType::F32)?;
        let values = match self.of {
            Encoding::SquareRoots => values.sqrt()?,
            Encoding::Values => values.contiguous()?,
        };
        with_slice_mut(&self.codes, |kernels, codes| {
            with_slice_mut(&self.scales, |_, scales| {
                with_slice(&values, |_, values| kernels.quantise(self.bits(), STATE_BLOCK, values, codes, scales))
            })
        })
    }
}

impl Readable for Quantized {
    fn dtype(&self) -> CoreDType {
        CoreDType::F32
    }

    fn len(&self) -> usize {
        self.codes.elem_count()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        TensorMemory(self.tensor().map_err(|error| error.to_string())?).read(f)
    }
}

impl Writable for Quantized {
    fn dtype(&self) -> CoreDType {
        CoreDType::F32
    }

    fn len(&self) -> usize {
        self.codes.elem_count()
    }

    /// Decodes and encodes once for each write.
    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> Result<(), String> {
        let values = self.tensor().map_err(|error| error.to_string())?;
        TensorMemory(values.clone()).write(f)?;
        self.set(&values).map_err(|error| error.to_string())
    }
}
