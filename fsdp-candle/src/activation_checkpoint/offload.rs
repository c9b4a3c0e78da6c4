//! Inputs of checkpointed closures outside of the memory that computes, between forward and backward.
//!
//! A rank has one thread that copies inputs away behind forward, and back ahead of backward. At most three inputs wait
//! to be copied away; then forward waits for the thread. Backward uses the inputs in the reverse order of forward, so the
//! thread reads one input ahead: the newest one that is older than the one that backward asks for.
//!
//! The graph holds tokens in place of the inputs ([`node_without_values`](crate::graph::node_without_values)), so an
//! input is freed when it is copied away and the model has dropped its handles.

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::io::ErrorKind;
use std::ops::{Bound, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use candle_core::op::BackpropOp;
use candle_core::{Device, Shape, Tensor};
use fsdp_core::{DType, Readable, Writable};
use parking_lot::{Condvar, Mutex};

use super::ranges::Ranges;
use crate::autograd::count_offload;
use crate::disk::{ALIGN, AlignedBuffer, Disk, bypass_page_cache};
use crate::error::{Error, Result};
use crate::kernels;
use crate::storage::{TensorMemory, take, to_core_dtype, to_tensor};
use crate::world::World;

/// Bytes of one read or write of the file.
const CHUNK: usize = 4 << 20;
/// Inputs that wait for the thread, beside the one that it copies and the one that forward is about to pass on.
const QUEUED: usize = 1;

/// A place for the inputs of checkpointed layers between forward and backward, as PyTorch's `save_on_cpu` and
/// torchtune's `OffloadActivations`: see [`CheckpointPolicy::offload`](super::CheckpointPolicy::offload).
///
/// A clone is the same place.
#[derive(Clone)]
pub struct ActivationOffload(Arc<Offload>);

struct Offload {
    shared: Arc<Shared>,
    jobs: SyncSender<Job>,
}

/// What the rank's thread uses as well.
struct Shared {
    rank: usize,
    place: Place,
    /// Inputs that are away, by number.
    live: Mutex<BTreeMap<u64, Weak<Saved>>>,
    next: AtomicU64,
    bytes: AtomicU64,
    /// The first failure to copy an input away that is not reported yet.
    failed: Mutex<Option<Failure>>,
}

enum Place {
    Host,
    Disk { disk: Box<dyn Disk>, dir: PathBuf, ranges: Mutex<Ranges> },
}

enum Job {
    Save(Arc<Saved>),
    Load(Arc<Saved>),
}

#[derive(Clone)]
struct Failure {
    kind: ErrorKind,
    message: String,
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        Failure { kind: ErrorKind::Other, message: error.to_string() }
    }
}

impl ActivationOffload {
    /// Keeps inputs that are on a device in host memory. Inputs in host memory stay where they are.
    pub fn cpu(world: &World) -> Result<Self> {
        Self::start(world.rank(), Place::Host, vec![])
    }

    /// Keeps inputs in a file without a name in an existing directory, for layers on CPUs and devices. Each rank has its
    /// own file, which the system frees when the process ends, even if the process is killed.
    ///
    /// The file grows as needed, and freed parts are used again. Copies need 4 MiB of memory. Reads and writes bypass the page
    /// cache (`O_DIRECT`). A file system without direct I/O is used through the page cache, with a warning.
    ///
    /// Fails with [`Error::ActivationOffload`] if the directory can't be written. The same error of a later read or
    /// write ends the next forward of a checkpointed layer, or the backward that needs the input.
    pub fn disk(world: &World, dir: impl Into<PathBuf>) -> Result<Self> {
        let (rank, dir) = (world.rank(), dir.into());
        let fail = |error: std::io::Error| {
            let message = format!("can't create a file: {error}. Pass a directory that this process may write to");
            Error::ActivationOffload { rank, dir: Some(dir.clone()), kind: error.kind(), message }
        };
        let file = tempfile::tempfile_in(&dir).map_err(fail)?;
        let mut first = AlignedBuffer::zeros(ALIGN).ok_or_else(|| fail(ErrorKind::OutOfMemory.into()))?;
        bypass_page_cache(&file, &mut first, &dir).map_err(fail)?;
        Self::on(rank, Box::new(file), &dir)
    }

    pub(super) fn on(rank: usize, disk: Box<dyn Disk>, dir: &Path) -> Result<Self> {
        let place = Place::Disk { disk, dir: dir.into(), ranges: Mutex::default() };
        let Some(chunk) = AlignedBuffer::zeros(CHUNK) else {
            let message = format!("can't allocate {CHUNK} bytes for copies");
            return Err(Error::ActivationOffload {
                rank,
                dir: Some(dir.into()),
                kind: ErrorKind::OutOfMemory,
                message,
            });
        };
        Self::start(rank, place, vec![chunk])
    }

    fn start(rank: usize, place: Place, chunk: Vec<AlignedBuffer>) -> Result<Self> {
        let shared = Arc::new(Shared {
            rank,
            place,
            live: Mutex::default(),
            next: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failed: Mutex::default(),
        });
        let (jobs, received) = sync_channel(QUEUED);
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("activation-offload".into());
        thread.spawn(move || of_thread.work(&received, chunk)).map_err(|error| {
            let message = format!("can't start a thread: {error}. Raise the limit of processes (`ulimit -u`)");
            shared.error(Failure { kind: error.kind(), message })
        })?;
        Ok(ActivationOffload(Arc::new(Offload { shared, jobs })))
    }

    /// Returns the bytes of this rank's inputs that wait for their graph to be dropped, in host memory or on disk.
    pub fn bytes(&self) -> u64 {
        self.0.shared.bytes.load(Ordering::Relaxed)
    }

    /// Starts to copy an input away. Returns `None` if it stays in memory. Fails if an earlier copy failed.
    pub(super) fn save(&self, tensor: &Tensor) -> candle_core::Result<Option<Arc<Saved>>> {
        let shared = &self.0.shared;
        if let Some(failure) = shared.failed.lock().take() {
            return Err(shared.error(failure).into());
        }
        let is_here = matches!(shared.place, Place::Host) && tensor.device().is_cpu();
        let Ok(dtype) = to_core_dtype(tensor.dtype()) else { return Ok(None) };
        if is_here || tensor.elem_count() == 0 || tensor.device().is_metal() {
            return Ok(None);
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let tensor = tensor.detach().contiguous()?;
        let saved = Arc::new(Saved {
            offload: self.clone(),
            number,
            dtype,
            shape: tensor.shape().clone(),
            device: tensor.device().clone(),
            state: Mutex::new(State::Here(tensor)),
            changed: Condvar::new(),
        });
        shared.live.lock().insert(number, Arc::downgrade(&saved));
        shared.bytes.fetch_add(saved.bytes(), Ordering::Relaxed);
        self.pass_on(Job::Save(saved.clone()))?;
        count_offload();
        Ok(Some(saved))
    }

    fn pass_on(&self, job: Job) -> Result<()> {
        self.0.jobs.send(job).map_err(|_| self.0.shared.error(panicked()))
    }
}

impl Debug for ActivationOffload {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.0.shared.place {
            Place::Host => f.write_str("ActivationOffload(cpu)"),
            Place::Disk { dir, .. } => write!(f, "ActivationOffload({})", dir.display()),
        }
    }
}

fn panicked() -> Failure {
    Failure { kind: ErrorKind::Other, message: "the thread that copies them panicked. Resume from a checkpoint".into() }
}

/// An input that is copied away. Its place is freed when this is dropped.
pub(super) struct Saved {
    offload: ActivationOffload,
    /// Position in the order of forward.
    number: u64,
    dtype: DType,
    shape: Shape,
    device: Device,
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    /// Not copied yet.
    Here(Tensor),
    Away(Copy),
    /// The thread copies it back.
    Loading(Copy),
    Loaded(Copy, Tensor),
    Failed(Failure),
}

/// Where an input was copied to.
#[derive(Clone)]
enum Copy {
    Host(Tensor),
    File(Range<u64>),
}

impl Saved {
    fn bytes(&self) -> u64 {
        (self.shape.elem_count() * self.dtype.size()) as u64
    }

    /// Returns the input. Starts to copy back the one that backward needs next.
    pub(super) fn restore(self: &Arc<Self>) -> candle_core::Result<Tensor> {
        self.ask()?;
        let before = {
            let live = self.offload.0.shared.live.lock();
            live.range((Bound::Unbounded, Bound::Excluded(self.number)))
                .next_back()
                .and_then(|(_, next)| next.upgrade())
        };
        if let Some(before) = before {
            before.ask()?;
        }
        loop {
            // The thread may have copied it away since.
            self.ask()?;
            let mut state = self.state.lock();
            match &*state {
                State::Here(tensor) => return Ok(tensor.clone()),
                State::Loaded(copy, tensor) => {
                    let (copy, tensor) = (copy.clone(), tensor.clone());
                    // Another backward over this graph reads it again.
                    *state = State::Away(copy);
                    return Ok(tensor);
                }
                State::Failed(failure) => {
                    let shared = &self.offload.0.shared;
                    // This reports it, so the next forward does not.
                    shared.failed.lock().take();
                    return Err(shared.error(failure.clone()).into());
                }
                State::Loading(_) => self.changed.wait(&mut state),
                State::Away(_) => {}
            }
        }
    }

    /// Starts to copy the input back, unless it is here.
    fn ask(self: &Arc<Self>) -> Result<()> {
        let mut state = self.state.lock();
        let State::Away(copy) = &*state else { return Ok(()) };
        *state = State::Loading(copy.clone());
        drop(state);
        self.offload.pass_on(Job::Load(self.clone()))
    }

    fn set(&self, state: State) {
        // The old state may free a tensor: outside of the lock.
        let old = std::mem::replace(&mut *self.state.lock(), state);
        self.changed.notify_all();
        drop(old);
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let shared = &self.offload.0.shared;
        shared.live.lock().remove(&self.number);
        shared.bytes.fetch_sub(self.bytes(), Ordering::Relaxed);
        if let State::Away(Copy::File(range)) | State::Loading(Copy::File(range)) | State::Loaded(Copy::File(range), _) =
            self.state.get_mut()
            && let Place::Disk { ranges, .. } = &shared.place
        {
            ranges.lock().give(range.clone());
        }
    }
}

impl Shared {
    fn error(&self, Failure { kind, message }: Failure) -> Error {
        let dir = match &self.place {
            Place::Host => None,
            Place::Disk { dir, .. } => Some(dir.clone()),
        };
        Error::ActivationOffload { rank: self.rank, dir, kind, message }
    }

    /// Runs the jobs of the rank's thread.
    fn work(&self, jobs: &Receiver<Job>, mut chunk: Vec<AlignedBuffer>) {
        for job in jobs {
            let saved = match &job {
                // Its graph was dropped.
                Job::Save(saved) | Job::Load(saved) if Arc::strong_count(saved) == 1 => continue,
                Job::Save(saved) | Job::Load(saved) => saved,
            };
            let run = || match &job {
                Job::Save(_) => self.save(saved, &mut chunk),
                Job::Load(_) => self.load(saved, &mut chunk),
            };
            // A waiting backward must not hang.
            let done = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(panicked()));
            let failed = |failure: Failure| {
                if matches!(job, Job::Save(_)) {
                    self.failed.lock().get_or_insert(failure.clone());
                }
                State::Failed(failure)
            };
            if let Some(state) = done.unwrap_or_else(|failure| Some(failed(failure))) {
                saved.set(state);
            }
        }
    }

    /// Copies an input away.
    fn save(&self, saved: &Saved, chunk: &mut [AlignedBuffer]) -> std::result::Result<Option<State>, Failure> {
        let tensor = match &*saved.state.lock() {
            State::Here(tensor) => tensor.clone(),
            _ => return Ok(None),
        };
        let (Place::Disk { disk, ranges, .. }, [chunk, ..]) = (&self.place, chunk) else {
            return Ok(Some(State::Away(Copy::Host(tensor.to_device(&Device::Cpu)?))));
        };
        let range = ranges.lock().take(saved.bytes().next_multiple_of(ALIGN as u64));
        let written = chunks(saved, &tensor, &range, |part, at, bytes| {
            let block = &mut chunk.bytes_mut()[..bytes.next_multiple_of(ALIGN)];
            part.read(&mut |values| block[..bytes].copy_from_slice(values)).map_err(candle_core::Error::msg)?;
            disk.write(block, at).map_err(|error| failed("write", &error))
        });
        match written {
            Ok(()) => Ok(Some(State::Away(Copy::File(range)))),
            Err(failure) => {
                ranges.lock().give(range);
                Err(failure)
            }
        }
    }

    /// Copies an input back, to a variable's memory: the graph of the second run begins with it.
    fn load(&self, saved: &Saved, chunk: &mut [AlignedBuffer]) -> std::result::Result<Option<State>, Failure> {
        let copy = match &*saved.state.lock() {
            State::Loading(copy) => copy.clone(),
            _ => return Ok(None),
        };
        let values = match (&copy, &self.place, chunk) {
            (Copy::Host(tensor), ..) => tensor.to_device(&saved.device)?,
            (Copy::File(range), Place::Disk { disk, .. }, [chunk, ..]) => {
                let kernels = kernels::of_device(&saved.device).map_err(candle_core::Error::from)?;
                let memory = kernels.zeros(saved.dtype, saved.shape.elem_count()).map_err(Error::from);
                let memory = memory.map_err(candle_core::Error::from)?;
                let values = to_tensor(memory, saved.shape.dims(), &saved.device)?;
                chunks(saved, &values, range, |part, at, bytes| {
                    let block = &mut chunk.bytes_mut()[..bytes.next_multiple_of(ALIGN)];
                    disk.read(block, at).map_err(|error| failed("read", &error))?;
                    let write = part.write(&mut |values| values.copy_from_slice(&block[..bytes]));
                    Ok(write.map_err(candle_core::Error::msg)?)
                })?;
                values
            }
            _ => return Err(panicked()),
        };
        let variable = Tensor::from_storage(take(&values)?, saved.shape.clone(), BackpropOp::none(), true);
        Ok(Some(State::Loaded(copy, variable)))
    }
}

/// Calls `f` with each part of a tensor, its place in the file, and its bytes.
fn chunks(
    saved: &Saved,
    tensor: &Tensor,
    range: &Range<u64>,
    mut f: impl FnMut(TensorMemory, u64, usize) -> std::result::Result<(), Failure>,
) -> std::result::Result<(), Failure> {
    let (flat, size) = (tensor.flatten_all()?, saved.dtype.size());
    let (mut first, elements, mut at) = (0, tensor.elem_count(), range.start);
    while first < elements {
        let count = (CHUNK / size).min(elements - first);
        f(TensorMemory(flat.narrow(0, first, count)?), at, count * size)?;
        first += count;
        at += (count * size) as u64;
    }
    Ok(())
}

fn failed(doing: &str, error: &std::io::Error) -> Failure {
    let then = match error.kind() {
        ErrorKind::StorageFull => "Free space, or use another directory",
        _ => "If the disk fails again, use another directory",
    };
    Failure { kind: error.kind(), message: format!("can't {doing} them: {error}. {then}") }
}
