//! What can be chosen about a process group.
//! Which group, and who this process is in it.

//! The group of all ranks, by the backend that the environment names.

use std::time::Duration;

use super::{group::ProcessGroup, mpi, shared_memory::shm};
use crate::{Error, HostNames, RankEnv, Result, heartbeat};

// ---- from process_group/options
/// Timeouts that make sense: longer than a look at a clock, and at most 30 years.
const SECONDS: std::ops::RangeInclusive<f64> = 1e-3..=1e9;

/// Choices for a process group. All ranks should make the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// How long a rank waits for its peers, when they meet and for each step of a collective. 10 minutes by default.
    pub timeout: Duration,
    /// Bytes that move at a time. A rank's shared memory is four times this. 128 KiB by default; rounded to what the
    /// ranks can share evenly.
    pub chunk_bytes: usize,
    /// Whether ranks that share a host share what comes to it from others, and add up what goes to others, where hosts
    /// are several. Results have the same bits. For reductions it takes a few MiB more. True by default; it is so where
    /// all ranks want it.
    pub hierarchy: bool,
    /// Which host this rank counts to: those with the same name share one, and have to be able to share its memory. By
    /// default found out.
    pub host: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options { timeout: Duration::from_secs(600), chunk_bytes: 128 << 10, hierarchy: true, host: None }
    }
}

impl Options {
    /// With another [`Options::timeout`].
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// With other [`Options::chunk_bytes`].
    pub fn with_chunk_bytes(mut self, chunk_bytes: usize) -> Self {
        self.chunk_bytes = chunk_bytes;
        self
    }

    /// With another [`Options::hierarchy`].
    pub fn with_hierarchy(mut self, hierarchy: bool) -> Self {
        self.hierarchy = hierarchy;
        self
    }

    /// With a name for [`Options::host`].
    pub fn with_host(mut self, name: impl Into<String>) -> Self {
        self.host = Some(name.into());
        self
    }

    /// With what the environment says: `FSDP_TIMEOUT_S`, in seconds, and `FSDP_HIERARCHY`, which is 0 or 1, read
    /// through `var`.
    ///
    /// # Errors
    /// When the timeout is set to anything but a number from 0.001 to 1000000000, or the other to anything else.
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
                    "FSDP_TIMEOUT_S={text:?}: a timeout is a number of seconds from {least} to {most}, such as 600. \
                     Set one, \
                     or leave the variable unset for 600"
                ))
            })?;
        }
        if let Some(text) = var("FSDP_HIERARCHY") {
            self.hierarchy = match text.trim() {
                "0" => false,
                "1" => true,
                _ => {
                    return Err(Error::Env(format!(
                        "FSDP_HIERARCHY={text:?}: set 0, so that ranks of several hosts send to each other as if each \
                         had one of its own, or leave the variable unset for 1"
                    )));
                }
            };
        }
        Ok(self)
    }
}

// ---- from process_group/membership
/// The name of the group of all ranks.
pub(crate) const WORLD: &str = "world";

/// A group's name, and this process's place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The group's name, the same on every rank and no other group's.
    pub name: String,
    /// This process's rank in the group.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// How long a collective may wait for its peers while none of them makes progress.
    pub timeout: Duration,
    /// The hosts of the ranks, for messages.
    pub hosts: HostNames,
}

impl Membership {
    /// That of the group of all ranks.
    pub fn world(rank: usize, size: usize, timeout: Duration) -> Self {
        Membership { name: WORLD.into(), rank, size, timeout, hosts: HostNames::default() }
    }

    /// With ranks on these hosts.
    pub fn with_hosts(self, hosts: HostNames) -> Self {
        Membership { hosts, ..self }
    }

    /// Whether the group is that of all ranks.
    pub fn is_world(&self) -> bool {
        self.name == WORLD
    }
}

// ---- from process_group/init
/// Makes the process group of all ranks, as the environment of this process wants it: `FSDP_BACKEND` names the backend,
/// `FSDP_TIMEOUT_S` and `FSDP_HIERARCHY` override what `options` say ([`Options::overridden_by`]). By default it is
/// `local` for a world of one, `mpi` where an MPI's launcher has started ranks on several hosts, and `shm` otherwise.
/// Starts this process's [heartbeat] as well.
///
/// # Errors
/// [`Error::Env`] when a variable can't be understood or names a backend that can't serve this world; those of
/// [`shm::connect`] and [`mpi::connect`].
pub fn init(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    heartbeat::start();
    init_with(env, options, |name| std::env::var(name).ok())
}

fn init_with(env: &RankEnv, options: Options, var: impl Fn(&str) -> Option<String>) -> Result<ProcessGroup> {
    let options = options.overridden_by(&var)?;
    match var("FSDP_BACKEND").as_deref().unwrap_or_else(|| default(env, &var)) {
        "local" if env.world_size == 1 => ProcessGroup::single_rank(options.timeout),
        "local" => Err(Error::Env(format!(
            "FSDP_BACKEND=local serves one process, but WORLD_SIZE={}: choose shm, or mpi for several hosts",
            env.world_size
        ))),
        "shm" => shm::connect(env, options),
        "mpi" => mpi::connect(env, options),
        other => Err(Error::Env(format!(
            "FSDP_BACKEND={other:?} is no backend of this build: choose one of local, shm, mpi"
        ))),
    }
}

/// The backend for ranks that say nothing of it. One that no MPI started can't use one.
fn default(env: &RankEnv, var: impl Fn(&str) -> Option<String>) -> &'static str {
    const OF_MPI: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD"];
    match (env.world_size, env.hosts) {
        (1, _) => "local",
        (_, 2..) if OF_MPI.iter().any(|name| var(name).is_some()) => "mpi",
        _ => "shm",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_timeout_is_an_error_that_names_the_variable() {
        let of = |text: &'static str| {
            Options::default().overridden_by(|name| (name == "FSDP_TIMEOUT_S").then(|| text.to_string()))
        };
        for text in
            ["", " ", "0", "-1", "nan", "-nan", "inf", "-inf", "1e30", "1e300", "1e-30", "2e9", "ten", "600s", "1,5"]
        {
            let error = of(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("FSDP_TIMEOUT_S={text:?}: ")), "{error}");
            assert!(error.contains("a number of seconds from 0.001 to 1000000000, such as 600"), "{error}");
        }
        for (text, millis) in [("0.001", 1), (" 2.5 ", 2500), ("1e9", 1_000_000_000_000)] {
            let options = of(text).unwrap();
            assert_eq!(options.timeout.as_millis(), millis);
        }
        assert_eq!(Options::default().overridden_by(|_| None).unwrap(), Options::default());
    }

    #[test]
    fn the_hierarchy_is_on_or_off() {
        let of = |text: &'static str| {
            Options::default().overridden_by(|name| (name == "FSDP_HIERARCHY").then(|| text.to_string()))
        };
        assert!(!of("0").unwrap().hierarchy && of(" 1 ").unwrap().hierarchy && Options::default().hierarchy);
        for text in ["", "no", "2"] {
            let error = of(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("FSDP_HIERARCHY={text:?}: set 0")), "{error}");
        }
    }

    #[test]
    fn the_backend_is_chosen_by_name_and_an_unknown_one_lists_those_there_are() {
        let init = |size: usize, backend: Option<&str>| {
            let env = RankEnv { world_size: size, ..RankEnv::single() };
            init_with(&env, Options::default(), |name| (name == "FSDP_BACKEND").then(|| backend.map(str::to_string))?)
        };
        for backend in [None, Some("local"), Some("shm"), Some("mpi")] {
            assert_eq!(init(1, backend).unwrap().size(), 1);
        }
        for (size, backend, part) in [(2, "local", "choose shm"), (1, "gloo", "one of local, shm")] {
            let Err(error) = init(size, Some(backend)) else { panic!("{backend} was taken") };
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn ranks_on_several_hosts_use_the_mpi_that_started_them() {
        let env = |world_size, hosts| RankEnv { world_size, hosts, ..RankEnv::single() };
        let by = |name: &'static str| move |asked: &str| (asked == name).then(|| "0".to_string());
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PMI_FD"] {
            assert_eq!(default(&env(4, 2), by(name)), "mpi");
            assert_eq!(default(&env(4, 1), by(name)), "shm");
            assert_eq!(default(&env(1, 1), by(name)), "local");
        }
        assert_eq!(default(&env(4, 2), by("SLURM_PROCID")), "shm");
    }
}
