//! The ranks of a job: who this process is, its device, and the group of all.

use std::sync::Arc;

use candle_core::Device;
use fsdp_core::process_group::{self, Options, local};
use fsdp_core::{Buffer, DeviceMesh, ProcessGroup, RankEnv, ReduceOp};

use crate::{Error, Result};

/// All ranks of a job, seen from one of them.
pub struct World {
    group: Arc<dyn ProcessGroup>,
    env: RankEnv,
    device: Device,
}

/// Joins the job that this process's environment describes (`RANK`, `WORLD_SIZE`, ...; without them, a world of one). Collective.
///
/// # Errors
/// When the environment contradicts itself, or the ranks do not meet.
pub fn init() -> Result<World> {
    let env = RankEnv::from_env()?;
    let group = process_group::init(&env, Options::default())?;
    Ok(World { group, env, device: Device::Cpu })
}

impl World {
    /// A world of this process alone, whatever its environment says.
    ///
    /// # Errors
    /// When the system refuses memory or threads.
    pub fn single() -> Result<Self> {
        match local::world(1, Options::default())?.pop() {
            Some(group) => Ok(Self::of(group)),
            None => Err(fsdp_core::Error::Env("a world of one has no rank".into()).into()),
        }
    }

    /// The world of a process group that is there already.
    pub fn of(group: Arc<dyn ProcessGroup>) -> Self {
        let env = RankEnv {
            rank: group.rank(),
            world_size: group.size(),
            local_rank: group.rank(),
            local_world_size: group.size(),
            ..RankEnv::single()
        };
        World { group, env, device: Device::Cpu }
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The environment that the launcher set.
    pub fn env(&self) -> &RankEnv {
        &self.env
    }

    /// The device that this rank computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// Lays the ranks out in a mesh. Collective.
    ///
    /// # Errors
    /// When the product of the dimensions is not the number of ranks.
    pub fn mesh(&self, dims: &[(&str, usize)]) -> Result<DeviceMesh> {
        Ok(DeviceMesh::new(&self.group, dims)?)
    }

    /// Reduces a few numbers over all ranks. Collective.
    ///
    /// # Errors
    /// Those of the collective.
    pub fn all_reduce(&self, values: &[f64], op: ReduceOp) -> Result<Vec<f64>> {
        match self.group.all_reduce(vec![Buffer::F64(values.to_vec())], op).wait()?.pop() {
            Some(Buffer::F64(values)) => Ok(values),
            _ => Err(Error::Device("an all-reduce of F64 returned something else".into())),
        }
    }
}
