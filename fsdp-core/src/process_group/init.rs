//! The group of all ranks, by the backend that the environment names.

use super::{group::ProcessGroup, mpi, options::Options, shared_memory::shm};
use crate::{Error, RankEnv, Result, heartbeat};

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
