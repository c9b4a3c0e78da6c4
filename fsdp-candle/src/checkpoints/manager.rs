//! The checkpoints of a run: saving, retention and resuming.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use fsdp_ckpt::{AsyncSaver, HostDirs, SaveOptions, SaveState, WhenBusy};
use fsdp_core::ProcessGroup;

use super::agree::{agree, for_purpose};
use super::directory::{Directory, Verified};
use super::train_state::TrainState;
use crate::error::{Error, Result};
use crate::world::World;

/// The checkpoints of a run in one directory. Saves and resumes a whole [`TrainState`]: torchtitan's
/// `CheckpointManager`.
///
/// A run has one manager, on every rank. All its methods are collective: every rank calls them, with the same step and
/// the same kind of state. A checkpoint of any world size and mesh resumes on any other, except for values of each rank
/// ([`TrainState::rank_value`]).
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let root = tempfile::tempdir()?;
/// # let run = root.path();
/// use fsdp_candle::{CheckpointManager, TrainState};
///
/// fn state<'a>(vars: &'a ShardedVarMap, optim: &'a mut AdamW, seen: &'a mut u64) -> TrainState<'a> {
///     TrainState::new(vars).optimizer(optim).value("rows", seen)
/// }
///
/// // The second round resumes where the first has ended.
/// for (round, steps) in [3, 5].into_iter().enumerate() {
/// #     let (world, vars, model, x) = one_layer(nn::linear)?;
///     let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
///     let mut seen = 0;
///     let mut checkpoints = CheckpointManager::new(&world, run).keep_newest(2);
///     let resumed = checkpoints.resume(state(&vars, &mut optim, &mut seen))?;
///     assert_eq!((resumed.as_ref().map(|from| from.step), seen), [(None, 0), (Some(3), 9)][round]);
///     for step in resumed.map_or(0, |from| from.step) + 1..=steps {
///         optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
///         seen += 3;
///         checkpoints.save(step, state(&vars, &mut optim, &mut seen))?;
///     }
///     checkpoints.finish()?;
/// }
/// assert!(run.join("step-00000005").exists() && !run.join("step-00000003").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CheckpointManager {
    group: ProcessGroup,
    directory: Directory,
    keep: Option<NonZeroUsize>,
    is_asynchronous: bool,
    /// Made by the first asynchronous save.
    saver: Option<AsyncSaver>,
    may_be_non_finite: bool,
    /// Newest checkpoint that this manager has saved or loaded.
    newest: Option<Resumed>,
}

/// The checkpoint that a run has resumed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Number of steps that were done when it was saved.
    pub step: usize,
    /// Path of the checkpoint.
    pub path: PathBuf,
}

impl CheckpointManager {
    /// Makes the manager of the checkpoints in the directory `dir`, which all ranks share and which need not exist. It
    /// may be the URL of an object store, see `fsdp_ckpt::save`. Does not communicate.
    pub fn new(world: &World, dir: impl Into<PathBuf>) -> Self {
        CheckpointManager {
            group: world.group().clone(),
            directory: Directory { path: dir.into(), host: None },
            keep: None,
            is_asynchronous: false,
            saver: None,
            may_be_non_finite: false,
            newest: None,
        }
    }

    /// Keeps the `keep` newest checkpoints after each save, and removes older ones. 0 keeps all, as is the default.
    pub fn keep_newest(mut self, keep: usize) -> Self {
        self.keep = NonZeroUsize::new(keep);
        self
    }

    /// Saves in the background: [`CheckpointManager::save`] returns when the state is copied to host memory. Call
    /// [`CheckpointManager::finish`] before the program ends.
    pub fn asynchronous(mut self) -> Self {
        self.is_asynchronous = true;
        self
    }

    /// Gives each host a directory of its own, of the same path, where hosts share none. `host` is the name of this
    /// rank's host, as `hostname` prints it. See [`fsdp_ckpt::HostDirs`]. Collective.
    ///
    /// # Errors
    /// A name is empty, or a collective fails.
    pub fn host(mut self, host: &str) -> Result<Self> {
        self.directory.host = Some((host.into(), HostDirs::new(&self.group, host)?));
        Ok(self)
    }

    /// Saves models and moments that have NaN or infinity, too. By default that is an error, so that good checkpoints
    /// are not removed for a bad one.
    pub fn allow_non_finite(mut self) -> Self {
        self.may_be_non_finite = true;
        self
    }

    /// Loads the newest whole checkpoint of the directory, and returns its step and path. Returns `None`, and changes
    /// nothing, if the directory has no checkpoint.
    ///
    /// Build the model and its optimizers first. All checksums are verified before a value is changed. A checkpoint
    /// that is damaged, or was not finished, is skipped with a warning. One whose checksums differ is renamed
    /// ([`fsdp_ckpt::quarantine`]).
    ///
    /// # Errors
    /// The same on every rank, with the rank, the path, and what was found and expected:
    ///
    /// - names or shapes differ: something is asked for that the checkpoint lacks, or it holds something that is not
    ///   asked
    ///   for. [`TrainState::allow_missing`] and [`TrainState::allow_unexpected`] allow it. Nothing has changed;
    /// - there are checkpoints, and none of them can be used, or the newest can't be read for another reason than
    ///   damage;
    /// - a file can't be read, after which the model's values are unspecified.
    pub fn resume(&mut self, mut state: TrainState<'_>) -> Result<Option<Resumed>> {
        self.wait()?;
        let group = for_purpose(&self.group, "resume of a training run");
        while let Some(path) = self.directory.newest(&group)? {
            match self.load_verified(&path, &mut state, &group)? {
                Ok(resumed) => return Ok(Some(resumed)),
                Err(why) => self.directory.quarantine(&path, &why, &group)?,
            }
        }
        Ok(None)
    }

    /// Loads the checkpoint at `path`, of this run or another one, instead of the newest. It may have any format of
    /// [`fsdp_ckpt::open`].
    ///
    /// # Errors
    /// As [`CheckpointManager::resume`]. A damaged checkpoint is an error, too.
    pub fn load(&mut self, path: impl AsRef<Path>, mut state: TrainState<'_>) -> Result<Resumed> {
        self.wait()?;
        let (path, group) = (path.as_ref(), for_purpose(&self.group, "load of a training state"));
        let loaded = self.load_verified(path, &mut state, &group)?;
        // A checkpoint of another run is not a save of this one.
        self.newest = None;
        loaded.map_err(|why| Error::Argument(format!("can't load {}: {why}; load another checkpoint", path.display())))
    }

    /// Loads a checkpoint, or returns why it is damaged.
    fn load_verified(
        &mut self,
        path: &Path,
        state: &mut TrainState<'_>,
        group: &ProcessGroup,
    ) -> Result<Result<Resumed, String>> {
        let tensors = agree(group, "list its tensors", state.tensors())?;
        let source = match self.directory.open(path, group, &tensors)? {
            Verified::Whole(source) => source,
            Verified::Damaged(why) => return Ok(Err(why)),
        };
        let step = state.load(&*source, group)?;
        let resumed = Resumed { step, path: path.to_path_buf() };
        self.newest = Some(resumed.clone());
        Ok(Ok(resumed))
    }

    /// Saves the state after `step` steps as `step-00000010` in the directory, and returns the path. A crash never
    /// leaves a part of a checkpoint under this name. Does nothing if this manager has just saved this step, or resumed
    /// from it.
    ///
    /// # Errors
    /// The same on every rank:
    ///
    /// - [`Error::NonFinite`], see [`CheckpointManager::allow_non_finite`];
    /// - the directory has a checkpoint of this step or a later one, from which this run has not resumed;
    /// - a value can't be saved, or differs between ranks ([`TrainState::rank_value`] saves the value of each rank);
    /// - an optimizer hides its state;
    /// - a rank can't write. With [`CheckpointManager::asynchronous`], the next call returns this error.
    pub fn save(&mut self, step: usize, state: TrainState<'_>) -> Result<PathBuf> {
        self.wait()?;
        if let Some(newest) = self.newest.as_ref().filter(|newest| newest.step == step) {
            return Ok(newest.path.clone());
        }
        let path = self.directory.path.join(format!("step-{step:08}"));
        let group = for_purpose(&self.group, "save of a training state");
        let tensors = agree(&group, "list its tensors", state.tensors())?;
        let values = state.values_to_save(step, &group)?;
        if !self.may_be_non_finite {
            agree(&group, "find only finite values", state.check_finite())?;
        }
        let finite = !self.may_be_non_finite && state.is_all_checked();
        self.directory.prepare(&path, step, &group)?;
        let state = SaveState { mesh: agree(&group, "name its mesh", state.mesh(&group))?, tensors, values };
        let host = self.directory.host.as_ref().map(|(name, _)| name.clone());
        let options = SaveOptions { finite, host };
        if self.is_asynchronous {
            self.saver()?.save_with(&path, &state, &options)?;
        } else {
            fsdp_ckpt::save_with(&path, &self.group, &state, &options)?;
            if let Some(keep) = self.keep {
                self.directory.keep_newest(keep, &path, &group);
            }
        }
        self.newest = Some(Resumed { step, path: path.clone() });
        Ok(path)
    }

    /// Waits until the last save is on disk on every rank.
    ///
    /// # Errors
    /// The error of an asynchronous save.
    pub fn finish(mut self) -> Result<()> {
        self.wait()
    }

    fn saver(&mut self) -> Result<&mut AsyncSaver> {
        if let Some(saver) = self.saver.take() {
            return Ok(self.saver.insert(saver));
        }
        let saver = AsyncSaver::new(self.group.clone(), WhenBusy::Wait)?;
        Ok(self.saver.insert(match self.keep {
            Some(keep) => saver.keep_newest(keep),
            None => saver,
        }))
    }

    fn wait(&mut self) -> Result<()> {
        let Some(saver) = &mut self.saver else { return Ok(()) };
        if let Err(error) = saver.wait() {
            // The step may be saved again.
            self.newest = None;
            return Err(error.into());
        }
        Ok(())
    }
}
