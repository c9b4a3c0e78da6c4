//! A tensor in a file, read and written a block at a time.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fsdp_core::{Buffer, DType as CoreDType, Readable, View, Writable};

use super::{ALIGN, StateFile};
use crate::error::Result;
use crate::kernels::{self, Slice};
use crate::storage::{TensorMemory, to_core_dtype, to_tensor, with_slice};

/// A contiguous tensor in a file. Clones are the same tensor.
#[derive(Clone, Debug)]
pub(crate) struct FileTensor {
    file: Arc<StateFile>,
    dtype: CoreDType,
    shape: Vec<usize>,
    /// Offset in the file, a multiple of [`ALIGN`].
    start: u64,
}

impl FileTensor {
    /// Copies a contiguous tensor in host memory to new space at the end of a file.
    pub(crate) fn new(file: Arc<StateFile>, values: &Tensor) -> Result<Self> {
        let dtype = to_core_dtype(values.dtype())?;
        let bytes = (values.elem_count() * dtype.size()).next_multiple_of(ALIGN);
        let start = file.grow(bytes as u64)?;
        let tensor = FileTensor { file, dtype, shape: values.dims().to_vec(), start };
        tensor.set(values)?;
        Ok(tensor)
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Calls `f` with some elements and their bytes, in order. A call has at most a block, and begins at a multiple of
    /// the block's elements. Writes the bytes back if `write` is set.
    fn each(
        &self,
        elements: Range<usize>,
        write: bool,
        mut f: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let size = self.dtype.size();
        let most = self.file.block_bytes() / size;
        // Blocks of the file begin at multiples of a block, so that each has aligned ends.
        let blocks = elements.start / most..elements.end.div_ceil(most);
        let blocks: Vec<Range<usize>> = match elements.is_empty() {
            true => vec![],
            false => blocks.map(|at| elements.start.max(at * most)..elements.end.min((at + 1) * most)).collect(),
        };
        let aligned = |block: &Range<usize>| {
            let (start, end) = ((block.start * size) / ALIGN * ALIGN, (block.end * size).next_multiple_of(ALIGN));
            self.start + start as u64..self.start + end as u64
        };
        let ranges: Vec<Range<u64>> = blocks.iter().map(aligned).collect();
        self.file.stream(&ranges, write, |at, bytes| {
            let block = blocks[at].clone();
            let from = block.start * size % ALIGN;
            let bytes = &mut bytes[from..from + block.len() * size];
            f(block, bytes)
        })
    }

    /// Calls `f` with the bytes of all elements, in order.
    fn read_values(&self, mut f: impl FnMut(&[u8])) -> Result<()> {
        self.each(0..self.elements(), false, |_, bytes| {
            f(bytes);
            Ok(())
        })
    }

    /// Lets `f` change the bytes of some elements, a block at a time and in order.
    pub(crate) fn update(
        &self,
        elements: Range<usize>,
        f: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.each(elements, true, f)
    }

    /// Copies all values to a buffer of the same dtype and length.
    pub(crate) fn copy_to(&self, values: &mut Buffer) -> Result<()> {
        let bytes = values.bytes_mut();
        let mut done = 0;
        self.read_values(|piece| {
            bytes[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        })
    }

    /// Returns a copy of the values.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        let mut values = Buffer::try_zeros(self.dtype, self.elements())?;
        self.copy_to(&mut values)?;
        Ok(to_tensor(values, &self.shape, &Device::Cpu)?)
    }

    /// Writes the values of a contiguous tensor of the same shape and dtype in host memory.
    pub(crate) fn set(&self, values: &Tensor) -> Result<()> {
        if values.dims() != self.shape || to_core_dtype(values.dtype())? != self.dtype {
            let (dims, dtype) = (values.dims(), values.dtype());
            let message = format!("expected {:?} {}, found {dims:?} {dtype:?}", self.shape, self.dtype);
            return Err(candle_core::Error::msg(message).into());
        }
        self.update(0..self.elements(), |elements, bytes| {
            Ok(with_slice(values, |kernels, all| {
                kernels.read(all.range(elements)?, &mut |from| bytes.copy_from_slice(from))
            })?)
        })
    }

    /// Returns the number of values that are not finite.
    pub(crate) fn count_non_finite(&self) -> Result<f64> {
        let kernels = kernels::of_device(&Device::Cpu)?;
        let mut total = 0.;
        self.each(0..self.elements(), false, |_, bytes| {
            let mut count = Buffer::F64(vec![0.]);
            kernels.count_non_finite(Slice::new(self.dtype, View::Host(&*bytes)), (&mut count).into())?;
            if let Buffer::F64(count) = count {
                total += count[0];
            }
            Ok(())
        })?;
        Ok(total)
    }
}

impl Readable for FileTensor {
    fn dtype(&self) -> CoreDType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.elements()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        TensorMemory(self.tensor().map_err(|error| error.to_string())?).read(f)
    }

    fn read_pieces(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.read_values(f).map_err(|error| error.to_string())
    }
}

impl Writable for FileTensor {
    fn dtype(&self) -> CoreDType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.elements()
    }

    /// Holds all values in memory meanwhile.
    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> Result<(), String> {
        let values = self.tensor().map_err(|error| error.to_string())?;
        TensorMemory(values.clone()).write(f)?;
        self.set(&values).map_err(|error| error.to_string())
    }
}
