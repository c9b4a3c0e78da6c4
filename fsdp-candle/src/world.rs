//! The ranks of a job: who this process is, its device, and the group of all.

use candle_core::Device;
use fsdp_core::process_group::{self, Options};
use fsdp_core::{DeviceMesh, ProcessGroup, RankEnv, ReduceOp};

use crate::error::Result;

/// All ranks of a job, seen from one of them.
pub struct World {
    group: ProcessGroup,
    env: RankEnv,
    device: Device,
}

/// Joins the job that this process's environment describes (`RANK`, `WORLD_SIZE`, ...; without them, a world of one).
/// Collective.
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
        Ok(Self::of(ProcessGroup::alone(Options::default().timeout)?))
    }

    /// The world of a process group that is there already.
    pub fn of(group: ProcessGroup) -> Self {
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
    pub fn group(&self) -> &ProcessGroup {
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
        Ok(self.group.all_reduce_values(values.to_vec(), op)?)
    }
}
