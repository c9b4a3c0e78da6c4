//! The shared memory through which the ranks of a group exchange data.
//!
//! A segment is one mapping. It has a control block, an announcement page and a ring of slots for each rank. A rank
//! writes its own parts and reads the parts of its peers.
//!
//! A group counts *steps* over its whole life. In step `k` a rank may fill its slot `k % SLOTS`, and publishes it by
//! setting its `produced` counter to `k + 1`. Once it has read the peers' slots of step `k`, it sets its `consumed`
//! counter to `k + 1`. A slot is free for step `k` once all ranks have consumed step `k - SLOTS`. The counters wrap
//! around; counters that are compared are never half the range apart.
//!
//! All unsafe code that shares memory is in this file.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, Ordering, fence},
    },
    time::Duration,
};

use memmap2::MmapRaw;
use rustix::thread::futex;

use super::super::{
    collective::Collective,
    host::{chunked::SlotLayout, packing::ALIGN},
};
use crate::shared_file;

/// Slots of a rank. A power of two, so that slot numbers continue evenly when the counters wrap.
pub(super) const SLOTS: u32 = 4;
/// Size of a memory page.
const PAGE: usize = 4096;

/// In a group of up to 41 ranks, an announcement adds one page to a slot whose data fills whole pages.
const _: () = assert!(Collective::announcement_len(41) <= PAGE && Collective::announcement_len(42) > PAGE);

/// Sizes of the parts of a segment. Each rank has a control block, an announcement page, and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) ranks: usize,
    pub(super) chunk: usize,
}

impl Shape {
    /// Creates the shape for `ranks` ranks that move about `chunk_bytes` at a time.
    pub(super) fn new(ranks: usize, chunk_bytes: usize) -> Self {
        let least = SlotLayout::least_bytes(ranks);
        Shape { ranks, chunk: chunk_bytes.clamp(least, 1 << 30).next_multiple_of(ALIGN) }
    }

    /// Returns the bytes of a slot's announcement, before its data.
    pub(super) fn header(&self) -> usize {
        Collective::announcement_len(self.ranks).next_multiple_of(ALIGN)
    }

    /// Returns the bytes of an announcement page: an announcement and what `PeerMonitor::set_announcement` allows in
    /// addition.
    pub(super) fn announcement_page(&self) -> usize {
        (Collective::announcement_len(self.ranks) + 128).next_multiple_of(PAGE)
    }

    fn slot(&self) -> usize {
        (self.header() + self.chunk).next_multiple_of(PAGE)
    }

    fn rank(&self) -> usize {
        PAGE + self.announcement_page() + self.slot() * SLOTS as usize
    }

    /// Returns the offset of a rank's control block.
    fn control_of(&self, rank: usize) -> usize {
        assert!(rank < self.ranks);
        rank * self.rank()
    }

    /// Returns the offset of a rank's announcement page.
    fn announcement_page_of(&self, rank: usize) -> usize {
        self.control_of(rank) + PAGE
    }

    /// Returns the offset of a rank's slot for `step`.
    fn slot_of(&self, rank: usize, step: u32) -> usize {
        self.announcement_page_of(rank) + self.announcement_page() + self.slot() * (step % SLOTS) as usize
    }

    /// Returns the bytes of the whole segment.
    pub(super) fn total(&self) -> usize {
        self.rank() * self.ranks
    }
}

/// The longest failure record, in bytes.
pub(super) const RECORD: usize = 2048;

/// A value with a cache line to itself.
#[repr(C, align(128))]
pub(super) struct CacheLine<T>(pub(super) T);

/// States of a rank, in [`Control::state`].
pub(super) mod state {
    /// The rank has not been claimed. The state of a new mapping.
    pub(super) const ABSENT: u32 = 0;
    pub(super) const ACTIVE: u32 = 1;
    pub(crate) const LEFT: u32 = 2;
    pub(crate) const FAILED: u32 = 3;
}

/// A rank's control block. Initially all zeros. Every bit pattern is valid, so reading is defined whatever a peer
/// writes.
#[repr(C)]
pub(super) struct Control {
    /// Number of published steps.
    pub(super) produced: CacheLine<AtomicU32>,
    /// Number of steps that were read.
    pub(super) consumed: CacheLine<AtomicU32>,
    /// Number of ranks that sleep on one of this rank's counters.
    sleepers: CacheLine<AtomicU32>,
    /// A value of [`state`].
    pub(super) state: CacheLine<AtomicU32>,
    /// Length of `record`, which is written before the state becomes [`state::FAILED`].
    record_len: AtomicU32,
    /// Why the rank failed: an encoded [`Failure`](super::super::Failure).
    record: [AtomicU8; RECORD],
}

const _: () = assert!(size_of::<Control>() <= PAGE);

/// Returns whether a counter has reached `target`, across a wrap.
pub(super) fn reached(counter: u32, target: u32) -> bool {
    counter.wrapping_sub(target) as i32 >= 0
}

impl Control {
    /// Sets a counter of this block to a larger value and wakes the ranks that sleep on it.
    fn raise(&self, counter: &AtomicU32, value: u32) {
        counter.store(value, Ordering::Release);
        // With the fence in `sleep`: either this load sees the sleeper, or the sleeper's load sees the new value.
        fence(Ordering::SeqCst);
        if self.sleepers.0.load(Ordering::Relaxed) > 0 {
            let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps while `counter`, one of this block's, is `seen`, for at most `at_most`. May return early.
    pub(super) fn sleep(&self, counter: &AtomicU32, seen: u32, at_most: Duration) {
        self.sleepers.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if counter.load(Ordering::Acquire) == seen
            && let Ok(timeout) = at_most.try_into()
        {
            // The caller checks again, whatever ended the wait.
            let _ = futex::wait(counter, futex::Flags::empty(), seen, Some(&timeout));
        }
        self.sleepers.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Writes the reason of the failure, at most [`RECORD`] bytes.
    pub(super) fn set_record(&self, bytes: &[u8]) {
        for (to, &byte) in self.record.iter().zip(bytes) {
            to.store(byte, Ordering::Relaxed);
        }
        self.record_len.store(bytes.len().min(RECORD) as u32, Ordering::Relaxed);
    }

    /// Reads the bytes of [`Control::set_record`].
    pub(super) fn record(&self) -> Vec<u8> {
        let len = (self.record_len.load(Ordering::Relaxed) as usize).min(RECORD);
        self.record[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Sets the final state and wakes all ranks that wait for this rank.
    pub(super) fn end(&self, state: u32) {
        self.state.0.store(state, Ordering::Release);
        for counter in [&self.produced.0, &self.consumed.0] {
            let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
        }
    }
}

/// A mapped segment.
pub(super) struct Segment {
    memory: MmapRaw,
    shape: Shape,
}

impl Segment {
    /// Creates a segment for the threads of this process.
    pub(super) fn new(shape: Shape) -> io::Result<Self> {
        Segment::map(&Segment::file(shape)?, shape)
    }

    /// Creates an anonymous file for a segment of this shape.
    pub(super) fn file(shape: Shape) -> io::Result<OwnedFd> {
        shared_file::create("fsdp-segment", shape.total())
    }

    /// Maps a file of [`Segment::file`], possibly of another process.
    pub(super) fn map(file: &OwnedFd, shape: Shape) -> io::Result<Self> {
        Ok(Segment { memory: shared_file::map(file, shape.total())?, shape })
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.shape.ranks
    }

    /// Returns a rank's control block.
    pub(super) fn control(&self, rank: usize) -> &Control {
        // SAFETY: in bounds by `Shape`; page-aligned; a `Control` is valid whatever the bytes, and nobody accesses it
        // but through atomics.
        unsafe { &*self.memory.as_ptr().add(self.shape.control_of(rank)).cast() }
    }

    /// Returns a rank's announcement page.
    pub(super) fn announcement_page(&self, rank: usize) -> &[AtomicU8] {
        // SAFETY: in bounds by `Shape`; nobody accesses it but through these atomics.
        unsafe {
            std::slice::from_raw_parts(
                self.memory.as_ptr().add(self.shape.announcement_page_of(rank)).cast(),
                self.shape.announcement_page(),
            )
        }
    }

    /// Returns the start of the slot of `rank` for `step`.
    fn slot(&self, rank: usize, step: u32) -> *mut u8 {
        // SAFETY: in bounds of the mapping by `Shape`.
        unsafe { self.memory.as_mut_ptr().add(self.shape.slot_of(rank, step)) }
    }
}

/// One rank's access to a segment. Only the port writes the rank's slots and counters.
pub(super) struct Port {
    segment: Arc<Segment>,
    rank: usize,
    produced: u32,
    consumed: u32,
}

impl Port {
    /// Claims a rank's port. Returns `None` if it is already claimed.
    pub(super) fn claim(segment: Arc<Segment>, rank: usize) -> Option<Self> {
        let control = segment.control(rank);
        let claimed =
            control.state.0.compare_exchange(state::ABSENT, state::ACTIVE, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let produced = control.produced.0.load(Ordering::Acquire);
        let consumed = control.consumed.0.load(Ordering::Acquire);
        claimed.then_some(Port { segment, rank, produced, consumed })
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.segment.ranks()
    }

    /// Returns the bytes of data in a slot.
    pub(super) fn chunk(&self) -> usize {
        self.segment.shape.chunk
    }

    /// Returns the number of steps that this rank has read.
    pub(super) fn consumed(&self) -> u32 {
        self.consumed
    }

    fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks()).filter(|&peer| peer != self.rank)
    }

    /// Returns the step that every peer must have consumed before the next slot may be written.
    pub(super) fn needed_for_slot(&self) -> u32 {
        self.produced.wrapping_add(1).wrapping_sub(SLOTS)
    }

    /// Returns whether the next slot may be written.
    pub(super) fn slot_is_free(&self) -> bool {
        let needed = self.needed_for_slot();
        self.peers().all(|peer| reached(self.segment.control(peer).consumed.0.load(Ordering::Acquire), needed))
    }

    /// Returns the announcement and the data of the next slot to publish, with the bytes of an earlier step.
    ///
    /// # Panics
    /// If the slot is not free.
    pub(super) fn slot(&mut self) -> (&mut [u8], &mut [u8]) {
        assert!(self.slot_is_free(), "the slot is still being read");
        let (header, chunk) = (self.segment.shape.header(), self.segment.shape.chunk);
        let start = self.segment.slot(self.rank, self.produced);
        // SAFETY: in bounds, since a slot is at least header and chunk. Nobody else accesses it: this is the rank's
        // only port and is borrowed mutably; peers read only slots of steps in [their consumed, this rank's produced),
        // and with all of them at `needed_for_slot` or later (checked with Acquire, so that their reads have happened)
        // none of those steps shares this slot.
        unsafe {
            (std::slice::from_raw_parts_mut(start, header), std::slice::from_raw_parts_mut(start.add(header), chunk))
        }
    }

    /// Lets the peers read the slot.
    pub(super) fn publish(&mut self) {
        self.publish_until(self.produced.wrapping_add(1));
    }

    /// Publishes all steps before `step`, those not yet published without data.
    pub(super) fn publish_until(&mut self, step: u32) {
        self.produced = step;
        let control = self.segment.control(self.rank);
        control.raise(&control.produced.0, self.produced);
    }

    /// Returns whether `peer` has published the step that this rank reads next.
    pub(super) fn is_published(&self, peer: usize) -> bool {
        reached(self.segment.control(peer).produced.0.load(Ordering::Acquire), self.consumed.wrapping_add(1))
    }

    /// Returns the announcement and the data of `peer` in the step that this rank reads next.
    ///
    /// # Panics
    /// If the peer has not published it.
    pub(super) fn peer_slot(&self, peer: usize) -> (&[u8], &[u8]) {
        assert!(peer != self.rank && self.is_published(peer), "the step is not published yet");
        let (header, chunk) = (self.segment.shape.header(), self.segment.shape.chunk);
        let start = self.segment.slot(peer, self.consumed);
        // SAFETY: in bounds, since a slot is at least header and chunk. The peer has published the step (checked with
        // Acquire, so that its writes have happened) and writes the slot again only after this rank's `consumed`
        // counter passed the step, which needs `&mut self`.
        unsafe { (std::slice::from_raw_parts(start, header), std::slice::from_raw_parts(start.add(header), chunk)) }
    }

    /// Goes on to the next step and lets the peers reuse their slots.
    pub(super) fn advance(&mut self) {
        self.consumed = self.consumed.wrapping_add(1);
        let control = self.segment.control(self.rank);
        control.raise(&control.consumed.0, self.consumed);
    }
}

impl Drop for Port {
    /// Leaves the group, unless the rank failed. Peers learn it also if the rank's thread panics or never starts.
    fn drop(&mut self) {
        let control = self.segment.control(self.rank);
        if control.state.0.load(Ordering::Relaxed) == state::ACTIVE {
            control.end(state::LEFT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_compare_across_the_wrap() {
        assert!(reached(3, 3) && reached(4, 3) && !reached(2, 3));
        assert!(reached(1, u32::MAX) && !reached(u32::MAX, 1));
    }

    #[test]
    fn records_are_read_as_written_and_never_beyond_their_end() {
        let segment = Segment::new(Shape::new(1, 4096)).unwrap();
        let control = segment.control(0);
        for bytes in [vec![], vec![1, 2, 3], vec![7; RECORD]] {
            control.set_record(&bytes);
            assert_eq!(control.record(), bytes);
        }
        control.record_len.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(control.record(), vec![7; RECORD]);
    }

    #[test]
    fn a_rank_has_one_port() {
        let segment = Arc::new(Segment::new(Shape::new(2, 4096)).unwrap());
        assert!(Port::claim(segment.clone(), 0).is_some());
        assert!(Port::claim(segment.clone(), 0).is_none());
        assert!(Port::claim(segment, 1).is_some());
    }

    #[test]
    fn a_rank_leaves_when_its_port_goes_unless_it_failed() {
        let segment = Arc::new(Segment::new(Shape::new(2, 4096)).unwrap());
        let state = |rank| segment.control(rank).state.0.load(Ordering::Relaxed);
        drop(Port::claim(segment.clone(), 0));
        let failed = Port::claim(segment.clone(), 1);
        segment.control(1).end(state::FAILED);
        drop(failed);
        assert_eq!((state(0), state(1)), (state::LEFT, state::FAILED));
        assert!(Port::claim(segment.clone(), 0).is_none());
    }

    #[test]
    fn slots_are_reused_once_all_ranks_have_read_them() {
        let segment = Arc::new(Segment::new(Shape::new(2, 4096)).unwrap());
        for rank in 0..2 {
            segment.control(rank).produced.0.store(u32::MAX - 5, Ordering::Relaxed);
            segment.control(rank).consumed.0.store(u32::MAX - 5, Ordering::Relaxed);
        }
        let mut writer = Port::claim(segment.clone(), 0).unwrap();
        let mut reader = Port::claim(segment, 1).unwrap();
        for lap in 0..4u8 {
            for slot in 0..SLOTS as u8 {
                writer.slot().1.fill(lap * 16 + slot);
                writer.publish();
            }
            assert!(!writer.slot_is_free());
            for slot in 0..SLOTS as u8 {
                assert!(reader.peer_slot(0).1.iter().all(|&byte| byte == lap * 16 + slot));
                reader.advance();
            }
            assert!(writer.slot_is_free() && !reader.is_published(0));
        }
    }
}
