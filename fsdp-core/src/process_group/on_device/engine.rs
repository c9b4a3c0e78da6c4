//! What moves the bytes of a device's memory between the ranks of a group.

use super::super::{
    backend::Promises, collective::Collective, failure::Failure, group::ProcessGroup, landing::CollectiveOutput, parts::Op,
};
use crate::{DeviceId, Result};

/// One rank's end of an engine for the memory of a device, in a group of at least two ranks.
///
/// The group ([`ProcessGroup::on_device`]) calls it for collectives of the device's memory, one after the other, and
/// keeps to what a [`Backend`](super::super::Backend) is promised. `host` is a group of the same ranks over the host's
/// memory, for whatever they have to tell each other.
pub trait DeviceEngine: Send {
    /// Whose memory it moves.
    fn device(&self) -> DeviceId;

    /// What may be relied on, where the host's group promises `host`.
    fn promises(&self, host: Promises) -> Promises;

    /// See [`Backend::runs_when_issued`](super::super::Backend::runs_when_issued).
    fn runs_when_issued(&self) -> bool;

    /// Runs a collective of the device's memory and returns its outputs, one a part or buffer.
    ///
    /// # Errors
    /// Whatever kept it. The group then calls [`DeviceEngine::fail`], and runs nothing any more.
    fn run(&mut self, collective: &Collective<'_>, op: Op, host: &ProcessGroup) -> Result<CollectiveOutput>;

    /// This rank's end of a new group, of at least two of this group's ranks: `ranks`, in their new order, which `host`
    /// is the group of.
    ///
    /// # Errors
    /// Whatever kept the ranks from meeting.
    fn split(
        &mut self,
        collective: &Collective<'_>,
        ranks: &[usize],
        host: &ProcessGroup,
    ) -> Result<Box<dyn DeviceEngine>>;

    /// This rank takes part in nothing any more. The host's group tells the peers. Called once at most.
    fn fail(&mut self, why: &Failure);
}
