//! Saving on a background thread.
//!
//! The thread has a process group of its own, so that its collectives never queue between the collectives of training.
//! The calls of [`AsyncSaver`] agree over the caller's group instead: an error or a refusal is the same on every rank.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use fsdp_core::{Buffer, ProcessGroup, Readable};
use rayon::prelude::*;

use crate::checkpoint::agree::{agree, for_purpose};
use crate::error::chain;
use crate::safetensors::read_bytes;
use crate::store::split;
use crate::{Error, HostDirs, Result, SaveOptions, SaveState, SaveSummary, TensorShard, keep_newest, save_with};

/// Behavior of [`AsyncSaver::save`] while the previous save is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenBusy {
    /// Waits for the previous save.
    #[default]
    Wait,
    /// Returns [`Error::Busy`] on every rank if any rank is still writing.
    Refuse,
}

/// Saves checkpoints in the background, like PyTorch's `async_save`.
///
/// [`AsyncSaver::save`] copies the state to buffers, which are reused, and returns. A thread then saves the copy over
/// its own process group. One save runs at a time. If it fails, the next call of [`AsyncSaver::save`],
/// [`AsyncSaver::wait`] or [`AsyncSaver::finish`] returns the error on every rank. No rank waits longer than the
/// group's timeout.
///
/// Call [`AsyncSaver::finish`] before the program ends. Dropping the saver also waits for the save, but only logs a
/// failure. `std::process::exit` does not wait, and leaves the checkpoint unfinished.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_ckpt::{AsyncSaver, SaveState, TensorShard, WhenBusy, latest};
/// use fsdp_core::{Buffer, MeshLayout, process_group::local};
///
/// let root = tempfile::tempdir()?;
/// local::try_run(2, |group| {
///     let mut saver = AsyncSaver::new(group, WhenBusy::Wait)?;
///     for step in [10, 20] {
///         let weight = TensorShard::whole("weight", &[3], Arc::new(Buffer::F32(vec![step as f32; 3])));
///         let mesh = MeshLayout::new(&[("dp", 2)])?;
///         let state = SaveState { mesh, tensors: vec![weight], values: Default::default() };
///         saver.save(&root.path().join(format!("step-{step}")), &state)?;
///         // Here training goes on, and may change the weight.
///     }
///     saver.finish()
/// })?;
/// assert_eq!(latest(root.path())?, Some(root.path().join("step-20")));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct AsyncSaver {
    /// The caller's group.
    group: ProcessGroup,
    /// The group of the background thread; `None` after a failure, since a failed group may not recover.
    own: Option<ProcessGroup>,
    when_busy: WhenBusy,
    keep: Option<NonZeroUsize>,
    staged: StagedTensors,
    running: Option<Running>,
}

/// A running save.
struct Running {
    path: PathBuf,
    thread: JoinHandle<Result<SaveSummary>>,
}

impl Running {
    fn join(self) -> Result<SaveSummary> {
        let outcome = self.thread.join().unwrap_or_else(|_| Err(Error::Argument("its thread panicked".into())));
        outcome.map_err(|error| Error::AsyncSave { path: self.path, source: Box::new(error) })
    }
}

impl AsyncSaver {
    /// Splits `group` once, for the background thread. Collective.
    ///
    /// # Errors
    /// [`Error::Group`].
    pub fn new(group: ProcessGroup, when_busy: WhenBusy) -> Result<Self> {
        let own = Some(group.split(0, group.rank())?);
        Ok(AsyncSaver { group, own, when_busy, keep: None, staged: StagedTensors::default(), running: None })
    }

    /// Keeps only the `keep` newest checkpoints after each save: rank 0 calls [`keep_newest`], or with
    /// [`SaveOptions::host`] the ranks call [`HostDirs::keep_newest`]. A failure to remove is only logged.
    pub fn keep_newest(mut self, keep: NonZeroUsize) -> Self {
        self.keep = Some(keep);
        self
    }

    /// Allocates the buffers for these tensors, so that the first save blocks no longer than later ones. Does not
    /// communicate.
    pub fn reserve(&mut self, tensors: &[TensorShard]) {
        self.staged.reserve(tensors);
    }

    /// Copies the state and starts to save it as the directory `dir`, see [`crate::save`]. Collective. The tensors may
    /// change when this returns.
    ///
    /// # Errors
    /// On every rank: the error of the previous save (call again to save this state); [`Error::Busy`] with
    /// [`WhenBusy::Refuse`]; [`Error::Rank`] if a rank can't read its tensors or start a thread; [`Error::Group`].
    pub fn save(&mut self, dir: impl AsRef<Path>, state: &SaveState) -> Result<()> {
        let dir = dir.as_ref();
        self.save_with(dir, state, &SaveOptions::default())
    }

    /// [`AsyncSaver::save`] with options. Has the same errors.
    pub fn save_with(&mut self, dir: impl AsRef<Path>, state: &SaveState, options: &SaveOptions) -> Result<()> {
        let dir = dir.as_ref();
        let _span = fsdp_core::heartbeat::span("checkpoint save", "");
        if self.when_busy == WhenBusy::Refuse {
            self.refuse_when_busy()?;
        }
        self.wait()?;
        let own = match &self.own {
            Some(own) => own.clone(),
            None => self.own.insert(self.group.split(0, self.group.rank())?).clone(),
        };
        let started = split(dir).and_then(|_| self.stage(state)).and_then(|state| {
            let (go, told) = std::sync::mpsc::channel();
            let (path, keep, options) = (dir.to_path_buf(), self.keep, options.clone());
            let thread = std::thread::Builder::new()
                .name("fsdp-ckpt-save".into())
                .spawn(move || match told.recv() {
                    Ok(()) => run(&path, &own, &state, &options, keep),
                    Err(_) => Err(Error::Argument("it was not begun".into())),
                })
                .map_err(|error| Error::Argument(format!("can't start a thread for the save: {error}")))?;
            Ok((go, Running { path: dir.to_path_buf(), thread }))
        });
        // The thread begins once every rank has staged its tensors. Otherwise it would wait for a rank that failed.
        let group = for_purpose(&self.group, "begin of an asynchronous save");
        let (go, running) = agree(&group, "stage its tensors", started)?;
        // The thread waits for this message.
        let _ = go.send(());
        self.running = Some(running);
        Ok(())
    }

    /// Waits until the running save has ended on every rank. Returns its summary, or `None` if no save was running.
    /// Collective.
    ///
    /// # Errors
    /// The save's error: [`Error::AsyncSave`], or [`Error::Rank`] if only another rank failed. [`Error::Group`].
    pub fn wait(&mut self) -> Result<Option<SaveSummary>> {
        let _span = fsdp_core::heartbeat::span("wait for checkpoint save", "");
        let outcome = self.running.take().map(Running::join).transpose();
        let message = outcome.as_ref().err().map(|error| chain(error)).unwrap_or_default();
        let error = match self.group.first_message(message) {
            Ok(None) => return outcome,
            Ok(Some((rank, cause))) => Error::Rank { rank, phase: "save in the background", cause, error: None },
            Err(error) => error.into(),
        };
        self.own = None;
        outcome.and(Err(error))
    }

    /// Waits for the last save, like [`AsyncSaver::wait`], and drops the saver.
    pub fn finish(mut self) -> Result<Option<SaveSummary>> {
        self.wait()
    }

    /// Returns whether a save is running on this rank. Other ranks may differ.
    pub fn is_busy(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.thread.is_finished())
    }

    fn refuse_when_busy(&self) -> Result<()> {
        let busy = self.running.as_ref().filter(|_| self.is_busy());
        let message = busy.map(|running| running.path.display().to_string()).unwrap_or_default();
        match self.group.first_message(message)? {
            Some((rank, path)) => Err(Error::Busy { path: path.into(), rank }),
            None => Ok(()),
        }
    }

    fn stage(&mut self, state: &SaveState) -> Result<SaveState> {
        let tensors = self.staged.copy(&state.tensors)?;
        Ok(SaveState { mesh: state.mesh.clone(), tensors, values: state.values.clone() })
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        // Without agreement: the other ranks may not drop their savers now.
        if let Some(running) = self.running.take()
            && let Err(error) = running.join()
        {
            tracing::error!("rank {}: {}", self.group.rank(), chain(&error));
        }
    }
}

fn run(
    path: &Path,
    group: &ProcessGroup,
    state: &SaveState,
    options: &SaveOptions,
    keep: Option<NonZeroUsize>,
) -> Result<SaveSummary> {
    let summary = save_with(path, group, state, options)?;
    let removed = match (keep, &options.host) {
        (None, _) => return Ok(summary),
        (Some(keep), None) if group.rank() == 0 => {
            split(path).and_then(|(parent, _)| keep_newest(&parent, keep, &[path]))
        }
        (Some(_), None) => return Ok(summary),
        (Some(keep), Some(host)) => HostDirs::new(group, host)
            .and_then(|dirs| split(path).and_then(|(parent, _)| dirs.keep_newest(&parent, keep, &[path]))),
    };
    if let Err(error) = removed {
        tracing::warn!("can't remove older checkpoints: {}", chain(&error));
    }
    Ok(summary)
}

/// Bytes that one core copies at a time: large enough for non-temporal stores.
const PIECE: usize = 8 << 20;

/// Host copies of a state, whose buffers are reused by the next save.
#[derive(Debug, Default)]
pub(crate) struct StagedTensors {
    buffers: Vec<Arc<Buffer>>,
}

impl StagedTensors {
    /// Copies the shards. Reuses buffers that no earlier copy holds, and frees buffers that fit no shard.
    pub(crate) fn copy(&mut self, shards: &[TensorShard]) -> Result<Vec<TensorShard>> {
        let mut free = std::mem::take(&mut self.buffers);
        let mut copies = Vec::with_capacity(shards.len());
        for shard in shards {
            let mut buffer = take(&mut free, shard)?;
            // No one else holds it.
            if let Some(buffer) = Arc::get_mut(&mut buffer) {
                let into = buffer.bytes_mut();
                let mut done = 0;
                read_bytes(&shard.fqn, &*shard.data, into.len(), &mut |bytes| {
                    copy(&mut into[done..done + bytes.len()], bytes);
                    done += bytes.len();
                    Ok(())
                })?;
            }
            self.buffers.push(Arc::clone(&buffer));
            copies.push(TensorShard { data: buffer as Arc<dyn Readable>, ..shard.clone() });
        }
        Ok(copies)
    }

    /// Allocates and touches the buffers that [`StagedTensors::copy`] needs for these shards.
    pub(crate) fn reserve(&mut self, shards: &[TensorShard]) {
        let mut free = std::mem::take(&mut self.buffers);
        for shard in shards {
            // Without memory, the save reports the error.
            let Ok(mut buffer) = take(&mut free, shard) else { continue };
            if let Some(buffer) = Arc::get_mut(&mut buffer) {
                // The system allocates pages of zeros only when they are written.
                buffer.bytes_mut().par_chunks_mut(PIECE).for_each(|piece| piece.fill(1));
            }
            self.buffers.push(buffer);
        }
    }
}

/// Takes a free buffer of the shard's size, or allocates one. Usually the first free buffer fits.
fn take(free: &mut Vec<Arc<Buffer>>, shard: &TensorShard) -> Result<Arc<Buffer>> {
    let (dtype, len) = (shard.data.dtype(), shard.data.len());
    let fits =
        |buffer: &mut Arc<Buffer>| buffer.dtype() == dtype && buffer.len() == len && Arc::get_mut(buffer).is_some();
    match free.iter_mut().position(fits) {
        Some(at) => Ok(free.remove(at)),
        None => {
            // `Buffer::zeros` aborts without memory. Try to reserve first, to return an error.
            let bytes = len.saturating_mul(dtype.size());
            if Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
                let reason = format!("there is no memory for a copy of its {bytes} bytes");
                return Err(Error::ShardMemory { tensor: shard.fqn.clone(), reason });
            }
            Ok(Arc::new(Buffer::zeros(dtype, len)))
        }
    }
}

/// Copies with all cores that this process may use.
fn copy(into: &mut [u8], from: &[u8]) {
    if from.len() <= PIECE || rayon::current_num_threads() == 1 {
        into.copy_from_slice(from);
    } else {
        into.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE)).for_each(|(into, from)| into.copy_from_slice(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(fqn: &str, data: Buffer) -> TensorShard {
        TensorShard::whole(fqn, &[data.len()], Arc::new(data))
    }

    /// Memory of an impossible size.
    struct Huge;

    impl Readable for Huge {
        fn dtype(&self) -> fsdp_core::DType {
            fsdp_core::DType::F32
        }
        fn len(&self) -> usize {
            1 << 60
        }
        fn read(&self, _: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
            Err("nobody gets here".into())
        }
    }

    #[test]
    fn missing_memory_is_an_error() {
        let shards = [TensorShard::whole("a", &[1 << 60], Arc::new(Huge))];
        let mut staged = StagedTensors::default();
        staged.reserve(&shards);
        let message = staged.copy(&shards).unwrap_err().to_string();
        let want = "can't access tensor \"a\": there is no memory for a copy of its 4611686018427387904 bytes";
        assert_eq!(message, want);
    }

    #[test]
    fn reuses_free_buffers() {
        let large = 3 * PIECE / 4 + 5;
        let state = |value: f32| [shard("a", Buffer::F32(vec![value; large])), shard("b", Buffer::I64(vec![7; 3]))];
        let mut staged = StagedTensors::default();
        staged.reserve(&state(0.0));
        let places = |staged: &StagedTensors| -> Vec<*const u8> {
            staged.buffers.iter().map(|buffer| buffer.bytes().as_ptr()).collect()
        };
        let first = places(&staged);
        let copies = staged.copy(&state(1.0)).unwrap();
        assert_eq!(places(&staged), first);
        let kept = Arc::clone(&staged.buffers[0]);
        assert!(*kept == Buffer::F32(vec![1.0; large]) && *staged.buffers[1] == Buffer::I64(vec![7; 3]));
        // Still in use: the copy must not change.
        let more = staged.copy(&state(2.0)).unwrap();
        assert!(places(&staged)[0] != first[0] && *kept == Buffer::F32(vec![1.0; large]));
        assert_eq!(more[0].data.len(), large);
        drop((copies, kept));
    }
}
