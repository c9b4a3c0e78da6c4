//! A device's memory, in which redistributions pack and unpack.

use candle_core::Device;
use fsdp_core::dtensor::{LocalMemory, Rows};
use fsdp_core::{Allocator, Buffer, DType, Result, View};

use crate::kernels::{self, Kernels, Slice, SliceMut};

/// Memory that a device's kernels copy, taken and freed.
pub(super) struct DeviceMemory(&'static dyn Kernels);

impl DeviceMemory {
    pub(super) fn of(device: &Device) -> crate::error::Result<Self> {
        Ok(DeviceMemory(kernels::of_device(device)?))
    }
}

impl Allocator for DeviceMemory {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.0.zeros(dtype, len)
    }

    fn give(&self, buffer: Buffer) {
        drop(buffer);
    }
}

impl LocalMemory for DeviceMemory {
    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.0.zeros(dtype, len)
    }

    fn copy_rows(&self, from: View<'_>, to: &mut Buffer, rows: &[Rows]) -> Result<()> {
        rows.iter().try_for_each(|rows| copy(self.0, from, to, rows)).map_err(|error| fsdp_core::Error::Device {
            device: to.device(),
            what: "copying elements of a DTensor".into(),
            cause: error.to_string(),
        })
    }
}

fn copy(kernels: &dyn Kernels, from: View<'_>, to: &mut Buffer, rows: &Rows) -> candle_core::Result<()> {
    let &Rows { count, len, from: read, to: written, from_stride, to_stride } = rows;
    let (from, room) = (Slice::new(to.dtype(), from), to.len());
    let from = from.range(read..from.len())?;
    let to = SliceMut::from(to).range(written..room)?;
    kernels.copy_rows(from, to, kernels::Rows { count, len, from_stride, to_stride })
}
