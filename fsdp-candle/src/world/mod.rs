//! The ranks of a job: this process's rank, its device, and the group of all ranks.

#[cfg_attr(not(feature = "cuda"), path = "no_engine.rs")]
mod engine;
mod rows;

use candle_core::Device;
use fsdp_core::env::check_threads;
use fsdp_core::file_limit;
use fsdp_core::process_group::{self, Options};
use fsdp_core::{DeviceMesh, ProcessGroup, RankEnv, ReduceOp};

use crate::error::{Error, Result};
use crate::kernels;

/// The ranks of a job.
pub struct World {
    group: ProcessGroup,
    env: RankEnv,
    device: Device,
}

/// Joins the job that the environment describes (`RANK`, `WORLD_SIZE`, ...; a single rank without them). Collective.
/// Fails if the environment is inconsistent or the ranks cannot connect, and if `RAYON_NUM_THREADS` or
/// `CANDLE_NUM_THREADS` is not a number of threads that this host can run.
///
/// Makes the process ignore SIGXFSZ, unless the program handles it: a file that reaches the limit of `ulimit -f` is
/// then an error of the write, which names the file, and not the silent end of the rank
/// ([`fsdp_core::file_limit::return_errors`]).
pub fn init() -> Result<World> {
    init_on(DeviceChoice::Cpu)
}

/// Joins a job that computes on a device. Collectives of [`World::group`] move memory of this rank's device and of the
/// host. Collective.
///
/// Between CUDA devices NCCL moves memory, if the build has it (feature `nccl`) and no two ranks share a device.
/// Otherwise memory goes through the host. `FSDP_DEVICE_BACKEND` (`nccl` or `host`) overrides the choice. For tests on
/// one device, ranks that share it use NCCL by `nccl-shared`, if `NCCL_HOSTID` differs between them, as `fsdp-launch`
/// sets it. With NCCL, ranks on several hosts need no MPI ([`process_group::init`]). Fails as [`init`] does, and if the
/// device does not exist or fails.
///
/// ```
/// use fsdp_candle::DeviceChoice;
///
/// let world = fsdp_candle::init_on(DeviceChoice::Cpu)?;
/// assert!(world.device().is_cpu());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn init_on(choice: DeviceChoice) -> Result<World> {
    file_limit::return_errors();
    check_threads()?;
    let env = RankEnv::from_env()?;
    // Fail before the other ranks wait.
    let device = choice.device(&env)?;
    let group = process_group::init(&env, Options::default().with_nccl_moving_tensors(is_for_nccl(&device)))?;
    World::join(env, group, choice)
}

/// Returns whether NCCL will move tensors of this device, as far as this rank alone can tell.
fn is_for_nccl(device: &Device) -> bool {
    !device.is_cpu() && engine::may_be_nccl()
}

impl World {
    /// Makes a world of this process only, whatever the environment's ranks. Fails if the system refuses memory or
    /// threads, and for a number of threads as [`init`] does.
    pub fn single() -> Result<Self> {
        check_threads()?;
        Ok(Self::of(ProcessGroup::single_rank(Options::default().timeout)?))
    }

    /// Makes the world of an existing process group.
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

    /// Makes the world of an existing process group of host memory, on devices as [`init_on`] does. A rank's number in
    /// the group selects its device. Collective. Fails if the device does not exist or fails.
    pub fn on(group: ProcessGroup, choice: DeviceChoice) -> Result<Self> {
        let World { group, env, .. } = World::of(group);
        World::join(env, group, choice)
    }

    fn join(env: RankEnv, group: ProcessGroup, choice: DeviceChoice) -> Result<Self> {
        let device = choice.device(&env)?;
        let group = if device.is_cpu() { group } else { engine::add_device(&device, group)? };
        Ok(World { group, env, device })
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Returns the launcher's environment.
    pub fn env(&self) -> &RankEnv {
        &self.env
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Arranges the ranks in a mesh. Collective. Fails if the product of the sizes is not the number of ranks.
    pub fn mesh(&self, dims: &[(&str, usize)]) -> Result<DeviceMesh> {
        Ok(DeviceMesh::new(&self.group, dims)?)
    }

    /// Reduces a few numbers over all ranks. Collective.
    pub fn all_reduce(&self, values: &[f64], op: ReduceOp) -> Result<Vec<f64>> {
        Ok(self.group.all_reduce_values(values.to_vec(), op)?)
    }
}

/// The devices that a job computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA devices if the build and the machine have some, otherwise the host.
    Auto,
    /// The host.
    #[default]
    Cpu,
    /// CUDA devices. `LOCAL_RANK` selects a rank's device; ranks in excess share devices.
    Cuda,
}

/// Returns the CUDA device of this number, the same one each time: Candle's, with one stream for all threads. Fails if
/// the device does not exist, or Candle made it with other settings.
#[cfg(feature = "cuda")]
pub fn cuda_device(ordinal: usize) -> Result<Device> {
    kernels::candle_device(ordinal)
}

impl DeviceChoice {
    /// Returns the device of this rank.
    fn device(self, env: &RankEnv) -> Result<Device> {
        match (self, self.count()) {
            (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Ok(0) | Err(_)) => Ok(Device::Cpu),
            (DeviceChoice::Cuda, Ok(0)) => Err(Error::Device(format!(
                "rank {} needs a CUDA device, but this process sees none: check nvidia-smi and \
                 CUDA_VISIBLE_DEVICES, or choose the CPU",
                env.rank
            ))),
            (DeviceChoice::Cuda, Err(error)) => Err(error),
            (_, Ok(count)) => kernels::candle_device(env.local_rank % count),
        }
    }

    /// Returns the number of CUDA devices, or 0 if the choice does not need them.
    fn count(self) -> Result<usize> {
        if self == DeviceChoice::Cpu { Ok(0) } else { kernels::device_count() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_always_available() {
        let env = RankEnv::single();
        assert!(DeviceChoice::default().device(&env).unwrap().is_cpu());
        if cfg!(not(feature = "cuda")) {
            assert!(DeviceChoice::Auto.device(&env).unwrap().is_cpu());
            let error = DeviceChoice::Cuda.device(&env).unwrap_err().to_string();
            assert!(error.contains("--features cuda"), "{error}");
        }
    }
}
