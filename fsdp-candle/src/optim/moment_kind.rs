//! How moments are stored: in full or in 8 bits, and the tensors of each.

use std::ops::Range;

use candle_core::{DType, Tensor};
use fsdp_core::{DType as CoreDType, Readable, Writable};

use crate::error::Error;
use crate::kernels::{self, EightBits, STATE_BLOCK};
use crate::storage::{TensorMemory, to_core_dtype, to_tensor, with_slice, with_slice_mut};

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

/// A tensor of a state: one value for each element, or for each [`STATE_BLOCK`] elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartKind {
    pub(super) dtype: CoreDType,
    /// Number of elements for each value.
    pub(super) per: usize,
}

impl PartKind {
    /// Returns the bytes of a number of elements.
    pub(super) fn bytes(self, elements: usize) -> usize {
        elements.div_ceil(self.per) * self.dtype.size()
    }

    /// Returns the bytes of elements in a tensor. The first element is a multiple of [`STATE_BLOCK`].
    pub(super) fn bytes_of(self, elements: &Range<usize>) -> Range<usize> {
        let size = self.dtype.size();
        elements.start / self.per * size..elements.end.div_ceil(self.per) * size
    }
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
