//! Contiguous elements of a tensor's or a buffer's memory on a device: the arguments of kernels.

use std::ops::Range;

use candle_core::{Result, bail};
#[cfg(feature = "cuda")]
use fsdp_core::device::cuda::CudaView;
use fsdp_core::{Buffer, DType, View};

/// Elements to read.
#[derive(Clone, Copy)]
pub(crate) struct Slice<'a> {
    dtype: DType,
    view: View<'a>,
}

/// Elements to write.
pub(crate) struct SliceMut<'a> {
    dtype: DType,
    view: ViewMut<'a>,
}

/// Memory of a device to write, as [`View`] is memory to read.
pub(crate) enum ViewMut<'a> {
    /// Bytes in host memory, in native order.
    Host(&'a mut [u8]),
    /// Bytes on a CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(CudaView<'a>),
}

impl<'a> Slice<'a> {
    pub(crate) fn new(dtype: DType, view: View<'a>) -> Self {
        Slice { dtype, view }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements, or 0 in memory of a device that this build does not support.
    pub(crate) fn len(&self) -> usize {
        match self.view {
            View::Host(memory) => memory.len() / self.dtype.size(),
            #[cfg(feature = "cuda")]
            View::Cuda(memory) => memory.bytes() / self.dtype.size(),
            _ => 0,
        }
    }

    pub(crate) fn view(&self) -> View<'a> {
        self.view
    }

    /// Returns the elements in a range.
    pub(crate) fn range(self, elements: Range<usize>) -> Result<Self> {
        let view = match self.view {
            View::Host(memory) => memory.get(bytes(self.dtype, &elements)).map(View::Host),
            #[cfg(feature = "cuda")]
            View::Cuda(memory) => memory.range(bytes(self.dtype, &elements)).map(View::Cuda),
            _ => None,
        };
        match view {
            Some(view) => Ok(Slice { view, ..self }),
            None => bail!("elements {elements:?} are outside of this memory"),
        }
    }
}

impl<'a> SliceMut<'a> {
    pub(crate) fn new(dtype: DType, view: ViewMut<'a>) -> Self {
        SliceMut { dtype, view }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match &self.view {
            ViewMut::Host(memory) => memory.len() / self.dtype.size(),
            #[cfg(feature = "cuda")]
            ViewMut::Cuda(memory) => memory.bytes() / self.dtype.size(),
        }
    }

    pub(crate) fn into_view(self) -> ViewMut<'a> {
        self.view
    }

    /// Returns the elements in a range.
    pub(crate) fn range(self, elements: Range<usize>) -> Result<Self> {
        let view = match self.view {
            ViewMut::Host(memory) => memory.get_mut(bytes(self.dtype, &elements)).map(ViewMut::Host),
            #[cfg(feature = "cuda")]
            ViewMut::Cuda(memory) => memory.range(bytes(self.dtype, &elements)).map(ViewMut::Cuda),
        };
        match view {
            Some(view) => Ok(SliceMut { view, ..self }),
            None => bail!("elements {elements:?} are outside of this memory"),
        }
    }
}

/// Converts elements to bytes. It saturates, so that an invalid range is refused and does not wrap.
fn bytes(dtype: DType, elements: &Range<usize>) -> Range<usize> {
    elements.start.saturating_mul(dtype.size())..elements.end.saturating_mul(dtype.size())
}

/// Binds the contents of an enum's variant for one of the dtypes that both Candle and collectives have.
macro_rules! each_dtype {
    ($value:expr, $enum:ident($v:ident) => $body:expr, $other:pat => $otherwise:expr) => {
        match $value {
            $enum::U8($v) => $body,
            $enum::U32($v) => $body,
            $enum::I64($v) => $body,
            $enum::BF16($v) => $body,
            $enum::F16($v) => $body,
            $enum::F32($v) => $body,
            $enum::F64($v) => $body,
            $other => $otherwise,
        }
    };
}
pub(super) use each_dtype;

/// Returns the error for the storage of a parameter that is not gathered.
pub(super) fn no_values<T>() -> Result<T> {
    bail!("the tensor's storage has no values: its parameter is not gathered")
}

/// Fails unless the lengths are equal.
pub(super) fn same_length(a: usize, b: usize) -> Result<()> {
    if a == b { Ok(()) } else { bail!("expected slices of one length, found {a} and {b} elements") }
}

impl<'a> From<&'a Buffer> for Slice<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        #[cfg(feature = "cuda")]
        if let Buffer::Cuda(memory) = buffer {
            return Slice::new(memory.dtype(), View::Cuda(memory.view()));
        }
        Slice::new(buffer.dtype(), View::Host(buffer.bytes()))
    }
}

impl<'a> From<&'a mut Buffer> for SliceMut<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        #[cfg(feature = "cuda")]
        if let Buffer::Cuda(memory) = buffer {
            return SliceMut::new(memory.dtype(), ViewMut::Cuda(memory.view()));
        }
        SliceMut::new(buffer.dtype(), ViewMut::Host(buffer.bytes_mut()))
    }
}
