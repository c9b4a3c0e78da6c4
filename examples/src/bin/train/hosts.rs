//! Who looks at checkpoints: rank 0 for all, or, with --checkpoint-local, each host in its own directory.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use fsdp_candle::{ReduceOp, World};
use fsdp_ckpt::{Error, Format, HostDirs, Result, Survey, TensorSource};
use serde::{Deserialize, Serialize};

use crate::agree::{Finding, from_rank, worst};
use crate::args::Args;

/// Where each host has its directory, the calls are collective, and their outcome is the same on every rank. Else they
/// are for the rank that makes them.
pub(crate) struct Hosts {
    name: Option<String>,
    dirs: Option<HostDirs>,
}

impl Hosts {
    /// Collective.
    pub(crate) fn of(args: &Args, world: &World) -> Result<Self> {
        if !args.checkpoint_local {
            return Ok(Hosts { name: None, dirs: None });
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let dirs = HostDirs::new(world.group(), &name)?;
        Ok(Hosts { name: Some(name), dirs: Some(dirs) })
    }

    /// This host's name for [`fsdp_ckpt::SaveOptions`].
    pub(crate) fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// The answer that all ranks go by. Rank 0 looks for it, and tells the others; where each host has its directory,
    /// every rank calls `ask`, which is collective then and has the same outcome everywhere. Collective.
    pub(crate) fn ask<T>(&self, world: &World, ask: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + for<'de> Deserialize<'de>,
    {
        match self.dirs {
            Some(_) => ask(),
            None => from_rank(world, 0, ask),
        }
    }

    /// What rank 0 answers. Where each host has its directory: collective.
    pub(crate) fn once<T>(&self, world: &World, ask: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + for<'de> Deserialize<'de>,
    {
        match self.dirs {
            Some(_) => from_rank(world, 0, ask),
            None => ask(),
        }
    }

    /// The outcome of what this rank did by itself. Where each host has its directory: collective, and an error on
    /// every rank when one of them has any.
    pub(crate) fn agreed<T>(&self, world: &World, own: anyhow::Result<T>) -> anyhow::Result<T> {
        if self.dirs.is_none() {
            return own;
        }
        let finding = match &own {
            Ok(_) => Finding::Good,
            Err(error) => Finding::Failed(format!("rank {}: {error:#}", world.rank())),
        };
        match worst(world, finding)? {
            Finding::Good => own,
            Finding::Failed(why) | Finding::Damaged(why) => Err(anyhow!(why)),
        }
    }

    /// Whether it is so here. Where each host has its directory: collective, and whether it is so on any rank.
    pub(crate) fn any(&self, world: &World, own: bool) -> anyhow::Result<bool> {
        match self.dirs {
            Some(_) => Ok(world.all_reduce(&[f64::from(u8::from(own))], ReduceOp::Max)?[0] > 0.),
            None => Ok(own),
        }
    }

    /// This rank's number among those that read the same files, and how many they are.
    pub(crate) fn readers(&self, world: &World) -> (usize, usize) {
        self.dirs.as_ref().map_or((world.rank(), world.size()), HostDirs::local_rank_and_size)
    }

    pub(crate) fn check_writable(&self, dir: &Path, world: &World) -> Result<()> {
        match &self.dirs {
            Some(dirs) => dirs.check_writable(dir),
            None => fsdp_ckpt::check_writable(dir, world.group()),
        }
    }

    pub(crate) fn survey(&self, dir: &Path) -> Result<Survey> {
        self.dirs.as_ref().map_or_else(|| fsdp_ckpt::survey(dir), |dirs| dirs.survey(dir))
    }

    /// A checkpoint or model. One that is whole on every host need not be ours.
    pub(crate) fn open(&self, path: &Path, world: &World) -> Result<Box<dyn TensorSource>> {
        let Some(dirs) = &self.dirs else { return fsdp_ckpt::open(path) };
        let other = fsdp_ckpt::open(path).ok().filter(|source| source.format() != Format::Fsdp);
        let all_have = world.group().all_reduce_scalar(u32::from(other.is_some()), ReduceOp::Min);
        match other.filter(|_| all_have.as_ref().is_ok_and(|all| *all == 1)) {
            Some(source) => Ok(source),
            None => Ok(Box::new(all_have.map_err(Error::from).and_then(|_| dirs.open(path))?)),
        }
    }

    pub(crate) fn set_aside(&self, path: &Path) -> Result<Option<PathBuf>> {
        self.dirs.as_ref().map_or_else(|| fsdp_ckpt::quarantine(path), |dirs| dirs.quarantine(path))
    }

    /// Leaves `newest` and `keep - 1` others in `dir`, everywhere. Collective.
    pub(crate) fn keep_newest(
        &self,
        dir: &Path,
        keep: NonZeroUsize,
        newest: &Path,
        world: &World,
    ) -> Result<Vec<PathBuf>> {
        match &self.dirs {
            Some(dirs) => dirs.keep_newest(dir, keep, &[newest]),
            None if world.rank() == 0 => fsdp_ckpt::keep_newest(dir, keep, &[newest]),
            None => Ok(Vec::new()),
        }
    }
}
