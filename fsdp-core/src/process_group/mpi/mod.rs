//! The backend over MPI, for ranks on several hosts.
//!
//! Every build has it: the library is opened at run time, whatever its binary interface. From the bottom up: `abi` (how
//! libraries spell constants), `functions` and `session` (calls of one library), `find` (which one), `held` (memory
//! that messages use), `line` (what a group and the thread that calls MPI share), `thread` and `driver` (that thread
//! and its handle), `wire` (sending and receiving with deadlines), `meet` (making groups), `phase` and `exchange` (what
//! ranks send each other in a collective, and running it), `hosts` and `sums` (what ranks that share a host do for each
//! other: they hand on what comes, and add up what goes), `engine` (the backend), `host_id` and `connect` (the world).
//!
//! All of it is messages between two ranks. MPI's own collectives can't be ended when a rank does not come, nor can
//! `MPI_Comm_split`, and don't say who is missing; and they add up in an order and a precision of their own. A group is
//! therefore no communicator but a tag, which each rank chooses for what is sent to it, and its ranks.
//! The world of all ranks over MPI.

mod communicator;
mod driver;
mod engine;
mod hierarchy;
mod library;
mod session;
mod transport;

use std::sync::Arc;

use driver::{Driver, MEETING_TIME};
use engine::Engine;
use transport::{Trouble, Wire, host_id};

use super::{
    backend::PeerState,
    group::ProcessGroup,
    options::{Membership, Options},
    waiting_ranks::Roll,
};
use crate::{Error, RankEnv, Result};

/// Meets the other processes of the job by MPI, wherever they run, and returns this rank's handle of the world.
///
/// The first call initialises MPI, on a thread that makes every call of it, and has it finalized when the process
/// exits. The library is that of the launcher, or the one that `FSDP_MPI_LIBRARY` names; nothing of it is needed to
/// build.
///
/// Where several hosts have ranks and one of them has several, these share what comes to their host, so that a byte
/// crosses the network once a host, and add up what goes to others ([`Options::hierarchy`]). Sums of half precision
/// travel as f32: with two ranks a host that saves nothing. Groups of ranks of one host are groups of
/// [`shm`](crate::process_group::shm).
///
/// # Errors
/// [`Error::Env`] when `env` names a rank outside its world; [`Error::Rendezvous`] when no MPI library is found or it
/// can't be used (the message says how to get one), when MPI and `env` disagree about rank or world size, because MPI
/// did not start the ranks, when ranks of this host meet by another backend, and when the ranks don't meet within the
/// timeout or a minute (the message names who is missing); [`Error::Os`] when the system refuses a thread.
pub fn connect(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    let RankEnv { rank, world_size, .. } = *env;
    if rank >= world_size {
        return Err(Error::Env(format!(
            "rank {rank} is outside a world of {world_size}: ranks count from 0 to the size of the world - 1"
        )));
    }
    if world_size == 1 {
        return ProcessGroup::single_rank(options.timeout);
    }
    let refused = |message: String| Error::Rendezvous { rank, message };
    // Until all have met: ranks leave MPI_Init one after the other.
    let roll = Roll::enter(env, "mpi");
    let driver = Driver::get(env, &roll, options.timeout).map_err(refused)?;
    if (driver.rank, driver.size) != (rank, world_size) {
        return Err(refused(format!(
            "MPI ({}) says that this process is rank {} of {}, and its environment rank {rank} of {world_size}: \
             another launcher has started it than that of this MPI. Start the ranks with this MPI's own mpirun, or \
             with one that it knows, or name the library of the MPI that started them in FSDP_MPI_LIBRARY",
            driver.library.display(),
            driver.rank,
            driver.size
        )));
    }
    let all: Vec<usize> = (0..world_size).collect();
    let _one_after_the_other = driver.meeting.lock();
    let patience = options.timeout.max(MEETING_TIME);
    let host = if options.hierarchy { host_id(options.host.as_deref()) } else { 0 };
    let met = Wire::world(driver, patience, |wire| wire.meet(&all, rank, options.chunk_bytes, host, options.timeout));
    let wire = met.map_err(refused)?.map_err(|trouble| {
        refused(match trouble {
            Trouble::Late { missing, waited } => format!(
                "rank(s) {missing:?} did not make the world within {:.1} s. See what they do instead, or raise \
                 FSDP_TIMEOUT_S",
                waited.as_secs_f64()
            ),
            Trouble::PeerState { peer, gone: PeerState::Died } => format!("rank {peer} died while the ranks met"),
            Trouble::PeerState { peer, .. } => format!("rank {peer} went away again"),
            Trouble::Refused { peer, text } => format!("rank {peer} can't be reached: {text}"),
            Trouble::Over => "the thread that calls MPI has ended".into(),
        })
    })?;
    let world = Membership::world(rank, world_size, options.timeout).with_hosts(wire.names.clone());
    ProcessGroup::new(world, Box::new(Engine::new(wire, Arc::new(env.clone()), options.chunk_bytes)))
}
