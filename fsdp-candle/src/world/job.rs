//! A rank in its job.

use candle_core::Device;
use fsdp_core::process_group::{self, Options};
use fsdp_core::{DeviceMesh, ProcessGroup, RankEnv, ReduceOp};

use super::device::DeviceChoice;
use super::engine::group_on;
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
    init_on(DeviceChoice::Cpu)
}

/// [`init`], for a job that computes on other devices. Collectives of [`World::group`] then move the memory of this
/// rank's device, and the host's. Collective.
///
/// Between CUDA devices NCCL moves it, where the build has it (feature `nccl`) and no two ranks share a device; else it
/// goes by way of the host's memory. `FSDP_DEVICE_BACKEND` (`nccl` or `host`) overrides the choice.
///
/// # Errors
/// As [`init`]; when there is no such device, or it refuses.
///
/// ```
/// use fsdp_candle::DeviceChoice;
///
/// let world = fsdp_candle::init_on(DeviceChoice::Cpu)?;
/// assert!(world.device().is_cpu());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn init_on(choice: DeviceChoice) -> Result<World> {
    let env = RankEnv::from_env()?;
    // What this rank lacks the others should not have to wait for.
    choice.device(&env)?;
    let group = process_group::init(&env, Options::default())?;
    World::join(env, group, choice)
}

impl World {
    /// A world of this process alone, whatever its environment says.
    ///
    /// # Errors
    /// When the system refuses memory or threads.
    pub fn single() -> Result<Self> {
        Ok(Self::of(ProcessGroup::single_rank(Options::default().timeout)?))
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

    /// The world of a process group of the host's memory that is there already, on other devices ([`init_on`]): a
    /// rank's number in the group counts them. Collective.
    ///
    /// # Errors
    /// When there is no such device, or it refuses.
    pub fn on(group: ProcessGroup, choice: DeviceChoice) -> Result<Self> {
        let World { group, env, .. } = World::of(group);
        World::join(env, group, choice)
    }

    fn join(env: RankEnv, group: ProcessGroup, choice: DeviceChoice) -> Result<Self> {
        let device = choice.device(&env)?;
        let group = group_on(&device, group)?;
        Ok(World { group, env, device })
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
