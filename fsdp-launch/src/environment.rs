//! The environment of a rank: what `torchrun` sets, so that a program can't tell the two launchers apart.

use std::{ffi::OsString, path::Path, process::Command};

use crate::{LaunchSpec, Result, cores, gpus};

/// What all ranks of a launch have in common.
pub(crate) struct Job<'a> {
    pub(crate) spec: &'a LaunchSpec,
    pub(crate) master_port: u16,
    pub(crate) run_id: &'a str,
    /// How often the ranks were started before.
    pub(crate) restart_count: u32,
    /// The directory of the attempt's logs, if there are any.
    pub(crate) log_dir: Option<&'a Path>,
    /// Without logs: the directory of the files in which ranks record the error that ended them.
    pub(crate) error_dir: &'a Path,
}

impl Job<'_> {
    /// The file in which `rank` may record its error.
    pub(crate) fn error_file(&self, rank: usize) -> std::path::PathBuf {
        if let Some(dir) = self.log_dir {
            return dir.join(rank.to_string()).join("error.json");
        }
        self.error_dir.join(format!("attempt-{}-rank-{rank}.json", self.restart_count))
    }

    /// What is set for `rank`, the variables of torchrun's documentation in its order first.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) where the rank should see one GPU but there is none for it.
    pub(crate) fn variables(&self, rank: usize) -> Result<Vec<(&'static str, OsString)>> {
        let spec = self.spec;
        let (rank_text, size) = (rank.to_string(), spec.nproc_per_node.to_string());
        let local_rank = if spec.virtual_local_rank { "0".into() } else { rank_text.clone() };
        let mut variables: Vec<(&str, OsString)> = vec![
            ("LOCAL_RANK", local_rank.into()),
            ("RANK", rank_text.clone().into()),
            ("GROUP_RANK", "0".into()),
            ("ROLE_RANK", rank_text.into()),
            ("ROLE_NAME", spec.role.as_str().into()),
            ("LOCAL_WORLD_SIZE", size.clone().into()),
            ("WORLD_SIZE", size.clone().into()),
            ("GROUP_WORLD_SIZE", "1".into()),
            ("ROLE_WORLD_SIZE", size.into()),
            ("MASTER_ADDR", spec.master_addr.as_str().into()),
            ("MASTER_PORT", self.master_port.to_string().into()),
            ("TORCHELASTIC_RESTART_COUNT", self.restart_count.to_string().into()),
            ("TORCHELASTIC_MAX_RESTARTS", spec.max_restarts.to_string().into()),
            ("TORCHELASTIC_RUN_ID", self.run_id.into()),
            ("TORCHELASTIC_ERROR_FILE", self.error_file(rank).into()),
        ];
        if spec.virtual_local_rank {
            let device = gpus::only_device_of(rank).map_err(|expected| crate::Error::Usage {
                flag: "--virtual-local-rank",
                value: "true".into(),
                expected,
            })?;
            variables.push(("CUDA_VISIBLE_DEVICES", device.into()));
        }
        let threads = (cores::count() / spec.nproc_per_node).max(1).to_string();
        let defaults = [
            ("RAYON_NUM_THREADS", threads.as_str()),
            ("OMP_NUM_THREADS", &threads),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ];
        let unset = defaults.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
        variables.extend(unset.map(|(name, value)| (name, value.into())));
        Ok(variables)
    }

    /// Gives `command` the environment of `rank`.
    ///
    /// # Errors
    /// As [`variables`](Self::variables).
    pub(crate) fn apply(&self, rank: usize, command: &mut Command) -> Result<()> {
        forget_cargo_run(command);
        // Of a torchrun around us: its agent would hold the store at MASTER_PORT. Ours is held by rank 0.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.envs(self.variables(rank)?);
        Ok(())
    }
}

/// Takes out of `command`'s environment what `cargo run` set for the launcher: a build started from here would see other values than one started by
/// hand and build anew, and a rank would take the launcher's package for its own.
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
    fn a_rank_reads_what_the_launcher_sets() {
        let spec = LaunchSpec::new("p", 4);
        let job = Job {
            spec: &spec,
            master_port: 4000,
            run_id: "run",
            restart_count: 2,
            log_dir: None,
            error_dir: Path::new("/errors"),
        };
        let variables = job.variables(3).unwrap();
        let env = fsdp_core::RankEnv::from_vars(|name| {
            variables.iter().find(|(have, _)| *have == name).map(|(_, value)| value.to_string_lossy().into_owned())
        })
        .unwrap();
        assert_eq!((env.rank, env.world_size, env.local_rank, env.local_world_size), (3, 4, 3, 4));
        assert_eq!((env.master_addr.as_str(), env.master_port), ("127.0.0.1", 4000));
        assert_eq!((env.run_id.as_str(), env.restart_count), ("run", 2));
    }
}
