//! Who this process is: the environment that a launcher sets for each rank.

mod launcher;
mod mpich;
mod slurm;

use crate::{Error, Result};
use launcher::{Launcher, SLURM, TORCHRUN};

/// What a launcher tells a rank, in the terms of `torchrun`.
///
/// Understood are the variables of `fsdp-launch` and `torchrun` (`RANK`, `WORLD_SIZE`, ...), of Open MPI (`OMPI_COMM_WORLD_RANK`, ...), of MPICH and its kin
/// (`PMI_RANK`, ...) and of Slurm's `srun` (`SLURM_PROCID`, ...), in this order. With none of them the process is a world of one.
///
/// `MASTER_ADDR`, `MASTER_PORT` and `TORCHELASTIC_RUN_ID` count whatever the launcher is. Where they are unset:
///
/// | launcher | `master_addr` | `master_port` | `run_id` |
/// |---|---|---|---|
/// | `srun` | the first host of `SLURM_STEP_NODELIST` | 20000 to 29999, by job and step | `slurm-JOB.STEP` |
/// | Open MPI | 127.0.0.1 | 29500 | `PMIX_NAMESPACE` |
/// | MPICH | 127.0.0.1 | 29500 | the socket that the job's processes of this host share with their parent ([`RankEnv::from_env`] only) |
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
    /// The number of hosts: `FSDP_HOSTS`, which `fsdp-launch` sets because several of it may run on one host; else so many as `local_world_size` makes of
    /// `world_size`.
    pub hosts: usize,
    /// Where rank 0 can be reached (`MASTER_ADDR`).
    pub master_addr: String,
    /// The port there (`MASTER_PORT`).
    pub master_port: u16,
    /// The job's name, the same on every rank (`TORCHELASTIC_RUN_ID`).
    pub run_id: String,
    /// How often the job was restarted after a failure (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: u32,
    /// How often its ranks were started before: `FSDP_ATTEMPT`, which `fsdp-launch` sets because hosts that come and go make attempts that are no restarts;
    /// else `restart_count`.
    pub attempt: u32,
}

impl RankEnv {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// When a variable is no number, or rank and world size contradict each other; the message names the variables.
    pub fn from_env() -> Result<Self> {
        Self::read(&|name| std::env::var(name).ok(), &mpich::socket)
    }

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

    /// Reads the variables through `var`, which returns `None` for an unset one.
    ///
    /// # Errors
    /// As [`RankEnv::from_env`].
    ///
    /// ```
    /// use fsdp_core::RankEnv;
    /// let env = RankEnv::from_vars(|name| match name {
    ///     "RANK" => Some("1".into()),
    ///     "WORLD_SIZE" => Some("4".into()),
    ///     _ => None,
    /// }).unwrap();
    /// assert_eq!((env.rank, env.world_size, env.local_rank, env.local_world_size), (1, 4, 1, 4));
    /// ```
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        Self::read(&var, &|_| None)
    }

    /// `socket` tells which socket a file descriptor is.
    fn read(var: &dyn Fn(&str) -> Option<String>, socket: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let mut env = RankEnv::single();
        let launcher = Launcher::detect(var)?;
        if let Some(launcher) = launcher {
            launcher.read(&mut env, var)?;
        }
        if launcher.is_some_and(|launcher| launcher.name == SLURM) {
            slurm::meeting(&mut env, var)?;
        }
        // Of another launcher below ours, ours knows nothing.
        let of_ours = |name| launcher.filter(|launcher| launcher.name == TORCHRUN).and_then(|_| var(name));
        env.hosts = match of_ours("FSDP_HOSTS") {
            Some(count) => number("FSDP_HOSTS", &count)?,
            None => env.world_size.div_ceil(env.local_world_size.max(1)),
        };
        if let Some(addr) = var("MASTER_ADDR") {
            env.master_addr = addr;
        }
        if let Some(port) = var("MASTER_PORT") {
            env.master_port = number("MASTER_PORT", &port)?;
        }
        let of_launcher = || launcher.and_then(|launcher| launcher.run_id(var, socket)).or_else(|| slurm::run_id(var));
        if let Some(id) = var("TORCHELASTIC_RUN_ID").or_else(of_launcher) {
            env.run_id = id;
        }
        if let Some(count) = var("TORCHELASTIC_RESTART_COUNT") {
            env.restart_count = number("TORCHELASTIC_RESTART_COUNT", &count)?;
        }
        env.attempt = match of_ours("FSDP_ATTEMPT") {
            Some(count) => number("FSDP_ATTEMPT", &count)?,
            None => env.restart_count,
        };
        Ok(env)
    }
}

fn number<N: std::str::FromStr>(name: &str, text: &str) -> Result<N> {
    text.trim()
        .parse()
        .map_err(|_| Error::Env(format!("{name}={text:?} is not a number in range: the launcher sets it")))
}

#[cfg(test)]
mod tests;
