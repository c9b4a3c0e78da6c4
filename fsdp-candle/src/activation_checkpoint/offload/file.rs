//! Inputs in a file.
//!
//! A rank has one thread that copies inputs away behind forward, and back ahead of backward. At most three inputs wait
//! to be copied away; then forward waits for the thread.

use std::io::ErrorKind;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use candle_core::Tensor;
use candle_core::op::BackpropOp;
use fsdp_core::{Readable, Writable, file_limit};
use parking_lot::{Condvar, Mutex};

use super::ranges::Ranges;
use super::{Away, Failure, Input};
use crate::disk::{ALIGN, AlignedBuffer, Disk, bypass_page_cache};
use crate::error::{Error, Result};
use crate::kernels;
use crate::storage::{TensorMemory, take, to_tensor};

/// Bytes of one read or write of the file.
const CHUNK: usize = 4 << 20;
/// Inputs that wait for the thread, beside the one that it copies and the one that forward is about to pass on.
const QUEUED: usize = 1;

/// The file of a rank's inputs.
pub(super) struct FilePlace {
    file: Arc<ActivationFile>,
    jobs: SyncSender<Job>,
}

/// The file, and what its thread and callers share.
struct ActivationFile {
    rank: usize,
    disk: Box<dyn Disk>,
    dir: PathBuf,
    ranges: Mutex<Ranges>,
    /// The first failure to copy an input away that is not reported yet.
    failed: Mutex<Option<Failure>>,
}

enum Job {
    Save(Arc<OnFile>),
    Load(Arc<OnFile>),
}

impl FilePlace {
    pub(super) fn create(rank: usize, dir: PathBuf) -> Result<Arc<Self>> {
        let fail = |error: std::io::Error| {
            let message = format!("can't create a file: {error}. Pass a directory that this process may write to");
            Failure { kind: error.kind(), message }.of(rank, Some(dir.clone()))
        };
        let file = tempfile::tempfile_in(&dir).map_err(fail)?;
        let mut first = AlignedBuffer::zeros(ALIGN).ok_or_else(|| fail(ErrorKind::OutOfMemory.into()))?;
        bypass_page_cache(&file, &mut first, &dir).map_err(fail)?;
        Self::new(rank, Box::new(file), &dir)
    }

    pub(super) fn new(rank: usize, disk: Box<dyn Disk>, dir: &Path) -> Result<Arc<Self>> {
        let (ranges, failed) = Default::default();
        let file = Arc::new(ActivationFile { rank, disk, dir: dir.into(), ranges, failed });
        let chunk = AlignedBuffer::zeros(CHUNK).ok_or_else(|| {
            let message = format!("can't allocate {CHUNK} bytes for copies");
            file.error(Failure { kind: ErrorKind::OutOfMemory, message })
        })?;
        let (jobs, received) = sync_channel(QUEUED);
        let of_thread = file.clone();
        let thread = std::thread::Builder::new().name("activation-offload".into());
        thread.spawn(move || of_thread.work(&received, chunk)).map_err(|error| {
            let message = format!("can't start a thread: {error}. Raise the limit of processes (`ulimit -u`)");
            file.error(Failure { kind: error.kind(), message })
        })?;
        Ok(Arc::new(FilePlace { file, jobs }))
    }

    pub(super) fn dir(&self) -> &Path {
        &self.file.dir
    }

    /// Starts to copy an input to the file. Fails if an earlier copy failed.
    pub(super) fn save(self: &Arc<Self>, input: Input, tensor: Tensor) -> Result<Arc<OnFile>> {
        if let Some(failure) = self.file.failed.lock().take() {
            return Err(self.file.error(failure));
        }
        let (state, changed) = (Mutex::new(State::Here(tensor)), Condvar::new());
        let saved = Arc::new(OnFile { place: self.clone(), state, changed, input });
        self.pass_on(Job::Save(saved.clone()))?;
        Ok(saved)
    }

    fn pass_on(&self, job: Job) -> Result<()> {
        self.jobs.send(job).map_err(|_| self.file.error(panicked()))
    }
}

fn panicked() -> Failure {
    Failure { kind: ErrorKind::Other, message: "the thread that copies them panicked. Resume from a checkpoint".into() }
}

/// An input in a file.
pub(super) struct OnFile {
    place: Arc<FilePlace>,
    state: Mutex<State>,
    changed: Condvar,
    // Dropped last: its bytes count until the range is free.
    input: Input,
}

enum State {
    /// Not copied yet.
    Here(Tensor),
    Away(Range<u64>),
    /// The thread copies it back.
    Loading(Range<u64>),
    Loaded(Range<u64>, Tensor),
    Failed(Failure),
}

impl OnFile {
    fn set(&self, state: State) {
        // The old state may free a tensor: outside of the lock.
        let old = std::mem::replace(&mut *self.state.lock(), state);
        self.changed.notify_all();
        drop(old);
    }
}

impl Away for OnFile {
    fn fetch(self: Arc<Self>) -> Result<()> {
        let mut state = self.state.lock();
        let State::Away(range) = &*state else { return Ok(()) };
        *state = State::Loading(range.clone());
        drop(state);
        self.place.pass_on(Job::Load(self.clone()))
    }

    fn take(self: Arc<Self>) -> Result<Tensor> {
        loop {
            // The thread may have copied it away since.
            self.clone().fetch()?;
            let mut state = self.state.lock();
            match &*state {
                State::Here(tensor) => return Ok(tensor.clone()),
                State::Loaded(range, tensor) => {
                    let (range, tensor) = (range.clone(), tensor.clone());
                    *state = State::Away(range);
                    return Ok(tensor);
                }
                State::Failed(failure) => {
                    let file = &self.place.file;
                    // This reports it, so the next forward does not.
                    file.failed.lock().take();
                    return Err(file.error(failure.clone()));
                }
                State::Loading(_) => self.changed.wait(&mut state),
                State::Away(_) => {}
            }
        }
    }
}

impl Drop for OnFile {
    fn drop(&mut self) {
        if let State::Away(range) | State::Loading(range) | State::Loaded(range, _) = self.state.get_mut() {
            self.place.file.ranges.lock().give(range.clone());
        }
    }
}

impl ActivationFile {
    fn error(&self, failure: Failure) -> Error {
        failure.of(self.rank, Some(self.dir.clone()))
    }

    /// Runs the jobs of the rank's thread.
    fn work(&self, jobs: &Receiver<Job>, mut chunk: AlignedBuffer) {
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
    fn save(&self, saved: &OnFile, chunk: &mut AlignedBuffer) -> std::result::Result<Option<State>, Failure> {
        let tensor = match &*saved.state.lock() {
            State::Here(tensor) => tensor.clone(),
            _ => return Ok(None),
        };
        let range = self.ranges.lock().take(saved.input.bytes.bytes.next_multiple_of(ALIGN as u64));
        let written = chunks(&saved.input, &tensor, &range, |part, at, bytes| {
            let block = &mut chunk.bytes_mut()[..bytes.next_multiple_of(ALIGN)];
            part.read(&mut |values| block[..bytes].copy_from_slice(values)).map_err(candle_core::Error::msg)?;
            self.disk.write(block, at).map_err(|error| failed("write", &error))
        });
        match written {
            Ok(()) => Ok(Some(State::Away(range))),
            Err(failure) => {
                self.ranges.lock().give(range);
                Err(failure)
            }
        }
    }

    /// Copies an input back, to a variable's memory: the graph of the second run begins with it.
    fn load(&self, saved: &OnFile, chunk: &mut AlignedBuffer) -> std::result::Result<Option<State>, Failure> {
        let range = match &*saved.state.lock() {
            State::Loading(range) => range.clone(),
            _ => return Ok(None),
        };
        let Input { dtype, shape, device, .. } = &saved.input;
        let kernels = kernels::of_device(device).map_err(candle_core::Error::from)?;
        let memory = kernels.zeros(*dtype, shape.elem_count()).map_err(Error::from);
        let values = to_tensor(memory.map_err(candle_core::Error::from)?, shape.dims(), device)?;
        chunks(&saved.input, &values, &range, |part, at, bytes| {
            let block = &mut chunk.bytes_mut()[..bytes.next_multiple_of(ALIGN)];
            self.disk.read(block, at).map_err(|error| failed("read", &error))?;
            let write = part.write(&mut |values| values.copy_from_slice(&block[..bytes]));
            Ok(write.map_err(candle_core::Error::msg)?)
        })?;
        let variable = Tensor::from_storage(take(&values)?, shape.clone(), BackpropOp::none(), true);
        Ok(Some(State::Loaded(range, variable)))
    }
}

/// Calls `f` with each part of a tensor, its place in the file, and its bytes.
fn chunks(
    input: &Input,
    tensor: &Tensor,
    range: &Range<u64>,
    mut f: impl FnMut(TensorMemory, u64, usize) -> std::result::Result<(), Failure>,
) -> std::result::Result<(), Failure> {
    let (flat, size) = (tensor.flatten_all()?, input.dtype.size());
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
    let advice = file_limit::advice(error);
    let then = match error.kind() {
        ErrorKind::StorageFull => "Free space, or use another directory",
        ErrorKind::FileTooLarge => advice.as_deref().unwrap_or("Use another directory"),
        _ => "If the disk fails again, use another directory",
    };
    Failure { kind: error.kind(), message: format!("can't {doing} them: {error}. {then}") }
}
