//! The state that an optimizer keeps for a parameter: a step count and moments, in full, in 8 bits or in a file.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use fsdp_core::{DType as CoreDType, Readable, Writable};

use super::disk::{OnDisk, PartKind};
use crate::disk::{FileMemory, FileValues};
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::kernels::{self, EightBits, STATE_BLOCK};
use crate::storage::{Memory, TensorMemory, copy_tensor, to_core_dtype, to_tensor, with_slice, with_slice_mut};

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

    /// Returns the tensor of a name such as `exp_avg`: the state itself, an f32 copy of 8-bit state, or a copy of state
    /// on disk. Fails if the state has no such tensor, there is not enough memory for a copy, or the disk fails.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.moments.iter().find(|(own, _)| *own == name) {
            Some((_, moment)) => moment.tensor(),
            None => {
                let names: Vec<_> = self.names().collect();
                Err(self.param.error(format!("its optimizer has no `{name}`; it has {names:?}")))
            }
        }
    }

    /// Returns the bytes of the tensors in this rank's memory.
    pub fn bytes(&self) -> usize {
        self.moments.iter().map(|(_, moment)| moment.bytes()).sum()
    }

    /// Returns the bytes of the tensors on this rank's disk. See [`crate::StateOnDisk`].
    pub fn bytes_on_disk(&self) -> u64 {
        self.moments.iter().map(|(_, moment)| moment.bytes_on_disk()).sum()
    }

    pub(crate) fn moments(&self) -> impl Iterator<Item = (&'static str, &Moment)> + '_ {
        self.moments.iter().map(|(name, moment)| (*name, moment))
    }
}

/// A state tensor of a shard's shape.
#[derive(Clone, Debug)]
pub(crate) enum Moment {
    /// In the parameter's dtype.
    Full(Tensor),
    /// In 8 bits.
    Quantized(Quantized),
    /// In a file.
    OnDisk(OnDisk),
}

/// How a moment is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentKind {
    /// In this dtype.
    Full(DType),
    /// F32 values in 8 bits.
    Quantized(Encoding),
}

impl MomentKind {
    /// Returns the dtype of the values.
    pub(super) fn dtype(self) -> DType {
        match self {
            MomentKind::Full(dtype) => dtype,
            MomentKind::Quantized(_) => DType::F32,
        }
    }

    /// Returns the tensors that a step writes to.
    pub(super) fn parts(self) -> candle_core::Result<Vec<PartKind>> {
        Ok(match self {
            MomentKind::Full(dtype) => vec![PartKind { dtype: to_core_dtype(dtype)?, per: 1 }],
            MomentKind::Quantized(_) => {
                vec![PartKind { dtype: CoreDType::U8, per: 1 }, PartKind { dtype: CoreDType::F32, per: STATE_BLOCK }]
            }
        })
    }
}

impl Moment {
    /// Returns zeros of a shard's shape and dtype.
    pub(super) fn zeros(param: &FsdpParam) -> Result<Self> {
        Moment::zeros_of(param, MomentKind::Full(param.var().dtype()))
    }

    /// Returns zeros of a shard's shape in memory.
    pub(super) fn zeros_of(param: &FsdpParam, kind: MomentKind) -> Result<Self> {
        let (shape, what) = (param.var().dims(), "the optimizer's state");
        match kind {
            MomentKind::Full(dtype) => Ok(Moment::Full(zeros(param, what, dtype, shape)?)),
            MomentKind::Quantized(of) => {
                let zeros = |dtype, count| zeros(param, what, dtype, &[count]);
                Ok(Moment::Quantized(Quantized::new(shape, of, zeros)?))
            }
        }
    }

    /// Returns the values: the memory itself, or a decoded copy.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        match self {
            Moment::Full(tensor) => Ok(tensor.clone()),
            Moment::Quantized(quantized) => Ok(quantized.tensor()?),
            Moment::OnDisk(moment) => moment.tensor(),
        }
    }

    /// Returns the dtype of the values.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Moment::Full(tensor) => tensor.dtype(),
            Moment::Quantized(_) => DType::F32,
            Moment::OnDisk(moment) => moment.kind().dtype(),
        }
    }

    /// Copies the values of a tensor of the same shape and dtype.
    pub(crate) fn set(&self, values: &Tensor) -> Result<()> {
        match self {
            Moment::Full(tensor) => Ok(copy_tensor(values, tensor)?),
            Moment::Quantized(quantized) => Ok(quantized.set(values)?),
            Moment::OnDisk(moment) => moment.set(values),
        }
    }

    /// Returns the values as a checkpoint reads and fills them.
    pub(crate) fn memory(&self) -> Arc<dyn Memory> {
        match self {
            Moment::Full(tensor) => Arc::new(TensorMemory(tensor.clone())),
            Moment::Quantized(quantized) => Arc::new(quantized.clone()),
            Moment::OnDisk(moment) => Arc::new(FileMemory(moment.clone())),
        }
    }

    /// Returns the tensors in memory that a step writes to.
    pub(super) fn parts(&self) -> Vec<&Tensor> {
        match self {
            Moment::Full(tensor) => vec![tensor],
            Moment::Quantized(quantized) => quantized.parts().to_vec(),
            Moment::OnDisk(_) => vec![],
        }
    }

    pub(super) fn bytes_on_disk(&self) -> u64 {
        match self {
            Moment::OnDisk(moment) => moment.bytes(),
            Moment::Full(_) | Moment::Quantized(_) => 0,
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
pub enum Encoding {
    /// The values.
    Values,
    /// The square roots of values that are not negative, which keeps the relative precision of a step's denominator.
    SquareRoots,
}

/// F32 values in 8 bits, with a scale for each block. Reads decode into temporary memory.
#[derive(Clone, Debug)]
pub(crate) struct Quantized {
    codes: Tensor,
    scales: Tensor,
    shape: Vec<usize>,
    of: Encoding,
}

impl Quantized {
    /// Makes zeros in tensors that `zeros` makes of a dtype and a number of elements.
    pub(super) fn new<E>(
        shape: &[usize],
        of: Encoding,
        zeros: impl Fn(DType, usize) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Self, E> {
        let elements: usize = shape.iter().product();
        let (codes, scales) = (zeros(DType::U8, elements)?, zeros(DType::F32, elements.div_ceil(STATE_BLOCK))?);
        Ok(Quantized { codes, scales, shape: shape.to_vec(), of })
    }

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
