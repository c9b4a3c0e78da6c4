//! What moves the bytes of a group: the one trait that tells engines apart.
//! What a backend hands over: outputs, and what has to be waited for before they are used.

//! What a rank sees of its peers without taking part in a collective.

use std::sync::Arc;

use super::{
    collective::{Collective, Failure},
    op::Op,
    options::Membership,
};
use crate::{Buffer, DeviceId, Error, Result};

// ---- from process_group/backend
/// What a backend promises beyond moving the right elements: what callers may rely on, and what the
/// [conformance suite](super::conformance) holds it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantees {
    /// Reductions combine the ranks' elements as a balanced tree, neighbours first, for six ranks
    /// `((0 + 1) + (2 + 3)) + (4 + 5)`: the same bits on every run. (All ranks get the same bits of an all-reduce,
    /// whatever the order.)
    pub fixed_order: bool,
    /// Half precision inputs are combined in single precision and rounded once. NCCL combines them in their own dtype.
    pub f32_accumulation: bool,
    /// A rank whose process dies is [`crate::Error::PeerLost`] at once, not [`crate::Error::Timeout`] some time later.
    pub detects_death: bool,
}

impl Guarantees {
    /// Everything. A backend that promises less says so in what it changes of this.
    pub const ALL: Guarantees = Guarantees { fixed_order: true, f32_accumulation: true, detects_death: true };
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
    fn guarantees(&self) -> Guarantees;

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
    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        None
    }
}

// ---- from process_group/landing
/// The outputs of a collective.
#[derive(Default)]
pub struct CollectiveOutput {
    /// What to wait for before the outputs are used. Declared before the outputs, to be dropped first: memory of the
    /// outputs must not be freed before the device has been told to wait.
    pub fence: Option<Box<dyn Fence>>,
    /// One a part or buffer, in the order in which they were passed.
    pub outputs: Vec<Buffer>,
}

impl CollectiveOutput {
    /// Outputs that are there when `fence` says so: a device is still at it.
    pub fn pending(outputs: Vec<Buffer>, fence: Box<dyn Fence>) -> Self {
        CollectiveOutput { outputs, fence: Some(fence) }
    }
}

impl From<Vec<Buffer>> for CollectiveOutput {
    /// Outputs that are there.
    fn from(outputs: Vec<Buffer>) -> Self {
        CollectiveOutput { outputs, fence: None }
    }
}

/// A collective that a device has still to run. It keeps whatever the device reads and writes meanwhile.
///
/// Dropping it is [`Fence::order`] without a word of what goes wrong: memory must not go back while it is in use.
pub trait Fence: Send {
    /// Lets the device's compute stream go on only when the collective is done, and releases what it kept. Does not
    /// block.
    ///
    /// # Errors
    /// Those of the device.
    fn order(&mut self) -> Result<()>;

    /// Blocks the calling thread until the collective is done, and releases what it kept.
    ///
    /// # Errors
    /// Those of the device.
    fn block(&mut self) -> Result<()>;
}

// ---- from process_group/peer_monitor
/// What became of a peer that takes part in nothing any more.
#[derive(Clone, Debug, PartialEq)]
pub enum PeerState {
    /// It left the group.
    Left,
    /// Its process ended.
    Died,
    /// It failed, and said why.
    Failed(Failure),
}

impl PeerState {
    /// The error of a rank that was in `collective` when it saw what became of `peer`.
    pub fn into_error(self, collective: &Collective<'_>, peer: usize) -> Error {
        match self {
            PeerState::Left => collective.lost(peer, "left the group"),
            PeerState::Died => collective.lost(peer, "died"),
            PeerState::Failed(why) => why.into_error(collective, peer),
        }
    }
}

/// What a rank sees of its peers, and shows them, from beside the thread that runs the group's collectives: for who
/// waits for a device. Nothing here waits.
pub trait PeerMonitor: Send + Sync {
    /// A peer that takes part in nothing any more: first of all one that said why.
    fn gone(&self) -> Option<(usize, PeerState)>;

    /// Tells the peers why this rank takes part in nothing any more, as
    /// [`Backend::fail`](super::backend::Backend::fail) does.
    fn fail(&self, why: &Failure);

    /// Shows the peers what this rank is at, in place of what it showed before: a [`Collective::announcement_len`] and
    /// 64 bytes at most. One thread does so.
    fn show(&self, bytes: &[u8]);

    /// What a peer shows. Nothing, where it shows nothing yet or is about to show something else.
    fn shown(&self, peer: usize) -> Option<Vec<u8>>;
}
