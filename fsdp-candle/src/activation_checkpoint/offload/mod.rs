//! Inputs of checkpointed closures outside of the memory that computes, between forward and backward.
//!
//! The graph holds tokens in place of the inputs ([`node_without_values`](crate::graph::node_without_values)), so an
//! input is freed when it is copied away and the model has dropped its handles. Backward uses the inputs in the reverse
//! order of forward. When it asks for one, the next older input is fetched as well.

mod file;
mod host;
mod ranges;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::io::ErrorKind;
use std::ops::Bound;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use candle_core::{Device, Shape, Tensor};
use fsdp_core::DType;
use parking_lot::Mutex;

use crate::autograd::count_offload;
#[cfg(test)]
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::storage::to_core_dtype;
use crate::world::World;
use file::FilePlace;
use host::HostPlace;

/// A place for the inputs of checkpointed layers between forward and backward, as PyTorch's `save_on_cpu` and
/// torchtune's `OffloadActivations`: see [`CheckpointPolicy::offload`](super::CheckpointPolicy::offload).
///
/// A clone is the same place.
#[derive(Clone)]
pub struct ActivationOffload(Arc<Offload>);

struct Offload {
    place: Place,
    /// Inputs that are away, by number.
    live: Mutex<BTreeMap<u64, Weak<Saved>>>,
    next: AtomicU64,
    bytes: Arc<AtomicU64>,
}

enum Place {
    Host(Arc<HostPlace>),
    File(Arc<FilePlace>),
}

impl ActivationOffload {
    /// Keeps inputs that are on a device in page-locked host memory. Copies run beside the computation. Inputs in host
    /// memory stay where they are.
    ///
    /// The memory is reused in later steps. On the device are two inputs that are being copied away, and in backward one
    /// that is copied back ahead of its use.
    pub fn cpu(world: &World) -> Self {
        Self::on(Place::Host(HostPlace::new(world.rank())))
    }

    /// Keeps inputs in a file without a name in an existing directory, for layers on CPUs and devices. Each rank has its
    /// own file, which the system frees when the process ends, even if the process is killed.
    ///
    /// The file grows as needed, and freed parts are used again. Copies need 4 MiB of memory, and at most three inputs wait
    /// for them. Reads and writes bypass the page cache (`O_DIRECT`). A file system without direct I/O is used through the
    /// page cache, with a warning.
    ///
    /// Fails with [`Error::ActivationOffload`] if the directory can't be written. The same error of a later read or
    /// write ends the next forward of a checkpointed layer, or the backward that needs the input.
    pub fn disk(world: &World, dir: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self::on(Place::File(FilePlace::create(world.rank(), dir.into())?)))
    }

    #[cfg(test)]
    fn on_disk(rank: usize, disk: Box<dyn Disk>, dir: &Path) -> Result<Self> {
        Ok(Self::on(Place::File(FilePlace::new(rank, disk, dir)?)))
    }

    fn on(place: Place) -> Self {
        let (live, next, bytes) = Default::default();
        ActivationOffload(Arc::new(Offload { place, live, next, bytes }))
    }

    /// Returns the bytes of this rank's inputs that wait for their graph to be dropped, in host memory or on disk.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Starts to copy an input away. Returns `None` if it stays in memory. Fails if an earlier copy failed.
    pub(super) fn save(&self, tensor: &Tensor) -> candle_core::Result<Option<Arc<Saved>>> {
        let offload = &self.0;
        let Ok(dtype) = to_core_dtype(tensor.dtype()) else { return Ok(None) };
        if tensor.elem_count() == 0 || tensor.device().is_metal() {
            return Ok(None);
        }
        let tensor = tensor.detach().contiguous()?;
        let (shape, device) = (tensor.shape().clone(), tensor.device().clone());
        let bytes = Bytes::of(&offload.bytes, (tensor.elem_count() * dtype.size()) as u64);
        let input = Input { dtype, shape, device, bytes };
        let copy: Arc<dyn Away> = match &offload.place {
            Place::Host(place) => match place.save(input, tensor)? {
                Some(copy) => copy,
                None => return Ok(None),
            },
            Place::File(place) => place.save(input, tensor)?,
        };
        let number = offload.next.fetch_add(1, Ordering::Relaxed);
        let saved = Arc::new(Saved { offload: offload.clone(), number, copy });
        offload.live.lock().insert(number, Arc::downgrade(&saved));
        count_offload();
        Ok(Some(saved))
    }
}

impl Debug for ActivationOffload {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.0.place {
            Place::Host(_) => f.write_str("ActivationOffload(cpu)"),
            Place::File(place) => write!(f, "ActivationOffload({})", place.dir().display()),
        }
    }
}

/// The copy of an input in a place.
trait Away: Send + Sync {
    /// Starts to copy the input back, unless it is here.
    fn fetch(self: Arc<Self>) -> Result<()>;

    /// Returns the input when it is back. Another backward over the graph may fetch it again.
    fn take(self: Arc<Self>) -> Result<Tensor>;
}

/// An input that is copied away. Its place is freed when this is dropped.
pub(super) struct Saved {
    offload: Arc<Offload>,
    /// Position in the order of forward.
    number: u64,
    copy: Arc<dyn Away>,
}

impl Saved {
    /// Returns the input. Starts to copy back the one that backward needs next.
    pub(super) fn restore(&self) -> candle_core::Result<Tensor> {
        self.copy.clone().fetch()?;
        let older = {
            let live = self.offload.live.lock();
            let older = live.range((Bound::Unbounded, Bound::Excluded(self.number))).next_back();
            older.and_then(|(_, saved)| saved.upgrade())
        };
        if let Some(older) = older {
            older.copy.clone().fetch()?;
        }
        Ok(self.copy.clone().take()?)
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        self.offload.live.lock().remove(&self.number);
    }
}

/// An input without its values.
struct Input {
    dtype: DType,
    shape: Shape,
    device: Device,
    bytes: Bytes,
}

/// Bytes that count until they are dropped.
struct Bytes {
    total: Arc<AtomicU64>,
    bytes: u64,
}

impl Bytes {
    fn of(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Bytes { total: total.clone(), bytes }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Why inputs could not be copied.
#[derive(Clone)]
struct Failure {
    kind: ErrorKind,
    message: String,
}

impl Failure {
    fn of(self, rank: usize, dir: Option<PathBuf>) -> Error {
        Error::ActivationOffload { rank, dir, kind: self.kind, message: self.message }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        Failure { kind: ErrorKind::Other, message: error.to_string() }
    }
}
