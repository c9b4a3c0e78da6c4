//! Who this process is: the environment that a launcher sets for each rank.

use crate::{Error, Result};

/// What a launcher tells a rank, in the terms of `torchrun`.
///
/// Understood are the variables of `fsdp-launch` and `torchrun` (`RANK`, `WORLD_SIZE`, ...), of Open MPI (`OMPI_COMM_WORLD_RANK`, ...), of MPICH and its kin
/// (`PMI_RANK`, ...) and of Slurm (`SLURM_PROCID`, ...), in this order. With none of them the process is a world of one.
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
    /// Where rank 0 can be reached (`MASTER_ADDR`).
    pub master_addr: String,
    /// The port there (`MASTER_PORT`).
    pub master_port: u16,
    /// The job's name, the same on every rank (`TORCHELASTIC_RUN_ID`).
    pub run_id: String,
    /// How often the job was restarted (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: u32,
}

/// Rank, world size, local rank and local world size as one launcher calls them.
const LAUNCHERS: [(&str, [&str; 4]); 4] = [
    ("torchrun", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    (
        "Open MPI",
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    ),
    ("MPICH", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    ("Slurm", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"]),
];

impl RankEnv {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// When a variable is no number, or rank and world size contradict each other; the message names the variables.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// A world of one.
    pub fn single() -> Self {
        RankEnv {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            master_addr: "127.0.0.1".into(),
            master_port: 29500,
            run_id: "none".into(),
            restart_count: 0,
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
        let mut env = RankEnv::single();
        for (launcher, [rank, size, local_rank, local_size]) in LAUNCHERS {
            let (Some(rank_text), Some(size_text)) = (var(rank), var(size)) else {
                // A program started by hand inside a Slurm allocation sees SLURM_NTASKS without a rank: that is no launcher's doing.
                if launcher == "torchrun" && var(rank).is_some() != var(size).is_some() {
                    let (set, unset) = if var(rank).is_some() { (rank, size) } else { (size, rank) };
                    return Err(Error::Env(format!(
                        "{set} is set but {unset} is not: set both, or neither for one process"
                    )));
                }
                continue;
            };
            env.rank = number(rank, &rank_text)?;
            env.world_size = number(size, &size_text)?;
            if env.rank >= env.world_size {
                return Err(Error::Env(format!(
                    "{rank}={} is outside the world of {size}={}: ranks count from 0 to {size}-1",
                    env.rank, env.world_size
                )));
            }
            env.local_rank = var(local_rank).map_or(Ok(env.rank), |text| number(local_rank, &text))?;
            env.local_world_size = var(local_size).map_or(Ok(env.world_size), |text| number(local_size, &text))?;
            break;
        }
        if let Some(addr) = var("MASTER_ADDR") {
            env.master_addr = addr;
        }
        if let Some(port) = var("MASTER_PORT") {
            env.master_port = number("MASTER_PORT", &port)?;
        }
        if let Some(id) = var("TORCHELASTIC_RUN_ID").or_else(|| var("SLURM_JOB_ID")) {
            env.run_id = id;
        }
        if let Some(count) = var("TORCHELASTIC_RESTART_COUNT") {
            env.restart_count = number("TORCHELASTIC_RESTART_COUNT", &count)?;
        }
        Ok(env)
    }
}

fn number<N: std::str::FromStr>(name: &str, text: &str) -> Result<N> {
    text.trim()
        .parse()
        .map_err(|_| Error::Env(format!("{name}={text:?} is not a number in range: the launcher sets it")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<RankEnv> {
        RankEnv::from_vars(|name| vars.iter().find(|(have, _)| *have == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn nothing_set_is_a_world_of_one() {
        assert_eq!(read(&[]).unwrap(), RankEnv::single());
        assert_eq!(read(&[("SLURM_NTASKS", "8")]).unwrap(), RankEnv::single());
    }

    #[test]
    fn every_launcher_is_understood() {
        for (_, [rank, size, local_rank, local_size]) in LAUNCHERS {
            let env = read(&[(rank, "5"), (size, "8"), (local_rank, "1"), (local_size, "4")]).unwrap();
            assert_eq!((env.rank, env.world_size, env.local_rank, env.local_world_size), (5, 8, 1, 4));
        }
    }

    #[test]
    fn contradictions_name_the_variables() {
        for (vars, part) in [
            (vec![("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 is outside"),
            (vec![("RANK", "0")], "WORLD_SIZE is not"),
            (vec![("RANK", "x"), ("WORLD_SIZE", "2")], "RANK=\"x\""),
            (vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")], "MASTER_PORT"),
        ] {
            let error = read(&vars).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
