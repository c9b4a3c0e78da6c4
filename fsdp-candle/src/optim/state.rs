//! The state that an optimizer keeps for a parameter: a step count and moments, in full, in 8 bits or in a file.

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::disk::OnDisk;
use super::moment_kind::{MomentKind, Quantized};
use crate::disk::{FileMemory, FileValues};
use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::kernels;
use crate::storage::{Memory, TensorMemory, copy_tensor, to_core_dtype, to_tensor};

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
