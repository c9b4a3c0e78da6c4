//! The shards of a unit as inputs of an all-gather, in the compute dtype.
//!
//! On a device, shards of another dtype are cast on a stream beside the compute stream, as FSDP2 casts them on its stream
//! for copy-ins. The all-gather waits for the casts, and computations wait for them only when the all-gather is done.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::{DType as CoreDType, DeviceId, Readable, View};
use parking_lot::Mutex;

use super::shard_reader::ShardReader;
use crate::kernels::{self, Casts};
use crate::storage::{Pool, to_core_dtype};

/// Memory and loaders that the inputs of a unit's all-gather share.
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
        let (at, len, device) = (shards.len() - 1, shard.elem_count(), kernels::device_id(shard.device())?);
        Ok(Arc::new(CastShard { at, len, dtype, device, casts: self.casts.clone() }))
    }
}

/// The casts of a unit's shards, all at once. They start when an engine reads the first, and their memory is freed when no
/// input is left.
#[derive(Default)]
struct ShardCasts {
    // Dropped before the shards, which computations may write from then on.
    started: Mutex<Option<Started>>,
    /// Shards to cast, each with the dtype of its copy.
    shards: Mutex<Vec<(Tensor, CoreDType)>>,
}

struct Started(Casts);

impl ShardCasts {
    fn start(&self) -> Result<Started> {
        let shards = self.shards.lock();
        let Some((first, _)) = shards.first() else { bail!("casts of a unit without shards") };
        match kernels::of_device(first.device())?.casts(&shards)? {
            Some(started) => Ok(Started(started)),
            None => bail!("shards on {:?} can't be cast beside computations", first.device()),
        }
    }

    /// Calls `f` with the casts, which start now if they have not.
    fn with<T>(&self, f: impl FnOnce(&Casts) -> T) -> std::result::Result<T, String> {
        let mut started = self.started.lock();
        let Started(casts) = match &mut *started {
            Some(started) => started,
            none => none.insert(self.start().map_err(|error| error.to_string())?),
        };
        Ok(f(casts))
    }
}

impl Drop for Started {
    /// Later computations wait for the casts, even if the collective failed: they may use the memory, or write the shards.
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
        self.casts.with(|casts| {
            casts.copying.order().map_err(|error| error.to_string())?;
            Readable::read(&casts.buffers[self.at], f)
        })?
    }

    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        self.casts.with(|casts| casts.copying.view(&casts.buffers[self.at], f))
    }
}
