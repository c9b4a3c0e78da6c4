//! The directory of a run's checkpoints: one that all ranks share, or one on each host.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use fsdp_ckpt::{HostDirs, Survey, TensorShard, TensorSource};
use fsdp_core::ProcessGroup;

use super::agree::agree;
use crate::error::{Error, Result};
use crate::warning::warn;

pub(super) struct Directory {
    pub(super) path: PathBuf,
    /// Name of this rank's host, if each host has a directory of its own.
    pub(super) host: Option<(String, HostDirs)>,
}

/// A checkpoint that all ranks have verified.
pub(super) enum Verified {
    Whole(Box<dyn TensorSource>),
    /// The checkpoint is damaged, with the reason.
    Damaged(String),
}

impl Directory {
    /// Returns the newest whole checkpoint, the same on every rank, and warns of newer damaged ones. Collective.
    ///
    /// # Errors
    /// A newer candidate can't be read for a reason other than damage, or there are candidates and none is whole: the
    /// run would silently repeat steps.
    pub(super) fn newest(&self, group: &ProcessGroup) -> Result<Option<PathBuf>> {
        let newest = self.ask(group, "find the newest checkpoint", || self.choose(group))?;
        if self.host.is_some() {
            return Ok(newest.flatten());
        }
        let name = newest.flatten().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let name = group.broadcast_bytes(0, name.unwrap_or_default().into_bytes())?;
        let name = String::from_utf8_lossy(&name).into_owned();
        Ok((!name.is_empty()).then(|| self.path.join(name)))
    }

    fn choose(&self, group: &ProcessGroup) -> Result<Option<PathBuf>> {
        let found = self.survey()?;
        let dir = self.path.display();
        if let Some((path, error)) = found.skipped.iter().find(|(_, error)| !error.is_damage()) {
            return Err(Error::Argument(format!(
                "{} can't be read, but is not known to be damaged: {}; fix the error, or move it away to resume from an \
                 older checkpoint",
                path.display(),
                error.with_causes()
            )));
        }
        let mut lost: Vec<String> = found.skipped.iter().map(|(_, error)| error.with_causes()).collect();
        lost.extend(found.quarantined.iter().map(|path| format!("{} is damaged", path.display())));
        lost.extend(found.links.iter().map(|(link, to)| format!("{} is a link to {}", link.display(), to.display())));
        if found.newest.is_none() && !lost.is_empty() {
            return Err(Error::Argument(format!(
                "no checkpoint in {dir} can be used ({}): add a whole one, or start a new run in another directory",
                lost.join("; ")
            )));
        }
        if group.rank() == 0 {
            found.warn_about_links();
            found.skipped.iter().for_each(|(path, error)| {
                warn(&format!("skipping {}: {}", path.display(), error.with_causes()));
            });
        }
        Ok(found.newest)
    }

    /// Opens a checkpoint, of which this rank reads its parts of `tensors`. All ranks verify all checksums together,
    /// each a share. Collective.
    pub(super) fn open(&self, path: &Path, group: &ProcessGroup, tensors: &[TensorShard]) -> Result<Verified> {
        let (opened, (reader, readers)) = match &self.host {
            Some((_, dirs)) => (dirs.open(path).map(|part| Box::new(part) as Box<_>), dirs.local_rank_and_size()),
            None => (fsdp_ckpt::open_for(path, group, tensors), (group.rank(), group.size())),
        };
        let verified = opened.and_then(|source: Box<dyn TensorSource>| {
            source.verify_share(reader, readers)?;
            Ok(source)
        });
        let damage = match &verified {
            Err(error) if error.is_damage() => error.with_causes(),
            _ => String::new(),
        };
        if let Some((rank, why)) = group.first_message(damage)? {
            return Ok(Verified::Damaged(format!("rank {rank}: {why}")));
        }
        let verified = agree(group, "open the checkpoint", verified.map_err(Error::from))?;
        Ok(Verified::Whole(verified))
    }

    /// Renames a damaged checkpoint. Collective.
    pub(super) fn quarantine(&self, path: &Path, why: &str, group: &ProcessGroup) -> Result<()> {
        self.ask(group, "rename a damaged checkpoint", || self.rename(path, why)).map(drop)
    }

    fn rename(&self, path: &Path, why: &str) -> Result<()> {
        let moved = match &self.host {
            Some((_, dirs)) => dirs.quarantine(path)?,
            None => fsdp_ckpt::quarantine(path)?,
        };
        if let Some(moved) = moved {
            let (path, moved) = (path.display(), moved.display());
            warn(&format!("{path} is damaged and was renamed to {moved}: {why}"));
        }
        Ok(())
    }

    /// Prepares the save of the checkpoint `path` of a step: renames a damaged checkpoint at this path. Collective.
    ///
    /// # Errors
    /// The directory has a whole checkpoint of this step or a later one. The next resume would take the later one, and
    /// retention would remove the new one.
    pub(super) fn prepare(&self, path: &Path, step: usize, group: &ProcessGroup) -> Result<()> {
        let look = || {
            let found = self.survey()?;
            if let Some(newest) = found.newest.filter(|newest| step_of(newest).is_some_and(|other| other >= step)) {
                return Err(Error::Argument(format!(
                    "step {step} cannot be saved in {}: {} is there, from which this run has not resumed; resume, move it \
                     away, or save to another directory",
                    self.path.display(),
                    newest.display()
                )));
            }
            match found.skipped.into_iter().find(|(skipped, _)| skipped.file_name() == path.file_name()) {
                Some((_, error)) if error.is_damage() => self.rename(path, &error.with_causes()),
                Some((_, error)) => Err(error.into()),
                None => Ok(()),
            }
        };
        self.ask(group, "prepare the save", look).map(drop)
    }

    /// Keeps the `keep` newest checkpoints, and `newest`. Only warns if it cannot. Collective.
    pub(super) fn keep_newest(&self, keep: NonZeroUsize, newest: &Path, group: &ProcessGroup) {
        let removed = match &self.host {
            Some((_, dirs)) => dirs.keep_newest(&self.path, keep, &[newest]),
            None if group.rank() == 0 => fsdp_ckpt::keep_newest(&self.path, keep, &[newest]),
            None => Ok(vec![]),
        };
        if let Err(error) = removed
            && group.rank() == 0
        {
            warn(&format!("cannot remove older checkpoints: {}", error.with_causes()));
        }
    }

    fn survey(&self) -> Result<Survey> {
        Ok(match &self.host {
            Some((_, dirs)) => dirs.survey(&self.path)?,
            None => fsdp_ckpt::survey(&self.path)?,
        })
    }

    /// Runs `look` on rank 0, or on every rank if each host has a directory; then it is collective. Returns rank 0's
    /// result on rank 0 only, and an error on every rank.
    fn ask<T>(&self, group: &ProcessGroup, phase: &'static str, look: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        let looks = self.host.is_some() || group.rank() == 0;
        agree(group, phase, looks.then(look).transpose())
    }
}

/// Returns the number at the end of a checkpoint's name.
pub(super) fn step_of(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    name[name.trim_end_matches(|c: char| c.is_ascii_digit()).len()..].parse().ok()
}
