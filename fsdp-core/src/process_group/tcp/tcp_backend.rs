//! The backend: collectives in steps, and the view of the peers.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    super::{
        backend::{Backend, CollectiveOutput, Guarantees, PeerMonitor, PeerState},
        collective::{Collective, Failure},
        host::chunked::{self, ChunkedCollective, SlotLayout, Slots},
        op::Op,
        options::Membership,
    },
    link::{Link, State, Step},
    message::{Gone, MAX_FRAME, Note, without_zeros},
};
use crate::{Buffer, DeviceId, Error, Result, hash::Hash};

/// Most bytes of a slot.
const MOST_BYTES: usize = 40 << 10;
/// Bytes of the slots of all ranks together, which a rank receives in a step.
const STEP_BYTES: usize = 1 << 20;
/// Bytes of a frame beside its announcement, its slot, and the ranks that it is for.
const OVERHEAD: usize = 64;
/// Longest encoded failure.
const FAILURE: usize = 4096;
/// Most bytes of a collective. More would take minutes through rank 0.
const MOST_COLLECTIVE_BYTES: u64 = 4 << 30;
/// How long a rank waits for the announcement pages of its peers, and how long it uses them.
const ANSWER: Duration = Duration::from_secs(1);

/// Most ranks: a frame holds an announcement, a slot with a share for each rank, and the ranks.
pub(super) const MOST_RANKS: usize = 512;

const _: () = assert!(
    Collective::announcement_len(MOST_RANKS) + MOST_BYTES + 2 * MOST_RANKS + OVERHEAD <= MAX_FRAME
        && (MOST_RANKS + 1) * 64 <= MOST_BYTES
);

/// One rank's end of a group.
pub(super) struct TcpBackend {
    group: Arc<Group>,
    layout: SlotLayout,
    /// Number of steps of all collectives so far.
    steps: u64,
    has_failed: bool,
}

/// A group. The thread that runs its collectives and its monitors share it.
struct Group {
    link: Arc<Link>,
    /// Hash of the group's name.
    id: u64,
    /// The members by their numbers in the world.
    ranks: Vec<usize>,
    rank: usize,
    /// The other members.
    to: Vec<u16>,
}

impl TcpBackend {
    /// Creates this rank's end of a group of these ranks of the world.
    pub(super) fn new(link: Arc<Link>, group: &Membership, ranks: Vec<usize>) -> Self {
        let mut hash = Hash::default();
        hash.bytes(group.name.as_bytes());
        let least = SlotLayout::least_bytes(ranks.len());
        let bytes = link.chunk_bytes.min(STEP_BYTES / ranks.len()).clamp(least, MOST_BYTES);
        // Slots consist of aligned shares.
        let bytes = bytes / 64 * 64;
        let layout = SlotLayout { rank: group.rank, ranks: ranks.len(), bytes };
        let to = ranks.iter().filter(|&&rank| rank != ranks[group.rank]).map(|&rank| rank as u16).collect();
        let group = Arc::new(Group { link, id: hash.value(), rank: group.rank, ranks, to });
        TcpBackend { group, layout, steps: 0, has_failed: false }
    }

    /// Runs the steps of a collective. In each step, every rank sends its slot to all other ranks and waits for their
    /// slots. So no rank is ahead of another by more than a step, which bounds what the hub keeps.
    fn run_steps(&mut self, collective: &Collective<'_>, chunked: &mut dyn ChunkedCollective) -> Result<()> {
        let SlotLayout { rank, ranks, bytes } = self.layout;
        let group = self.group.clone();
        let start = self.steps;
        let source = chunked.source();
        let is_known = !collective.is_sized_by_peers() && source.is_none_or(|source| source == rank);
        let mut steps = if is_known { chunked.steps().max(1) } else { 1 };
        let (mut slot, mut own) = (vec![0; bytes], vec![0; Collective::announcement_len(ranks)]);
        let mut step = 0;
        while step < steps {
            slot.fill(0);
            if source.is_none_or(|source| source == rank) {
                chunked.fill(step, &mut slot)?;
            }
            if step == 0 {
                collective.announce(&mut own);
            }
            let announcement = if step == 0 { without_zeros(&own) } else { &[] };
            group.send_step(announcement, &slot, |peer| chunked.read_by(peer));
            let mut received = Received(group.wait(collective, start + steps as u64)?);
            if step == 0 {
                for step in &mut received.0 {
                    step.announcement.resize(own.len(), 0);
                }
                chunked.learn(collective.compare(|peer| &received.0[peer].announcement)?);
                steps = chunked.steps().max(1);
            }
            received.0.iter_mut().for_each(|step| step.slot.resize(bytes, 0));
            chunked.drain(step, &received)?;
            self.steps += 1;
            step += 1;
        }
        Ok(())
    }
}

/// The parts of a step by rank; empty for this rank.
struct Received(Vec<Step>);

impl Slots for Received {
    fn slot(&self, peer: usize) -> &[u8] {
        &self.0[peer].slot
    }

    /// A peer sends nothing else of its slot.
    fn part(&self, peer: usize, range: Range<usize>) -> &[u8] {
        &self.0[peer].slot[..range.len()]
    }
}

impl Backend for TcpBackend {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees::ALL
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let bytes = match &op {
            Op::AllToAll { parts, .. } => parts.iter().map(|part| bytes(&part.input)).sum(),
            Op::Gather(messages) | Op::Scatter(messages) => messages.longest as u64 * collective.group().size as u64,
            // Ranks compare a collective of devices by a barrier under its call.
            Op::Barrier => 0,
            _ => collective.call().bytes,
        };
        if bytes > MOST_COLLECTIVE_BYTES {
            let message = format!(
                "{collective} moves {bytes} bytes of host memory, but without MPI at most {MOST_COLLECTIVE_BYTES} go \
                 through rank 0. Move tensors by NCCL (devices and the feature nccl), or start the ranks with \
                 FSDP_BACKEND=mpi"
            );
            return Err(Error::Argument { rank: collective.group().rank, message });
        }
        let layout = self.layout;
        chunked::run(op, layout, |chunked| self.run_steps(collective, chunked)).map(Into::into)
    }

    /// Needs no message: a rank keeps what comes for a group that it has not made yet.
    fn split(&mut self, _: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let ranks = ranks.iter().map(|&rank| self.group.ranks[rank]).collect();
        Ok(Box::new(TcpBackend::new(self.group.link.clone(), group, ranks)))
    }

    fn fail(&mut self, why: &Failure) {
        self.has_failed = true;
        self.group.fail(why);
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        Some(self.group.clone())
    }
}

fn bytes(buffer: &Buffer) -> u64 {
    buffer.len() as u64 * buffer.dtype().size() as u64
}

impl Drop for TcpBackend {
    fn drop(&mut self) {
        if !self.has_failed {
            self.group.link.send(self.group.id, &self.group.to, &Note::Left);
        }
        self.group.link.state().leave(self.group.id);
    }
}

impl Group {
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.ranks.len()).filter(move |&peer| peer != rank)
    }

    /// Sends a step to every peer: the whole slot, or the parts that peers read. Peers that read nothing share a note.
    fn send_step(&self, announcement: &[u8], slot: &[u8], read_by: impl Fn(usize) -> Option<Range<usize>>) {
        let send = |to: &[u16], slot: &[u8]| {
            if !to.is_empty() {
                self.link.send(self.id, to, &Note::Step { announcement, slot: without_zeros(slot) });
            }
        };
        let mut without_data = Vec::new();
        for peer in self.peers() {
            match read_by(peer) {
                None => return send(&self.to, slot),
                Some(part) if part.is_empty() => without_data.push(self.ranks[peer] as u16),
                Some(part) => send(&[self.ranks[peer] as u16], &slot[part]),
            }
        }
        send(&without_data, &[]);
    }

    /// Waits for the next step of every peer. `end` is the number of steps at the end of the collective: a peer that has
    /// sent as many may leave.
    fn wait(&self, collective: &Collective<'_>, end: u64) -> Result<Vec<Step>> {
        let timeout = collective.group().timeout;
        let mut state = self.link.state();
        let (mut since, mut seen) = (Instant::now(), 0);
        loop {
            let missing: Vec<_> = self.peers().filter(|&peer| !state.has_step(self.id, self.ranks[peer])).collect();
            if missing.is_empty() {
                return Ok(self.ranks.iter().map(|&rank| state.next_step(self.id, rank)).collect());
            }
            let is_needed = |peer: usize| state.received(self.id, self.ranks[peer]) < end;
            if let Some((peer, gone)) = self.lost(&state, is_needed) {
                return Err(gone.into_error(collective, peer));
            }
            if let Some(how) = state.lost {
                return Err(self.without_hub(collective, how, since.elapsed()));
            }
            let progress: u64 = self.ranks.iter().map(|&rank| state.received(self.id, rank)).sum();
            if progress != seen {
                (since, seen) = (Instant::now(), progress);
            }
            let waited = since.elapsed();
            if waited >= timeout {
                return Err(collective.timed_out(missing, waited));
            }
            self.link.wait(&mut state, timeout - waited);
        }
    }

    /// Returns the peer whose end best explains a failure, among those that are `needed`.
    fn lost(&self, state: &State, needed: impl Fn(usize) -> bool) -> Option<(usize, PeerState)> {
        let ended = self.peers().filter(|&peer| needed(peer));
        let ended = ended.filter_map(|peer| Some((peer, state.ended(self.id, self.ranks[peer])?)));
        let (peer, ended) = ended.min_by_key(|(_, ended)| ended.precedence())?;
        Some((peer, ended.state.clone()))
    }

    /// Returns the error of a rank that has lost the hub.
    fn without_hub(&self, collective: &Collective<'_>, how: Gone, waited: Duration) -> Error {
        if let Some(peer) = self.peers().find(|&peer| self.ranks[peer] == 0) {
            return PeerState::from(how).into_error(collective, peer);
        }
        let Membership { rank, name, .. } = collective.group();
        let how = if how == Gone::Unreachable { "does not answer" } else { "has ended" };
        Error::Store {
            what: format!("rank {rank}: {collective} in group \"{name}\" by the store"),
            holder: self.link.holder.clone(),
            seconds: waited.as_secs_f64(),
            cause: format!("rank 0, which forwards what ranks send, {how}. See the output of rank 0"),
        }
    }
}

impl PeerMonitor for Group {
    fn lost_peer(&self) -> Option<(usize, PeerState)> {
        let state = self.link.state();
        let of_hub = || {
            let peer = self.peers().find(|&peer| self.ranks[peer] == 0)?;
            Some((peer, state.lost?.into()))
        };
        self.lost(&state, |_| true).or_else(of_hub)
    }

    fn fail(&self, why: &Failure) {
        self.link.send(self.id, &self.to, &Note::Failed(&why.to_bytes(FAILURE)));
    }

    /// Keeps the page here. The thread that reads from the hub sends it to a peer that asks.
    fn set_announcement(&self, bytes: &[u8]) {
        self.link.state().set_page(self.id, bytes);
    }

    fn announcement(&self, peer: usize) -> Option<Vec<u8>> {
        let mut state = self.link.state();
        if peer == self.rank {
            return state.own_page(self.id);
        }
        if state.begins_to_ask(self.id, 2 * ANSWER) {
            drop(state);
            self.link.send(self.id, &self.to, &Note::Ask);
            state = self.link.state();
        }
        loop {
            let left = ANSWER.saturating_sub(state.asked_for(self.id));
            let page = state.page(self.id, self.ranks[peer]);
            if page.is_some() || left.is_zero() || state.ended(self.id, self.ranks[peer]).is_some() {
                return page.filter(|page| !page.is_empty());
            }
            self.link.wait(&mut state, left);
        }
    }
}
