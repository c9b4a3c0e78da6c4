//! What each launcher calls a rank's place in the world.

use super::{
    mpich,
    rank_env::{RankEnv, number},
    slurm,
};
use crate::{Error, Result};

type Var<'a> = &'a dyn Fn(&str) -> Option<String>;

pub(super) const TORCHRUN: &str = "torchrun";
const MPICH: &str = "MPICH";
pub(super) const SLURM: &str = "Slurm";

/// The variables of one launcher.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) name: &'static str,
    pub(super) rank: &'static str,
    /// The first that is set counts.
    pub(super) size: &'static [&'static str],
    pub(super) local_rank: &'static str,
    pub(super) local_size: &'static str,
    /// The same on every rank, and different between jobs; the first that is set counts.
    run_id: &'static [&'static str],
}

pub(super) const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: TORCHRUN,
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        run_id: &[],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        run_id: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        name: MPICH,
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        run_id: &["PMIX_NAMESPACE", "PMI_JOBID"],
    },
    Launcher {
        name: SLURM,
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
        run_id: &[],
    },
];

impl Launcher {
    /// Who started this process, as far as its variables tell.
    pub(super) fn detect(var: Var<'_>) -> Result<Option<&'static Self>> {
        for launcher in &LAUNCHERS {
            let size = launcher.size_set(var);
            match (var(launcher.rank).is_some(), size.is_some()) {
                (true, true) if launcher.started_here(var) => return Ok(Some(launcher)),
                (has_rank, has_size) if launcher.name == TORCHRUN && has_rank != has_size => {
                    let names = (launcher.rank, launcher.size[0]);
                    let (set, unset) = if has_rank { names } else { (names.1, names.0) };
                    return Err(Error::Env(format!(
                        "{set} is set but {unset} is not: set both, or neither for one process"
                    )));
                }
                // A program started by hand inside a Slurm allocation sees SLURM_NTASKS without a rank: that is no
                // launcher's doing.
                _ => {}
            }
        }
        Ok(None)
    }

    fn size_set(&self, var: Var<'_>) -> Option<(&'static str, String)> {
        self.size.iter().find_map(|name| Some((*name, var(name)?)))
    }

    /// Whether the variables are those of a rank of this launcher, and not passed down or set for others' sake.
    fn started_here(&self, var: Var<'_>) -> bool {
        match self.name {
            // `srun --mpi=pmi2` sets these as well, but tells the local rank in its own.
            MPICH => var(self.local_rank).is_some() || var("SLURM_PROCID").is_none(),
            // The script of `sbatch` is rank 0 of as many ranks as it may start, and has started none of them.
            SLURM => !slurm::is_batch_script(var),
            _ => true,
        }
    }

    /// Reads ranks and sizes.
    pub(super) fn read(&self, env: &mut RankEnv, var: Var<'_>) -> Result<()> {
        let (size, size_text) = self.size_set(var).unwrap_or((self.size[0], String::new()));
        env.rank = number(self.rank, &var(self.rank).unwrap_or_default())?;
        env.world_size = number(size, &size_text)?;
        if env.rank >= env.world_size {
            return Err(Error::Env(format!(
                "{}={} is outside the world of {size}={}: ranks count from 0 to {size}-1",
                self.rank, env.rank, env.world_size
            )));
        }
        let tasks = if self.name == SLURM { slurm::local_size(var)? } else { None };
        let (local_size, count) = match tasks {
            Some(found) => found,
            None => match var(self.local_size) {
                Some(text) => (self.local_size, number(self.local_size, &text)?),
                None => (size, env.world_size),
            },
        };
        env.local_world_size = count;
        if !(1..=env.world_size).contains(&count) {
            return Err(Error::Env(format!(
                "{local_size} says that {count} of {size}={} processes run on this host: at least 1 does, and not \
                 more than there are",
                env.world_size
            )));
        }
        env.local_rank = var(self.local_rank).map_or(Ok(env.rank % count), |text| number(self.local_rank, &text))?;
        if env.local_rank >= count {
            return Err(Error::Env(format!(
                "{}={} is outside the {count} processes of this host that {local_size} tells: local ranks count from 0",
                self.local_rank, env.local_rank
            )));
        }
        Ok(())
    }

    /// What tells this job from others on this host.
    pub(super) fn run_id(&self, var: Var<'_>, socket: Var<'_>) -> Option<String> {
        let set = self.run_id.iter().find_map(|name| var(name));
        set.or_else(|| if self.name == MPICH { mpich::run_id(var, socket) } else { None })
    }
}
