//! Groups for memory of a device: an engine moves the device's memory, a group of the same ranks moves the host's.
//!
//! Both belong to one [`ProcessGroup`], so that collectives of both memories have one order and one first error.

#[cfg(feature = "cuda")]
mod host_staging;

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
pub use host_staging::{HostStaging, ranks_nccl_refuses, ranks_sharing_devices};

/// One rank's end of an engine for device memory, in a group of at least two ranks.
///
/// The group ([`ProcessGroup::on_device`]) calls it under the rules of [`Backend`]. `host` is a group of the same ranks
/// over host memory, over which ranks can coordinate.
pub trait DeviceEngine: Send {
    /// Returns the device whose memory it moves.
    fn device(&self) -> DeviceId;

    /// Returns the guarantees of the engine, given the guarantees `host` of the host group.
    fn guarantees(&self, host: Guarantees) -> Guarantees;

    /// See [`Backend::runs_when_issued`].
    fn runs_when_issued(&self) -> bool;

    /// See [`Backend::registers_memory`].
    ///
    /// # Errors
    /// The reason why it does not.
    fn registers_memory(&self) -> Result<(), String> {
        Err(format!("the engine of {} does not", self.device()))
    }

    /// Runs a collective of device memory and returns one output for each part or buffer.
    ///
    /// # Errors
    /// The reason the collective failed. The group then calls [`DeviceEngine::fail`] and runs no further collective.
    fn run(&mut self, collective: &Collective<'_>, op: Op, host: &ProcessGroup) -> Result<CollectiveOutput>;

    /// Creates this rank's end of a new group of at least two ranks, which `host` is already a group of.
    ///
    /// # Errors
    /// The reason the ranks could not meet.
    fn split(
        &mut self,
        collective: &Collective<'_>,
        ranks: &[usize],
        host: &ProcessGroup,
    ) -> Result<Box<dyn DeviceEngine>>;

    /// Ends this rank's part in the group; the host group tells the peers. Called at most once.
    fn fail(&mut self, why: &Failure);
}

impl ProcessGroup {
    /// Turns a group for host memory into one that also moves a device's memory.
    ///
    /// # Errors
    /// Errors of [`ProcessGroup::new`].
    pub fn on_device(self, engine: Box<dyn DeviceEngine>) -> Result<Self> {
        let membership = self.membership().clone();
        ProcessGroup::new(membership, device_backend(self, engine))
    }
}

/// Returns a backend that runs collectives of device memory on `engine` and the others on `host`.
pub fn device_backend(host: ProcessGroup, engine: Box<dyn DeviceEngine>) -> Box<dyn Backend> {
    match host.size() {
        1 => Box::new(SingleRank(engine.device())),
        _ => Box::new(OnDevice::new(host, engine)),
    }
}

/// An engine for device memory, and a group of the same ranks for host memory.
struct OnDevice {
    // Dropped before the host group: a rank that has left the host group has ended its part of everything.
    engine: Box<dyn DeviceEngine>,
    host: ProcessGroup,
}

impl OnDevice {
    fn new(host: ProcessGroup, engine: Box<dyn DeviceEngine>) -> Self {
        // The thread of the outer group waits at once.
        OnDevice { engine, host: host.blocking() }
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

    fn registers_memory(&self) -> Result<(), String> {
        self.engine.registers_memory()
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        match op.device() {
            DeviceId::Host => Ok(self.host.issue(Ok(collective.call().clone()), op).wait()?.into()),
            _ => self.engine.run(collective, op, &self.host),
        }
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        // Ranks that end up alone do not take part, so this must not count as a collective of the host group.
        let backend = self
            .host
            .run_uncounted(collective.call(), |backend, collective| backend.split(collective, ranks, group))?;
        let host = ProcessGroup::new(group.clone(), backend)?;
        let engine = self.engine.split(collective, ranks, &host)?;
        Ok(Box::new(OnDevice::new(host, engine)))
    }

    fn fail(&mut self, why: &Failure) {
        self.engine.fail(why);
        let call = Call::without_parts("fail", "");
        // An error means that the host group has failed already.
        let _ = self.host.run_uncounted(&call, |backend, _| {
            backend.fail(why);
            Ok(())
        });
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        self.host.peer_monitor()
    }
}
