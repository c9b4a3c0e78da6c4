//! The host, as a device.

use std::ops::Range;

use candle_core::{Result, Storage};
use fsdp_core::{Buffer, DType};

use super::super::doors::StorageMut;
use super::super::eight_bits::EightBits;
use super::super::norm::NormType;
use super::super::set::{Kernels, Rows};
use super::super::slice::{Slice, SliceMut};
use super::super::update::{AdamUpdate, SgdUpdate};
use super::{arithmetic, eight_bits, memory, norm, optimizers};

/// The host.
pub(in crate::kernels) struct Cpu;

impl Kernels for Cpu {
    fn zeros(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        Buffer::try_zeros(dtype, len)
    }

    fn storage(&self, buffer: Buffer) -> Result<Storage> {
        memory::storage(buffer)
    }

    fn buffer(&self, storage: Storage) -> Option<Buffer> {
        memory::buffer(storage)
    }

    fn freed_storage(&self) -> Result<Storage> {
        Ok(memory::freed_storage())
    }

    fn slice<'a>(&self, storage: &'a Storage, elements: Range<usize>) -> Result<Slice<'a>> {
        memory::slice(storage, elements)
    }

    fn slice_mut<'a>(&self, storage: StorageMut<'a>, elements: Range<usize>) -> Result<SliceMut<'a>> {
        memory::slice_mut(storage, elements)
    }

    fn read(&self, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        f(memory::bytes(from)?);
        Ok(())
    }

    fn write(&self, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        f(memory::bytes_mut(to)?);
        Ok(())
    }

    fn copy_rows(&self, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()> {
        memory::copy_rows(from, to, rows)
    }

    fn add(&self, sum: SliceMut<'_>, more: Slice<'_>) -> Result<()> {
        arithmetic::add(sum, more)
    }

    fn scale(&self, values: SliceMut<'_>, factor: f64) -> Result<()> {
        arithmetic::scale(values, factor)
    }

    fn cast(&self, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
        arithmetic::cast(from, to)
    }

    fn powers(&self, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> Result<()> {
        memory::put(sum, norm::powers(values, norm)?)
    }

    fn count_non_finite(&self, values: Slice<'_>, count: SliceMut<'_>) -> Result<()> {
        memory::put(count, norm::count_non_finite(values)? as f64)
    }

    fn mix(&self, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()> {
        arithmetic::mix(values, kept, more, taken)
    }

    fn adam(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 2],
    ) -> Result<()> {
        optimizers::adam(update, param, grad, moments)
    }

    fn sgd(
        &self,
        update: &SgdUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        buffer: Option<SliceMut<'_>>,
    ) -> Result<()> {
        optimizers::sgd(update, param, grad, buffer)
    }

    fn adam_8bit(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 4],
    ) -> Result<()> {
        optimizers::adam_8bit(update, param, grad, moments)
    }

    fn quantise(
        &self,
        bits: EightBits,
        block: usize,
        values: Slice<'_>,
        codes: SliceMut<'_>,
        scales: SliceMut<'_>,
    ) -> Result<()> {
        eight_bits::quantise(bits, block, values, (codes, scales))
    }

    fn dequantise(
        &self,
        bits: EightBits,
        block: usize,
        codes: Slice<'_>,
        scales: Slice<'_>,
        values: SliceMut<'_>,
    ) -> Result<()> {
        eight_bits::dequantise(bits, block, (codes, scales), values)
    }
}
