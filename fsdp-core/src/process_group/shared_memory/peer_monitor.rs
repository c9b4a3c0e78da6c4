//! Waiting for peers, and noticing what keeps them.
//! Seeing the peers without waiting for them.
//!
//! A rank's board is bytes that it may change at any time: their number, a hash of them, and they themselves. Who reads
//! a board while it is written finds another hash.

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
    engine,
    segment::{Port, RECORD, Segment, reached, state},
};
use crate::{Error, Result, hash::Hash};

/// How long a rank sleeps before it looks whether its peers are alive.
const SLICE: Duration = Duration::from_millis(50);

/// What a rank waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    /// The next round of one rank, or of all.
    Published(Option<usize>),
    /// Everybody's having read the slot to be written next.
    Free,
}

/// What a wait is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct During<'a> {
    pub(super) collective: &'a Collective<'a>,
    /// The round that ends it.
    pub(super) end: u32,
}

/// Waits of one rank of a group.
pub(super) struct Watch {
    /// How long a wait may last.
    timeout: Duration,
    /// Whether whoever is waited for may need this very core, because there are more ranks than cores.
    is_crowded: bool,
    /// A pidfd for each rank; none when the ranks are threads.
    processes: Vec<OwnedFd>,
}

impl Watch {
    pub(super) fn new(timeout: Duration, ranks: usize, processes: Vec<OwnedFd>) -> Self {
        let is_crowded = !engine::suffice(ranks, &processes);
        Watch { timeout, is_crowded, processes }
    }

    /// How often to look before sleeping. To sleep and be woken takes longer than a small collective does.
    fn spins(&self, collective: &Collective<'_>) -> u32 {
        match (self.is_crowded, collective.is_awaited()) {
            (true, _) => 10,
            (false, false) => 200,
            (false, true) => 4000,
        }
    }

    /// Waits until the goal is reached.
    pub(super) fn wait(&self, port: &Port, during: During<'_>, goal: Goal) -> Result<()> {
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
        // Somebody who has published all of this collective may leave or fail without harm, unless it is who is waited
        // for. (The counter is read after the state: nothing is published after the end.)
        let still_needed = |awaited| {
            move |peer: usize, _| {
                peer == awaited || !reached(segment.control(peer).produced.0.load(Ordering::Acquire), during.end)
            }
        };
        let mut started = None;
        for peer in (0..port.ranks()).filter(wanted) {
            for _ in 0..self.spins(during.collective) {
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
                if let Some(error) = self.trouble(segment, port.rank(), during, has_slept, still_needed(peer)) {
                    // The peer may have done its part just before it ended.
                    if is_there(peer) {
                        break;
                    }
                    return Err(error);
                }
                let waited = started.get_or_insert_with(Instant::now).elapsed();
                if waited >= self.timeout {
                    let missing = (0..port.ranks()).filter(wanted).filter(|&peer| !is_there(peer)).collect();
                    return Err(during.collective.timed_out(missing, waited));
                }
                segment.control(peer).sleep(counter(peer), seen, SLICE.min(self.timeout - waited));
                has_slept = true;
            }
        }
        Ok(())
    }

    /// Why waiting is in vain, if it is: what became of a peer that has ended and is still `needed`. Looking for dead
    /// processes costs a system call.
    fn trouble(
        &self,
        segment: &Segment,
        rank: usize,
        during: During<'_>,
        look_for_dead: bool,
        needed: impl Fn(usize, u32) -> bool + Copy,
    ) -> Option<Error> {
        let (peer, state) = self.gone(segment, rank, look_for_dead, needed)?;
        if state == state::LEFT && !look_for_dead {
            // It may have left because another one died.
            return self.trouble(segment, rank, during, true, needed);
        }
        if state == state::FAILED {
            return Some(Failure::from_bytes(&segment.control(peer).record()).into_error(during.collective, peer));
        }
        let how = match state {
            state::LEFT => "left the group",
            _ => "died",
        };
        Some(during.collective.lost(peer, how))
    }

    /// A peer that has ended and is still `needed`, and its state.
    pub(super) fn gone(
        &self,
        segment: &Segment,
        rank: usize,
        look_for_dead: bool,
        needed: impl Fn(usize, u32) -> bool,
    ) -> Option<(usize, u32)> {
        // Before the states are read: a process that ended says in its state how.
        let dead = if look_for_dead { self.dead() } else { Vec::new() };
        let gone = (0..segment.ranks()).filter(|&peer| peer != rank).filter_map(|peer| {
            let control = segment.control(peer);
            let state = control.state.0.load(Ordering::Acquire);
            let has_ended = matches!(state, state::LEFT | state::FAILED) || dead.contains(&peer);
            (has_ended && needed(peer, state)).then_some((peer, state))
        });
        // Who says why it failed knows more than who is merely gone.
        gone.min_by_key(|&(_, state)| match state {
            state::FAILED => 0,
            state::LEFT => 2,
            _ => 1,
        })
    }

    /// Whether one of `peers` has failed or died, for waits that are not for a counter.
    pub(super) fn all_well(&self, port: &Port, during: During<'_>, peers: &[usize]) -> Result<()> {
        let needed = |peer, state| state != state::LEFT && peers.contains(&peer);
        self.trouble(port.segment(), port.rank(), during, true, needed).map_or(Ok(()), Err)
    }

    /// Whether a process that dies is seen to.
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

/// Bytes of a board before what it shows.
const HEAD: usize = 16;

/// What a rank sees.
pub(super) struct Sight {
    pub(super) segment: Arc<Segment>,
    pub(super) watch: Arc<Watch>,
    pub(super) rank: usize,
}

impl PeerMonitor for Sight {
    fn lost_peer(&self) -> Option<(usize, PeerState)> {
        let (peer, state) = self.watch.gone(&self.segment, self.rank, true, |_, _| true)?;
        let gone = match state {
            state::FAILED => PeerState::Failed(Failure::from_bytes(&self.segment.control(peer).record())),
            state::LEFT => PeerState::Left,
            _ => PeerState::Died,
        };
        Some((peer, gone))
    }

    fn fail(&self, why: &Failure) {
        let control = self.segment.control(self.rank);
        control.set_record(&why.to_bytes(RECORD));
        control.end(state::FAILED);
    }

    fn set_status(&self, bytes: &[u8]) {
        let board = self.segment.board(self.rank);
        let bytes = &bytes[..bytes.len().min(board.len() - HEAD)];
        let head = [(bytes.len() as u64).to_le_bytes(), hash(bytes).to_le_bytes()];
        let all = head.iter().flatten().chain(bytes);
        board.iter().zip(all).for_each(|(to, &byte)| to.store(byte, Ordering::Relaxed));
    }

    fn status(&self, peer: usize) -> Option<Vec<u8>> {
        let board = self.segment.board(peer);
        let read = |bytes: &[AtomicU8]| bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect::<Vec<u8>>();
        let head = read(&board[..HEAD]);
        let number = |at: usize| head[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let end = usize::try_from(number(0)).ok().filter(|len| (1..=board.len() - HEAD).contains(len))? + HEAD;
        let bytes = read(&board[HEAD..end]);
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

    fn sights() -> [Sight; 2] {
        let segment = Arc::new(Segment::anonymous(Shape::new(2, 4096)).unwrap());
        let watch = Arc::new(Watch::new(Duration::from_secs(60), 2, vec![]));
        [0, 1].map(|rank| Sight { segment: segment.clone(), watch: watch.clone(), rank })
    }

    #[test]
    fn a_peer_sees_what_is_shown_and_nothing_half_written() {
        let [one, other] = sights();
        assert_eq!(other.shown(0), None);
        for shown in [vec![7; 3000], vec![1], vec![0; 3100]] {
            one.show(&shown);
            assert_eq!(other.shown(0), Some(shown));
        }
        one.segment.board(0)[HEAD + 5].store(1, Ordering::Relaxed);
        assert_eq!(other.shown(0), None);
        one.segment.board(0)[7].store(255, Ordering::Relaxed);
        assert_eq!(other.shown(0), None);
    }

    #[test]
    fn a_peer_that_is_gone_is_seen_with_why() {
        let [one, other] = sights();
        assert_eq!(other.gone(), None);
        other.segment.control(0).end(state::LEFT);
        assert_eq!(other.gone(), Some((0, PeerState::Left)));
        let why = Failure::of(&crate::Error::Layout("why".into()));
        one.fail(&why);
        assert_eq!(other.gone(), Some((0, PeerState::Failed(why))));
    }
}
