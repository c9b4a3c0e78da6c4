//! Tensors: their types, shapes and places in memory.

use crate::element::Element;

use super::refusal::{Result, bad};

pub(super) type Dims = [usize; 4];

/// A `cudnnDataType_t` that is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataType {
    Float(Element),
    I32,
}

impl DataType {
    pub(super) const F32: Self = Self::Float(Element::F32);

    pub(super) fn of(number: i64) -> Result<Self> {
        match number {
            0 => Ok(Self::F32),
            2 => Ok(Self::Float(Element::F16)),
            4 => Ok(Self::I32),
            9 => Ok(Self::Float(Element::BF16)),
            _ => Err(bad(format!("cudnnDataType_t {number} is not emulated"))),
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Float(element) => element.bytes(),
            Self::I32 => 4,
        }
    }

    /// Returns a 16-bit float's type.
    pub(super) fn half(self) -> Option<Element> {
        match self {
            Self::Float(element @ (Element::F16 | Element::BF16)) => Some(element),
            _ => None,
        }
    }

    /// `at` points to a value of this type.
    pub(super) unsafe fn read(self, at: *const u8) -> f64 {
        // SAFETY: ensured by the caller.
        unsafe {
            match self {
                Self::Float(element) => element.read(at),
                Self::I32 => f64::from(at.cast::<i32>().read_unaligned()),
            }
        }
    }
}

/// A finalized tensor descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) uid: i64,
    pub(super) of: DataType,
    pub(super) dims: Dims,
    /// Strides in elements.
    pub(super) strides: Dims,
    /// Bytes of which an address is a multiple.
    pub(super) alignment: u64,
    /// Whether it exists within a graph only.
    pub(super) is_virtual: bool,
    /// Whether it is a number in the host's memory.
    pub(super) is_by_value: bool,
}

impl Tensor {
    /// Fails if the attributes do not fit together.
    pub(super) fn with_shape(mut self, dims: &[i64], strides: &[i64]) -> Result<Self> {
        let uid = self.uid;
        if dims.len() != strides.len() || !matches!((dims.len(), self.is_by_value), (4, _) | (1, true)) {
            return Err(bad(format!("tensor {uid} of {dims:?} has the strides {strides:?}; 4 of each are emulated")));
        }
        if dims.iter().chain(strides).any(|size| *size < 1) {
            return Err(bad(format!("tensor {uid} of {dims:?} has the strides {strides:?}: all must be positive")));
        }
        for (i, (dim, stride)) in dims.iter().zip(strides).enumerate() {
            (self.dims[i], self.strides[i]) = (*dim as usize, *stride as usize);
        }
        if self.is_by_value && (self.dims != [1; 4] || self.is_virtual) {
            return Err(bad(format!(
                "tensor {uid} of {dims:?} is by value: it must be one number that is not virtual"
            )));
        }
        if self.of == DataType::I32 && !self.is_by_value {
            return Err(bad(format!("tensor {uid} is of i32: only numbers by value are emulated")));
        }
        if self.alignment == 0 {
            return Err(bad(format!("tensor {uid} has an alignment of 0 bytes")));
        }
        Ok(self)
    }

    /// Returns whether it lies in the device's memory.
    pub(super) fn is_real(&self) -> bool {
        !self.is_virtual && !self.is_by_value
    }

    /// Returns the bytes from its first element to the end of its last.
    pub(super) fn span(&self) -> usize {
        let last: usize = self.dims.iter().zip(self.strides).map(|(dim, stride)| (dim - 1) * stride).sum();
        (last + 1) * self.of.bytes()
    }

    /// Returns the places of its elements in memory, in elements, in row-major order of the indices.
    pub(super) fn offsets(&self) -> impl Iterator<Item = usize> {
        indices(self.dims).map(|index| offset(index, self.strides))
    }
}

/// Returns all indices, in row-major order.
pub(super) fn indices(dims: Dims) -> impl Iterator<Item = Dims> {
    (0..dims.iter().product::<usize>()).scan([0; 4], move |next, _| {
        let index = *next;
        for (next, dim) in next.iter_mut().zip(dims).rev() {
            *next += 1;
            if *next < dim {
                break;
            }
            *next = 0;
        }
        Some(index)
    })
}

pub(super) fn offset(index: Dims, strides: Dims) -> usize {
    index.iter().zip(strides).map(|(index, stride)| index * stride).sum()
}

/// Returns the strides of a row-major array.
pub(super) fn row_major(dims: Dims) -> Dims {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}
