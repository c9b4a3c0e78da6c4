//! Memory that MPI reads and writes: it lives as long as anybody does, however a collective ends.
//! What a group and the thread that calls MPI share: messages on their way, and what is known of the peers.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    super::{backend::PeerState, collective::Failure},
    library::{Kind, Refused},
};
use crate::Buffer;

/// What alignment every dtype has.
type Word = u64;

/// Bytes that are aligned for every dtype.
pub(super) type Page = Vec<Word>;

/// A page with room for so many bytes.
pub(super) fn page(bytes: usize) -> Page {
    vec![0; bytes.div_ceil(size_of::<Word>())]
}

/// Bytes of one of the buffers or pages.
#[derive(Clone, Debug)]
pub(super) struct Span {
    /// Which: buffers come before pages.
    pub(super) region: usize,
    pub(super) bytes: Range<usize>,
}

/// Where a region is.
#[derive(Clone, Copy)]
struct Region {
    start: *mut u8,
    len: usize,
}

/// Buffers and pages. Messages that are on their way share it with the collective that sends them.
///
/// Its bytes are reached through [`Held::read`] and [`Held::write`] only, whose callers know what is on its way.
pub(super) struct Held {
    /// Nothing looks into these before [`Held::into_parts`].
    buffers: Vec<Buffer>,
    pages: Vec<Page>,
    regions: Vec<Region>,
}

// SAFETY: the pointers are to memory that it owns. Who reads or writes through them promises that nobody else writes.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    pub(super) fn new(mut buffers: Vec<Buffer>, mut pages: Vec<Page>) -> Self {
        let region = |bytes: &mut [u8]| Region { start: bytes.as_mut_ptr(), len: bytes.len() };
        let of_buffers = buffers.iter_mut().map(|buffer| region(buffer.bytes_mut()));
        let regions = of_buffers.chain(pages.iter_mut().map(|page| region(bytemuck::cast_slice_mut(page)))).collect();
        Held { buffers, pages, regions }
    }

    /// The region of the first page.
    pub(super) fn first_page(&self) -> usize {
        self.buffers.len()
    }

    /// The buffers and pages, of which nothing is on its way any more.
    pub(super) fn into_parts(self) -> (Vec<Buffer>, Vec<Page>) {
        (self.buffers, self.pages)
    }

    /// Where a span begins.
    ///
    /// # Panics
    /// When it is outside of its region.
    pub(super) fn address(&self, span: &Span) -> *mut u8 {
        let Region { start, len } = self.regions[span.region];
        assert!(span.bytes.start <= span.bytes.end && span.bytes.end <= len, "{span:?} is outside of {len} bytes");
        // SAFETY: it is within the region, or at its end.
        unsafe { start.add(span.bytes.start) }
    }

    /// # Safety
    /// Nobody writes to the span meanwhile: neither a message nor [`Held::write`].
    pub(super) unsafe fn read(&self, span: &Span) -> &[u8] {
        // SAFETY: the address is of so many bytes, which the caller keeps from being written.
        unsafe { std::slice::from_raw_parts(self.address(span), span.bytes.len()) }
    }

    /// # Safety
    /// Nobody reads or writes the span meanwhile: no message, no [`Held::read`] and no other [`Held::write`].
    #[expect(clippy::mut_from_ref, reason = "the caller promises that nobody else has it")]
    pub(super) unsafe fn write(&self, span: &Span) -> &mut [u8] {
        // SAFETY: the address is of so many bytes, which the caller has for itself.
        unsafe { std::slice::from_raw_parts_mut(self.address(span), span.bytes.len()) }
    }
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    To,
    From,
}

/// A message to or from a rank of the group.
pub(super) struct Transfer {
    pub(super) way: Way,
    pub(super) peer: usize,
    pub(super) span: Span,
}

/// Messages that were issued together.
pub(super) struct Batch {
    messages: Vec<(Way, usize, AtomicBool)>,
    pending: AtomicUsize,
    refused: Mutex<Option<(usize, Refused)>>,
}

impl Batch {
    pub(super) fn of(transfers: &[Transfer]) -> Self {
        let messages: Vec<_> =
            transfers.iter().map(|transfer| (transfer.way, transfer.peer, AtomicBool::new(false))).collect();
        Batch { pending: AtomicUsize::new(messages.len()), messages, refused: Mutex::default() }
    }

    /// Whether all of them are done, well or not. What they received is there then.
    pub(super) fn is_done(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// The peers of messages that are not done.
    pub(super) fn open(&self, way: Way) -> Vec<usize> {
        let is_open = |(of, _, done): &&(Way, usize, AtomicBool)| *of == way && !done.load(Ordering::Acquire);
        let mut peers: Vec<_> = self.messages.iter().filter(is_open).map(|(_, peer, _)| *peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Who did not come, if the wait for them ends now: who was to send, or else to receive.
    pub(super) fn missing(&self) -> Vec<usize> {
        let missing = self.open(Way::From);
        if missing.is_empty() { self.open(Way::To) } else { missing }
    }

    /// The first message that MPI refused.
    pub(super) fn refused(&self) -> Option<(usize, Refused)> {
        self.refused.lock().clone()
    }
}

/// A peer that takes part in nothing any more.
#[derive(Clone, Debug)]
pub(super) struct Notice {
    /// How many messages it has sent to this rank before, which still come.
    pub(super) sent: u64,
    /// How many collectives it has done.
    pub(super) completed: u64,
    pub(super) gone: PeerState,
    pub(super) heard: Instant,
}

impl Notice {
    /// Whether it says that `rank` did not come.
    fn blames(&self, rank: usize) -> bool {
        matches!(&self.gone, PeerState::Failed(why) if why.blames(rank))
    }
}

/// Bytes of a notice, as it travels.
pub(super) const NOTICE: usize = 2048;
const NUMBERS: usize = 6;

/// What a rank that has left its group, or failed, tells the peer that receives by `tag`.
pub(super) fn notice(tag: u16, line: &Line, peer: usize, why: Option<&Failure>) -> Vec<u8> {
    let text = why.map_or(vec![], |why| why.to_bytes(NOTICE - 8 * NUMBERS));
    let [from, len] = [line.rank as u64, text.len() as u64];
    let numbers = [u64::from(tag), from, line.sent(peer), line.completed(), u64::from(why.is_some()), len];
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).chain(text).collect();
    bytes.resize(NOTICE, 0);
    bytes
}

/// Reads what [`notice`] wrote: the tag, the rank, and what became of it.
pub(super) fn read(bytes: &[u8]) -> (u64, usize, Notice) {
    let mut numbers = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let mut next = || numbers.next().unwrap_or_default();
    let [tag, peer, sent, completed, has_failed, len] = [(); NUMBERS].map(|()| next());
    let text = bytes.get(8 * NUMBERS..).unwrap_or_default();
    let text = &text[..text.len().min(len as usize)];
    let gone = if has_failed != 0 { PeerState::Failed(Failure::from_bytes(text)) } else { PeerState::Left };
    (tag, peer as usize, Notice { sent, completed, gone, heard: Instant::now() })
}

/// One rank's end of a group.
pub(super) struct Line {
    /// What the others mark their messages to this rank with.
    pub(super) tag: u16,
    /// The members by their ranks in MPI's world.
    pub(super) ranks: Vec<usize>,
    /// This rank's place among them.
    pub(super) rank: usize,
    /// What this rank marks its messages to the others with, once they have said so.
    tags: OnceLock<Vec<u16>>,
    /// How many messages went to each.
    sent: Vec<AtomicU64>,
    /// How many collectives are done.
    completed: AtomicU64,
    /// Counts whatever is done.
    progress: AtomicU64,
    /// Whether there are notices.
    has_heard: AtomicBool,
    notices: Mutex<Vec<Option<Notice>>>,
    bell: Condvar,
}

impl Line {
    pub(super) fn new(tag: u16, ranks: Vec<usize>, rank: usize) -> Self {
        let sent = ranks.iter().map(|_| AtomicU64::new(0)).collect();
        let notices = Mutex::new(vec![None; ranks.len()]);
        let (completed, progress) = (AtomicU64::new(0), AtomicU64::new(0));
        let (tags, has_heard, bell) = (OnceLock::new(), AtomicBool::new(false), Condvar::new());
        Line { tag, ranks, rank, tags, sent, completed, progress, has_heard, notices, bell }
    }

    /// The other members.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.ranks.len());
        // From the next one on, so that not all send to one at once.
        (1..size).map(move |step| (rank + step) % size)
    }

    pub(super) fn set_tags(&self, tags: Vec<u16>) {
        // They are set once.
        let _ = self.tags.set(tags);
    }

    /// What messages to a peer are marked with. Nothing before it has said so.
    pub(super) fn tag_of(&self, peer: usize) -> Option<u16> {
        self.tags.get().and_then(|tags| tags.get(peer)).copied()
    }

    /// Counts one message more to a peer.
    pub(super) fn count(&self, peer: usize) {
        self.sent[peer].fetch_add(1, Ordering::Relaxed);
    }

    fn sent(&self, peer: usize) -> u64 {
        self.sent[peer].load(Ordering::Relaxed)
    }

    /// So many collectives are done.
    pub(super) fn complete(&self, count: u64) {
        self.completed.store(count, Ordering::Relaxed);
    }

    /// How many collectives are done.
    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Whether the ranks have met.
    pub(super) fn is_met(&self) -> bool {
        self.tags.get().is_some()
    }

    /// Whether all peers are gone.
    pub(super) fn is_over(&self) -> bool {
        self.lock().iter().enumerate().all(|(peer, notice)| peer == self.rank || notice.is_some())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Notice>>> {
        self.notices.lock()
    }

    /// What is known of peers that are gone.
    pub(super) fn notices(&self) -> Vec<(usize, Notice)> {
        if !self.has_heard.load(Ordering::Acquire) {
            return vec![];
        }
        let notices = self.lock();
        notices.iter().enumerate().filter_map(|(peer, notice)| Some((peer, notice.clone()?))).collect()
    }

    /// A peer that has failed in the collective that this rank is in, or before: it is void then, also where all
    /// messages come. Of several, one that knows more than that this rank did not come.
    pub(super) fn failed(&self) -> Option<(usize, Notice)> {
        let is_void = |(_, notice): &(usize, Notice)| {
            matches!(notice.gone, PeerState::Failed(_)) && notice.completed <= self.completed()
        };
        self.notices().into_iter().filter(is_void).min_by_key(|(_, notice)| notice.blames(self.rank))
    }

    /// Whom this rank waits for since `began`, where a peer says meanwhile that it waited for this rank in vain: it has
    /// to name them, as the peer may not know of them. Nobody, where this rank is the one that came too late.
    pub(super) fn awaited(&self, batch: &Batch, notice: &Notice, began: Instant) -> Vec<usize> {
        if !notice.blames(self.rank) || notice.heard < began {
            return vec![];
        }
        let mut missing = batch.missing();
        for (peer, notice) in self.notices() {
            if matches!(notice.gone, PeerState::Failed(_)) {
                missing.retain(|&other| other != peer);
            }
        }
        missing
    }

    /// A peer is gone. What was heard of it first counts.
    pub(super) fn hear(&self, peer: usize, notice: Notice) {
        if let Some(place @ None) = self.lock().get_mut(peer) {
            *place = Some(notice);
        }
        self.has_heard.store(true, Ordering::Release);
        self.bell.notify_all();
    }

    /// A message is done. Nobody uses its memory any more.
    pub(super) fn finish(&self, batch: &Batch, index: usize, outcome: Result<(), Refused>) {
        let (_, peer, done) = &batch.messages[index];
        let mut ring = false;
        if let Err(refused) = outcome {
            batch.refused.lock().get_or_insert((*peer, refused));
            ring = true;
        }
        done.store(true, Ordering::Release);
        self.progress.fetch_add(1, Ordering::Relaxed);
        ring |= batch.pending.fetch_sub(1, Ordering::AcqRel) == 1;
        if ring {
            // Who is about to sleep has looked before with the lock held, or looks after it.
            drop(self.lock());
            self.bell.notify_all();
        }
    }

    /// Sleeps until something happens, unless `is_awake`, or until `most` has passed.
    pub(super) fn sleep(&self, most: Duration, is_awake: impl Fn() -> bool) {
        let mut guard = self.lock();
        if !is_awake() {
            self.bell.wait_for(&mut guard, most);
        }
    }
}

impl Refused {
    /// What became of a peer that MPI refused a message of, if it says so.
    pub(super) fn gone(&self) -> Option<PeerState> {
        (self.kind == Kind::Died).then_some(PeerState::Died)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_and_pages_come_back_with_what_was_written() {
        let held = Held::new(vec![Buffer::F32(vec![1.0; 2]), Buffer::U8(vec![])], vec![page(9)]);
        let span = |region, bytes| Span { region, bytes };
        // SAFETY: no two of the spans overlap.
        unsafe {
            held.write(&span(0, 4..8)).copy_from_slice(&2f32.to_ne_bytes());
            held.write(&span(held.first_page(), 8..9))[0] = 7;
            assert_eq!(held.read(&span(0, 0..4)), 1f32.to_ne_bytes());
            assert!(held.read(&span(1, 0..0)).is_empty());
        }
        let (buffers, pages) = held.into_parts();
        assert_eq!(buffers, [Buffer::F32(vec![1.0, 2.0]), Buffer::U8(vec![])]);
        assert_eq!(bytemuck::cast_slice::<u64, u8>(&pages[0])[8], 7);
    }

    #[test]
    #[should_panic(expected = "outside of 8 bytes")]
    fn what_is_outside_of_a_region_has_no_address() {
        Held::new(vec![Buffer::U8(vec![0; 8])], vec![]).address(&Span { region: 0, bytes: 4..9 });
    }

    #[test]
    fn notices_survive_the_way() {
        let why = Failure::of(&crate::Error::Layout("why".into()));
        let line = Line::new(9, vec![0, 1, 2, 3], 3);
        [0, 0, 1].into_iter().for_each(|peer| line.count(peer));
        line.complete(12);
        for (why, gone) in [(None, PeerState::Left), (Some(&why), PeerState::Failed(why.clone()))] {
            let bytes = notice(7, &line, 0, why);
            assert_eq!(bytes.len(), NOTICE);
            let (tag, peer, read) = read(&bytes);
            assert_eq!((tag, peer, read.sent, read.completed, read.gone), (7, 3, 2, 12, gone));
        }
        let long = Failure::of(&crate::Error::Layout("x".repeat(9000)));
        assert_eq!(notice(7, &line, 0, Some(&long)).len(), NOTICE);
        assert_eq!(read(&[]).1, 0);
    }

    #[test]
    fn a_batch_knows_which_messages_are_open_and_what_was_refused() {
        let line = Line::new(1, vec![4, 5, 6], 1);
        assert_eq!(line.peers().collect::<Vec<_>>(), [2, 0]);
        let of = |way, peer| Transfer { way, peer, span: Span { region: 0, bytes: 0..0 } };
        let batch = Batch::of(&[of(Way::From, 2), of(Way::From, 0), of(Way::To, 2)]);
        assert_eq!((batch.open(Way::From), batch.open(Way::To)), (vec![0, 2], vec![2]));
        line.finish(&batch, 0, Ok(()));
        line.finish(&batch, 2, Err(Refused::new("no")));
        assert_eq!((batch.open(Way::From), batch.open(Way::To), batch.is_done()), (vec![0], vec![], false));
        line.finish(&batch, 1, Ok(()));
        assert!(batch.is_done() && !line.is_met() && !line.is_over());
        assert_eq!(batch.refused(), Some((2, Refused::new("no"))));
        assert_eq!(line.progress(), 3);
    }

    #[test]
    fn a_rank_that_is_blamed_while_it_waits_names_those_it_waits_for() {
        let of = |way, peer| Transfer { way, peer, span: Span { region: 0, bytes: 0..0 } };
        let failed = |missing: Vec<usize>, heard| {
            let (group, what, seconds) = ("world".into(), "barrier".into(), 1.0);
            let error = crate::Error::Timeout { rank: 1, group, what, missing, hosts: Default::default(), seconds };
            Notice { sent: 0, completed: 0, gone: PeerState::Failed(Failure::of(&error)), heard }
        };
        let began = Instant::now();
        let line = Line::new(1, vec![0, 1, 2, 3], 0);
        let batch = Batch::of(&[of(Way::From, 1), of(Way::From, 2), of(Way::To, 3)]);
        // Rank 1 waits for this one, which waits for rank 2.
        line.hear(1, failed(vec![0], Instant::now()));
        let (peer, notice) = line.failed().unwrap();
        assert_eq!((peer, line.awaited(&batch, &notice, began)), (1, vec![2]));
        // It is itself the cause where it comes when it is blamed already, and where nothing is open.
        assert!(line.awaited(&batch, &notice, notice.heard + Duration::from_millis(1)).is_empty());
        let done = Batch::of(&[of(Way::From, 2)]);
        line.finish(&done, 0, Ok(()));
        assert!(line.awaited(&done, &notice, began).is_empty());
        // Who does not take what this rank sends is named as well.
        assert_eq!(line.awaited(&Batch::of(&[of(Way::To, 3)]), &notice, began), [3]);
        // Somebody knows who is missing.
        line.hear(3, failed(vec![2], Instant::now()));
        let (peer, notice) = line.failed().unwrap();
        assert_eq!((peer, line.awaited(&batch, &notice, began)), (3, vec![]));
    }
}
