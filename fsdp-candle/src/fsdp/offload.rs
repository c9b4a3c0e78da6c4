//! A shard and its reduced gradient in host memory, while layers compute on a device.
//!
//! [Note: Order of offload copies]
//!
//! A shard is copied to the device before each all-gather ([`Offload::upload`]), on a stream for such copies. Only the
//! all-gather waits for this copy. A reduced gradient is copied back on another stream ([`Offload::download`]). Later
//! computations wait for it when the next unit's gradients come, and the host waits when backward ends.
//!
//! A shard must not be written while a copy reads it. Two places ensure that. [`FsdpParam::var`] waits for the copies,
//! and everything in this crate gets the shard from there. Backward waits before it hands out gradients, so that an
//! optimizer may keep the variables: without gradients it does not write.
//!
//! [`FsdpParam::var`]: super::FsdpParam::var

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use fsdp_core::{Allocator, Buffer, DType, DeviceId, Readable, View};
use parking_lot::Mutex;

use super::policy::OffloadPolicy;
use crate::error::Error;
use crate::kernels::{self, HostMemory, HostSource, Kernels, PendingCopy};
use crate::storage::{Pool, PooledBuffer, to_core_dtype, to_tensor};

/// The copies of one offloaded parameter.
pub(crate) struct Offload {
    kernels: &'static dyn Kernels,
    source: Box<dyn HostSource>,
    page_locked: bool,
    dtype: DType,
    len: usize,
    downloads: Arc<Downloads>,
    gradient: Mutex<HostGradient>,
}

/// A reduced gradient on the host.
#[derive(Default)]
struct HostGradient {
    memory: Option<Box<dyn HostMemory>>,
    /// Whether the memory holds a gradient that is not yet added to `sum`.
    is_pending: bool,
    sum: Option<Buffer>,
}

/// Pending copies of one model's gradients to the host, with their device buffers.
pub(crate) struct Downloads {
    pool: Arc<Pool>,
    pending: Mutex<Vec<(Box<dyn PendingCopy>, Buffer)>>,
}

/// A shard on the device, which an all-gather reads. Its memory goes back to the pool.
pub(super) struct Uploaded {
    copying: Box<dyn PendingCopy>,
    buffer: PooledBuffer,
    /// The shard in its own dtype, while the copy converts it.
    _via: Option<PooledBuffer>,
}

impl Offload {
    /// Prepares the copies of a host shard whose layers compute on `device`; `None` if no copy is needed.
    pub(crate) fn of(
        shard: &Tensor,
        policy: OffloadPolicy,
        device: &Device,
        downloads: &Arc<Downloads>,
    ) -> Result<Option<Self>> {
        let OffloadPolicy::Cpu { pin_memory: page_locked } = policy else { return Ok(None) };
        let kernels = kernels::of_device(device)?;
        let Some(source) = kernels.host_source(shard, page_locked)? else { return Ok(None) };
        Ok(Some(Offload {
            kernels,
            source,
            page_locked,
            dtype: to_core_dtype(shard.dtype())?,
            len: shard.elem_count(),
            downloads: downloads.clone(),
            gradient: Mutex::default(),
        }))
    }

    /// Waits until no copy reads the shard.
    pub(super) fn settle(&self) -> Result<()> {
        self.source.settle()
    }

    /// Starts to copy the shard to the device, in `dtype`.
    pub(super) fn upload(&self, dtype: DType) -> Result<Uploaded> {
        let pool = &self.downloads.pool;
        let take = |dtype| Ok::<_, Error>(PooledBuffer::new(pool.take(dtype, self.len)?, pool));
        let buffer = take(dtype)?;
        let via = if dtype == self.dtype { None } else { Some(take(self.dtype)?) };
        let copying = self.source.upload(&buffer, via.as_deref())?;
        Ok(Uploaded { copying, buffer, _via: via })
    }

    /// Begins a unit's downloads: returns the previous unit's buffers to the pool.
    pub(super) fn begin_downloads(&self) -> Result<()> {
        self.downloads.release()
    }

    /// Starts to copy a reduced gradient to the host, where it adds to the stored gradient.
    pub(super) fn download(&self, gradient: Buffer) -> Result<()> {
        let mut own = self.gradient.lock();
        // The copy of an earlier backward may still be in the memory that this copy needs.
        own.accumulate()?;
        let memory = match own.memory.take() {
            Some(memory) => Some(memory),
            None => self.kernels.host_memory(self.dtype, self.len, self.page_locked)?,
        };
        let Some(mut memory) = memory else { bail!("gradients can't be copied from the host to the host") };
        let copying = match memory.download((&gradient).into()) {
            Ok(copying) => copying,
            Err(error) => {
                self.downloads.pool.give(gradient);
                return Err(error);
            }
        };
        self.downloads.pending.lock().push((copying, gradient));
        (own.memory, own.is_pending) = (Some(memory), true);
        if !self.page_locked {
            // The copy is done, and its memory is worth more than allocating it again costs.
            own.accumulate()?;
            own.memory = None;
        }
        Ok(())
    }

    /// Waits for the gradient, and until no copy reads the shard.
    pub(super) fn take_gradient(&self) -> Result<Option<Buffer>> {
        self.downloads.release()?;
        self.settle()?;
        let mut own = self.gradient.lock();
        own.accumulate()?;
        Ok(own.sum.take())
    }

    /// Drops the gradient.
    pub(super) fn clear(&self) {
        let mut own = self.gradient.lock();
        (own.is_pending, own.sum) = (false, None);
        drop(own);
        if let Err(error) = self.downloads.release() {
            tracing::warn!(%error, "dropping gradients that were copied to the host");
        }
    }
}

impl HostGradient {
    /// Waits for the pending copy, and adds it to the sum.
    fn accumulate(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_pending) {
            return Ok(());
        }
        let Some(memory) = &self.memory else { return Ok(()) };
        let (host, more) = (kernels::of_device(&Device::Cpu)?, memory.values()?);
        match &mut self.sum {
            Some(sum) => host.add(sum.into(), more),
            None => {
                let mut sum = host.zeros(more.dtype(), more.len()).map_err(Error::from)?;
                host.copy(more, (&mut sum).into())?;
                self.sum = Some(sum);
                Ok(())
            }
        }
    }
}

impl Downloads {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Downloads { pool, pending: Mutex::default() }
    }

    /// Returns the buffers to the pool. Later computations may use them.
    fn release(&self) -> Result<()> {
        let pending = std::mem::take(&mut *self.pending.lock());
        let mut outcome = Ok(());
        for (copying, buffer) in pending {
            outcome = outcome.and(copying.order());
            self.pool.give(buffer);
        }
        outcome
    }
}

impl Uploaded {
    /// Returns the shard as a tensor for the user's code. Later computations wait for the copy. Its memory leaves the
    /// pool.
    pub(super) fn into_tensor(mut self, shape: &[usize], device: &Device) -> Result<Tensor> {
        self.copying.order()?;
        to_tensor(self.buffer.leave(), shape, device)
    }
}

impl Readable for Uploaded {
    fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn device(&self) -> DeviceId {
        self.buffer.device()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        self.copying.order().map_err(|error| error.to_string())?;
        self.buffer.read(f)
    }

    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        self.copying.view(&self.buffer, f);
        Ok(())
    }
}

impl Drop for Uploaded {
    /// Later computations wait for the copy even if nothing read it, since they may use its memory.
    fn drop(&mut self) {
        if let Err(error) = self.copying.order() {
            tracing::warn!(%error, "returning a copied shard's memory");
        }
    }
}
