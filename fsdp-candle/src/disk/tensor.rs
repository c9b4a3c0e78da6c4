//! A tensor in a file, read and written a block at a time.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use fsdp_core::{Buffer, DType as CoreDType};

use super::values::{FileValues, count_non_finite};
use super::{ALIGN, Access, FileRange, StateFile};
use crate::error::Result;
use crate::storage::{to_core_dtype, with_slice};

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

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the pages of some elements. The first element begins a page.
    pub(crate) fn range(&self, elements: &Range<usize>) -> FileRange<'_> {
        let at = |element: usize| self.start + (element * self.dtype.size()) as u64;
        FileRange { file: &self.file, bytes: at(elements.start)..at(elements.end).next_multiple_of(ALIGN as u64) }
    }

    /// Returns the elements of each block.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let (most, elements) = (self.file.block_bytes() / self.dtype.size(), self.len());
        (0..elements).step_by(most).map(move |start| start..elements.min(start + most))
    }

    /// Calls `f` with elements and their bytes, a block at a time. Reads in order.
    fn each(&self, access: Access, mut f: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>) -> Result<()> {
        let blocks: Vec<Range<usize>> = self.blocks().collect();
        let ranges: Vec<Range<u64>> = blocks.iter().map(|block| self.range(block).bytes).collect();
        self.file.stream(&ranges, access, |at, bytes| {
            f(blocks[at].clone(), &mut bytes[..blocks[at].len() * self.dtype.size()])
        })
    }

    /// Copies the values of tensors to buffers of the same dtypes and lengths, with reads of all tensors at once.
    pub(crate) fn copy_all(tensors: &[&FileTensor], values: &mut [Buffer]) -> Result<()> {
        let Some(first) = tensors.first() else { return Ok(()) };
        let of_tensor =
            |(at, tensor): (usize, &&FileTensor)| tensor.blocks().map(move |block| (at, block)).collect::<Vec<_>>();
        let blocks: Vec<(usize, Range<usize>)> = tensors.iter().enumerate().flat_map(of_tensor).collect();
        let items: Vec<_> = blocks.iter().map(|(at, block)| vec![tensors[*at].range(block)]).collect();
        first.file.stream_items(&items, Access::Read, |item, bytes| {
            let (at, block) = &blocks[item];
            let size = tensors[*at].dtype.size();
            let into = &mut values[*at].bytes_mut()[block.start * size..block.end * size];
            into.copy_from_slice(&bytes[..into.len()]);
            Ok(())
        })
    }

    /// Returns the number of values that are not finite.
    pub(crate) fn count_non_finite(&self) -> Result<f64> {
        let mut total = 0.;
        self.each(Access::Read, |_, bytes| {
            total += count_non_finite(self.dtype, bytes)?;
            Ok(())
        })?;
        Ok(total)
    }
}

impl FileValues for FileTensor {
    fn dtype(&self) -> CoreDType {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn read_values(&self, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.each(Access::Read, |_, bytes| {
            f(bytes);
            Ok(())
        })
    }

    fn set(&self, values: &Tensor) -> Result<()> {
        if values.dims() != self.shape || to_core_dtype(values.dtype())? != self.dtype {
            let (dims, dtype) = (values.dims(), values.dtype());
            let message = format!("expected {:?} {}, found {dims:?} {dtype:?}", self.shape, self.dtype);
            return Err(candle_core::Error::msg(message).into());
        }
        self.each(Access::Write, |elements, bytes| {
            Ok(with_slice(values, |kernels, all| {
                kernels.read(all.range(elements)?, &mut |from| bytes.copy_from_slice(from))
            })?)
        })
    }
}
