//! The trait of a backend, which moves the bytes of a group, and the types of its interface.

use std::{sync::Arc, time::Duration};

use super::{
    collective::{Collective, Failure},
    op::Op,
    options::Membership,
};
use crate::{Buffer, DeviceId, Error, Result};

/// Properties of a backend beyond correct collectives. Callers rely on them, and the conformance suite tests them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantees {
    /// Reductions combine the ranks' elements as a balanced tree of neighbours, for six ranks
    /// `((0 + 1) + (2 + 3)) + (4 + 5)`. Every run gives the same bits. In any order, an all-reduce gives all ranks the
    /// same bits.
    pub fixed_order: bool,
    /// Half-precision inputs are combined in single precision and rounded once. NCCL combines them in their own dtype.
    pub f32_accumulation: bool,
    /// The death of a peer's process is [`crate::Error::PeerLost`] at once, not [`crate::Error::Timeout`] later.
    pub detects_death: bool,
}

impl Guarantees {
    /// All guarantees.
    pub const ALL: Guarantees = Guarantees { fixed_order: true, f32_accumulation: true, detects_death: true };
}

/// One rank's end of an engine that moves bytes between the ranks of a group.
///
/// A [`ProcessGroup`](crate::ProcessGroup) owns the backend and runs one collective at a time, in issue order. The
/// calling thread is the group's own, or one that issues a blocking collective ([`crate::ProcessGroup::blocking`]). The
/// group checks arguments, counts and fingerprints collectives, keeps the first error, records progress for the
/// launcher, and runs collectives of a single rank. Dropping a backend leaves the group.
///
/// A backend keeps these rules:
/// - Every wait ends. It fails soon after a peer failed ([`Failure::into_error`]), left or died ([`Collective::lost`]),
///   and after [`Membership::timeout`] without progress ([`Collective::timed_out`]).
/// - Ranks compare what they issued before any of them returns an output: [`Collective::announce`] writes an
///   announcement, [`Collective::compare`] reads the announcements of all ranks.
/// - Outputs are allocated when the operation runs, and inputs are given back as soon as they are read.
pub trait Backend: Send {
    /// Returns the device whose memory the backend moves. A backend for a device moves the host's memory as well.
    fn device(&self) -> DeviceId;

    /// Returns whether collectives of device memory run at once, on the thread that issues them. They do if running one
    /// only enqueues work on the device.
    fn runs_when_issued(&self) -> bool {
        false
    }

    /// Returns the backend's guarantees.
    fn guarantees(&self) -> Guarantees;

    /// Succeeds if the backend can communicate by memory that it allocates and registers itself
    /// ([`crate::ProcessGroup::with_registered_memory`]).
    ///
    /// # Errors
    /// The reason why it can't.
    fn registers_memory(&self) -> Result<(), String> {
        Err(format!("its backend for the memory of {} does not allocate any", self.device()))
    }

    /// Runs a collective and returns one output for each part or buffer, none for a barrier.
    ///
    /// # Errors
    /// The reason the collective failed. The group then calls [`Backend::fail`] and runs no further collective.
    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput>;

    /// Creates this rank's end of a new group of at least two of this group's ranks, this rank among them.
    ///
    /// `ranks` has the members in their new order. `collective` is the one by which the ranks agreed on the split.
    /// Other ranks of this group may create other groups at the same time.
    ///
    /// # Errors
    /// The reason the ranks could not meet.
    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>>;

    /// Tells the peers why this rank leaves the group. Called at most once.
    fn fail(&mut self, why: &Failure);

    /// Returns a view of the peers for threads that wait for a device, if the backend has one.
    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        None
    }
}

/// The outputs of a collective.
#[derive(Default)]
pub struct CollectiveOutput {
    /// The pending end of the collective, to wait for before the outputs are used. This field is declared, and so
    /// dropped, before the outputs: their memory must not be freed before the device has been told to wait.
    pub fence: Option<Box<dyn Fence>>,
    /// One buffer for each part or buffer of the call, in the same order.
    pub outputs: Vec<Buffer>,
}

impl CollectiveOutput {
    /// Creates outputs that a device still writes. `fence` waits for them.
    pub fn pending(outputs: Vec<Buffer>, fence: Box<dyn Fence>) -> Self {
        CollectiveOutput { outputs, fence: Some(fence) }
    }
}

impl From<Vec<Buffer>> for CollectiveOutput {
    /// Creates outputs that are complete.
    fn from(outputs: Vec<Buffer>) -> Self {
        CollectiveOutput { outputs, fence: None }
    }
}

/// A collective that a device has yet to finish. It keeps the memory that the device reads and writes.
///
/// Dropping it orders the compute stream as [`Fence::order`] does and ignores errors, so that memory in use is not
/// reused.
pub trait Fence: Send {
    /// Makes the device's compute stream wait for the collective, and releases the kept memory. Does not block the
    /// calling thread.
    ///
    /// # Errors
    /// Errors of the device.
    fn order(&mut self) -> Result<()>;

    /// Blocks the calling thread until the collective is done, and releases the kept memory.
    ///
    /// # Errors
    /// Errors of the device.
    fn synchronize(&mut self) -> Result<()>;
}

/// State of a peer that no longer takes part in the group.
#[derive(Clone, Debug, PartialEq)]
pub enum PeerState {
    /// It left the group.
    Left,
    /// Its process ended.
    Died,
    /// Its host has not answered for this long.
    Unreachable(Duration),
    /// It failed and sent the reason.
    Failed(Failure),
}

impl PeerState {
    /// Returns the error of a rank that saw this state of `peer` during `collective`.
    pub fn into_error(self, collective: &Collective<'_>, peer: usize) -> Error {
        match self {
            PeerState::Left => collective.lost(peer, "left the group"),
            PeerState::Died => collective.lost(peer, "died"),
            PeerState::Unreachable(silent) => {
                let seconds = silent.as_secs();
                let cause = "its host or the network is down, or its process is stopped";
                collective.lost(peer, format!("has not answered for {seconds} s: {cause}"))
            }
            PeerState::Failed(why) => why.into_error(collective, peer),
        }
    }

    /// Returns a number that is lower the better this state explains why a group failed.
    pub(super) fn precedence(&self) -> u8 {
        match self {
            PeerState::Failed(_) => 0,
            PeerState::Died | PeerState::Unreachable(_) => 1,
            PeerState::Left => 2,
        }
    }
}

/// A view of the peers for threads beside the one that runs collectives, such as those that wait for a device. Its
/// methods do not block, except that [`PeerMonitor::announcement`] may ask the peers, for at most a second.
pub trait PeerMonitor: Send + Sync {
    /// Returns a peer that left, died or failed. A peer that sent the reason of its failure comes first.
    fn lost_peer(&self) -> Option<(usize, PeerState)>;

    /// Tells the peers why this rank leaves the group, as [`Backend::fail`] does.
    fn fail(&self, why: &Failure);

    /// Replaces this rank's announcement page, which peers can read: at most [`Collective::announcement_len`] and 64
    /// bytes. Called by one thread only.
    fn set_announcement(&self, bytes: &[u8]);

    /// Returns the announcement page of a peer, or `None` if it is empty or being written.
    fn announcement(&self, peer: usize) -> Option<Vec<u8>>;
}
