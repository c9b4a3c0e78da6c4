//! Who a process is.

use crate::{Error, Result};

/// What a launcher tells a rank, in the terms of `torchrun`.
///
/// Understood are the variables of `fsdp-launch` and `torchrun` (`RANK`, `WORLD_SIZE`, ...), of Open MPI
/// (`OMPI_COMM_WORLD_RANK`, ...), of MPICH and its kin (`PMI_RANK`, ...) and of Slurm's `srun` (`SLURM_PROCID`, ...),
/// in this order. With none of them the process is a world of one.
///
/// `MASTER_ADDR`, `MASTER_PORT` and `TORCHELASTIC_RUN_ID` count whatever the launcher is. Where they are unset:
///
/// | launcher | `master_addr` | `master_port` | `run_id` |
/// |---|---|---|---|
/// | `srun` | the first host of `SLURM_STEP_NODELIST` | 20000 to 29999, by job and step | `slurm-JOB.STEP` |
/// | Open MPI | 127.0.0.1 | 29500 | `PMIX_NAMESPACE` |
/// | MPICH | 127.0.0.1 | 29500 | the socket that a host's ranks share with their parent ([`RankEnv::from_env`] only) |
/// | none, `torchrun` | 127.0.0.1 | 29500 | `none` |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// This process's rank in the world (`RANK`).
    pub rank: usize,
    /// The number of processes (`WORLD_SIZE`).
    pub world_size: usize,
    /// The rank on this host (`LOCAL_RANK`).
    pub local_rank: usize,
    /// The number of processes on this host (`LOCAL_WORLD_SIZE`).
    pub local_world_size: usize,
    /// The number of hosts: `FSDP_HOSTS`, which `fsdp-launch` sets because several of it may run on one host; else
    /// what Slurm tells, or so many as `local_world_size` makes of `world_size`.
    pub hosts: usize,
    /// Where rank 0 can be reached (`MASTER_ADDR`).
    pub master_addr: String,
    /// The port there (`MASTER_PORT`).
    pub master_port: u16,
    /// The job's name, the same on every rank (`TORCHELASTIC_RUN_ID`).
    pub run_id: String,
    /// How often the job was restarted after a failure (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: u32,
    /// How often its ranks were started before: `FSDP_ATTEMPT`, which `fsdp-launch` sets because hosts that come and go
    /// make attempts that are no restarts; else `restart_count`.
    pub attempt: u32,
}

impl RankEnv {
    /// A world of one.
    pub fn single() -> Self {
        RankEnv {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            hosts: 1,
            master_addr: "127.0.0.1".into(),
            master_port: 29500,
            run_id: "none".into(),
            restart_count: 0,
            attempt: 0,
        }
    }
}

/// The value of a variable that a launcher sets.
pub(super) fn number<N: std::str::FromStr>(name: &str, text: &str) -> Result<N> {
    text.trim()
        .parse()
        .map_err(|_| Error::Env(format!("{name}={text:?} is not a number in range: the launcher sets it")))
}
