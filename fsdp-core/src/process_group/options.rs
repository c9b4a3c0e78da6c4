//! Options of a process group, its membership, and the choice of a backend for the world.

use std::time::Duration;

use super::{group::ProcessGroup, mpi, shared_memory::shm};
use crate::{Error, HostNames, RankEnv, Result, env::MAX_WORLD_SIZE, heartbeat};

/// Accepted timeouts, in seconds: from a millisecond to 30 years.
const SECONDS: std::ops::RangeInclusive<f64> = 1e-3..=1e9;

/// Options of a process group. All ranks should use the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// How long a rank waits for its peers, at the rendezvous and in each step of a collective. 10 minutes by default.
    pub timeout: Duration,
    /// Bytes that move at a time, rounded so that ranks can share them evenly. 128 KiB by default. A rank's shared
    /// memory is four times as large.
    pub chunk_bytes: usize,
    /// Whether ranks of one host share data from other hosts, and add up data for them before it is sent. Results have
    /// the same bits. Reductions take a few MiB more. True by default, and in effect if it is true on all ranks.
    pub hierarchy: bool,
    /// Name of this rank's host. Ranks with the same name must be able to share memory. Detected by default.
    pub host: Option<String>,
    /// Whether tensors are on devices and NCCL moves them, so that the group carries small messages only. Ranks on
    /// several hosts then need no MPI. False by default.
    pub nccl_moves_tensors: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            timeout: Duration::from_secs(600),
            chunk_bytes: 128 << 10,
            hierarchy: true,
            host: None,
            nccl_moves_tensors: false,
        }
    }
}

impl Options {
    /// Sets [`Options::timeout`].
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets [`Options::chunk_bytes`].
    pub fn with_chunk_bytes(mut self, chunk_bytes: usize) -> Self {
        self.chunk_bytes = chunk_bytes;
        self
    }

    /// Sets [`Options::host`].
    pub fn with_host(mut self, name: impl Into<String>) -> Self {
        self.host = Some(name.into());
        self
    }

    /// Sets [`Options::nccl_moves_tensors`].
    pub fn with_nccl_moving_tensors(mut self, nccl_moves_tensors: bool) -> Self {
        self.nccl_moves_tensors = nccl_moves_tensors;
        self
    }

    /// Applies the environment variables `FSDP_TIMEOUT_S` (seconds) and `FSDP_HIERARCHY` (0 or 1), read through `var`.
    ///
    /// # Errors
    /// If the timeout is not a number from 0.001 to 1000000000, or the hierarchy is neither 0 nor 1.
    ///
    /// ```
    /// use fsdp_core::process_group::Options;
    /// let options = Options::default().overridden_by(|name| (name == "FSDP_TIMEOUT_S").then(|| "2.5".into()))?;
    /// assert_eq!(options.timeout.as_millis(), 2500);
    /// # Ok::<(), fsdp_core::Error>(())
    /// ```
    pub fn overridden_by(mut self, var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        if let Some(text) = var("FSDP_TIMEOUT_S") {
            let seconds = text.trim().parse().ok().filter(|seconds: &f64| SECONDS.contains(seconds));
            self.timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(|| {
                let (least, most) = (SECONDS.start(), SECONDS.end());
                Error::Env(format!(
                    "FSDP_TIMEOUT_S={text:?}: expected a number of seconds from {least} to {most}, such as 600 (the \
                     default)"
                ))
            })?;
        }
        if let Some(text) = var("FSDP_HIERARCHY") {
            self.hierarchy = match text.trim() {
                "0" => false,
                "1" => true,
                _ => {
                    return Err(Error::Env(format!(
                        "FSDP_HIERARCHY={text:?}: expected 0 (ranks of several hosts send to each other directly) or 1 \
                         (the default)"
                    )));
                }
            };
        }
        Ok(self)
    }
}

/// Name of the group of all ranks.
pub(crate) const WORLD: &str = "world";

/// A group's name, size and hosts, and this process's rank in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Unique name of the group, the same on every rank.
    pub name: String,
    /// This process's rank in the group.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// How long a collective waits for its peers while none of them makes progress.
    pub timeout: Duration,
    /// Host names of the ranks, for messages.
    pub hosts: HostNames,
}

impl Membership {
    /// Creates the membership of the group of all ranks.
    pub fn world(rank: usize, size: usize, timeout: Duration) -> Self {
        Membership { name: WORLD.into(), rank, size, timeout, hosts: HostNames::default() }
    }

    /// Creates the membership of the rank that `env` describes in the group of all ranks.
    pub(super) fn of_env(env: &RankEnv, timeout: Duration) -> Result<Self> {
        let RankEnv { rank, world_size, .. } = *env;
        if rank >= world_size {
            return Err(Error::Env(format!(
                "rank {rank} is outside a world of {world_size}: ranks count from 0 to the world size - 1"
            )));
        }
        if world_size > MAX_WORLD_SIZE {
            return Err(Error::Env(format!(
                "a world of {world_size} ranks is larger than {MAX_WORLD_SIZE}: check the world size"
            )));
        }
        Ok(Membership::world(rank, world_size, timeout))
    }

    /// Returns whether this is the group of all ranks.
    pub fn is_world(&self) -> bool {
        self.name == WORLD
    }
}

/// Creates the process group of all ranks by the environment of this process, and starts its [heartbeat].
///
/// `FSDP_BACKEND` names the backend; `FSDP_TIMEOUT_S` and `FSDP_HIERARCHY` override `options`
/// ([`Options::overridden_by`]). The default backend depends on the environment and the options only, not on what is
/// installed:
///
/// | ranks | started by | default |
/// |---|---|---|
/// | one | | `local` |
/// | several, on one host | | `shm` |
/// | on several hosts | `mpirun`, or `srun --mpi=...` | `mpi` |
/// | on several hosts, NCCL moves tensors ([`Options::nccl_moves_tensors`]) | others | `tcp` |
/// | on several hosts, tensors in host memory | `fsdp-launch` | `mpi` |
/// | | others | `shm`, which is an error that names the ways out |
///
/// # Errors
/// [`Error::Env`] if a variable is invalid or its backend cannot serve this world, and the errors of [`shm::connect`],
/// [`mpi::connect`] and `tcp::connect`.
pub fn init(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    heartbeat::start();
    init_with(env, options, |name| std::env::var(name).ok())
}

fn init_with(env: &RankEnv, options: Options, var: impl Fn(&str) -> Option<String>) -> Result<ProcessGroup> {
    let options = options.overridden_by(&var)?;
    let asked = var("FSDP_BACKEND");
    let backend = asked.as_deref().unwrap_or_else(|| default(env, options.nccl_moves_tensors, &var));
    if env.rank == 0 && env.hosts > 1 {
        let (ranks, hosts, why) =
            (env.world_size, env.hosts, if asked.is_some() { "asked for" } else { "the default" });
        tracing::info!("{ranks} ranks on {hosts} hosts connect by {backend} ({why}; FSDP_BACKEND chooses)");
    }
    match backend {
        "local" if env.world_size == 1 => ProcessGroup::single_rank(options.timeout),
        "local" => Err(Error::Env(format!(
            "FSDP_BACKEND=local serves one rank, but WORLD_SIZE is {}: use shm, or tcp or mpi for several hosts",
            env.world_size
        ))),
        "shm" => shm::connect(env, options),
        "mpi" => mpi::connect(env, options),
        #[cfg(feature = "tcp")]
        "tcp" => super::tcp::connect(env, options),
        #[cfg(not(feature = "tcp"))]
        "tcp" => Err(Error::Env(
            "FSDP_BACKEND=tcp: this build has no such backend: build it with the feature `tcp` of fsdp-core".into(),
        )),
        other => Err(Error::Env(format!("FSDP_BACKEND={other:?}: unknown backend, expected local, shm, tcp or mpi"))),
    }
}

/// Returns the default backend. Only ranks that an MPI launcher started can use MPI.
fn default(env: &RankEnv, nccl_moves_tensors: bool, var: impl Fn(&str) -> Option<String>) -> &'static str {
    const OF_MPI: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD"];
    let is_of_mpi = OF_MPI.iter().any(|name| var(name).is_some());
    // `fsdp-launch` serves MPI, but its ranks need not use it.
    let needs_mpi = is_of_mpi && var("FSDP_ATTEMPT").is_none();
    match (env.world_size, env.hosts) {
        (1, _) => "local",
        (_, 2..) if nccl_moves_tensors && !needs_mpi && cfg!(feature = "tcp") => "tcp",
        (_, 2..) if is_of_mpi => "mpi",
        _ => "shm",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_timeout_names_the_variable() {
        let of = |text: &'static str| {
            Options::default().overridden_by(|name| (name == "FSDP_TIMEOUT_S").then(|| text.to_string()))
        };
        for text in
            ["", " ", "0", "-1", "nan", "-nan", "inf", "-inf", "1e30", "1e300", "1e-30", "2e9", "ten", "600s", "1,5"]
        {
            let error = of(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("FSDP_TIMEOUT_S={text:?}: ")), "{error}");
            assert!(error.contains("expected a number of seconds from 0.001 to 1000000000, such as 600"), "{error}");
        }
        for (text, millis) in [("0.001", 1), (" 2.5 ", 2500), ("1e9", 1_000_000_000_000)] {
            let options = of(text).unwrap();
            assert_eq!(options.timeout.as_millis(), millis);
        }
        assert_eq!(Options::default().overridden_by(|_| None).unwrap(), Options::default());
    }

    #[test]
    fn hierarchy_is_0_or_1() {
        let of = |text: &'static str| {
            Options::default().overridden_by(|name| (name == "FSDP_HIERARCHY").then(|| text.to_string()))
        };
        assert!(!of("0").unwrap().hierarchy && of(" 1 ").unwrap().hierarchy && Options::default().hierarchy);
        for text in ["", "no", "2"] {
            let error = of(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("FSDP_HIERARCHY={text:?}: expected 0")), "{error}");
        }
    }

    #[test]
    fn backends_are_chosen_by_name() {
        let init = |size: usize, backend: Option<&str>| {
            let env = RankEnv { world_size: size, ..RankEnv::single() };
            init_with(&env, Options::default(), |name| (name == "FSDP_BACKEND").then(|| backend.map(str::to_string))?)
        };
        for backend in [None, Some("local"), Some("shm"), Some("mpi")] {
            assert_eq!(init(1, backend).unwrap().size(), 1);
        }
        for (size, backend, part) in [(2, "local", "use shm"), (1, "gloo", "expected local, shm, tcp or mpi")] {
            let Err(error) = init(size, Some(backend)) else { panic!("{backend} was accepted") };
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn ranks_on_several_hosts_use_the_mpi_that_started_them() {
        let env = |world_size, hosts| RankEnv { world_size, hosts, ..RankEnv::single() };
        let by = |name: &'static str| move |asked: &str| (asked == name).then(|| "0".to_string());
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PMI_FD"] {
            for nccl_moves_tensors in [false, true] {
                assert_eq!(default(&env(4, 2), nccl_moves_tensors, by(name)), "mpi");
                assert_eq!(default(&env(4, 1), nccl_moves_tensors, by(name)), "shm");
                assert_eq!(default(&env(1, 1), nccl_moves_tensors, by(name)), "local");
            }
        }
        assert_eq!(default(&env(4, 2), false, by("SLURM_PROCID")), "shm");
    }

    #[cfg(feature = "tcp")]
    #[test]
    fn ranks_on_several_hosts_need_no_mpi_if_nccl_moves_tensors() {
        let env = |hosts| RankEnv { world_size: 4, hosts, ..RankEnv::single() };
        let ours = |asked: &str| ["FSDP_ATTEMPT", "PMI_FD", "PMI_RANK"].contains(&asked).then(|| "0".to_string());
        assert_eq!([false, true].map(|moves| default(&env(2), moves, ours)), ["mpi", "tcp"]);
        assert_eq!([false, true].map(|moves| default(&env(2), moves, |_| None)), ["shm", "tcp"]);
        assert_eq!([false, true].map(|moves| default(&env(1), moves, ours)), ["shm", "shm"]);
    }
}
