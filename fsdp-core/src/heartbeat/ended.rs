//! Which ranks of its world have ended well: told to a rank by its launcher, so that it waits for nobody who will not
//! come.

use std::{path::Path, sync::atomic::Ordering};

use super::{
    board::{Board, VARIABLE, WORLD, open},
    memory::{Page, WORDS},
};
use crate::{RankEnv, hash::Hash};

/// Ranks that there is room for.
const MOST: usize = 64 * (WORDS - WORLD - 1);

/// A number for the world that `env` is of: a rank may have started a launcher of its own, whose ranks are others.
fn world(env: &RankEnv) -> u64 {
    let mut hash = Hash::default();
    hash.bytes(env.run_id.as_bytes());
    hash.number(u64::from(env.attempt));
    hash.number(env.world_size as u64);
    hash.value()
}

/// The word and the bit of a rank.
fn place(rank: usize) -> (usize, u64) {
    (WORLD + 1 + rank / 64, 1 << (rank % 64))
}

impl Board {
    /// Tells the rank that another of its world has ended with exit code 0: if it still waits to meet that one, it
    /// gives up. Of `ended`, the other's environment, `rank`, `world_size`, `run_id` and `attempt` count. Ranks from
    /// 256 on are not told of.
    pub fn tell_ended(&self, ended: &RankEnv) {
        if ended.rank < MOST {
            let (word, bit) = place(ended.rank);
            self.page[WORLD].store(world(ended), Ordering::Release);
            self.page[word].fetch_or(bit, Ordering::AcqRel);
        }
    }
}

/// What a rank's launcher tells it of the others.
pub(crate) struct Peers {
    /// The rank's board, whichever of its processes writes there; none where the launcher is another.
    page: Option<Page>,
    world: u64,
}

impl Peers {
    /// Those of the rank that `env` describes, this process.
    pub(crate) fn of(env: &RankEnv) -> Self {
        let page = std::env::var_os(VARIABLE).and_then(|path| open(Path::new(&path)).ok());
        Peers { page, world: world(env) }
    }

    /// Whether that rank has ended with exit code 0.
    pub(crate) fn has_ended(&self, rank: usize) -> bool {
        let Some(page) = self.page.as_ref().filter(|_| rank < MOST) else { return false };
        let (word, bit) = place(rank);
        page[word].load(Ordering::Acquire) & bit != 0 && page[WORLD].load(Ordering::Acquire) == self.world
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::Board;

    #[test]
    fn only_ranks_of_the_same_world_that_have_ended_have() {
        let env = |run_id: &str, rank| RankEnv { rank, world_size: 300, run_id: run_id.into(), ..RankEnv::single() };
        let board = Board::new().unwrap();
        let peers = |env: &RankEnv| Peers { page: open(Path::new(&board.path())).ok(), world: world(env) };
        assert!((0..300).all(|rank| !peers(&env("r", 0)).has_ended(rank)));
        for rank in [0, 64, 255, 299, usize::MAX] {
            board.tell_ended(&env("r", rank));
        }
        let ended = |env: &RankEnv| (0..300).filter(|&rank| peers(env).has_ended(rank)).collect::<Vec<_>>();
        assert_eq!(ended(&env("r", 7)), [0, 64, 255]);
        for other in [env("other", 0), RankEnv { attempt: 1, ..env("r", 0) }, RankEnv { world_size: 2, ..env("r", 0) }]
        {
            assert!(ended(&other).is_empty(), "{other:?}");
        }
        assert!(!Peers { page: None, world: 0 }.has_ended(0));
        // A process that takes over its own board clears what it wrote itself.
        for _ in 0..2 {
            crate::heartbeat::writer::Writer::claim(Path::new(&board.path()), 7).unwrap();
        }
        assert_eq!(ended(&env("r", 7)), [0, 64, 255]);
        assert_eq!(board.snapshot().collectives, []);
    }
}
