//! Where the parts of a segment lie.
//! The shared memory that the ranks of a group exchange data through.
//!
//! A segment is one mapping: for each rank a control block, a board (see `peer_monitor`) and a ring of slots. A rank writes
//! only what is its own and reads what is its peers'. A group runs in *rounds*, which count up over its whole life: in
//! round `k` every rank may fill its slot `k % SLOTS` and publishes it by raising its `produced` counter to `k + 1`;
//! when it has read what it wants of everybody's round `k` it raises its `consumed` counter to `k + 1`. A slot is free
//! for round `k` once everybody has consumed round `k - SLOTS`. The counters wrap around; no two ranks' counters that
//! are compared are ever half the range apart.
//!
//! All unsafe code that shares memory is in this file.

use std::{
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, Ordering, fence},
    },
    time::Duration,
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
    thread::futex,
};

use super::super::{collective::Collective, host::packing::ALIGN};

/// Slots a rank. A power of two, so that slot numbers go on evenly when the counters wrap.
pub(super) const SLOTS: u32 = 4;
/// A page of memory.
const PAGE: usize = 4096;

/// What docs/architecture.md says of announcements: those of 41 ranks fit into a page.
const _: () = assert!(Collective::announcement_len(41) <= PAGE && Collective::announcement_len(42) > PAGE);

/// How large the parts of a segment are. For each rank there are a control block, a board, and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) ranks: usize,
    pub(super) chunk: usize,
}

impl Shape {
    /// For `ranks` ranks that move at most about `chunk_bytes` at a time.
    pub(super) fn new(ranks: usize, chunk_bytes: usize) -> Self {
        // Every rank's share of a slot holds at least one element of the largest dtype, at an aligned place.
        let least = (ranks + 1) * ALIGN;
        Shape { ranks, chunk: chunk_bytes.clamp(least, 1 << 30).next_multiple_of(ALIGN) }
    }

    /// Bytes of a slot before its data: an announcement.
    pub(super) fn header(&self) -> usize {
        Collective::announcement_len(self.ranks).next_multiple_of(ALIGN)
    }

    /// Bytes of a board: an announcement, and what [`PeerMonitor::set_status`](super::super::peer_monitor::PeerMonitor::set_status) adds.
    pub(super) fn board(&self) -> usize {
        (Collective::announcement_len(self.ranks) + 128).next_multiple_of(PAGE)
    }

    fn slot(&self) -> usize {
        (self.header() + self.chunk).next_multiple_of(PAGE)
    }

    fn rank(&self) -> usize {
        PAGE + self.board() + self.slot() * SLOTS as usize
    }

    /// Where the control block of a rank begins.
    fn control_of(&self, rank: usize) -> usize {
        assert!(rank < self.ranks);
        rank * self.rank()
    }

    /// Where the board of a rank begins.
    fn board_of(&self, rank: usize) -> usize {
        self.control_of(rank) + PAGE
    }

    /// Where the slot of a rank for `round` begins.
    fn slot_of(&self, rank: usize, round: u32) -> usize {
        self.board_of(rank) + self.board() + self.slot() * (round % SLOTS) as usize
    }

    /// Bytes of the whole segment.
    pub(super) fn total(&self) -> usize {
        self.rank() * self.ranks
    }
}

/// The longest failure record, in bytes.
pub(super) const RECORD: usize = 2048;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A value with a cache line to itself.
#[repr(C, align(128))]
pub(super) struct Line<T>(pub(super) T);

/// What became of a rank, in [`Control::state`].
pub(super) mod state {
    /// Nobody has claimed the rank yet. What a fresh mapping holds.
    pub(super) const ABSENT: u32 = 0;
    pub(super) const ACTIVE: u32 = 1;
    pub(crate) const LEFT: u32 = 2;
    pub(crate) const FAILED: u32 = 3;
}

/// A rank's control block. All zeros is its initial state, and every bit pattern is valid: a peer can't make reading it
/// undefined.
#[repr(C)]
struct Control {
    /// Rounds published.
    pub(super) produced: Line<AtomicU32>,
    /// Rounds read.
    pub(super) consumed: Line<AtomicU32>,
    /// How many ranks sleep on one of this rank's counters.
    sleepers: Line<AtomicU32>,
    /// One of [`state`]'s.
    pub(super) state: Line<AtomicU32>,
    /// Bytes of `record` that are set, written before the state becomes [`state::FAILED`].
    record_len: AtomicU32,
    /// Why the rank failed.
    record: [AtomicU8; RECORD],
}

const _: () = assert!(size_of::<Control>() <= PAGE);

/// Whether a counter has come to `target`, in spite of wrapping.
pub(super) fn reached(counter: u32, target: u32) -> bool {
    counter.wrapping_sub(target) as i32 >= 0
}

impl Control {
    /// Raises a counter of this block and wakes who sleeps on it.
    fn raise(&self, counter: &AtomicU32, value: u32) {
        counter.store(value, Ordering::Release);
        // With the fence in `sleep`: either this load sees the sleeper, or the sleeper's load sees the new value.
        fence(Ordering::SeqCst);
        if self.sleepers.0.load(Ordering::Relaxed) > 0 {
            let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps until `counter`, one of this block's, is not `seen` any more, or `at_most` is over, or for no reason.
    pub(super) fn sleep(&self, counter: &AtomicU32, seen: u32, at_most: Duration) {
        self.sleepers.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if counter.load(Ordering::Acquire) == seen
            && let Ok(timeout) = at_most.try_into()
        {
            // Being woken, interrupted, late and too slow to fall asleep are all the same to the caller, who looks
            // again.
            let _ = futex::wait(counter, futex::Flags::empty(), seen, Some(&timeout));
        }
        self.sleepers.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Writes why the rank failed, of which there are at most [`RECORD`] bytes.
    pub(super) fn set_record(&self, bytes: &[u8]) {
        for (to, &byte) in self.record.iter().zip(bytes) {
            to.store(byte, Ordering::Relaxed);
        }
        self.record_len.store(bytes.len().min(RECORD) as u32, Ordering::Relaxed);
    }

    /// Reads what [`Control::set_record`] wrote, or whatever is there.
    pub(super) fn record(&self) -> Vec<u8> {
        let len = (self.record_len.load(Ordering::Relaxed) as usize).min(RECORD);
        self.record[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Sets the state for good and wakes everybody who waits for this rank.
    pub(super) fn end(&self, state: u32) {
        self.state.0.store(state, Ordering::Release);
        for counter in [&self.produced.0, &self.consumed.0] {
            let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
        }
    }
}

/// A mapped segment.
pub(super) struct Segment {
    base: NonNull<u8>,
    shape: Shape,
}

// SAFETY: the mapping is valid in every thread until it is dropped; control blocks are atomics, and `Port` keeps the
// accesses to slots apart.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A segment for the threads of this process.
    pub(super) fn anonymous(shape: Shape) -> Result<Self, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                shape.total(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        }?;
        Segment::new(base, shape)
    }

    /// A file without a name for a segment of this shape, that nobody can resize.
    pub(super) fn file(shape: Shape) -> Result<OwnedFd, Errno> {
        let file = rustix::fs::memfd_create("fsdp-segment", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, shape.total() as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    }

    /// Maps what [`Segment::file`] made, maybe in another process.
    pub(super) fn map(file: impl AsFd, shape: Shape) -> Result<Self, Errno> {
        // Without the seals the other side could truncate the file, and touching the mapping would kill this process.
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SEALS)
            || rustix::fs::fstat(&file)?.st_size as u64 != shape.total() as u64
        {
            return Err(Errno::INVAL);
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use; the file is as
        // large as the mapping and sealed.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                shape.total(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Segment::new(base, shape)
    }

    fn new(base: *mut std::ffi::c_void, shape: Shape) -> Result<Self, Errno> {
        NonNull::new(base.cast()).map(|base| Segment { base, shape }).ok_or(Errno::NOMEM)
    }

    /// The number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.shape.ranks
    }

    /// A rank's control block.
    pub(super) fn control(&self, rank: usize) -> &Control {
        // SAFETY: in bounds by `Shape`; page-aligned; a `Control` is valid whatever the bytes, and nobody accesses it
        // but through atomics.
        unsafe { self.base.add(self.shape.control_of(rank)).cast::<Control>().as_ref() }
    }

    /// A rank's board.
    pub(super) fn board(&self, rank: usize) -> &[AtomicU8] {
        // SAFETY: in bounds by `Shape`; nobody accesses it but through these atomics.
        unsafe {
            std::slice::from_raw_parts(self.base.add(self.shape.board_of(rank)).cast().as_ptr(), self.shape.board())
        }
    }

    /// Where the slot of `rank` for `round` begins.
    fn slot(&self, rank: usize, round: u32) -> *mut u8 {
        // SAFETY: in bounds of the mapping by `Shape`.
        unsafe { self.base.add(self.shape.slot_of(rank, round)).as_ptr() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `base` and the length are those of the mapping that this value owns; no reference into it outlives
        // it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.shape.total()) };
    }
}

/// One rank's end of a segment: the only thing that writes the rank's slots and counters.
pub(super) struct Port {
    segment: Arc<Segment>,
    rank: usize,
    produced: u32,
    consumed: u32,
}

impl Port {
    /// Takes a rank's end; `None` when somebody else has it.
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

    /// Bytes of data that a slot holds.
    pub(super) fn chunk(&self) -> usize {
        self.segment.shape.chunk
    }

    /// Rounds this rank has read.
    pub(super) fn consumed(&self) -> u32 {
        self.consumed
    }

    fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks()).filter(|&peer| peer != self.rank)
    }

    /// What every peer must have consumed before the next slot may be written.
    pub(super) fn needed_for_slot(&self) -> u32 {
        self.produced.wrapping_add(1).wrapping_sub(SLOTS)
    }

    /// Whether the next slot may be written.
    pub(super) fn slot_is_free(&self) -> bool {
        let needed = self.needed_for_slot();
        self.peers().all(|peer| reached(self.segment.control(peer).consumed.0.load(Ordering::Acquire), needed))
    }

    /// The announcement and the data of the slot to publish next, with whatever an earlier round left there.
    ///
    /// # Panics
    /// When the slot is not free.
    pub(super) fn slot(&mut self) -> (&mut [u8], &mut [u8]) {
        assert!(self.slot_is_free(), "the slot is still being read");
        let (header, chunk) = (self.segment.shape.header(), self.segment.shape.chunk);
        let start = self.segment.slot(self.rank, self.produced);
        // SAFETY: in bounds, since a slot is at least header and chunk. Nobody else accesses it: this is the rank's
        // only port and is borrowed mutably; peers read only slots of rounds in [their consumed, this rank's produced),
        // and with all of them at `needed_for_slot` or later (checked with Acquire, so that their reads have happened)
        // none of those rounds shares this slot.
        unsafe {
            (std::slice::from_raw_parts_mut(start, header), std::slice::from_raw_parts_mut(start.add(header), chunk))
        }
    }

    /// Makes the slot readable for the peers.
    pub(super) fn publish(&mut self) {
        self.publish_until(self.produced.wrapping_add(1));
    }

    /// Ends all rounds before `round` at once, those not yet published with nothing in them.
    pub(super) fn publish_until(&mut self, round: u32) {
        self.produced = round;
        let control = self.segment.control(self.rank);
        control.raise(&control.produced.0, self.produced);
    }

    /// Whether `peer` has published the round that this rank reads next.
    pub(super) fn is_published(&self, peer: usize) -> bool {
        reached(self.segment.control(peer).produced.0.load(Ordering::Acquire), self.consumed.wrapping_add(1))
    }

    /// The announcement and the data of `peer` in the round that this rank reads next.
    ///
    /// # Panics
    /// When the peer has not published it yet.
    pub(super) fn peer_slot(&self, peer: usize) -> (&[u8], &[u8]) {
        assert!(peer != self.rank && self.is_published(peer), "the round is not published yet");
        let (header, chunk) = (self.segment.shape.header(), self.segment.shape.chunk);
        let start = self.segment.slot(peer, self.consumed);
        // SAFETY: in bounds, since a slot is at least header and chunk. The peer has published the round (checked with
        // Acquire, so that its writes have happened) and writes the slot again only after this rank's `consumed`
        // counter passed the round, which needs `&mut self`.
        unsafe { (std::slice::from_raw_parts(start, header), std::slice::from_raw_parts(start.add(header), chunk)) }
    }

    /// Goes on to the next round: the peers may use their slots of this one again.
    pub(super) fn advance(&mut self) {
        self.consumed = self.consumed.wrapping_add(1);
        let control = self.segment.control(self.rank);
        control.raise(&control.consumed.0, self.consumed);
    }
}

impl Drop for Port {
    /// Leaves the group, unless the rank failed before. Here, so that peers learn it also when the rank's thread panics
    /// or never starts.
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
    fn a_record_is_read_as_it_was_written_and_never_beyond_its_end() {
        let segment = Segment::anonymous(Shape::new(1, 4096)).unwrap();
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
        let segment = Arc::new(Segment::anonymous(Shape::new(2, 4096)).unwrap());
        assert!(Port::claim(segment.clone(), 0).is_some());
        assert!(Port::claim(segment.clone(), 0).is_none());
        assert!(Port::claim(segment, 1).is_some());
    }

    #[test]
    fn a_rank_leaves_when_its_port_goes_unless_it_failed() {
        let segment = Arc::new(Segment::anonymous(Shape::new(2, 4096)).unwrap());
        let state = |rank| segment.control(rank).state.0.load(Ordering::Relaxed);
        drop(Port::claim(segment.clone(), 0));
        let failed = Port::claim(segment.clone(), 1);
        segment.control(1).end(state::FAILED);
        drop(failed);
        assert_eq!((state(0), state(1)), (state::LEFT, state::FAILED));
        assert!(Port::claim(segment.clone(), 0).is_none());
    }

    #[test]
    fn slots_are_reused_only_when_everybody_has_read_them_also_across_the_wrap() {
        let segment = Arc::new(Segment::anonymous(Shape::new(2, 4096)).unwrap());
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

    #[test]
    fn only_a_sealed_file_of_the_right_size_is_mapped() {
        let shape = Shape::new(2, 4096);
        let file = Segment::file(shape).unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err() && Segment::map(&file, shape).is_ok());
        assert!(Segment::map(&file, Shape::new(3, 4096)).is_err());
        let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, shape.total() as u64).unwrap();
        assert!(Segment::map(&unsealed, shape).is_err());
    }
}
