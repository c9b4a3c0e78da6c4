//! A CUDA device.

use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{CudaDevice, Result, bail};
use cudarc::driver::{CudaStream, LaunchConfig};
use fsdp_core::device::cuda::{CudaMemory, CudaView, failed};
use fsdp_core::{DType, View};

use super::super::slice::{Slice, SliceMut, ViewMut};
use super::launch::{Arg, Module};
use crate::error::Error;

/// Shares that a sum is first made of: one a block.
pub(super) const MOST_SHARES: usize = 512;

/// A CUDA device, and the stream that it computes on. Everything here is in that stream's order.
pub(in crate::kernels) struct Cuda {
    pub(super) device: CudaDevice,
    pub(super) stream: Arc<CudaStream>,
    module: Module,
    /// The shares of a sum. Whoever adds something up has it from the first kernel's launch to the last one's.
    pub(super) shares: Mutex<CudaMemory>,
    copies: OnceLock<Copies>,
}

/// A device's streams for copies from the host's memory and to it.
pub(super) struct Copies {
    pub(super) up: Arc<CudaStream>,
    pub(super) down: Arc<CudaStream>,
}

impl Cuda {
    pub(super) fn new(device: CudaDevice, stream: Arc<CudaStream>) -> crate::error::Result<Self> {
        let module = Module::new(&stream)?;
        let shares = Mutex::new(CudaMemory::uninit(&stream, DType::F64, MOST_SHARES)?);
        Ok(Cuda { device, stream, module, shares, copies: OnceLock::new() })
    }

    /// The streams for copies, which the first call makes.
    pub(super) fn copies(&self) -> Result<&Copies> {
        if self.copies.get().is_none() {
            let new = || {
                let stream = self.stream.context().new_stream();
                stream.map_err(|error| Error::Core(failed(&self.stream, "making a stream for copies", &error)))
            };
            // Of two threads, the first one's are kept.
            let _ = self.copies.set(Copies { up: new()?, down: new()? });
        }
        match self.copies.get() {
            Some(copies) => Ok(copies),
            None => bail!("streams for copies were made and are not there"),
        }
    }

    /// Elements of this device, to be read.
    pub(super) fn view<'a>(&self, slice: Slice<'a>) -> Result<CudaView<'a>> {
        match slice.view() {
            View::Cuda(view) if view.stream().cu_stream() == self.stream.cu_stream() => Ok(view),
            _ => bail!("the elements are not in memory of {}", fsdp_core::device::cuda::id(&self.stream)),
        }
    }

    /// Elements of this device, to be written.
    pub(super) fn view_mut<'a>(&self, slice: SliceMut<'a>) -> Result<CudaView<'a>> {
        match slice.into_view() {
            ViewMut::Cuda(view) if view.stream().cu_stream() == self.stream.cu_stream() => Ok(view),
            _ => bail!("the elements are not in memory of {}", fsdp_core::device::cuda::id(&self.stream)),
        }
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// The arguments are the kernel's, by type and order, and it reads and writes nothing but the elements of views
    /// whose addresses it got.
    pub(super) unsafe fn launch(&self, kernel: &str, config: LaunchConfig, args: &[Arg]) -> Result<()> {
        // SAFETY: the caller says so of the arguments. Memory is freed in the order of the stream that computes.
        unsafe { self.launch_on(&self.stream, kernel, config, args) }
    }

    /// Runs a kernel in the order of another stream.
    ///
    /// # Safety
    /// As [`Cuda::launch`]. The caller keeps the memory until the stream has run it.
    pub(super) unsafe fn launch_on(
        &self,
        stream: &CudaStream,
        kernel: &str,
        config: LaunchConfig,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: the caller says so of the arguments.
        unsafe { self.module.launch(stream, kernel, config, args) }
    }
}

/// An error unless there are as many of one as of the other.
pub(super) fn same_length(a: usize, b: usize) -> Result<()> {
    if a == b { Ok(()) } else { bail!("{a} elements do not go with {b}") }
}

/// An error unless elements are of this dtype.
pub(super) fn same_dtype(wanted: DType, got: DType) -> Result<()> {
    if wanted == got { Ok(()) } else { bail!("expected elements of {wanted}, got {got}") }
}
