//! The backend for ranks that are processes of one host: they exchange data through shared memory without a name, which goes when they go.

use std::sync::Arc;

use super::{
    Options, ProcessGroup,
    engine::{
        Group, Meet, Subgroup,
        segment::{Port, Segment, Shape},
        watch::Watch,
    },
    local::Threads,
};
use crate::{
    Error, RankEnv, Result,
    heartbeat::Peers,
    rendezvous::{self, Meeting},
};

/// How processes come to share a segment: the first rank makes it and hands it to the others.
#[derive(Clone)]
struct Processes {
    env: RankEnv,
    options: Options,
    peers: Arc<Peers>,
}

impl Meet for Processes {
    fn meet(&self, group: &Subgroup<'_>) -> Result<(Port, Watch, Arc<dyn Meet>)> {
        if group.size == 1 {
            return Threads::new(self.options.clone()).meet(group);
        }
        let os = |source: rustix::io::Errno| Error::Os {
            rank: group.rank,
            what: format!("sharing the memory of group \"{}\"", group.name),
            source: Arc::new(source.into()),
        };
        let meeting = Meeting {
            addr: &self.env.master_addr,
            port: self.env.master_port,
            run: format!("{}\n{}", self.env.run_id, self.env.attempt),
            group: &group.name,
            rank: group.rank,
            size: group.size,
            timeout: self.options.timeout,
            all_well: group.all_well,
            // In the groups within it each rank watches the others' processes.
            has_ended: &|rank| group.name == super::WORLD && self.peers.has_ended(rank),
        };
        let gathering = rendezvous::meet(&meeting, self.options.chunk_bytes as u64, || {
            Segment::file(Shape::new(group.size, self.options.chunk_bytes)).map_err(os)
        })?;
        // Rank 0's choice, so that all ranks have the same even where their options differ.
        let shape = Shape::new(group.size, usize::try_from(gathering.number).unwrap_or(usize::MAX));
        let segment = Arc::new(Segment::map(&gathering.file, shape).map_err(os)?);
        let port = Port::claim(segment, group.rank).ok_or_else(|| Error::Rendezvous {
            rank: group.rank,
            message: format!("another process is rank {} of group \"{}\" too", group.rank, group.name),
        })?;
        let watch = Watch::new(group.name.clone(), self.options.timeout, group.size, gathering.processes);
        Ok((port, watch, Arc::new(self.clone())))
    }
}

/// Meets the other processes of the job on this host and returns this rank's handle of the world.
///
/// # Errors
/// [`Error::Env`] when `env` names a rank outside its world; [`Error::Rendezvous`] when the ranks don't meet within the timeout (the message names who is missing), when they disagree about the size of the world or
/// two have the same rank, and when the job spans several hosts; [`Error::Os`] when the system refuses memory, sockets or threads.
pub fn connect(env: &RankEnv, options: Options) -> Result<Arc<dyn ProcessGroup>> {
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
                 collectives between hosts are not there yet, so start all ranks on one host",
                env.world_size, env.hosts, env.local_world_size
            ),
        });
    }
    if env.world_size > rendezvous::MOST_RANKS {
        return Err(Error::Rendezvous {
            rank: env.rank,
            message: format!("the shm backend serves at most {} ranks, not {}", rendezvous::MOST_RANKS, env.world_size),
        });
    }
    let subgroup = Subgroup { name: super::WORLD.into(), rank: env.rank, size: env.world_size, all_well: &|| Ok(()) };
    let processes = Processes { env: env.clone(), options, peers: Arc::new(Peers::of(env)) };
    let (port, watch, meet) = processes.meet(&subgroup)?;
    Ok(Arc::new(Group::start(port, watch, meet)?))
}
