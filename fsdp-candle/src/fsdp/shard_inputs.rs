//! The shards of a unit as inputs of an all-gather, in the compute dtype.
//!
//! On a device, shards of another dtype are cast on a stream beside the compute stream, as FSDP2 casts them on its stream
//! for copy-ins. The all-gather waits for the casts, and computations wait for them only when the all-gather is done.

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::{Buffer, DType as CoreDType, DeviceId, Readable, View};
use parking_lot::Mutex;

use super::shard_reader::ShardReader;
use crate::kernels::{self, Casts, PendingCopy};
use crate::storage::{Pool, to_core_dtype};

/// What the inputs of a unit's all-gather share.
pub(super) struct ShardInputs {
    pub(super) pool: Arc<Pool>,
    pub(super) on_disk: Arc<ShardReader>,
    casts: Arc<ShardCasts>,
}

impl ShardInputs {
    pub(super) fn new(pool: &Arc<Pool>) -> Self {
        ShardInputs { pool: pool.clone(), on_disk: ShardReader::new(pool), casts: Arc::default() }
    }

    /// Adds a shard on a device, which is cast with the others.
    pub(super) fn cast(&self, shard: &Tensor, dtype: DType) -> Result<Arc<dyn Readable>> {
        let dtype = to_core_dtype(dtype)?;
        let mut shards = self.casts.shards.lock();
        shards.push((shard.clone(), dtype));
        let device = kernels::device_id(shard.device())?;
        Ok(Arc::new(CastShard {
            at: shards.len() - 1,
            len: shard.elem_count(),
            dtype,
            device,
            casts: self.casts.clone(),
        }))
    }

    /// Starts the casts of all shards. Call before an engine reads one.
    pub(super) fn start(&self) -> Result<()> {
        let shards = self.casts.shards.lock();
        let Some((first, _)) = shards.first() else { return Ok(()) };
        let Some(started) = kernels::of_device(first.device())?.casts(&shards)? else {
            bail!("shards on {:?} can't be cast beside computations", first.device())
        };
        // Started once, after the last shard was added.
        let _ = self.casts.started.set(Started(started));
        Ok(())
    }
}

/// The casts of a unit's shards. The casts' memory is freed when no input is left.
#[derive(Default)]
struct ShardCasts {
    // Dropped before the shards, which computations may reuse from then on.
    started: OnceLock<Started>,
    /// Shards to cast, each with the dtype of its copy.
    shards: Mutex<Vec<(Tensor, CoreDType)>>,
}

struct Started(Casts);

impl Drop for Started {
    /// Later computations wait for the casts even if no engine read them: they may use the memory, or write the shards.
    fn drop(&mut self) {
        if let Err(error) = self.0.copying.order() {
            tracing::warn!(%error, "freeing the memory of cast shards");
        }
    }
}

/// A shard that is cast beside computations.
struct CastShard {
    casts: Arc<ShardCasts>,
    at: usize,
    len: usize,
    dtype: CoreDType,
    device: DeviceId,
}

impl CastShard {
    fn started(&self) -> std::result::Result<(&Buffer, &dyn PendingCopy), String> {
        let Started(casts) = self.casts.started.get().ok_or("the cast of a shard was not started")?;
        let buffer = casts.buffers.get(self.at).ok_or("a shard was added after the casts had started")?;
        Ok((buffer, &*casts.copying))
    }
}

impl Readable for CastShard {
    fn dtype(&self) -> CoreDType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        let (buffer, copying) = self.started()?;
        copying.order().map_err(|error| error.to_string())?;
        Readable::read(buffer, f)
    }

    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        let (buffer, copying) = self.started()?;
        copying.view(buffer, f);
        Ok(())
    }
}
