//! The backend over one TCP connection for each rank, for ranks on several hosts without MPI.
//!
//! NCCL moves the tensors of such a job. This backend carries the rest: NCCL's ids, what ranks compare, agree on and
//! broadcast, and the news that a rank is gone. Tensors in host memory can use it too, slowly.
//!
//! Rank 0 serves a *hub* at `MASTER_ADDR:MASTER_PORT` (`hub`), the address at which PyTorch's ranks find their store.
//! Every rank connects to it (`link`), with the secret of the job's [store](crate::store), and names the ranks that a
//! note is for. The hub forwards notes without reading them (`message`). Groups exist on their members only, so that
//! `split` takes no message. A collective is the one that shared memory uses, with messages in place of slots
//! (`tcp_backend`): sums have the same bits.
//!
//! # Design
//!
//! - **The hub is in rank 0, not in a launcher.** Ranks then meet in the same way under any launcher, and the loss of
//!   the hub is the loss of rank 0, which ends the job anyway. `torchrun` has its store in the agent because the agents
//!   themselves meet there; `fsdp-launch` has a rendezvous of its own.
//! - **A star, not a mesh.** One open port is enough. A note crosses the network twice, which small notes can afford.
//! - **Death is a connection that closes without a goodbye.** The hub tells all ranks at once. Keepalive probes end the
//!   connection of a host that is off the network, on both sides, after 15 seconds. A timeout of the group that is
//!   shorter names the missing ranks earlier.
//! - **Rank 0 serves for a few seconds after its program has ended,** while other ranks finish. A group without rank 0
//!   that goes on for longer loses its hub.

mod hub;
mod link;
mod message;
mod tcp_backend;

use std::{
    collections::HashMap,
    sync::{Arc, Once, Weak},
};

use link::Link;
use parking_lot::Mutex;
use tcp_backend::{MOST_RANKS, TcpBackend};

use super::{
    group::ProcessGroup,
    options::{Membership, Options},
};
use crate::{Error, RankEnv, Result, store::Secret};

/// A job's address, run id and attempt, and a rank of this process in it.
type Member = (String, u16, String, u32, usize);

/// Number of worlds that each rank has joined, because a program may join several.
static WORLDS: Mutex<Option<HashMap<Member, u32>>> = Mutex::new(None);

/// The connections of this process.
static LINKS: Mutex<Vec<Weak<Link>>> = Mutex::new(Vec::new());

/// Leaves the worlds that the program has not left when it exits, so that its last notes are sent: only a process that
/// is killed is dead to its peers. On rank 0, then serves the others for a short time.
extern "C" fn at_exit() {
    let links: Vec<_> = LINKS.lock().iter().filter_map(Weak::upgrade).collect();
    links.iter().for_each(|link| link.leave());
    hub::linger();
}

/// Meets the other processes of the job at `MASTER_ADDR:MASTER_PORT`, which rank 0 serves, and returns the group of all
/// ranks.
///
/// # Errors
/// [`Error::Env`] if `env` names a rank outside its world, or the secret is invalid. [`Error::Store`] if rank 0 cannot
/// serve the address, or this rank cannot reach it or has another secret. [`Error::Rendezvous`] if ranks disagree about
/// the world size or have the same rank, use another backend, or are missing after the timeout or ten seconds.
/// [`Error::Os`] if the system refuses a thread.
pub fn connect(env: &RankEnv, options: Options) -> Result<ProcessGroup> {
    let RankEnv { rank, world_size, .. } = *env;
    let world = Membership::of_env(env, options.timeout)?;
    if world_size == 1 {
        return ProcessGroup::single_rank(options.timeout);
    }
    if world_size > MOST_RANKS {
        let message =
            format!("the tcp backend serves at most {MOST_RANKS} ranks, not {world_size}: use FSDP_BACKEND=mpi");
        return Err(Error::Rendezvous { rank, message });
    }
    let secret = Secret::from_env(env)?;
    if env.hosts > 1 && rank == 0 && !secret.is_given() {
        tracing::warn!(
            "neither FSDP_STORE_SECRET nor FSDP_STORE_SECRET_FILE is set: any user who knows the job's id can connect to \
             {}:{}",
            env.master_addr,
            env.master_port
        );
    }
    if rank == 0 && !options.nccl_moves_tensors {
        let faster = if env.hosts > 1 { "mpi" } else { "shm" };
        tracing::warn!("tensors in host memory go through rank 0, which is slow: FSDP_BACKEND={faster} is faster");
    }
    let member = (env.master_addr.clone(), env.master_port, env.run_id.clone(), env.attempt, rank);
    let number = {
        let mut worlds = WORLDS.lock();
        let count = worlds.get_or_insert_default().entry(member).or_default();
        *count += 1;
        *count
    };
    let host = options.host.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    static AT_EXIT: Once = Once::new();
    // Before the ranks meet: if they cannot, rank 0 still tells the others why.
    // SAFETY: the function is called once, when the process exits, and depends on nothing that ends before.
    AT_EXIT.call_once(|| _ = unsafe { libc::atexit(at_exit) });
    let link = Arc::new(Link::meet(env, &secret, number, options.chunk_bytes, &host, options.timeout)?);
    {
        let mut links = LINKS.lock();
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
    }
    let world = Membership { hosts: link.names.clone(), ..world };
    let backend = TcpBackend::new(link, &world, (0..world_size).collect());
    ProcessGroup::new(world, Box::new(backend))
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread, time::Duration};

    use super::*;
    use crate::process_group::{Failure, PeerState};

    /// Runs two ranks as threads.
    fn both<T: Send>(rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let run_id = format!("tcp unit test {}", std::process::id());
        let env = RankEnv { world_size: 2, local_world_size: 2, master_port: free, run_id, ..RankEnv::single() };
        let join = |number: usize| {
            let options = Options::default().with_timeout(Duration::from_secs(60)).with_host(format!("node{number}"));
            rank(connect(&RankEnv { rank: number, ..env.clone() }, options).unwrap())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|number| scope.spawn(move || join(number))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn threads_beside_a_collective_read_pages_and_learn_of_failures() {
        both(|world| {
            let (monitor, peer) = (world.peer_monitor().unwrap(), 1 - world.rank());
            assert_eq!((monitor.announcement(peer), monitor.lost_peer()), (None, None));
            world.barrier().wait().unwrap();
            monitor.set_announcement(&[7, world.rank() as u8, 0]);
            assert_eq!(monitor.announcement(world.rank()), Some(vec![7, world.rank() as u8, 0]));
            world.barrier().wait().unwrap();
            // Pages are asked for again once they are old.
            let page = (0..40).find_map(|_| {
                thread::sleep(Duration::from_millis(100));
                monitor.announcement(peer)
            });
            assert_eq!(page, Some(vec![7, peer as u8, 0]));
            world.barrier().wait().unwrap();
            let why = Failure::of(&Error::Layout("on purpose".into()));
            if world.rank() == 0 {
                monitor.fail(&why);
                // The other rank sees it before this one leaves.
                thread::sleep(Duration::from_millis(500));
            } else {
                let error = world.barrier().wait().unwrap_err().to_string();
                assert!(error.contains("failed: rank 0 on node0 failed: on purpose"), "{error}");
                assert_eq!(monitor.lost_peer(), Some((0, PeerState::Failed(why))));
            }
        });
    }

    #[test]
    fn groups_outlive_the_world() {
        let numbers = both(|world| {
            let group = world.split(0, 1 - world.rank()).unwrap();
            drop(world);
            group.gather_values(vec![group.rank() as u32]).unwrap()
        });
        assert_eq!(numbers, vec![vec![0, 1]; 2]);
    }
}
