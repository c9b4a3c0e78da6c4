//! Launchers of ranks on hosts of `tests/hosts/hosts`: those of two MPIs, and ours.

use std::{env, fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use fsdp_test_support::{need::Mpi, program, workspace};

/// A launcher, and how its ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    OpenMpi,
    Mpich,
    /// Ours, with ranks that communicate by MPICH.
    Ours,
    /// Ours, with ranks that communicate by TCP.
    WithoutMpi,
}

impl Way {
    /// Returns the environment variable with a rank's number.
    pub(crate) fn rank_variable(self) -> &'static str {
        match self {
            Way::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Way::Mpich => "PMI_RANK",
            Way::Ours | Way::WithoutMpi => "RANK",
        }
    }

    /// Returns whether the launcher is ours.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Way::Ours | Way::WithoutMpi)
    }

    /// Makes a command that starts `args` in `dir` with a number of ranks on each of several hosts. `options` are for
    /// `tests/hosts/hosts`, `more` for the launcher.
    pub(crate) fn start(
        self,
        options: &[&str],
        (hosts, ranks): (usize, usize),
        more: &[&str],
        args: &[&str],
        dir: &Path,
    ) -> Command {
        let mut command = Command::new(workspace().join("tests/hosts/hosts"));
        command.env_remove("FSDP_BACKEND").current_dir(dir).args(["--hosts", &hosts.to_string()]).args(options);
        let (all, each) = ((hosts * ranks).to_string(), ranks.to_string());
        let nodes: Vec<_> = (0..hosts).map(|host| format!("node{host}:{ranks}")).collect();
        let nodes = nodes.join(",");
        match self {
            Way::OpenMpi => {
                command.arg("first").arg(Mpi::Open.mpirun().unwrap()).args(["-n", &all, "--host", &nodes]);
                // Ranks share cores. Open MPI passes on only named variables.
                command.args(["--bind-to", "none", "-x", "FSDP_TIMEOUT_S"]);
            }
            Way::Mpich => {
                command.arg("first").arg(Mpi::Mpich.mpirun().unwrap()).args(["-n", &all, "-hosts", &nodes]);
            }
            Way::Ours | Way::WithoutMpi => {
                let token = dir.join("token");
                fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
                fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
                if self == Way::Ours {
                    let mpich = Mpi::Mpich.mpirun().unwrap();
                    let mut path = mpich.parent().unwrap().as_os_str().to_os_string();
                    path.push(":");
                    path.push(env::var_os("PATH").unwrap_or_default());
                    command.env("PATH", path);
                } else {
                    command.env("FSDP_BACKEND", "tcp").env("FSDP_MPI_LIBRARY", "/nowhere.so");
                }
                command.arg("each").arg(program("fsdp-launch"));
                if !more.iter().any(|option| option.starts_with("--nnodes")) {
                    command.args(["--nnodes", &hosts.to_string()]);
                }
                command.args(["--nproc-per-node", &each]);
                command.args(["--rdzv-endpoint", "node0:29400", "--rdzv-token-file"]).arg(&token);
            }
        }
        command.args(more).args(args);
        if env::var_os("FSDP_TIMEOUT_S").is_none() {
            command.env("FSDP_TIMEOUT_S", "60");
        }
        command
    }
}
