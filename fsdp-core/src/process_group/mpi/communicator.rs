//! State of a group that is shared with the thread that calls MPI: its buffers in flight, requests, tags, and the
//! peers' notifications.

use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{
    super::{backend::PeerState, collective::Failure},
    library::{Kind, MpiError},
};
use crate::Buffer;

/// A type with the largest alignment of all dtypes.
type Word = u64;

/// Bytes that are aligned for every dtype.
pub(super) type Page = Vec<Word>;

/// Allocates a page of at least `bytes` bytes.
pub(super) fn page(bytes: usize) -> Page {
    vec![0; bytes.div_ceil(size_of::<Word>())]
}

/// A range of bytes of a buffer or page.
#[derive(Clone, Debug)]
pub(super) struct Span {
    /// Index of the buffer, or of the page plus the number of buffers.
    pub(super) region: usize,
    pub(super) bytes: Range<usize>,
}

/// Address and length of a buffer or page.
#[derive(Clone, Copy)]
struct Region {
    start: *mut u8,
    len: usize,
}

/// Buffers and pages that messages in flight use. Shared by the collective and the thread that calls MPI, so that
/// memory outlives the messages even if the collective fails.
///
/// Bytes are accessed only through [`InFlight::read`] and [`InFlight::write`], whose callers know which messages are in
/// flight.
pub(super) struct InFlight {
    /// Not accessed directly before [`InFlight::into_parts`].
    buffers: Vec<Buffer>,
    pages: Vec<Page>,
    regions: Vec<Region>,
}

// SAFETY: the pointers are to memory that it owns. Callers of `read` and `write` promise exclusive access.
unsafe impl Send for InFlight {}
// SAFETY: as above.
unsafe impl Sync for InFlight {}

impl InFlight {
    pub(super) fn new(mut buffers: Vec<Buffer>, mut pages: Vec<Page>) -> Self {
        let region = |bytes: &mut [u8]| Region { start: bytes.as_mut_ptr(), len: bytes.len() };
        let of_buffers = buffers.iter_mut().map(|buffer| region(buffer.bytes_mut()));
        let regions = of_buffers.chain(pages.iter_mut().map(|page| region(bytemuck::cast_slice_mut(page)))).collect();
        InFlight { buffers, pages, regions }
    }

    /// Returns the index of the first page's region.
    pub(super) fn first_page(&self) -> usize {
        self.buffers.len()
    }

    /// Returns the buffers and pages, once no message is in flight.
    pub(super) fn into_parts(self) -> (Vec<Buffer>, Vec<Page>) {
        (self.buffers, self.pages)
    }

    /// Returns the address of a span.
    ///
    /// # Panics
    /// If the span is outside its region.
    pub(super) fn address(&self, span: &Span) -> *mut u8 {
        let Region { start, len } = self.regions[span.region];
        assert!(span.bytes.start <= span.bytes.end && span.bytes.end <= len, "{span:?} is outside of {len} bytes");
        // SAFETY: it is within the region, or at its end.
        unsafe { start.add(span.bytes.start) }
    }

    /// # Safety
    /// No message and no [`InFlight::write`] writes the span meanwhile.
    pub(super) unsafe fn read(&self, span: &Span) -> &[u8] {
        // SAFETY: the address has that many bytes, and the caller prevents writes.
        unsafe { std::slice::from_raw_parts(self.address(span), span.bytes.len()) }
    }

    /// # Safety
    /// No message, [`InFlight::read`] or other [`InFlight::write`] accesses the span meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that nobody else has it")]
    pub(super) unsafe fn write(&self, span: &Span) -> &mut [u8] {
        // SAFETY: the address has that many bytes, and the caller has exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.address(span), span.bytes.len()) }
    }
}

/// Direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// A message to or from a rank of the group.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) peer: usize,
    pub(super) span: Span,
}

/// Messages that were posted together.
pub(super) struct Batch {
    messages: Vec<(Direction, usize, AtomicBool)>,
    pending: AtomicUsize,
    refused: Mutex<Option<(usize, MpiError)>>,
}

impl Batch {
    pub(super) fn of(transfers: &[Transfer]) -> Self {
        let messages: Vec<_> =
            transfers.iter().map(|transfer| (transfer.direction, transfer.peer, AtomicBool::new(false))).collect();
        Batch { pending: AtomicUsize::new(messages.len()), messages, refused: Mutex::default() }
    }

    /// Returns whether all messages have ended, with or without errors. Received data can then be read.
    pub(super) fn is_done(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Returns the peers of messages in flight.
    pub(super) fn open(&self, direction: Direction) -> Vec<usize> {
        let is_open =
            |(of, _, done): &&(Direction, usize, AtomicBool)| *of == direction && !done.load(Ordering::Acquire);
        let mut peers: Vec<_> = self.messages.iter().filter(is_open).map(|(_, peer, _)| *peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Returns the ranks that a wait is for: senders of missing messages, or else receivers.
    pub(super) fn missing(&self) -> Vec<usize> {
        let missing = self.open(Direction::Receive);
        if missing.is_empty() { self.open(Direction::Send) } else { missing }
    }

    /// Returns the first error of a message, with its peer.
    pub(super) fn refused(&self) -> Option<(usize, MpiError)> {
        self.refused.lock().clone()
    }
}

/// The end of a peer's part in a group.
#[derive(Clone, Debug)]
pub(super) struct Notification {
    /// Number of messages that the peer sent to this rank before, which still arrive.
    pub(super) sent: u64,
    /// Number of collectives that it completed.
    pub(super) completed: u64,
    pub(super) gone: PeerState,
    /// When this rank received it.
    pub(super) received_at: Instant,
}

impl Notification {
    /// Creates the notification of a peer that cannot send one.
    pub(super) fn of_silent_peer(gone: PeerState) -> Self {
        Notification { sent: 0, completed: 0, gone, received_at: Instant::now() }
    }

    /// Returns whether the peer timed out waiting for `rank`.
    fn blames(&self, rank: usize) -> bool {
        matches!(&self.gone, PeerState::Failed(why) if why.blames(rank))
    }
}

/// Length of an encoded notification in bytes.
pub(super) const NOTIFICATION: usize = 2048;
const NUMBERS: usize = 6;

/// Encodes the notification of a rank that has left or failed, for the peer that receives by `tag`.
pub(super) fn notification(tag: u16, communicator: &Communicator, peer: usize, why: Option<&Failure>) -> Vec<u8> {
    let text = why.map_or(vec![], |why| why.to_bytes(NOTIFICATION - 8 * NUMBERS));
    let [from, len] = [communicator.rank as u64, text.len() as u64];
    let numbers =
        [u64::from(tag), from, communicator.sent(peer), communicator.completed(), u64::from(why.is_some()), len];
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).chain(text).collect();
    bytes.resize(NOTIFICATION, 0);
    bytes
}

/// Decodes a notification: tag, rank, and the end of its part.
pub(super) fn parse_notification(bytes: &[u8]) -> (u64, usize, Notification) {
    let mut numbers = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let mut next = || numbers.next().unwrap_or_default();
    let [tag, peer, sent, completed, has_failed, len] = [(); NUMBERS].map(|()| next());
    let text = bytes.get(8 * NUMBERS..).unwrap_or_default();
    let text = &text[..text.len().min(len as usize)];
    let gone = if has_failed != 0 { PeerState::Failed(Failure::from_bytes(text)) } else { PeerState::Left };
    (tag, peer as usize, Notification { sent, completed, gone, received_at: Instant::now() })
}

/// One rank's state of a group.
pub(super) struct Communicator {
    /// Tag of messages to this rank.
    pub(super) tag: u16,
    /// World ranks of the members.
    pub(super) ranks: Vec<usize>,
    /// This rank's index among the members.
    pub(super) rank: usize,
    /// Tags of messages to the members, once they are known.
    tags: OnceLock<Vec<u16>>,
    /// Number of messages sent to each member.
    sent: Vec<AtomicU64>,
    /// Number of completed collectives.
    completed: AtomicU64,
    /// Number of finished messages.
    progress: AtomicU64,
    /// Whether there are notifications.
    has_notifications: AtomicBool,
    notifications: Mutex<Vec<Option<Notification>>>,
    wake: Condvar,
}

impl Communicator {
    pub(super) fn new(tag: u16, ranks: Vec<usize>, rank: usize) -> Self {
        let sent = ranks.iter().map(|_| AtomicU64::new(0)).collect();
        let notifications = Mutex::new(vec![None; ranks.len()]);
        let (completed, progress) = (AtomicU64::new(0), AtomicU64::new(0));
        let (tags, has_notifications, wake) = (OnceLock::new(), AtomicBool::new(false), Condvar::new());
        Communicator { tag, ranks, rank, tags, sent, completed, progress, has_notifications, notifications, wake }
    }

    /// Returns the other members.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.ranks.len());
        // Starts at the next member, so that not all send to the same one at once.
        (1..size).map(move |step| (rank + step) % size)
    }

    pub(super) fn set_tags(&self, tags: Vec<u16>) {
        // Tags are set once.
        let _ = self.tags.set(tags);
    }

    /// Returns the tag of messages to a peer, if it is known.
    pub(super) fn tag_of(&self, peer: usize) -> Option<u16> {
        self.tags.get().and_then(|tags| tags.get(peer)).copied()
    }

    /// Counts a message to a peer.
    pub(super) fn count(&self, peer: usize) {
        self.sent[peer].fetch_add(1, Ordering::Relaxed);
    }

    fn sent(&self, peer: usize) -> u64 {
        self.sent[peer].load(Ordering::Relaxed)
    }

    /// Sets the number of completed collectives.
    pub(super) fn complete(&self, count: u64) {
        self.completed.store(count, Ordering::Relaxed);
    }

    /// Returns the number of completed collectives.
    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Returns whether the members have met.
    pub(super) fn is_met(&self) -> bool {
        self.tags.get().is_some()
    }

    /// Returns whether all peers have left, died or failed.
    pub(super) fn is_over(&self) -> bool {
        self.notifications
            .lock()
            .iter()
            .enumerate()
            .all(|(peer, notification)| peer == self.rank || notification.is_some())
    }

    /// Returns the peers that have left, died or failed.
    pub(super) fn notifications(&self) -> Vec<(usize, Notification)> {
        if !self.has_notifications.load(Ordering::Acquire) {
            return vec![];
        }
        let notifications = self.notifications.lock();
        notifications
            .iter()
            .enumerate()
            .filter_map(|(peer, notification)| Some((peer, notification.clone()?)))
            .collect()
    }

    /// Returns a peer that failed in this rank's current collective or before, which is then void even if all messages
    /// arrive. Prefers a peer that did not time out waiting for this rank.
    pub(super) fn failed(&self) -> Option<(usize, Notification)> {
        let is_void = |(_, notification): &(usize, Notification)| {
            matches!(notification.gone, PeerState::Failed(_)) && notification.completed <= self.completed()
        };
        self.notifications().into_iter().filter(is_void).min_by_key(|(_, notification)| notification.blames(self.rank))
    }

    /// Returns the ranks that this rank has been waiting for since `began`, if a peer timed out waiting for this rank
    /// meanwhile. The peer may not know of those ranks, so this rank must name them. Empty if this rank itself was
    /// late.
    pub(super) fn awaited(&self, batch: &Batch, notification: &Notification, began: Instant) -> Vec<usize> {
        if !notification.blames(self.rank) || notification.received_at < began {
            return vec![];
        }
        let mut missing = batch.missing();
        for (peer, notification) in self.notifications() {
            if matches!(notification.gone, PeerState::Failed(_)) {
                missing.retain(|&other| other != peer);
            }
        }
        missing
    }

    /// Records the end of a peer's part. The first notification counts.
    pub(super) fn on_notification(&self, peer: usize, notification: Notification) {
        if let Some(place @ None) = self.notifications.lock().get_mut(peer) {
            *place = Some(notification);
        }
        self.has_notifications.store(true, Ordering::Release);
        self.wake.notify_all();
    }

    /// Records the end of a message, whose memory is no longer used.
    pub(super) fn finish(&self, batch: &Batch, index: usize, outcome: Result<(), MpiError>) {
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
            // A thread that is about to sleep checks while it holds the lock.
            drop(self.notifications.lock());
            self.wake.notify_all();
        }
    }

    /// Sleeps until a message of interest or a notification, at most for `most`, unless `is_awake`.
    pub(super) fn sleep(&self, most: Duration, is_awake: impl Fn() -> bool) {
        let mut guard = self.notifications.lock();
        if !is_awake() {
            self.wake.wait_for(&mut guard, most);
        }
    }
}

impl MpiError {
    /// Returns the state of the peer, if MPI reports that it died.
    pub(super) fn peer_state(&self) -> Option<PeerState> {
        (self.kind == Kind::Died).then_some(PeerState::Died)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_and_pages_keep_what_was_written() {
        let in_flight = InFlight::new(vec![Buffer::F32(vec![1.0; 2]), Buffer::U8(vec![])], vec![page(9)]);
        let span = |region, bytes| Span { region, bytes };
        // SAFETY: no two of the spans overlap.
        unsafe {
            in_flight.write(&span(0, 4..8)).copy_from_slice(&2f32.to_ne_bytes());
            in_flight.write(&span(in_flight.first_page(), 8..9))[0] = 7;
            assert_eq!(in_flight.read(&span(0, 0..4)), 1f32.to_ne_bytes());
            assert!(in_flight.read(&span(1, 0..0)).is_empty());
        }
        let (buffers, pages) = in_flight.into_parts();
        assert_eq!(buffers, [Buffer::F32(vec![1.0, 2.0]), Buffer::U8(vec![])]);
        assert_eq!(bytemuck::cast_slice::<u64, u8>(&pages[0])[8], 7);
    }

    #[test]
    #[should_panic(expected = "outside of 8 bytes")]
    fn spans_outside_of_a_region_panic() {
        InFlight::new(vec![Buffer::U8(vec![0; 8])], vec![]).address(&Span { region: 0, bytes: 4..9 });
    }

    #[test]
    fn notifications_survive_encoding() {
        let why = Failure::of(&crate::Error::Layout("why".into()));
        let communicator = Communicator::new(9, vec![0, 1, 2, 3], 3);
        [0, 0, 1].into_iter().for_each(|peer| communicator.count(peer));
        communicator.complete(12);
        for (why, gone) in [(None, PeerState::Left), (Some(&why), PeerState::Failed(why.clone()))] {
            let bytes = notification(7, &communicator, 0, why);
            assert_eq!(bytes.len(), NOTIFICATION);
            let (tag, peer, read) = parse_notification(&bytes);
            assert_eq!((tag, peer, read.sent, read.completed, read.gone), (7, 3, 2, 12, gone));
        }
        let long = Failure::of(&crate::Error::Layout("x".repeat(9000)));
        assert_eq!(notification(7, &communicator, 0, Some(&long)).len(), NOTIFICATION);
        assert_eq!(parse_notification(&[]).1, 0);
    }

    #[test]
    fn batches_track_messages_in_flight_and_errors() {
        let communicator = Communicator::new(1, vec![4, 5, 6], 1);
        assert_eq!(communicator.peers().collect::<Vec<_>>(), [2, 0]);
        let of = |direction, peer| Transfer { direction, peer, span: Span { region: 0, bytes: 0..0 } };
        let batch = Batch::of(&[of(Direction::Receive, 2), of(Direction::Receive, 0), of(Direction::Send, 2)]);
        assert_eq!((batch.open(Direction::Receive), batch.open(Direction::Send)), (vec![0, 2], vec![2]));
        communicator.finish(&batch, 0, Ok(()));
        communicator.finish(&batch, 2, Err(MpiError::new("no")));
        assert_eq!(
            (batch.open(Direction::Receive), batch.open(Direction::Send), batch.is_done()),
            (vec![0], vec![], false)
        );
        communicator.finish(&batch, 1, Ok(()));
        assert!(batch.is_done() && !communicator.is_met() && !communicator.is_over());
        assert_eq!(batch.refused(), Some((2, MpiError::new("no"))));
        assert_eq!(communicator.progress(), 3);
    }

    #[test]
    fn a_rank_blamed_while_it_waits_names_the_ranks_it_waits_for() {
        let of = |direction, peer| Transfer { direction, peer, span: Span { region: 0, bytes: 0..0 } };
        let failed = |missing: Vec<usize>, received_at| {
            let (group, what, seconds) = ("world".into(), "barrier".into(), 1.0);
            let error = crate::Error::Timeout { rank: 1, group, what, missing, hosts: Default::default(), seconds };
            Notification { sent: 0, completed: 0, gone: PeerState::Failed(Failure::of(&error)), received_at }
        };
        let began = Instant::now();
        let communicator = Communicator::new(1, vec![0, 1, 2, 3], 0);
        let batch = Batch::of(&[of(Direction::Receive, 1), of(Direction::Receive, 2), of(Direction::Send, 3)]);
        // Rank 1 waits for this one, which waits for rank 2.
        communicator.on_notification(1, failed(vec![0], Instant::now()));
        let (peer, notification) = communicator.failed().unwrap();
        assert_eq!((peer, communicator.awaited(&batch, &notification, began)), (1, vec![2]));
        // The rank is the cause if it was blamed before it came, and if no message is in flight.
        assert!(
            communicator.awaited(&batch, &notification, notification.received_at + Duration::from_millis(1)).is_empty()
        );
        let done = Batch::of(&[of(Direction::Receive, 2)]);
        communicator.finish(&done, 0, Ok(()));
        assert!(communicator.awaited(&done, &notification, began).is_empty());
        // A peer that does not receive is named as well.
        assert_eq!(communicator.awaited(&Batch::of(&[of(Direction::Send, 3)]), &notification, began), [3]);
        // Another peer knows which rank is missing.
        communicator.on_notification(3, failed(vec![2], Instant::now()));
        let (peer, notification) = communicator.failed().unwrap();
        assert_eq!((peer, communicator.awaited(&batch, &notification, began)), (3, vec![]));
    }
}
