//! The backend for processes of one host. Their shared memory has no name and disappears with them.

use std::{io, sync::Arc};

use super::{
    super::{
        backend::Backend,
        group::ProcessGroup,
        options::{Membership, Options},
        waiting_ranks::WaitingRanks,
    },
    peer_monitor::Waiter,
    rendezvous::{self, Rendezvous},
    segment::{Port, Segment, Shape},
    shm_backend::{SegmentSource, SharedMemory},
};
use crate::{Error, RankEnv, Result, heartbeat::PeerExits};

/// Largest number of ranks of a group.
pub(in super::super) const MOST_RANKS: usize = rendezvous::MOST_RANKS;

/// Creates segments for processes: the first rank creates the file and sends it to the others.
#[derive(Clone)]
struct Processes {
    env: RankEnv,
    chunk_bytes: usize,
    peers: Arc<PeerExits>,
}

impl SegmentSource for Processes {
    fn open(&self, group: &Membership, check_peers: &dyn Fn() -> Result<()>) -> Result<(Port, Waiter)> {
        let os = |source: io::Error| {
            Error::os(group.rank, format!("sharing the memory of group \"{}\"", group.name), source)
        };
        let parameters = Rendezvous {
            addr: &self.env.master_addr,
            port: self.env.master_port,
            run: format!("{}\n{}", self.env.run_id, self.env.attempt),
            group,
            check_peers,
            // In groups split from the world, ranks watch each other's processes.
            has_ended: &|rank| group.is_world() && self.peers.has_exited(rank),
        };
        let met = rendezvous::meet(&parameters, self.chunk_bytes as u64, || {
            Segment::file(Shape::new(group.size, self.chunk_bytes)).map_err(os)
        })?;
        // Rank 0's choice, so that the shape is the same on all ranks even if their options differ.
        let shape = Shape::new(group.size, usize::try_from(met.number).unwrap_or(usize::MAX));
        let segment = Arc::new(Segment::map(&met.file, shape).map_err(os)?);
        let port = Port::claim(segment, group.rank).ok_or_else(|| Error::Rendezvous {
            rank: group.rank,
            message: format!("another process is also rank {} of group \"{}\"", group.rank, group.name),
        })?;
        Ok((port, Waiter::new(group.timeout, group.size, met.processes)))
    }

    fn for_subgroup(&self) -> Box<dyn SegmentSource> {
        Box::new(self.clone())
    }
}

/// Meets the other processes of the job on this host and returns the group of all ranks.
///
/// # Errors
/// [`Error::Env`] if `env` names a rank outside its world. [`Error::Rendezvous`] if ranks are missing after the
/// timeout, use another backend, disagree about the world size or have the same rank, and if the job spans several
/// hosts.
/// [`Error::Os`] if the system refuses memory, sockets or threads.
pub fn connect(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    let world = Membership::of_env(env, options.timeout)?;
    if env.hosts > 1 {
        return Err(Error::Rendezvous {
            rank: env.rank,
            message: format!(
                "the shm backend serves one host, but the {} ranks run on {} hosts, {} on this one. Start them by \
                 fsdp-launch, or mpirun, or srun --mpi=pmi2|pmix, with FSDP_BACKEND=mpi, or start all ranks on one \
                 host. FSDP_BACKEND=tcp needs no MPI, but is slow for tensors in host memory",
                env.world_size, env.hosts, env.local_world_size
            ),
        });
    }
    if env.world_size > MOST_RANKS {
        return Err(Error::Rendezvous {
            rank: env.rank,
            message: format!("the shm backend serves at most {MOST_RANKS} ranks, not {}", env.world_size),
        });
    }
    if env.world_size == 1 {
        return ProcessGroup::single_rank(options.timeout);
    }
    let processes =
        Processes { env: env.clone(), chunk_bytes: options.chunk_bytes, peers: Arc::new(PeerExits::open(env)) };
    let waiting = WaitingRanks::register(env, "shm");
    let check_peers = || match waiting.backend_conflict() {
        Some(message) => Err(Error::Rendezvous { rank: env.rank, message }),
        None => Ok(()),
    };
    let backend = SharedMemory::join(Box::new(processes), &world, &check_peers)?;
    ProcessGroup::new(world, Box::new(backend))
}

/// Joins a group of processes of this host that know each other by another backend. `check_peers` fails if an expected
/// rank is gone.
pub(in super::super) fn join(
    env: &RankEnv,
    chunk_bytes: usize,
    group: &Membership,
    check_peers: &dyn Fn() -> Result<()>,
) -> Result<Box<dyn Backend>> {
    let processes = Processes { env: env.clone(), chunk_bytes, peers: Arc::new(PeerExits::open(env)) };
    Ok(Box::new(SharedMemory::join(Box::new(processes), group, check_peers)?))
}
