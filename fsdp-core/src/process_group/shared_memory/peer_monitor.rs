//! Waiting for peers, and detecting their failure.
//!
//! A rank's announcement page consists of a length, a hash, and bytes that the rank may replace at any time. A rank
//! that reads it during a write finds a wrong hash.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    super::{
        backend::{PeerMonitor, PeerState},
        collective::{Collective, Failure},
    },
    segment::{Port, RECORD, Segment, reached, state},
    shm_backend::has_core_for_each_rank,
};
use crate::{Error, Result, hash::Hash};

/// How long a rank sleeps between checks that its peers are alive.
const SLICE: Duration = Duration::from_millis(50);

/// The condition that a rank waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    /// One rank, or all ranks, published the next step.
    Published(Option<usize>),
    /// All ranks have read the slot to be written next.
    Free,
}

/// The collective that a wait is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitContext<'a> {
    pub(super) collective: &'a Collective<'a>,
    /// The step after its last.
    pub(super) end: u32,
}

/// Waits for the peers of one rank.
pub(super) struct Waiter {
    /// The longest wait.
    timeout: Duration,
    /// Whether there are more ranks than cores, so that a spinning rank may keep a peer from running.
    is_crowded: bool,
    /// A pidfd of each rank; empty if ranks are threads.
    processes: Vec<OwnedFd>,
}

impl Waiter {
    pub(super) fn new(timeout: Duration, ranks: usize, processes: Vec<OwnedFd>) -> Self {
        let is_crowded = !has_core_for_each_rank(ranks, &processes);
        Waiter { timeout, is_crowded, processes }
    }

    /// Returns how often to check before sleeping. Sleeping and waking take longer than a small collective.
    fn spins(&self, collective: &Collective<'_>) -> u32 {
        match (self.is_crowded, collective.is_awaited()) {
            (true, _) => 10,
            (false, false) => 200,
            (false, true) => 4000,
        }
    }

    /// Waits until the goal is reached.
    pub(super) fn wait(&self, port: &Port, context: WaitContext<'_>, goal: Goal) -> Result<()> {
        let segment = port.segment();
        let target = match goal {
            Goal::Published(_) => port.consumed().wrapping_add(1),
            Goal::Free => port.needed_for_slot(),
        };
        let counter = |peer: usize| {
            let control = segment.control(peer);
            match goal {
                Goal::Published(_) => &control.produced.0,
                Goal::Free => &control.consumed.0,
            }
        };
        let is_there = |peer| reached(counter(peer).load(Ordering::Acquire), target);
        let only = if let Goal::Published(only) = goal { only } else { None };
        let wanted = |peer: &usize| *peer != port.rank() && only.is_none_or(|only| only == *peer);
        // A peer that has published all of this collective may leave or fail, unless this rank waits for it. (The
        // counter is read after the state, and nothing is published after the final state.)
        let still_needed = |awaited| {
            move |peer: usize, _: &PeerState| {
                peer == awaited || !reached(segment.control(peer).produced.0.load(Ordering::Acquire), context.end)
            }
        };
        let mut started = None;
        for peer in (0..port.ranks()).filter(wanted) {
            for _ in 0..self.spins(context.collective) {
                if is_there(peer) {
                    break;
                }
                std::hint::spin_loop();
            }
            let mut has_slept = false;
            loop {
                let seen = counter(peer).load(Ordering::Acquire);
                if reached(seen, target) {
                    break;
                }
                if let Some(error) = self.trouble(segment, port.rank(), context, has_slept, still_needed(peer)) {
                    // The peer may have reached the goal just before it ended.
                    if is_there(peer) {
                        break;
                    }
                    return Err(error);
                }
                let waited = started.get_or_insert_with(Instant::now).elapsed();
                if waited >= self.timeout {
                    let missing = (0..port.ranks()).filter(wanted).filter(|&peer| !is_there(peer)).collect();
                    return Err(context.collective.timed_out(missing, waited));
                }
                segment.control(peer).sleep(counter(peer), seen, SLICE.min(self.timeout - waited));
                has_slept = true;
            }
        }
        Ok(())
    }

    /// Returns the error for a peer that has ended and is still `needed`. `look_for_dead` costs a system call.
    fn trouble(
        &self,
        segment: &Segment,
        rank: usize,
        context: WaitContext<'_>,
        look_for_dead: bool,
        needed: impl Fn(usize, &PeerState) -> bool + Copy,
    ) -> Option<Error> {
        let (peer, gone) = self.lost_peer(segment, rank, look_for_dead, needed)?;
        if gone == PeerState::Left && !look_for_dead {
            // It may have left because another peer died.
            return self.trouble(segment, rank, context, true, needed);
        }
        Some(gone.into_error(context.collective, peer))
    }

    /// Returns a peer that has ended and is still `needed`. A peer that recorded the reason of its failure comes first.
    fn lost_peer(
        &self,
        segment: &Segment,
        rank: usize,
        look_for_dead: bool,
        needed: impl Fn(usize, &PeerState) -> bool,
    ) -> Option<(usize, PeerState)> {
        // Before the states are read: a process that ended properly has set its state.
        let dead = if look_for_dead { self.dead() } else { Vec::new() };
        let lost = (0..segment.ranks()).filter(|&peer| peer != rank).filter_map(|peer| {
            let control = segment.control(peer);
            let gone = match control.state.0.load(Ordering::Acquire) {
                state::LEFT => PeerState::Left,
                state::FAILED => PeerState::Failed(Failure::from_bytes(&control.record())),
                _ if dead.contains(&peer) => PeerState::Died,
                _ => return None,
            };
            needed(peer, &gone).then_some((peer, gone))
        });
        lost.min_by_key(|(_, gone)| gone.precedence())
    }

    /// Fails if one of `peers` has failed or died, for waits without a counter.
    pub(super) fn check_peers(&self, port: &Port, context: WaitContext<'_>, peers: &[usize]) -> Result<()> {
        let needed = |peer, gone: &PeerState| *gone != PeerState::Left && peers.contains(&peer);
        self.trouble(port.segment(), port.rank(), context, true, needed).map_or(Ok(()), Err)
    }

    /// Returns whether the death of a peer's process is detected.
    pub(super) fn detects_death(&self) -> bool {
        !self.processes.is_empty()
    }

    fn dead(&self) -> Vec<usize> {
        let mut fds: Vec<_> = self.processes.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        if fds.is_empty() || rustix::event::poll(&mut fds, Some(&Default::default())).is_err() {
            return Vec::new();
        }
        (0..fds.len()).filter(|&rank| !fds[rank].revents().is_empty()).collect()
    }
}

/// Bytes of an announcement page before its content.
const PAGE_HEAD: usize = 16;

/// A view of the peers through a segment.
pub(super) struct SegmentMonitor {
    pub(super) segment: Arc<Segment>,
    pub(super) waiter: Arc<Waiter>,
    pub(super) rank: usize,
}

impl PeerMonitor for SegmentMonitor {
    fn lost_peer(&self) -> Option<(usize, PeerState)> {
        self.waiter.lost_peer(&self.segment, self.rank, true, |_, _| true)
    }

    fn fail(&self, why: &Failure) {
        let control = self.segment.control(self.rank);
        control.set_record(&why.to_bytes(RECORD));
        control.end(state::FAILED);
    }

    fn set_announcement(&self, bytes: &[u8]) {
        let announcement_page = self.segment.announcement_page(self.rank);
        let bytes = &bytes[..bytes.len().min(announcement_page.len() - PAGE_HEAD)];
        let head = [(bytes.len() as u64).to_le_bytes(), hash(bytes).to_le_bytes()];
        let all = head.iter().flatten().chain(bytes);
        announcement_page.iter().zip(all).for_each(|(to, &byte)| to.store(byte, Ordering::Relaxed));
    }

    fn announcement(&self, peer: usize) -> Option<Vec<u8>> {
        let announcement_page = self.segment.announcement_page(peer);
        let read = |bytes: &[AtomicU8]| bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect::<Vec<u8>>();
        let head = read(&announcement_page[..PAGE_HEAD]);
        let number = |at: usize| head[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let end =
            usize::try_from(number(0)).ok().filter(|len| (1..=announcement_page.len() - PAGE_HEAD).contains(len))?
                + PAGE_HEAD;
        let bytes = read(&announcement_page[PAGE_HEAD..end]);
        (hash(&bytes) == number(8)).then_some(bytes)
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = Hash::default();
    hash.bytes(bytes);
    hash.value()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use super::super::segment::Shape;

    fn monitors() -> [SegmentMonitor; 2] {
        let segment = Arc::new(Segment::new(Shape::new(2, 4096)).unwrap());
        let waiter = Arc::new(Waiter::new(Duration::from_secs(60), 2, vec![]));
        [0, 1].map(|rank| SegmentMonitor { segment: segment.clone(), waiter: waiter.clone(), rank })
    }

    #[test]
    fn announcement_pages_are_read_whole_or_not_at_all() {
        let [one, other] = monitors();
        assert_eq!(other.announcement(0), None);
        for announcement in [vec![7; 3000], vec![1], vec![0; 3100]] {
            one.set_announcement(&announcement);
            assert_eq!(other.announcement(0), Some(announcement));
        }
        one.segment.announcement_page(0)[PAGE_HEAD + 5].store(1, Ordering::Relaxed);
        assert_eq!(other.announcement(0), None);
        one.segment.announcement_page(0)[7].store(255, Ordering::Relaxed);
        assert_eq!(other.announcement(0), None);
    }

    #[test]
    fn lost_peers_are_reported_with_the_reason() {
        let [one, other] = monitors();
        assert_eq!(other.lost_peer(), None);
        other.segment.control(0).end(state::LEFT);
        assert_eq!(other.lost_peer(), Some((0, PeerState::Left)));
        let why = Failure::of(&crate::Error::Layout("why".into()));
        one.fail(&why);
        assert_eq!(other.lost_peer(), Some((0, PeerState::Failed(why))));
    }
}
