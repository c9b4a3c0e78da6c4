//! A moment in the file of a rank's state, read and written a block at a time.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor, bail};
use fsdp_core::{DType as CoreDType, Readable, Writable};

use crate::disk::{ALIGN, Access, FileValues, StateFile, count_non_finite};
use crate::error::Result;
use crate::kernels::STATE_BLOCK;
use crate::optim::moment_kind::{MomentKind, Quantized};
use crate::storage::{TensorMemory, to_core_dtype, with_slice};

/// A moment in a file.
#[derive(Clone, Debug)]
pub(crate) struct OnDisk {
    /// `None` without elements.
    file: Option<Arc<StateFile>>,
    kind: MomentKind,
    shape: Vec<usize>,
    extents: Arc<[Extent]>,
}

/// Some elements of a moment, which lie together in the file.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) elements: Range<usize>,
    /// Bytes of each of the moment's tensors in the file.
    pub(super) parts: Vec<Range<u64>>,
}

impl Extent {
    /// Returns the range to read and write, with both ends aligned.
    fn aligned(&self) -> Range<u64> {
        let (first, last) = (self.parts.first(), self.parts.last());
        let (start, end) = (first.map_or(0, |part| part.start), last.map_or(0, |part| part.end));
        start / ALIGN as u64 * ALIGN as u64..end.next_multiple_of(ALIGN as u64)
    }
}

impl OnDisk {
    pub(super) fn new(file: Option<Arc<StateFile>>, kind: MomentKind, shape: &[usize], extents: Vec<Extent>) -> Self {
        OnDisk { file, kind, shape: shape.to_vec(), extents: extents.into() }
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the kind, which has the dtype of the values.
    pub(crate) fn kind(&self) -> MomentKind {
        self.kind
    }

    /// Returns the bytes in the file.
    pub(crate) fn bytes(&self) -> u64 {
        let parts = self.extents.iter().flat_map(|extent| &extent.parts);
        parts.map(|part| part.end - part.start).sum()
    }

    /// Calls `f` with the elements of each extent and their bytes. Reads in order.
    fn each(&self, access: Access, mut f: impl FnMut(Range<usize>, Vec<&mut [u8]>) -> Result<()>) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let ranges: Vec<_> = self.extents.iter().map(Extent::aligned).collect();
        file.stream(&ranges, access, |at, bytes| {
            let Extent { elements, parts } = &self.extents[at];
            let within = parts.iter().map(|part| {
                let start = (part.start - ranges[at].start) as usize;
                start..start + (part.end - part.start) as usize
            });
            f(elements.clone(), split(bytes, within))
        })
    }

    /// Decodes a part of an extent at a time, because values take four times as much memory as codes.
    fn decode(&self, elements: usize, parts: &[&mut [u8]], f: &mut dyn FnMut(&[u8])) -> candle_core::Result<()> {
        for start in (0..elements).step_by(DECODED) {
            let piece = start..elements.min(start + DECODED);
            let some = self.quantized(piece.len())?;
            for ((tensor, kind), part) in some.parts().into_iter().zip(self.kind.parts()?).zip(parts) {
                copy_into(tensor, &part[kind.bytes_of(&piece)])?;
            }
            TensorMemory(some.tensor()?).read(f).map_err(candle_core::Error::msg)?;
        }
        Ok(())
    }

    fn quantized(&self, elements: usize) -> candle_core::Result<Quantized> {
        match self.kind {
            MomentKind::Quantized(of) => {
                Quantized::new(&[elements], of, |dtype, count| Tensor::zeros(count, dtype, &Device::Cpu))
            }
            MomentKind::Full(dtype) => bail!("a moment of {dtype:?} has no codes"),
        }
    }

    /// Returns the number of values, or scales of 8-bit values, that are not finite.
    pub(crate) fn count_non_finite(&self) -> Result<f64> {
        let witness = self.kind.parts()?.len() - 1;
        let dtype = self.kind.parts()?[witness].dtype;
        let mut total = 0.;
        self.each(Access::Read, |_, parts| {
            total += count_non_finite(dtype, parts[witness])?;
            Ok(())
        })?;
        Ok(total)
    }
}

impl FileValues for OnDisk {
    fn dtype(&self) -> CoreDType {
        to_core_dtype(self.kind.dtype()).unwrap_or(CoreDType::F32)
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn read_values(&self, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.each(Access::Read, |elements, parts| match self.kind {
            MomentKind::Full(_) => {
                parts.into_iter().for_each(|part| f(part));
                Ok(())
            }
            MomentKind::Quantized(_) => Ok(self.decode(elements.len(), &parts, f)?),
        })
    }

    fn set(&self, values: &Tensor) -> Result<()> {
        let values = values.to_device(&Device::Cpu)?.to_dtype(self.kind.dtype())?.contiguous()?.flatten_all()?;
        if values.elem_count() != self.elements() {
            let (found, expected) = (values.elem_count(), self.elements());
            return Err(candle_core::Error::msg(format!("expected {expected} values, found {found}")).into());
        }
        self.each(Access::Update, |elements, mut parts| {
            match self.kind {
                MomentKind::Full(_) => with_slice(&values, |kernels, all| {
                    kernels.read(all.range(elements)?, &mut |bytes| parts[0][..bytes.len()].copy_from_slice(bytes))
                })?,
                MomentKind::Quantized(_) => {
                    for start in elements.clone().step_by(DECODED) {
                        let count = (elements.end - start).min(DECODED);
                        let some = self.quantized(count)?;
                        some.set(&values.narrow(0, start, count)?)?;
                        let piece = start - elements.start..start - elements.start + count;
                        for ((tensor, kind), part) in some.parts().into_iter().zip(self.kind.parts()?).zip(&mut parts) {
                            let into = &mut part[kind.bytes_of(&piece)];
                            let copy = &mut |bytes: &[u8]| into.copy_from_slice(bytes);
                            TensorMemory(tensor.clone()).read(copy).map_err(candle_core::Error::msg)?;
                        }
                    }
                }
            }
            Ok(())
        })
    }
}

/// Elements to decode or encode at once.
const DECODED: usize = 256 * STATE_BLOCK;

/// Returns the given ranges of the bytes, which are in order and disjoint.
pub(super) fn split(bytes: &mut [u8], ranges: impl Iterator<Item = Range<usize>>) -> Vec<&mut [u8]> {
    let (mut rest, mut done) = (bytes, 0);
    let cut = |range: Range<usize>| {
        let (part, more) = std::mem::take(&mut rest)[range.start - done..].split_at_mut(range.len());
        (rest, done) = (more, range.end);
        part
    };
    ranges.map(cut).collect()
}

fn copy_into(tensor: &Tensor, from: &[u8]) -> candle_core::Result<()> {
    TensorMemory(tensor.clone()).write(&mut |bytes| bytes.copy_from_slice(from)).map_err(candle_core::Error::msg)
}
