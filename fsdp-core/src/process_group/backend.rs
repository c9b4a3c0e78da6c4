//! What moves the bytes of a group: the one trait that tells engines apart.

use std::sync::Arc;

use super::{
    collective::Collective, failure::Failure, landing::CollectiveOutput, lookout::Lookout, membership::Membership, parts::Op,
};
use crate::{DeviceId, Result};

/// What a backend promises beyond moving the right elements: what callers may rely on, and what the
/// [conformance suite](super::conformance) holds it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promises {
    /// Reductions combine the ranks' elements as a balanced tree, neighbours first, for six ranks
    /// `((0 + 1) + (2 + 3)) + (4 + 5)`: the same bits on every run. (All ranks get the same bits of an all-reduce,
    /// whatever the order.)
    pub fixed_order: bool,
    /// Half precision inputs are combined in single precision and rounded once. NCCL combines them in their own dtype.
    pub f32_sums: bool,
    /// A rank whose process dies is [`crate::Error::PeerLost`] at once, not [`crate::Error::Timeout`] some time later.
    pub sees_death: bool,
}

impl Promises {
    /// Everything. A backend that promises less says so in what it changes of this.
    pub const ALL: Promises = Promises { fixed_order: true, f32_sums: true, sees_death: true };
}

/// One rank's end of an engine that moves bytes between the ranks of a group.
///
/// A [`ProcessGroup`](crate::ProcessGroup) owns it and calls it one collective after the other, in the order in which
/// this rank issued them: from a thread of its own, or from one that waits ([`crate::ProcessGroup::deferred`]). All
/// that any engine needs is the group's: it checks arguments, counts collectives, fingerprints them, keeps the first
/// error, tells the launcher, and serves groups of one rank.
/// Dropping a backend is leaving its group.
///
/// Its rules:
/// - Every wait ends: with an error soon after a peer has failed ([`Failure::into_error`]), left or died
///   ([`Collective::lost`]), and after [`Membership::timeout`] without progress ([`Collective::timed_out`]).
/// - Ranks show each other what they issued before an output is handed over: [`Collective::announce`] writes it,
///   [`Collective::compare`] reads everybody's.
/// - Outputs are taken from an operation's allocator when it runs, and inputs given back as soon as they are read.
pub trait Backend: Send {
    /// Where the memory is that it moves. One for a device moves the host's memory as well.
    fn device(&self) -> DeviceId;

    /// Whether collectives of the device's memory run on the thread that issues them, at once: where running one is no
    /// more than telling the device, and what follows has to be told it later.
    fn runs_when_issued(&self) -> bool {
        false
    }

    /// What may be relied on.
    fn promises(&self) -> Promises;

    /// Runs a collective and returns its outputs, one a part or buffer; none for a barrier.
    ///
    /// # Errors
    /// Whatever kept it. The group then calls [`Backend::fail`], and runs nothing any more.
    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput>;

    /// This rank's end of a new group, of at least two of this group's ranks: `ranks`, in their new order, of which
    /// this rank is one. The other ranks of the group may make groups of their own meanwhile. `collective` is the one
    /// that the ranks agreed by.
    ///
    /// # Errors
    /// Whatever kept the ranks from meeting.
    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>>;

    /// Tells the peers why this rank takes part in nothing any more. Called once at most.
    fn fail(&mut self, why: &Failure);

    /// What this rank sees of its peers beside its collectives, where there is such: who waits for a device learns by
    /// it at once that a peer is gone, and after a timeout which ranks did not come.
    fn lookout(&self) -> Option<Arc<dyn Lookout>> {
        None
    }
}
