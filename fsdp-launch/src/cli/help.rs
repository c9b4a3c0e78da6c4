//! Help text beyond the options.

/// End of the short help.
pub(crate) const EXAMPLES: &str = "\
Examples:
  fsdp-launch --nproc-per-node 2 train --steps 100
  fsdp-launch --nproc-per-node gpu script.py          (--help tells more)";

/// End of the long help.
pub(crate) const AFTER_HELP: &str = "\
Examples:
  fsdp-launch --nproc-per-node 2 train --steps 100      a target of your Cargo workspace, built first
  fsdp-launch --nproc-per-node auto ./target/release/train
  fsdp-launch --nproc-per-node 2 script.py --epochs 3   $PYTHON_EXEC or python3 -u script.py
  fsdp-launch --nproc-per-node 2 -m package.train       python3 -u -m package.train
  fsdp-launch --nproc-per-node 2 --dry-run script.py    what would be started
  fsdp-launch --nnodes 2 --rdzv-endpoint node0:29400 --rdzv-token-file token script.py     on each of two hosts
  fsdp-launch status                                    the runs on this host, and what each rank does
  fsdp-launch --nproc-per-node 2 --max-restarts 3 --log-dir logs train --checkpoint-dir ckpt --resume auto

PROGRAM: a name that ends in .py is a Python script, unless --no-python is given. A name with a '/' is a path. Any \
other name is searched for in this order: targets of the workspace, which are built in release mode; the directory of \
fsdp-launch; PATH.

Environment: each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, \
TORCHELASTIC_RUN_ID and the other variables of torchrun. RAYON_NUM_THREADS and OMP_NUM_THREADS default to cores / \
ranks. GLIBC_TUNABLES defaults to settings by which freed memory stays with the process, in huge pages. The launcher \
does not listen on MASTER_PORT: rank 0 may, as PyTorch's store does.

Several hosts: start a launcher on each, with the same --nnodes, --rdzv-endpoint and token. The launcher on the \
endpoint's host assigns the ranks. A failure on one host ends or restarts the ranks on all hosts. With --nnodes \
MIN:MAX, a run shrinks when a host is lost and grows when a host joins; neither counts as a restart. Launchers on one \
host that meet at localhost need no token.

MPI: MPICH programs run as ranks without mpiexec. Start Open MPI programs with mpirun.

Output: lines are printed with the prefix `[rank N] `. If stderr is a terminal, rank 0 writes to it directly, so that \
its progress bar works. The ranks' stdin is empty.

Failures: the first failed rank ends the others, by SIGTERM and, after --shutdown-timeout, by SIGKILL. If it failed \
with an exit code, SIGTERM comes 0.3 s later, so that other ranks can report the same error. The launcher exits with \
the failed rank's exit code, or 128 + the number of its signal, or 2 for a wrong command line. Ctrl-C, SIGTERM, \
SIGHUP and SIGQUIT end all ranks in the same way, with the same signal; a second Ctrl-C kills them at once. With \
--max-restarts, all ranks start again after a failure. TORCHELASTIC_RESTART_COUNT counts the restarts, and the \
summary names the first failure of each attempt. Processes that a rank leaves behind end with the attempt.

Hangs: ranks that use fsdp-core have a heartbeat. A rank without heartbeat for --heartbeat-timeout is killed, which \
is a failure. After a hang, or a collective that timed out, the summary shows the state of every rank, and the ranks \
that are missing. `fsdp-launch status` shows the same for running launches. To launch a program named status, give \
its path: ./status.

Variables: options can be set as for torchrun: PET_NPROC_PER_NODE=2 is --nproc-per-node 2. RUST_LOG=fsdp_launch=debug \
logs the launcher's actions.";
