//! The hub: a server in the process of rank 0 that forwards notes between the ranks of a job, and tells them which rank
//! is gone.
//!
//! Each connection has a thread that reads, and a thread that writes what is queued for the rank. Frames of one rank
//! reach another in the order in which they were sent, and the news that a rank is gone follows its last frame. Queues
//! have no limit of their own: a rank sends a step only after all ranks have sent the step before.
//!
//! The kernel tells a dead process from a dead link. It closes the connections of a process that ends, and it answers
//! keepalive probes for a process that is stopped, but not for a host that is off the network. So ranks send no
//! heartbeats, and a debugger does not end a job.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::net::sockopt;

use super::message::{FromHub, Gone, Note, ToHub, append, frames};
use crate::{
    RankEnv, Result,
    channel::{Accepted, Channel, Handler, Listener, Writer},
    store::{
        RequestContext,
        tcp::{Secret, listen},
    },
};

/// Time after which the kernel ends a connection to a host that does not answer.
pub(super) const LINK_TIMEOUT: Duration = Duration::from_secs(15);
/// Idle time before the kernel's first probe, and the time between two probes.
const PROBE_AFTER: Duration = Duration::from_secs(5);
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// How long rank 0 serves ranks that have not left when its program ends.
const PARTING: Duration = Duration::from_secs(5);
/// The same if the ranks of a world have failed.
const PARTING_AFTER_FAILURE: Duration = Duration::from_millis(500);
/// The same if ranks could not meet. They end as soon as they have read the reason, which takes long on a busy host.
const PARTING_AFTER_REFUSAL: Duration = Duration::from_secs(10);
/// Maximum wait between two checks of the worlds.
const SLICE: Duration = Duration::from_millis(50);
/// Worlds of a job that exist at a time.
const WORLDS: usize = 8;
/// Connections beyond those of ranks.
const SPARE_CONNECTIONS: usize = 64;

/// Sets the time limit of a link. Writes have no other limit.
pub(super) fn limit(stream: &TcpStream) -> io::Result<()> {
    stream.set_write_timeout(None)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, ((LINK_TIMEOUT - PROBE_AFTER).as_secs() / PROBE_EVERY.as_secs()) as u32)?;
    // Probes are not sent while data is on its way.
    Ok(sockopt::set_tcp_user_timeout(stream, LINK_TIMEOUT.as_millis() as u32)?)
}

/// The hub of a job. It serves until the process ends, because a program may join several worlds one after the other.
pub(super) struct Hub {
    job: (String, u16, String, u32),
    port: u16,
    /// Address at which rank 0 itself connects.
    own: IpAddr,
    worlds: Arc<Worlds>,
    listener: Listener,
}

/// The hubs of this process. Tests have several.
static HUBS: Mutex<Vec<Arc<Hub>>> = Mutex::new(Vec::new());

impl Hub {
    /// Returns the hub of the job, and starts it if it does not exist yet. Called on rank 0.
    pub(super) fn get(env: &RankEnv, secret: &Secret, asked: &RequestContext<'_>) -> Result<Arc<Self>> {
        let job = (env.master_addr.clone(), env.master_port, env.run_id.clone(), env.attempt);
        let mut hubs = HUBS.lock();
        if let Some(hub) = hubs.iter().find(|hub| hub.job == job) {
            return Ok(hub.clone());
        }
        let hub = Arc::new(listen(env, asked, |listener| Hub::start(listener, secret, env.world_size, job))?);
        hubs.push(hub.clone());
        Ok(hub)
    }

    fn start(
        listener: TcpListener,
        secret: &Secret,
        ranks: usize,
        job: (String, u16, String, u32),
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let own = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let worlds = Arc::<Worlds>::default();
        let max = ranks.saturating_mul(WORLDS).saturating_add(SPARE_CONNECTIONS);
        let listener = Listener::start(listener, secret.key().clone(), max, Connections(worlds.clone()))?;
        Ok(Hub { job, port: address.port(), own, worlds, listener })
    }

    /// Waits until all ranks have closed their connections, for a short time.
    fn linger(&self) {
        let began = Instant::now();
        while !self.listener.wait_until_closed(SLICE) && began.elapsed() < self.worlds.parting() {}
    }

    /// Returns the address at which rank 0 connects. The job's address may be one of a router.
    pub(super) fn own_address(&self) -> SocketAddr {
        SocketAddr::new(self.own, self.port)
    }
}

/// Lets the other ranks finish when rank 0's program ends, because their notes pass through this process.
pub(super) fn linger() {
    let hubs: Vec<Arc<Hub>> = HUBS.lock().clone();
    hubs.iter().for_each(|hub| hub.linger());
}

/// The worlds of a job by their numbers.
#[derive(Default)]
struct Worlds {
    all: Mutex<BTreeMap<u32, World>>,
}

/// One world: its ranks so far.
struct World {
    members: Vec<Option<Member>>,
    /// Why its ranks cannot meet, if so.
    refused: Option<String>,
    has_failed: bool,
}

struct Member {
    host: String,
    chunk_bytes: u32,
    /// Frames to write; `None` once the rank is gone.
    queue: Option<Sender<Arc<[u8]>>>,
    gone: Option<Gone>,
}

impl World {
    /// Queues a frame for all ranks that are there, except one.
    fn tell_all(&self, frame: &FromHub<'_>, except: Option<usize>) {
        let bytes: Arc<[u8]> = frame.to_bytes().into();
        for (_, member) in self.members.iter().enumerate().filter(|(rank, _)| Some(*rank) != except) {
            member.iter().for_each(|member| member.tell(bytes.clone()));
        }
    }

    /// Tells all ranks that are there why the ranks cannot meet.
    fn refuse(&mut self, why: String) {
        self.tell_all(&FromHub::Refused(&why), None);
        self.refused.get_or_insert(why);
    }

    /// Returns why a rank cannot join, if so.
    fn refusal(&self, rank: usize, size: usize) -> Option<String> {
        if self.refused.is_some() {
            return self.refused.clone();
        }
        if size != self.members.len() {
            return Some(format!(
                "rank {rank} has a world size of {size}, and another rank has {}",
                self.members.len()
            ));
        }
        match self.members.get(rank) {
            None => Some(format!("rank {rank} is outside a world of {size}")),
            Some(Some(_)) => Some(format!("two processes say they are rank {rank}")),
            Some(None) => None,
        }
    }
}

impl Member {
    fn tell(&self, frame: Arc<[u8]>) {
        // Fails if the connection broke; its reader is about to report that.
        self.queue.as_ref().and_then(|queue| queue.send(frame).ok());
    }
}

impl Worlds {
    /// Adds a rank. Returns whether it may stay; otherwise all ranks of the world have the reason.
    fn join(&self, join: &ToHub<'_>, queue: &Sender<Arc<[u8]>>) -> bool {
        let &ToHub::Join { rank, size, world, chunk_bytes, host } = join else { return false };
        let (number, size) = (rank as usize, size as usize);
        let mut worlds = self.all.lock();
        let world = worlds.entry(world).or_insert_with(|| World {
            members: (0..size.min(super::MOST_RANKS)).map(|_| None).collect(),
            refused: None,
            has_failed: false,
        });
        if let Some(why) = world.refusal(number, size) {
            queue.send(FromHub::Refused(&why).to_bytes().into()).ok();
            world.refuse(why);
            return false;
        }
        for (rank, member) in world.members.iter().enumerate() {
            let Some(Member { host, chunk_bytes, gone, .. }) = member else { continue };
            let rank = rank as u32;
            let joined = FromHub::Joined { rank, chunk_bytes: *chunk_bytes, host };
            let gone = gone.map(|how| FromHub::Gone { rank, how });
            for frame in [joined].into_iter().chain(gone) {
                queue.send(frame.to_bytes().into()).ok();
            }
        }
        world.members[number] = Some(Member { host: host.into(), chunk_bytes, queue: Some(queue.clone()), gone: None });
        world.tell_all(&FromHub::Joined { rank, chunk_bytes, host }, None);
        true
    }

    /// Ends the meeting of a world.
    fn give_up(&self, world: u32, why: &str) {
        if let Some(world) = self.all.lock().get_mut(&world) {
            world.refuse(why.to_owned());
        }
    }

    /// Forwards a note of a rank.
    fn forward(&self, world: u32, from: u32, group: u64, to: &[u16], note: &[u8]) {
        let frame: Arc<[u8]> = FromHub::Note { from, group, note }.to_bytes().into();
        let mut worlds = self.all.lock();
        let Some(world) = worlds.get_mut(&world) else { return };
        world.has_failed |= Note::is_failure(note);
        for member in to.iter().filter_map(|&rank| world.members.get(usize::from(rank))?.as_ref()) {
            member.tell(frame.clone());
        }
    }

    /// Tells the ranks of a world that one of them is gone.
    fn depart(&self, number: u32, rank: u32, how: Gone) {
        let mut worlds = self.all.lock();
        if let Some(world) = worlds.get_mut(&number) {
            if let Some(Some(member)) = world.members.get_mut(rank as usize) {
                member.gone = Some(how);
                // The writer ends once the queue is empty.
                member.queue = None;
            }
            world.has_failed |= how != Gone::Left;
            world.tell_all(&FromHub::Gone { rank, how }, Some(rank as usize));
            let is_over = world.members.iter().all(|member| member.as_ref().is_some_and(|it| it.gone.is_some()));
            // A rank that joins later gets the reason, too.
            if is_over && world.refused.is_none() {
                worlds.remove(&number);
            }
        }
    }

    /// Returns how long to wait for the ranks when the program ends.
    fn parting(&self) -> Duration {
        let worlds = self.all.lock();
        if worlds.values().any(|world| world.refused.is_some()) {
            PARTING_AFTER_REFUSAL
        } else if worlds.values().any(|world| world.has_failed) {
            PARTING_AFTER_FAILURE
        } else {
            PARTING
        }
    }
}

/// Serves the connections of ranks.
struct Connections(Arc<Worlds>);

impl Handler for Connections {
    fn refused(&self, from: IpAddr, why: &io::Error) {
        tracing::warn!("rank 0 refused {from}: {why}. Ranks need the job's FSDP_STORE_SECRET");
    }

    fn refusal(&self, why: &str) -> Vec<u8> {
        let mut message = vec![];
        append(&mut message, &FromHub::Refused(why).to_bytes());
        message
    }

    fn serve(&self, guest: Accepted) -> io::Result<()> {
        let Accepted { channel: Channel { mut reader, mut writer }, first, .. } = guest;
        let joining = frames(&first).and_then(|frames| ToHub::parse(frames.first()?));
        let Some(joining @ ToHub::Join { rank, world, .. }) = joining else {
            let why = "the first message is not one of this version: run the same build on all ranks";
            writer.send(&self.refusal(why))?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        };
        limit(writer.stream())?;
        let (queue, queued) = channel();
        let broken = Arc::new(OnceLock::new());
        let of_writer = broken.clone();
        let thread = thread::Builder::new().name(format!("hub to rank {rank}"));
        thread.spawn(move || write_queued(writer, &queued, &of_writer))?;
        if !self.0.join(&joining, &queue) {
            return Ok(());
        }
        drop(queue);
        let how = loop {
            // A failed write may take the error that a read would have returned.
            let message = match reader.receive(Duration::MAX) {
                Ok(message) => message,
                Err(error) => break Gone::of(*broken.get().unwrap_or(&error.kind())),
            };
            let Some(frames) = frames(message) else { break Gone::Died };
            let mut end = None;
            for frame in frames {
                match ToHub::parse(frame) {
                    Some(ToHub::Send { group, to, note }) => self.0.forward(world, rank, group, &to, note),
                    Some(ToHub::Goodbye) => end = Some(Gone::Left),
                    Some(ToHub::GiveUp(why)) => self.0.give_up(world, why),
                    _ => end = Some(Gone::Died),
                }
            }
            if let Some(how) = end {
                break how;
            }
        };
        self.0.depart(world, rank, how);
        Ok(())
    }
}

/// Writes queued frames, several in a message, until the queue's senders are gone. Then ends the direction.
fn write_queued(mut writer: Writer, queued: &Receiver<Arc<[u8]>>, broken: &OnceLock<io::ErrorKind>) {
    let mut message = vec![];
    let mut next = queued.recv().ok();
    while let Some(frame) = next.take() {
        message.clear();
        append(&mut message, &frame);
        next = queued.try_iter().find(|frame| !append(&mut message, frame));
        if let Err(error) = writer.send(&message) {
            broken.set(error.kind()).ok();
            // Wakes the thread that reads.
            writer.close();
            return;
        }
        next = next.or_else(|| queued.recv().ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_group::tcp::MOST_RANKS;

    /// Run it with `--nocapture` for the table in docs/planning.md.
    #[test]
    fn a_meeting_sends_each_rank_one_frame_for_each_rank() {
        println!("ranks  frames to a rank  bytes to a rank");
        for ranks in [8, 64, 512] {
            let worlds = Worlds::default();
            let join = |rank: usize| {
                let (queue, queued) = channel();
                let host = format!("node-{:04}.cluster", rank / 8);
                let (rank, size) = (rank as u32, ranks as u32);
                let joined = ToHub::Join { rank, size, world: 1, chunk_bytes: 1 << 20, host: &host };
                assert!(worlds.join(&joined, &queue));
                queued
            };
            let mut most = 0;
            for queued in (0..ranks).map(join).collect::<Vec<_>>() {
                let frames: Vec<_> = queued.try_iter().collect();
                let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
                most = most.max(bytes);
                assert!(frames.len() == ranks && bytes <= 32 * ranks, "{} frames, {bytes} bytes", frames.len());
            }
            println!("{ranks:>5}  {ranks:>16}  {most:>15}");
        }
        let env = RankEnv { world_size: MOST_RANKS + 1, ..RankEnv::single() };
        let refused = super::super::connect(&env, Default::default()).unwrap_err().to_string();
        assert!(refused.contains("at most 512 ranks, not 513: use FSDP_BACKEND=mpi"), "{refused}");
    }
}
