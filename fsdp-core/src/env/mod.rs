//! Who this process is: the environment that a launcher sets for each rank.

mod launcher;
mod mpich;
mod rank_env;
mod slurm;

use launcher::{Launcher, SLURM, TORCHRUN};
pub use rank_env::RankEnv;
use rank_env::number;

use crate::Result;

impl RankEnv {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// When a variable is no number, or rank and world size contradict each other; the message names the variables.
    pub fn from_env() -> Result<Self> {
        Self::read(&|name| std::env::var(name).ok(), &mpich::socket)
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
        let mut hosts = None;
        if launcher.is_some_and(|launcher| launcher.name == SLURM) {
            slurm::meeting(&mut env, var)?;
            hosts = slurm::hosts(var)?;
        }
        // Of another launcher below ours, ours knows nothing.
        let of_ours = |name| launcher.filter(|launcher| launcher.name == TORCHRUN).and_then(|_| var(name));
        env.hosts = match of_ours("FSDP_HOSTS") {
            Some(count) => number("FSDP_HOSTS", &count)?,
            None => hosts.unwrap_or_else(|| env.world_size.div_ceil(env.local_world_size.max(1))),
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

#[cfg(test)]
mod tests;
