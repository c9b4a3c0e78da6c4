//! The environment that a launcher sets for each rank: rank, world size and the address of rank 0.

mod slurm;

use crate::{Error, Result};

/// Reads a variable; `None` if it is unset.
type Var<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The place of a rank in its job, in the terms of `torchrun`.
///
/// Reads the variables of these launchers, in this order: `fsdp-launch` and `torchrun` (`RANK`, `WORLD_SIZE`, ...),
/// Open MPI (`OMPI_COMM_WORLD_RANK`, ...), MPICH and its derivatives (`PMI_RANK`, ...), Slurm's `srun` (`SLURM_PROCID`,
/// ...). Without any of them, the world is one rank.
///
/// `MASTER_ADDR`, `MASTER_PORT` and `TORCHELASTIC_RUN_ID` apply under every launcher. Where they are unset:
///
/// | launcher | `master_addr` | `master_port` | `run_id` |
/// |---|---|---|---|
/// | `srun` | the first host of `SLURM_STEP_NODELIST` | 20000 to 29999, by job and step | `slurm-JOB.STEP` |
/// | Open MPI | 127.0.0.1 | 29500 | `PMIX_NAMESPACE` |
/// | MPICH | 127.0.0.1 | 29500 | the socket that a host's ranks share with their parent ([`RankEnv::from_env`] only) |
/// | none, `torchrun` | 127.0.0.1 | 29500 | `none` |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// Rank of this process in the world (`RANK`).
    pub rank: usize,
    /// Number of processes (`WORLD_SIZE`).
    pub world_size: usize,
    /// Rank on this host (`LOCAL_RANK`).
    pub local_rank: usize,
    /// Number of processes on this host (`LOCAL_WORLD_SIZE`).
    pub local_world_size: usize,
    /// Number of hosts. `fsdp-launch` sets `FSDP_HOSTS`, because several launchers may run on one host. Otherwise it is
    /// Slurm's number, or `world_size` divided by `local_world_size`.
    pub hosts: usize,
    /// Address of rank 0 (`MASTER_ADDR`).
    pub master_addr: String,
    /// Port at that address (`MASTER_PORT`).
    pub master_port: u16,
    /// Id of the job, the same on every rank (`TORCHELASTIC_RUN_ID`).
    pub run_id: String,
    /// Number of restarts after a failure (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: u32,
    /// Number of times that the ranks were started before. `fsdp-launch` sets `FSDP_ATTEMPT`, because a change of hosts
    /// starts a new attempt that is not a restart. Otherwise it is `restart_count`.
    pub attempt: u32,
}

impl RankEnv {
    /// Returns a world of one rank.
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

/// Parses a number that a launcher sets.
fn number<N: std::str::FromStr>(name: &str, text: &str) -> Result<N> {
    text.trim().parse().map_err(|_| {
        Error::Env(format!("{name}={text:?} is not a number in range: unset it, or start the rank by its launcher"))
    })
}

/// Variables with the number of threads of this process.
const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];
/// Maximum number of threads on a host with few cores, and per core.
const MAX_THREADS: usize = 256;
const MAX_THREADS_PER_CORE: usize = 4;

/// Checks the variables with the number of threads of this process, before a library starts them: rayon and Candle
/// ignore a value that is not a number, and panic if the system refuses so many threads.
///
/// # Errors
/// [`Error::Env`] if `RAYON_NUM_THREADS` or `CANDLE_NUM_THREADS` is not a number of threads that this host can run.
///
/// ```
/// fsdp_core::env::check_threads()?;
/// # Ok::<(), fsdp_core::Error>(())
/// ```
pub fn check_threads() -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    check_thread_counts(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()), cores)
}

fn check_thread_counts(var: Var<'_>, cores: usize) -> Result<()> {
    let most = MAX_THREADS.max(cores.saturating_mul(MAX_THREADS_PER_CORE));
    for name in THREADS {
        let Some(text) = var(name).filter(|text| !text.is_empty()) else { continue };
        // 0 means the default.
        if !text.parse::<usize>().is_ok_and(|count| count <= most) {
            return Err(Error::Env(format!(
                "{name}={text:?} is not a number of threads from 1 to {most}: set it to the cores of each rank, or \
                 unset it. This host has {cores} cores"
            )));
        }
    }
    Ok(())
}

/// Parses the port of rank 0, which all ranks must know before they meet.
fn port_of(name: &str, text: &str) -> Result<u16> {
    match text.trim().parse() {
        Ok(port @ 1..) => Ok(port),
        _ => Err(Error::Env(format!(
            "{name}={text:?} is not a port: set it to the same free port of rank 0's host on all ranks, from 1 to \
             65535, or unset it. fsdp-launch chooses a free one"
        ))),
    }
}

/// Parses the number of hosts of a world.
fn hosts_of(name: &str, text: &str, world_size: usize) -> Result<usize> {
    let hosts = number(name, text)?;
    if (1..=world_size).contains(&hosts) {
        return Ok(hosts);
    }
    Err(Error::Env(format!("{name}={hosts}: expected 1 to the number of ranks, which is {world_size}")))
}

/// Maximum number of ranks. A larger number is a mistake.
pub const MAX_WORLD_SIZE: usize = 1 << 20;

impl RankEnv {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// When a variable is not a number, or rank and world size contradict each other. The message names the variables.
    pub fn from_env() -> Result<Self> {
        // Bytes that are not UTF-8 are wrong, not unset.
        Self::read(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()), &socket_inode)
    }

    /// Reads the variables through `var`, which returns `None` for an unset variable.
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

    /// `socket` returns the inode of the socket behind a file descriptor.
    fn read(var: Var<'_>, socket: Var<'_>) -> Result<Self> {
        let mut env = RankEnv::single();
        let launcher = Launcher::detect(var)?;
        if let Some(launcher) = launcher {
            launcher.read(&mut env, var)?;
        }
        let mut hosts = None;
        if launcher.is_some_and(|launcher| launcher.name == SLURM) {
            slurm::set_master(&mut env, var)?;
            hosts = slurm::hosts(var)?;
        }
        // If another launcher started this rank under `fsdp-launch`, the variables of `fsdp-launch` do not describe it.
        let torchrun_var = |name| launcher.filter(|launcher| launcher.name == TORCHRUN).and_then(|_| var(name));
        env.hosts = match torchrun_var("FSDP_HOSTS") {
            Some(count) => hosts_of("FSDP_HOSTS", &count, env.world_size)?,
            None => hosts.unwrap_or_else(|| env.world_size.div_ceil(env.local_world_size.max(1))),
        };
        if let Some(addr) = var("MASTER_ADDR") {
            if addr.trim().is_empty() {
                return Err(Error::Env(format!("MASTER_ADDR={addr:?} is empty: set it to rank 0's host, or unset it")));
            }
            env.master_addr = addr;
        }
        if let Some(port) = var("MASTER_PORT") {
            env.master_port = port_of("MASTER_PORT", &port)?;
        }
        let launcher_run_id =
            || launcher.and_then(|launcher| launcher.run_id(var, socket)).or_else(|| slurm::run_id(var));
        if let Some(id) = var("TORCHELASTIC_RUN_ID").or_else(launcher_run_id) {
            env.run_id = id;
        }
        if let Some(count) = var("TORCHELASTIC_RESTART_COUNT") {
            env.restart_count = number("TORCHELASTIC_RESTART_COUNT", &count)?;
        }
        env.attempt = match torchrun_var("FSDP_ATTEMPT") {
            Some(count) => number("FSDP_ATTEMPT", &count)?,
            None => env.restart_count,
        };
        Ok(env)
    }
}

const TORCHRUN: &str = "torchrun";
const MPICH: &str = "MPICH";
const SLURM: &str = "Slurm";

/// Variables of one launcher.
#[derive(Debug)]
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first that is set applies.
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: &'static str,
    /// The same on every rank, and different between jobs. The first that is set applies.
    run_id: &'static [&'static str],
}

const LAUNCHERS: [Launcher; 4] = [
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
    /// Returns the launcher whose variables are set.
    fn detect(var: Var<'_>) -> Result<Option<&'static Self>> {
        for launcher in &LAUNCHERS {
            let size = launcher.size_var(var);
            match (var(launcher.rank).is_some(), size.is_some()) {
                (true, true) if launcher.is_rank(var) => return Ok(Some(launcher)),
                (has_rank, has_size) if launcher.name == TORCHRUN && has_rank != has_size => {
                    let names = (launcher.rank, launcher.size[0]);
                    let (set, unset) = if has_rank { names } else { (names.1, names.0) };
                    return Err(Error::Env(format!(
                        "{set} is set but {unset} is not: set both, or neither for one process"
                    )));
                }
                // A program started by hand in a Slurm allocation sees SLURM_NTASKS without a rank.
                _ => {}
            }
        }
        Ok(None)
    }

    fn size_var(&self, var: Var<'_>) -> Option<(&'static str, String)> {
        self.size.iter().find_map(|name| Some((*name, var(name)?)))
    }

    /// Returns whether the variables are those of a rank, and not inherited from a parent.
    fn is_rank(&self, var: Var<'_>) -> bool {
        match self.name {
            // `srun --mpi=pmi2` also sets PMI_RANK, but not MPICH's local rank.
            MPICH => var(self.local_rank).is_some() || var("SLURM_PROCID").is_none(),
            // The script of `sbatch` has rank 0 of the job's size, but is not one of several ranks.
            SLURM => !slurm::is_batch_script(var),
            _ => true,
        }
    }

    /// Reads ranks and sizes.
    fn read(&self, env: &mut RankEnv, var: Var<'_>) -> Result<()> {
        let (size, size_text) = self.size_var(var).unwrap_or((self.size[0], String::new()));
        env.rank = number(self.rank, &var(self.rank).unwrap_or_default())?;
        env.world_size = number(size, &size_text)?;
        if !(1..=MAX_WORLD_SIZE).contains(&env.world_size) {
            return Err(Error::Env(format!(
                "{size}={} is not a number of ranks: expected 1 to {MAX_WORLD_SIZE}",
                env.world_size
            )));
        }
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
                "{local_size} gives {count} processes on this host: expected 1 to {size}={}",
                env.world_size
            )));
        }
        env.local_rank = var(self.local_rank).map_or(Ok(env.rank % count), |text| number(self.local_rank, &text))?;
        if env.local_rank >= count {
            return Err(Error::Env(format!(
                "{}={} is outside the {count} processes of {local_size}: local ranks count from 0",
                self.local_rank, env.local_rank
            )));
        }
        Ok(())
    }

    /// Returns the id that distinguishes this job from others on the host.
    fn run_id(&self, var: Var<'_>, socket: Var<'_>) -> Option<String> {
        let set = self.run_id.iter().find_map(|name| var(name));
        set.or_else(|| if self.name == MPICH { mpich_run_id(var, socket) } else { None })
    }
}

/// Returns an id of an MPICH job. MPICH's `mpirun` (Hydra) sets no variable that identifies a job, but all ranks of a
/// job on one host inherit one socket of their common parent.
fn mpich_run_id(var: Var<'_>, socket: Var<'_>) -> Option<String> {
    Some(format!("mpich-{}", socket(&var("HYDI_CONTROL_FD")?)?))
}

/// Returns the inode of a file descriptor that is a socket.
fn socket_inode(descriptor: &str) -> Option<String> {
    let descriptor: u32 = descriptor.trim().parse().ok()?;
    let target = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
}

#[cfg(test)]
mod tests;
