//! The set of kernels of a CUDA device.

use std::ops::Range;

use candle_core::{Result, Storage, Tensor};
use fsdp_core::device::cuda::CudaMemory;
use fsdp_core::{Buffer, DType};

use super::super::doors::StorageMut;
use super::super::eight_bits::EightBits;
use super::super::host_copies::{HostSink, HostSource};
use super::super::norm::NormType;
use super::super::set::{Kernels, Rows};
use super::super::slice::{Slice, SliceMut};
use super::super::update::{AdamUpdate, SgdUpdate};
use super::device::Cuda;
use super::{arithmetic, eight_bits, host_copies, memory, norm, optimizers};

impl Kernels for Cuda {
    fn zeros(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        CudaMemory::zeros(&self.stream, dtype, len).map(Buffer::Cuda)
    }

    fn storage(&self, buffer: Buffer) -> Result<Storage> {
        memory::storage(self, buffer)
    }

    fn buffer(&self, storage: Storage) -> Option<Buffer> {
        memory::buffer(storage)
    }

    fn freed_storage(&self) -> Result<Storage> {
        memory::freed_storage(self)
    }

    fn slice<'a>(&self, storage: &'a Storage, elements: Range<usize>) -> Result<Slice<'a>> {
        memory::slice(storage, elements)
    }

    fn slice_mut<'a>(&self, storage: StorageMut<'a>, elements: Range<usize>) -> Result<SliceMut<'a>> {
        memory::slice_mut(storage, elements)
    }

    fn read(&self, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        memory::read(self, from, f)
    }

    fn write(&self, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        memory::write(self, to, f)
    }

    fn copy_rows(&self, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()> {
        memory::copy_rows(self, from, to, rows)
    }

    fn add(&self, sum: SliceMut<'_>, more: Slice<'_>) -> Result<()> {
        arithmetic::add(self, sum, more)
    }

    fn scale(&self, values: SliceMut<'_>, factor: f64) -> Result<()> {
        arithmetic::scale(self, values, factor)
    }

    fn cast(&self, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
        arithmetic::cast(self, from, to)
    }

    fn powers(&self, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> Result<()> {
        norm::powers(self, values, norm, sum)
    }

    fn count_non_finite(&self, values: Slice<'_>, count: SliceMut<'_>) -> Result<()> {
        norm::count_non_finite(self, values, count)
    }

    fn mix(&self, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()> {
        arithmetic::mix(self, values, kept, more, taken)
    }

    fn adam(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 2],
    ) -> Result<()> {
        optimizers::adam(self, update, param, grad, moments)
    }

    fn sgd(
        &self,
        update: &SgdUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        buffer: Option<SliceMut<'_>>,
    ) -> Result<()> {
        optimizers::sgd(self, update, param, grad, buffer)
    }

    fn adam_8bit(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 4],
    ) -> Result<()> {
        optimizers::adam_8bit(self, update, param, grad, moments)
    }

    fn quantise(
        &self,
        bits: EightBits,
        block: usize,
        values: Slice<'_>,
        codes: SliceMut<'_>,
        scales: SliceMut<'_>,
    ) -> Result<()> {
        eight_bits::quantise(self, bits, block, values, (codes, scales))
    }

    fn dequantise(
        &self,
        bits: EightBits,
        block: usize,
        codes: Slice<'_>,
        scales: Slice<'_>,
        values: SliceMut<'_>,
    ) -> Result<()> {
        eight_bits::dequantise(self, bits, block, (codes, scales), values)
    }

    fn host_source(&self, tensor: &Tensor, page_locked: bool) -> Result<Option<Box<dyn HostSource>>> {
        host_copies::source(self, tensor, page_locked).map(Some)
    }

    fn host_sink(&self, dtype: DType, len: usize, page_locked: bool) -> Result<Option<Box<dyn HostSink>>> {
        host_copies::sink(self, dtype, len, page_locked).map(Some)
    }
}
