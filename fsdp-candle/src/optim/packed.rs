//! A tensor in 8 bits, with a scale for each block of its elements.

use candle_core::{DType, Result, Tensor};
use fsdp_core::{Readable, Writable};

use crate::kernels::{self, EightBits, STATE_BLOCK};
use crate::storage::{TensorMemory, to_tensor, with_slice, with_slice_mut};

/// What the codes are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PackedOf {
    /// The values.
    Values,
    /// The roots of the values, which are not negative: what a step divides by keeps its relative precision.
    Roots,
}

/// Values of f32 that are kept in 8 bits. Reading them decodes into memory that is there meanwhile.
#[derive(Clone, Debug)]
pub struct Packed {
    codes: Tensor,
    scales: Tensor,
    shape: Vec<usize>,
    of: PackedOf,
}

impl Packed {
    /// Codes and scales of a tensor of this shape.
    pub(super) fn new(codes: Tensor, scales: Tensor, shape: &[usize], of: PackedOf) -> Self {
        Packed { codes, scales, shape: shape.to_vec(), of }
    }

    fn bits(&self) -> EightBits {
        match self.of {
            PackedOf::Values => EightBits::Signed,
            PackedOf::Roots => EightBits::Unsigned,
        }
    }

    /// The codes and the scales.
    pub(super) fn parts(&self) -> [&Tensor; 2] {
        [&self.codes, &self.scales]
    }

    /// The values.
    pub(super) fn tensor(&self) -> Result<Tensor> {
        let device = self.codes.device();
        let kernels = kernels::of_device(device)?;
        let zeros = kernels.zeros(fsdp_core::DType::F32, self.codes.elem_count()).map_err(crate::error::Error::from)?;
        let values = to_tensor(zeros, &self.shape, device)?;
        with_slice_mut(&values, |kernels, values| {
            with_slice(&self.codes, |_, codes| {
                with_slice(&self.scales, |_, scales| {
                    kernels.dequantise(self.bits(), STATE_BLOCK, codes, scales, values)
                })
            })
        })?;
        match self.of {
            PackedOf::Roots if values.elem_count() > 0 => values.sqr(),
            _ => Ok(values),
        }
    }

    /// Sets the values to those of a tensor of F32, rounded to 8 bits.
    pub(super) fn set(&self, values: &Tensor) -> Result<()> {
        if values.elem_count() == 0 {
            return Ok(());
        }
        let values = values.to_device(self.codes.device())?.to_dtype(DType::F32)?;
        let values = match self.of {
            PackedOf::Roots => values.sqrt()?,
            PackedOf::Values => values.contiguous()?,
        };
        with_slice_mut(&self.codes, |kernels, codes| {
            with_slice_mut(&self.scales, |_, scales| {
                with_slice(&values, |_, values| kernels.quantise(self.bits(), STATE_BLOCK, values, codes, scales))
            })
        })
    }
}

impl Readable for Packed {
    fn dtype(&self) -> fsdp_core::DType {
        fsdp_core::DType::F32
    }

    fn len(&self) -> usize {
        self.codes.elem_count()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        TensorMemory(self.tensor().map_err(|error| error.to_string())?).read(f)
    }
}

impl Writable for Packed {
    fn dtype(&self) -> fsdp_core::DType {
        fsdp_core::DType::F32
    }

    fn len(&self) -> usize {
        self.codes.elem_count()
    }

    /// What is written in parts is decoded and encoded for each of them.
    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> std::result::Result<(), String> {
        let values = self.tensor().map_err(|error| error.to_string())?;
        TensorMemory(values.clone()).write(f)?;
        self.set(&values).map_err(|error| error.to_string())
    }
}
