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

PROGRAM: what ends in .py is a Python script (unless --no-python is given). With a '/' in it, it is a path. Any other \
name is looked for in three places, in this order: the targets of the workspace, which are built in release mode; the \
directory of fsdp-launch; PATH.

Each rank finds who it is in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, \
TORCHELASTIC_RUN_ID and the other variables that torchrun sets. RAYON_NUM_THREADS and OMP_NUM_THREADS are set to \
cores / ranks unless you set them. The launcher holds no port: rank 0 may listen at MASTER_PORT, as PyTorch's store \
does.

Several hosts: start a launcher on each, with the same --nnodes, --rdzv-endpoint and token. The launcher on the \
endpoint's host gives all of them their ranks. A failure on one host ends the ranks on all hosts, or restarts them. \
With --nnodes MIN:MAX a run goes on with the hosts that are left, and grows when a host comes. Neither counts as a \
restart. Launchers that share a host and meet at localhost need no token.

MPI: the ranks may be programs of MPICH, which then need no mpiexec. Start those of Open MPI with mpirun.

Output is printed line by line behind `[rank N] `. Where stderr is a terminal, rank 0's stderr goes there directly, \
so that its progress bar shows. The ranks' stdin is empty.

The first rank that fails ends the others: by SIGTERM, then by SIGKILL after --shutdown-timeout. If it failed by an \
exit code, SIGTERM comes 0.3 s later: other ranks may have found the same thing wrong, and have time to say so. The \
launcher exits with that rank's exit code, or with 128 + the number of the signal that killed it. It exits with 2 when \
the command line is wrong. Ctrl-C (also SIGTERM, SIGHUP, SIGQUIT) ends all ranks in the same way, but they get the \
signal itself. A second Ctrl-C kills them at once. With --max-restarts, all ranks start again after a failure. \
TORCHELASTIC_RESTART_COUNT tells them how often, and the summary names each attempt's first failure. Processes that a \
rank left behind end with the attempt.

A rank that hangs is a failure too. In programs that use fsdp-core each rank has a heartbeat. A rank whose heart \
stands still for --heartbeat-timeout is killed. After a hang, or a collective that timed out, the summary tells where \
every rank was, and who did not arrive. `fsdp-launch status` shows the same of runs under way. To launch a program of \
that name, give its path: ./status.

Options can be set in the environment as for torchrun: PET_NPROC_PER_NODE=2 is --nproc-per-node 2. \
RUST_LOG=fsdp_launch=debug shows what the launcher does.";
