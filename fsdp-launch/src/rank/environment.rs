//! The environment of a rank: `torchrun`'s variables, so that programs work under both launchers.

use std::{ffi::OsString, path::Path, process::Command};

use crate::{
    LaunchSpec, Result,
    rank::{affinity, gpus},
    rendezvous::Assignment,
};

/// Secret of the run's store (`fsdp_core::store`).
const STORE_SECRET: &str = "FSDP_STORE_SECRET";

/// Settings of glibc's allocator: freed memory stays with the process, in huge pages where the system offers them. A
/// training step allocates the same large tensors as the last one, which would otherwise cost page faults. Another libc
/// ignores the variable.
const TUNABLES: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=0x200000000:\
     glibc.malloc.trim_threshold=0x1000000000:glibc.malloc.arena_max=1";

/// State that all ranks of an attempt on this host share.
pub(crate) struct Job<'a> {
    pub(crate) spec: &'a LaunchSpec,
    pub(crate) assignment: &'a Assignment,
    /// Unique id of the launch.
    pub(crate) launch_id: &'a str,
    /// Directory of the attempt's logs, if any.
    pub(crate) log_dir: Option<&'a Path>,
    /// Directory of the error files, without logs.
    pub(crate) error_dir: &'a Path,
}

impl Job<'_> {
    /// Returns the global rank of a local rank.
    pub(crate) fn rank(&self, local_rank: usize) -> usize {
        self.assignment.first_rank + local_rank
    }

    /// Returns the path of a rank's error file.
    pub(crate) fn error_file(&self, local_rank: usize) -> std::path::PathBuf {
        if let Some(dir) = self.log_dir {
            return dir.join(local_rank.to_string()).join("error.json");
        }
        self.error_dir.join(format!("attempt-{}-rank-{local_rank}.json", self.assignment.attempt))
    }

    /// Returns the variables of a rank, first those of torchrun's documentation in its order. Fails when the rank
    /// should see one GPU but none is left.
    pub(crate) fn variables(&self, local_rank: usize) -> Result<Vec<(&'static str, OsString)>> {
        let (spec, assignment) = (self.spec, self.assignment);
        let text = |number: usize| OsString::from(number.to_string());
        let shown_local_rank = if spec.virtual_local_rank { 0 } else { local_rank };
        let mut variables: Vec<(&str, OsString)> = vec![
            ("LOCAL_RANK", text(shown_local_rank)),
            ("RANK", text(self.rank(local_rank))),
            ("GROUP_RANK", text(assignment.group_rank)),
            ("ROLE_RANK", text(assignment.first_role_rank + local_rank)),
            ("ROLE_NAME", spec.role.as_str().into()),
            ("LOCAL_WORLD_SIZE", text(spec.nproc_per_node)),
            ("WORLD_SIZE", text(assignment.world_size)),
            ("GROUP_WORLD_SIZE", text(assignment.group_world_size)),
            ("ROLE_WORLD_SIZE", text(assignment.role_world_size)),
            ("MASTER_ADDR", assignment.master_addr.as_str().into()),
            ("MASTER_PORT", text(assignment.master_port.into())),
            ("TORCHELASTIC_RESTART_COUNT", assignment.restarts.to_string().into()),
            ("TORCHELASTIC_MAX_RESTARTS", spec.max_restarts.to_string().into()),
            ("TORCHELASTIC_RUN_ID", assignment.run_id.as_str().into()),
            ("TORCHELASTIC_ERROR_FILE", self.error_file(local_rank).into()),
            ("FSDP_HOSTS", text(assignment.machines)),
            ("FSDP_ATTEMPT", assignment.attempt.to_string().into()),
        ];
        if spec.virtual_local_rank {
            let device = gpus::only_device_of(local_rank).map_err(|expected| crate::Error::Usage {
                flag: "--virtual-local-rank",
                value: "true".into(),
                expected,
            })?;
            variables.push(("CUDA_VISIBLE_DEVICES", device.into()));
        }
        let threads = (affinity::core_count() / spec.nproc_per_node).max(1).to_string();
        let defaults = [
            ("RAYON_NUM_THREADS", threads.as_str()),
            ("OMP_NUM_THREADS", &threads),
            ("GLIBC_TUNABLES", TUNABLES),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ];
        let unset = defaults.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
        variables.extend(unset.map(|(name, value)| (name, value.into())));
        // Ranks that share a device: NCCL accepts those that it takes for ranks of several hosts.
        let is = |name, value| std::env::var_os(name).is_some_and(|set| set == value);
        let accepts = is("NCCL_MULTI_RANK_GPU_ENABLE", "1") || std::env::var_os("NCCL_HOSTID").is_some();
        if is("FSDP_DEVICE_BACKEND", "nccl-shared") && !accepts {
            variables.push(("NCCL_HOSTID", format!("rank-{}", self.rank(local_rank)).into()));
        }
        Ok(variables)
    }

    /// Sets the environment of a rank.
    pub(crate) fn apply(&self, local_rank: usize, command: &mut Command) -> Result<()> {
        forget_cargo_run(command);
        // An outer torchrun's agent serves a store at MASTER_PORT; here rank 0 does.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.envs(self.variables(local_rank)?);
        // A secret must not appear in `--dry-run`, which prints `variables`.
        match self.assignment.store_secret.text() {
            Some(secret) => command.env(STORE_SECRET, secret),
            None => command.env_remove(STORE_SECRET),
        };
        Ok(())
    }
}

/// Returns the name of this host.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Removes the variables that `cargo run` set for the launcher. They would make a build from here differ from one by
/// hand, and a rank would see the launcher's package.
pub(crate) fn forget_cargo_run(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let is_ours = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_")
                || name.starts_with("CARGO_BIN_EXE_")
                || matches!(
                    name,
                    "CARGO_MANIFEST_DIR"
                        | "CARGO_MANIFEST_PATH"
                        | "CARGO_MANIFEST_LINKS"
                        | "CARGO_BIN_NAME"
                        | "CARGO_CRATE_NAME"
                        | "CARGO_PRIMARY_PACKAGE"
                        | "CARGO_TARGET_TMPDIR"
                        | "CARGO_MAKEFLAGS"
                        | "OUT_DIR"
                )
        });
        if is_ours {
            command.env_remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_env_reads_the_launchers_variables() {
        let spec = LaunchSpec::new("p", 4);
        let assignment = Assignment {
            attempt: 2,
            restarts: 1,
            group_rank: 1,
            group_world_size: 3,
            first_rank: 2,
            world_size: 9,
            first_role_rank: 1,
            role_world_size: 5,
            machines: 3,
            ..Assignment::single_node("run", 4, 4000)
        };
        let job = Job {
            spec: &spec,
            assignment: &assignment,
            launch_id: "id",
            log_dir: None,
            error_dir: Path::new("/errors"),
        };
        let variables = job.variables(3).unwrap();
        let of =
            |name: &str| variables.iter().find(|(have, _)| *have == name).map(|(_, value)| value.to_string_lossy());
        for (name, value) in [
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "3"),
            ("ROLE_RANK", "4"),
            ("ROLE_WORLD_SIZE", "5"),
            ("FSDP_HOSTS", "3"),
            ("TORCHELASTIC_ERROR_FILE", "/errors/attempt-2-rank-3.json"),
        ] {
            assert_eq!(of(name).as_deref(), Some(value), "{name}");
        }
        let env = fsdp_core::RankEnv::from_vars(|name| of(name).map(Into::into)).unwrap();
        assert_eq!((env.rank, env.world_size, env.local_rank, env.local_world_size), (5, 9, 3, 4));
        assert_eq!((env.master_addr.as_str(), env.master_port), ("127.0.0.1", 4000));
        assert_eq!((env.run_id.as_str(), env.attempt, env.restart_count), ("run", 2, 1));
    }
}
