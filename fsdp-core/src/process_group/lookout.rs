//! What a rank sees of its peers without taking part in a collective.

use super::{collective::Collective, failure::Failure};
use crate::Error;

/// What became of a peer that takes part in nothing any more.
#[derive(Clone, Debug, PartialEq)]
pub enum Gone {
    /// It left the group.
    Left,
    /// Its process ended.
    Died,
    /// It failed, and said why.
    Failed(Failure),
}

impl Gone {
    /// The error of a rank that was in `collective` when it saw what became of `peer`.
    pub fn into_error(self, collective: &Collective<'_>, peer: usize) -> Error {
        match self {
            Gone::Left => collective.lost(peer, "left the group"),
            Gone::Died => collective.lost(peer, "died"),
            Gone::Failed(why) => why.into_error(collective, peer),
        }
    }
}

/// What a rank sees of its peers, and shows them, from beside the thread that runs the group's collectives: for who
/// waits for a device. Nothing here waits.
pub trait Lookout: Send + Sync {
    /// A peer that takes part in nothing any more: first of all one that said why.
    fn gone(&self) -> Option<(usize, Gone)>;

    /// Tells the peers why this rank takes part in nothing any more, as
    /// [`Backend::fail`](super::backend::Backend::fail) does.
    fn fail(&self, why: &Failure);

    /// Shows the peers what this rank is at, in place of what it showed before: a [`Collective::announcement_len`] and
    /// 64 bytes at most. One thread does so.
    fn show(&self, bytes: &[u8]);

    /// What a peer shows. Nothing, where it shows nothing yet or is about to show something else.
    fn shown(&self, peer: usize) -> Option<Vec<u8>>;
}
