//! The backend for ranks that are processes of one host: they exchange data through shared memory without a name, which
//! goes when they go.

use std::sync::Arc;

use super::{
    super::{
        backend::Backend,
        group::ProcessGroup,
        options::{Membership, Options},
        waiting_ranks::Roll,
    },
    engine::{Meet, SharedMemory},
    peer_monitor::Watch,
    rendezvous::{self, Meeting},
    segment::{Port, Segment, Shape},
};
use crate::{Error, RankEnv, Result, heartbeat::PeerExits};

/// The most ranks of a group.
pub(in super::super) const MOST_RANKS: usize = rendezvous::MOST_RANKS;

/// How processes come to share a segment: the first rank makes it and hands it to the others.
#[derive(Clone)]
struct Processes {
    env: RankEnv,
    chunk_bytes: usize,
    peers: Arc<PeerExits>,
}

impl Meet for Processes {
    fn meet(&self, group: &Membership, all_well: &dyn Fn() -> Result<()>) -> Result<(Port, Watch)> {
        let os = |source: rustix::io::Errno| Error::Os {
            rank: group.rank,
            what: format!("sharing the memory of group \"{}\"", group.name),
            source: Arc::new(source.into()),
        };
        let meeting = Meeting {
            addr: &self.env.master_addr,
            port: self.env.master_port,
            run: format!("{}\n{}", self.env.run_id, self.env.attempt),
            group,
            all_well,
            // In the groups within it each rank watches the others' processes.
            has_ended: &|rank| group.is_world() && self.peers.has_exited(rank),
        };
        let met = rendezvous::meet(&meeting, self.chunk_bytes as u64, || {
            Segment::file(Shape::new(group.size, self.chunk_bytes)).map_err(os)
        })?;
        // Rank 0's choice, so that all ranks have the same even where their options differ.
        let shape = Shape::new(group.size, usize::try_from(met.number).unwrap_or(usize::MAX));
        let segment = Arc::new(Segment::map(&met.file, shape).map_err(os)?);
        let port = Port::claim(segment, group.rank).ok_or_else(|| Error::Rendezvous {
            rank: group.rank,
            message: format!("another process is rank {} of group \"{}\" too", group.rank, group.name),
        })?;
        Ok((port, Watch::new(group.timeout, group.size, met.processes)))
    }

    fn again(&self) -> Box<dyn Meet> {
        Box::new(self.clone())
    }
}

/// Meets the other processes of the job on this host and returns this rank's handle of the world.
///
/// # Errors
/// [`Error::Env`] when `env` names a rank outside its world; [`Error::Rendezvous`] when the ranks don't meet within the
/// timeout (the message names who is missing), when some meet by another backend, when they disagree about the size of
/// the world or two have the same rank, and when the job spans several hosts; [`Error::Os`] when the system refuses
/// memory, sockets or threads.
pub fn connect(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    if env.rank >= env.world_size {
        return Err(Error::Env(format!(
            "rank {} is outside a world of {}: ranks count from 0 to the size of the world - 1",
            env.rank, env.world_size
        )));
    }
    if env.hosts > 1 {
        return Err(Error::Rendezvous {
            rank: env.rank,
            message: format!(
                "the shm backend serves the processes of one host, but the {} ranks run on {} hosts, {} on this one: \
                 between hosts there is MPI, for ranks that fsdp-launch has started, or mpirun, or srun with \
                 --mpi=pmi2 (for MPICH) or --mpi=pmix (for Open MPI), with FSDP_BACKEND=mpi or without that variable. \
                 Else start all ranks on one host",
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
    let world = Membership::world(env.rank, env.world_size, options.timeout);
    let processes =
        Processes { env: env.clone(), chunk_bytes: options.chunk_bytes, peers: Arc::new(PeerExits::open(env)) };
    let roll = Roll::enter(env, "shm");
    let all_well = || match roll.in_vain() {
        Some(message) => Err(Error::Rendezvous { rank: env.rank, message }),
        None => Ok(()),
    };
    let backend = SharedMemory::join(Box::new(processes), &world, &all_well)?;
    ProcessGroup::new(world, Box::new(backend))
}

/// This rank's end of a group of processes of this host that know each other by another backend: `env` is theirs, and
/// `all_well` fails when one that is to come is gone.
pub(in super::super) fn join(
    env: &RankEnv,
    chunk_bytes: usize,
    group: &Membership,
    all_well: &dyn Fn() -> Result<()>,
) -> Result<Box<dyn Backend>> {
    let processes = Processes { env: env.clone(), chunk_bytes, peers: Arc::new(PeerExits::open(env)) };
    Ok(Box::new(SharedMemory::join(Box::new(processes), group, all_well)?))
}
