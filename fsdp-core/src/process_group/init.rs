//! The group of all ranks, by the backend that the environment names.

use super::{group::ProcessGroup, options::Options, shared_memory::shm};
use crate::{Error, RankEnv, Result, heartbeat};

/// Makes the process group of all ranks, as the environment of this process wants it: `FSDP_BACKEND` names the backend
/// (by default `local` for a world of one and `shm` otherwise), `FSDP_TIMEOUT_S` overrides [`Options::timeout`]. Starts
/// this process's [heartbeat] as well.
///
/// # Errors
/// [`Error::Env`] when a variable can't be understood or names a backend that can't serve this world; those of
/// [`shm::connect`].
pub fn init(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    heartbeat::start();
    init_with(env, options, |name| std::env::var(name).ok())
}

fn init_with(env: &RankEnv, options: Options, var: impl Fn(&str) -> Option<String>) -> Result<ProcessGroup> {
    let options = options.overridden_by(&var)?;
    let default = if env.world_size == 1 { "local" } else { "shm" };
    match var("FSDP_BACKEND").as_deref().unwrap_or(default) {
        "local" if env.world_size == 1 => ProcessGroup::alone(options.timeout),
        "local" => Err(Error::Env(format!(
            "FSDP_BACKEND=local serves one process, but WORLD_SIZE={}: choose shm",
            env.world_size
        ))),
        "shm" => shm::connect(env, options),
        other => {
            Err(Error::Env(format!("FSDP_BACKEND={other:?} is no backend of this build: choose one of local, shm")))
        }
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
        for backend in [None, Some("local"), Some("shm")] {
            assert_eq!(init(1, backend).unwrap().size(), 1);
        }
        for (size, backend, part) in [(2, "local", "choose shm"), (1, "gloo", "one of local, shm")] {
            let Err(error) = init(size, Some(backend)) else { panic!("{backend} was taken") };
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
