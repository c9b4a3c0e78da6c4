//! The backend of a group that moves a device's memory and the host's.

use std::sync::Arc;

use super::super::{
    alone::Alone,
    backend::{Backend, Promises},
    call::Call,
    collective::Collective,
    failure::Failure,
    group::ProcessGroup,
    landing::CollectiveOutput,
    lookout::Lookout,
    membership::Membership,
    parts::Op,
};
use super::engine::DeviceEngine;
use crate::{DeviceId, Result};

impl ProcessGroup {
    /// The ranks of this group, which moves the host's memory, as a group that moves a device's as well.
    ///
    /// # Errors
    /// As [`ProcessGroup::new`].
    pub fn on_device(self, engine: Box<dyn DeviceEngine>) -> Result<Self> {
        let membership = self.membership().clone();
        ProcessGroup::new(membership, beside(self, engine))
    }
}

/// An engine beside a group of the host's memory.
pub(in super::super) fn beside(host: ProcessGroup, engine: Box<dyn DeviceEngine>) -> Box<dyn Backend> {
    match host.size() {
        1 => Box::new(Alone(engine.device())),
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

    fn promises(&self) -> Promises {
        self.engine.promises(self.host.promises())
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
        let backend = self.host.aside(collective.call().clone(), meet)?;
        let host = ProcessGroup::new(group.clone(), backend)?;
        let engine = self.engine.split(collective, ranks, &host)?;
        Ok(Box::new(OnDevice::new(host, engine)))
    }

    fn fail(&mut self, why: &Failure) {
        self.engine.fail(why);
        let why = why.clone();
        let call = Call::new("fail", "", std::iter::empty());
        // Who hears it no more has failed already.
        let _ = self.host.aside(call, move |backend, _| {
            backend.fail(&why);
            Ok(())
        });
    }

    fn lookout(&self) -> Option<Arc<dyn Lookout>> {
        self.host.lookout()
    }
}
