//! Groups that move a device's memory: an engine for the device, beside a group that moves the host's.
//! What moves the bytes of a device's memory between the ranks of a group.

//! The backend of a group that moves a device's memory and the host's.

#[cfg(feature = "cuda")]
mod through_host;

use std::sync::Arc;

use super::{
    backend::{Backend, CollectiveOutput, Guarantees, PeerMonitor},
    call::Call,
    collective::{Collective, Failure},
    group::ProcessGroup,
    op::Op,
    options::Membership,
    single_rank::SingleRank,
};
use crate::{DeviceId, Result};

#[cfg(feature = "cuda")]
pub use through_host::{HostStaging, ranks_sharing_devices};

/// One rank's end of an engine for the memory of a device, in a group of at least two ranks.
///
/// The group ([`ProcessGroup::on_device`]) calls it for collectives of the device's memory, one after the other, and
/// keeps to what a [`Backend`](super::super::Backend) is promised. `host` is a group of the same ranks over the host's
/// memory, for whatever they have to tell each other.
pub trait DeviceEngine: Send {
    /// Whose memory it moves.
    fn device(&self) -> DeviceId;

    /// What may be relied on, where the host's group promises `host`.
    fn guarantees(&self, host: Guarantees) -> Guarantees;

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

impl ProcessGroup {
    /// The ranks of this group, which moves the host's memory, as a group that moves a device's as well.
    ///
    /// # Errors
    /// As [`ProcessGroup::new`].
    pub fn on_device(self, engine: Box<dyn DeviceEngine>) -> Result<Self> {
        let membership = self.membership().clone();
        ProcessGroup::new(membership, device_backend(self, engine))
    }
}

/// Returns a backend that runs collectives of the device's memory on `engine` and the others on `host`.
pub fn device_backend(host: ProcessGroup, engine: Box<dyn DeviceEngine>) -> Box<dyn Backend> {
    match host.size() {
        1 => Box::new(SingleRank(engine.device())),
        _ => Box::new(OnDevice::new(host, engine)),
    }
}

/// An engine for the device, and a group of the same ranks over the host's memory.
struct OnDevice {
    // Before the host's group: a rank that has left it has ended its part of everything.
    engine: Box<dyn DeviceEngine>,
    host: ProcessGroup,
}

impl OnDevice {
    fn new(host: ProcessGroup, engine: Box<dyn DeviceEngine>) -> Self {
        // What comes from this group's thread is waited for at once.
        OnDevice { engine, host: host.deferred() }
    }
}

impl Backend for OnDevice {
    fn device(&self) -> DeviceId {
        self.engine.device()
    }

    fn runs_when_issued(&self) -> bool {
        self.engine.runs_when_issued()
    }

    fn guarantees(&self) -> Guarantees {
        self.engine.guarantees(self.host.guarantees())
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        match op.device() {
            DeviceId::Host => Ok(self.host.issue(Ok(collective.call().clone()), op).wait()?.into()),
            _ => self.engine.run(collective, op, &self.host),
        }
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let (of, membership) = (ranks.to_vec(), group.clone());
        // Ranks that end up alone are not asked, so this must not count as a collective of the host's group.
        let meet =
            move |backend: &mut dyn Backend, collective: &Collective<'_>| backend.split(collective, &of, &membership);
        let backend = self.host.run_uncounted(collective.call().clone(), meet)?;
        let host = ProcessGroup::new(group.clone(), backend)?;
        let engine = self.engine.split(collective, ranks, &host)?;
        Ok(Box::new(OnDevice::new(host, engine)))
    }

    fn fail(&mut self, why: &Failure) {
        self.engine.fail(why);
        let why = why.clone();
        let call = Call::new("fail", "", std::iter::empty());
        // Who hears it no more has failed already.
        let _ = self.host.run_uncounted(call, move |backend, _| {
            backend.fail(&why);
            Ok(())
        });
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        self.host.peer_monitor()
    }
}
