//! The backend over MPI, for ranks on several hosts.
//!
//! The library is opened at run time, so that every build has this backend. `library` finds it and knows the binary
//! interfaces, `session` calls it, and the one thread of `driver` makes all calls. A `communicator` is the state that a
//! group shares with that thread. `transport` sends and receives with deadlines, `mpi_backend` runs collectives, and
//! `hierarchy` plans what ranks of one host do for each other.
//!
//! All communication is point to point. MPI's own collectives and `MPI_Comm_split` cannot be cancelled if a rank is
//! missing, do not name missing ranks, and add in an order and precision of their own. A group is therefore not an MPI
//! communicator. It consists of ranks, and of tags: each rank chooses the tag of the messages sent to it. Ranks outside
//! a new group take no part in its creation.
//!
//! A rank that fails or leaves notifies its peers. The notification counts the collectives that the rank completed and
//! the messages that it sent. A peer that waits for one of these messages receives it; all other peers fail at once.
//! Messages own their memory: after a failure, MPI may still write to memory of a message that it cannot cancel.
//!
//! Messages within a host are MPI's too: one comparison, one set of deadlines and one notification serve all peers. A
//! group whose ranks share a host uses [`shm`](crate::process_group::shm) instead, if it serves that many ranks.

mod communicator;
mod driver;
mod hierarchy;
mod library;
mod mpi_backend;
mod session;
mod transport;

use std::sync::Arc;

use driver::{Driver, MIN_RENDEZVOUS_TIME};
use mpi_backend::MpiBackend;
use transport::{Transport, WaitError, host_id};

use super::{
    backend::PeerState,
    group::ProcessGroup,
    options::{Membership, Options},
    waiting_ranks::WaitingRanks,
};
use crate::{Error, RankEnv, Result};

/// Meets the other processes of the job over MPI and returns the group of all ranks.
///
/// The first call initializes MPI on a thread of its own, and finalizes it when the process exits. The library is the
/// launcher's, or the one that `FSDP_MPI_LIBRARY` names; none is needed to build.
///
/// If a host has several ranks, they share data from other hosts and add up data for them ([`Options::hierarchy`]), so
/// that a byte crosses the network once for each host. Half-precision sums cross as f32, which saves nothing for two
/// ranks on a host. Groups within a host use [`shm`](crate::process_group::shm).
///
/// # Errors
/// [`Error::Env`] if `env` names a rank outside its world. [`Error::Rendezvous`] if no usable MPI library is found, MPI
/// and `env` disagree about rank or world size, ranks of this host use another backend, or ranks are missing after the
/// timeout or a minute. [`Error::Os`] if the system refuses a thread.
pub fn connect(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    let RankEnv { rank, world_size, .. } = *env;
    let world = Membership::of_env(env, options.timeout)?;
    if world_size == 1 {
        return ProcessGroup::single_rank(options.timeout);
    }
    let refused = |message: String| Error::Rendezvous { rank, message };
    // Registered until all have met, because ranks leave MPI_Init at different times.
    let waiting = WaitingRanks::register(env, "mpi");
    let driver = Driver::get(env, &waiting, options.timeout).map_err(refused)?;
    if (driver.rank, driver.size) != (rank, world_size) {
        return Err(refused(format!(
            "MPI ({}) says that this process is rank {} of {}, but its environment says rank {rank} of {world_size}. \
             Start the ranks with this MPI's mpirun, or set FSDP_MPI_LIBRARY to the library of the MPI that started \
             them",
            driver.library.display(),
            driver.rank,
            driver.size
        )));
    }
    let all: Vec<usize> = (0..world_size).collect();
    let patience = options.timeout.max(MIN_RENDEZVOUS_TIME);
    let host = if options.hierarchy { host_id(options.host.as_deref()) } else { 0 };
    let met = Transport::world(driver, patience, |transport| {
        transport.meet(&all, rank, options.chunk_bytes, host, options.timeout)
    });
    let transport = met.map_err(refused)?.map_err(|error| {
        refused(match error {
            WaitError::Late { missing, waited } => format!(
                "rank(s) {missing:?} did not join the world within {:.1} s: see what they do, or raise FSDP_TIMEOUT_S",
                waited.as_secs_f64()
            ),
            WaitError::PeerLost { peer, gone: PeerState::Died } => format!("rank {peer} died while the ranks met"),
            WaitError::PeerLost { peer, .. } => format!("rank {peer} left while the ranks met"),
            WaitError::MpiError { peer, text } => format!("rank {peer} can't be reached: {text}"),
            WaitError::Over => "the thread that calls MPI has ended".into(),
        })
    })?;
    let world = Membership { hosts: transport.names.clone(), ..world };
    ProcessGroup::new(world, Box::new(MpiBackend::new(transport, Arc::new(env.clone()), options.chunk_bytes)))
}
