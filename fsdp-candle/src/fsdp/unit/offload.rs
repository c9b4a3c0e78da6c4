//! A shard and its reduced gradient in the host's memory, while layers compute on a device.
//!
//! # Order
//! A shard goes to the device before each all-gather ([`Offload::upload`]), on a stream for such copies: the all-gather
//! waits for its copy, and nothing else does. A reduced gradient comes back on another stream ([`Offload::download`]);
//! what is computed next waits for it only when the next unit's gradients come, and the host when backward ends.
//!
//! Who writes a shard waits for the copies that read it. That are two places. Everything in this crate gets the shard
//! from [`FsdpParam::var`](super::FsdpParam::var), which waits. And backward waits before it hands gradients out, so
//! that an optimizer may have kept the variables: without gradients it writes nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Result, Tensor, bail};
use fsdp_core::{Allocator, Buffer, DType, DeviceId, Readable, View};

use crate::error::Error;
use crate::fsdp::policy::OffloadPolicy;
use crate::kernels::{self, HostSink, HostSource, Kernels, PendingCopy};
use crate::storage::{Pool, to_core_dtype, to_tensor};

/// What an offloaded parameter has besides its shard.
pub(crate) struct Offload {
    kernels: &'static dyn Kernels,
    source: Box<dyn HostSource>,
    page_locked: bool,
    dtype: DType,
    len: usize,
    downloads: Arc<Downloads>,
    gradient: Mutex<HostGradient>,
}

/// The reduced gradient, on the host.
#[derive(Default)]
struct HostGradient {
    sink: Option<Box<dyn HostSink>>,
    /// Whether the sink has what is to be added.
    is_landing: bool,
    sum: Option<Buffer>,
}

/// The buffers of one model's gradients that are on their way to the host.
pub(crate) struct Downloads {
    pool: Arc<Pool>,
    leaving: Mutex<Vec<(Box<dyn PendingCopy>, Buffer)>>,
}

/// A shard on the device, for an all-gather to read. Its memory goes back to the pool.
pub(super) struct Uploaded {
    copying: Option<Box<dyn PendingCopy>>,
    buffer: Option<Buffer>,
    via: Option<Buffer>,
    pool: Arc<Pool>,
}

impl Offload {
    /// What a shard on the host needs to be computed with on `device`; `None` where it is there already.
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

    fn gradient(&self) -> MutexGuard<'_, HostGradient> {
        self.gradient.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until the shard may be written.
    pub(super) fn settle(&self) -> Result<()> {
        self.source.settle()
    }

    /// Starts to copy the shard to the device, in this dtype.
    pub(super) fn upload(&self, dtype: DType) -> Result<Uploaded> {
        let pool = self.downloads.pool.clone();
        let take = |dtype| pool.take(dtype, self.len).map_err(Error::from);
        let mut uploaded = Uploaded { copying: None, buffer: Some(take(dtype)?), via: None, pool: pool.clone() };
        if dtype != self.dtype {
            uploaded.via = Some(take(self.dtype)?);
        }
        if let Some(buffer) = &uploaded.buffer {
            uploaded.copying = Some(self.source.upload(buffer, uploaded.via.as_ref())?);
        }
        Ok(uploaded)
    }

    /// Begins a unit's downloads: gives the buffers of the last one's back.
    pub(super) fn begin_downloads(&self) -> Result<()> {
        self.downloads.release()
    }

    /// Starts to copy a reduced gradient to the host, where it adds to what is there.
    pub(super) fn download(&self, gradient: Buffer) -> Result<()> {
        let mut own = self.gradient();
        // What an earlier backward has left in the memory that this one needs.
        own.land()?;
        let sink = match own.sink.take() {
            Some(sink) => Some(sink),
            None => self.kernels.host_sink(self.dtype, self.len, self.page_locked)?,
        };
        let Some(mut sink) = sink else { bail!("gradients can't be copied from the host to the host") };
        let copying = match sink.download(&gradient) {
            Ok(copying) => copying,
            Err(error) => {
                self.downloads.pool.give(gradient);
                return Err(error);
            }
        };
        self.downloads.leaving().push((copying, gradient));
        (own.sink, own.is_landing) = (Some(sink), true);
        if !self.page_locked {
            // It is there already, and the memory is worth more than what it takes to allocate it again.
            own.land()?;
            own.sink = None;
        }
        Ok(())
    }

    /// Blocks until the gradient is there, and the shard may be written.
    pub(super) fn take_gradient(&self) -> Result<Option<Buffer>> {
        self.downloads.release()?;
        self.settle()?;
        let mut own = self.gradient();
        own.land()?;
        Ok(own.sum.take())
    }

    /// Drops the gradient: the step failed.
    pub(super) fn forget(&self) {
        let mut own = self.gradient();
        (own.is_landing, own.sum) = (false, None);
        drop(own);
        if let Err(error) = self.downloads.release() {
            tracing::warn!(%error, "forgetting gradients that were copied to the host");
        }
    }
}

impl HostGradient {
    /// Adds what was copied to what is there. Blocks until it is there.
    fn land(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_landing) {
            return Ok(());
        }
        let Some(sink) = &self.sink else { return Ok(()) };
        let (host, more) = (kernels::of_device(&Device::Cpu)?, sink.values()?);
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
        Downloads { pool, leaving: Mutex::default() }
    }

    fn leaving(&self) -> MutexGuard<'_, Vec<(Box<dyn PendingCopy>, Buffer)>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the buffers back, which what is computed next may then use.
    fn release(&self) -> Result<()> {
        let leaving = std::mem::take(&mut *self.leaving());
        let mut outcome = Ok(());
        for (copying, buffer) in leaving {
            outcome = outcome.and(copying.order());
            self.pool.give(buffer);
        }
        outcome
    }
}

impl Uploaded {
    /// The shard as a tensor, which what is computed next waits for: for the user's code. It is the pool's no more.
    pub(super) fn into_tensor(mut self, shape: &[usize], device: &Device) -> Result<Tensor> {
        if let Some(copying) = &self.copying {
            copying.order()?;
        }
        match self.buffer.take() {
            Some(buffer) => {
                self.pool.leave(&buffer);
                to_tensor(buffer, shape, device)
            }
            None => bail!("a shard was taken twice"),
        }
    }
}

impl Readable for Uploaded {
    fn dtype(&self) -> DType {
        self.buffer.as_ref().map_or(DType::U8, Buffer::dtype)
    }

    fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::len)
    }

    fn device(&self) -> DeviceId {
        self.buffer.as_ref().map_or(DeviceId::Host, Buffer::device)
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        if let Some(copying) = &self.copying {
            copying.order().map_err(|error| error.to_string())?;
        }
        self.buffer.as_ref().map_or(Ok(()), |buffer| buffer.read(f))
    }

    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        match (&self.copying, &self.buffer) {
            (Some(copying), Some(buffer)) => copying.view(buffer, f),
            _ => return Err("a shard was not copied to the device".into()),
        }
        Ok(())
    }
}

impl Drop for Uploaded {
    /// What is computed next waits for the copy, whether anything has read it or not: the memory is free for it.
    fn drop(&mut self) {
        if let Some(copying) = self.copying.take()
            && let Err(error) = copying.order()
        {
            tracing::warn!(%error, "giving a copied shard's memory back");
        }
        self.buffer.take().into_iter().chain(self.via.take()).for_each(|buffer| self.pool.give(buffer));
    }
}
