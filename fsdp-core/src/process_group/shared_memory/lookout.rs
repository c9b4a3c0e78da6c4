//! Seeing the peers without waiting for them.
//!
//! A rank's board is bytes that it may change at any time: their number, a hash of them, and they themselves. Who reads
//! a board while it is written finds another hash.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use super::{
    super::{
        failure::Failure,
        lookout::{Gone, Lookout},
    },
    segment::{RECORD, Segment, state},
    watch::Watch,
};
use crate::hash::Hash;

/// Bytes of a board before what it shows.
const HEAD: usize = 16;

/// What a rank sees.
pub(super) struct Sight {
    pub(super) segment: Arc<Segment>,
    pub(super) watch: Arc<Watch>,
    pub(super) rank: usize,
}

impl Lookout for Sight {
    fn gone(&self) -> Option<(usize, Gone)> {
        let (peer, state) = self.watch.gone(&self.segment, self.rank, true, |_, _| true)?;
        let gone = match state {
            state::FAILED => Gone::Failed(Failure::from_bytes(&self.segment.control(peer).record())),
            state::LEFT => Gone::Left,
            _ => Gone::Died,
        };
        Some((peer, gone))
    }

    fn fail(&self, why: &Failure) {
        let control = self.segment.control(self.rank);
        control.set_record(&why.to_bytes(RECORD));
        control.end(state::FAILED);
    }

    fn show(&self, bytes: &[u8]) {
        let board = self.segment.board(self.rank);
        let bytes = &bytes[..bytes.len().min(board.len() - HEAD)];
        let head = [(bytes.len() as u64).to_le_bytes(), hash(bytes).to_le_bytes()];
        let all = head.iter().flatten().chain(bytes);
        board.iter().zip(all).for_each(|(to, &byte)| to.store(byte, Ordering::Relaxed));
    }

    fn shown(&self, peer: usize) -> Option<Vec<u8>> {
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
    use std::time::Duration;

    use super::{super::shape::Shape, *};

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
        assert_eq!(other.gone(), Some((0, Gone::Left)));
        let why = Failure::of(&crate::Error::Layout("why".into()));
        one.fail(&why);
        assert_eq!(other.gone(), Some((0, Gone::Failed(why))));
    }
}
