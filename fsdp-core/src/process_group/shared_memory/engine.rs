//! The backend over shared memory: a collective is a number of rounds over a segment.

use std::sync::Arc;

use super::{
    super::{
        backend::{Backend, Promises},
        collective::Collective,
        failure::Failure,
        landing::CollectiveOutput,
        lookout::Lookout,
        membership::Membership,
        parts::Op,
    },
    all_gather::AllGather,
    all_reduce::AllReduce,
    all_to_all::AllToAll,
    broadcast::Broadcast,
    lookout::Sight,
    meet::Meet,
    reduce_scatter::ReduceScatter,
    rounds::{self, Rounds},
    seat::Seat,
    segment::Port,
    watch::{During, Watch},
};
use crate::{DeviceId, Result};

/// One rank's end.
pub(super) struct SharedMemory {
    port: Port,
    watch: Arc<Watch>,
    meet: Box<dyn Meet>,
}

impl SharedMemory {
    /// Meets the other ranks of a group of at least two. `all_well` fails when one that is to come is gone.
    pub(super) fn join(meet: Box<dyn Meet>, group: &Membership, all_well: &dyn Fn() -> Result<()>) -> Result<Self> {
        let (port, watch) = meet.meet(group, all_well)?;
        Ok(SharedMemory { port, watch: Arc::new(watch), meet })
    }

    fn sight(&self) -> Sight {
        Sight { segment: self.port.segment().clone(), watch: self.watch.clone(), rank: self.port.rank() }
    }

    fn rounds(&mut self, collective: &Collective<'_>, this: &mut dyn Rounds) -> Result<()> {
        rounds::run(&mut self.port, &self.watch, collective, this)
    }
}

impl Backend for SharedMemory {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn promises(&self) -> Promises {
        Promises { sees_death: self.watch.sees_death(), ..Promises::ALL }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let seat = Seat { rank: self.port.rank(), ranks: self.port.ranks(), bytes: self.port.chunk() };
        match op {
            Op::AllGather { parts, memory } => {
                let mut this = AllGather::new(parts, seat, &*memory)?;
                self.rounds(collective, &mut this)?;
                Ok(this.outputs.into())
            }
            Op::ReduceScatter { parts, op, memory } => {
                let mut this = ReduceScatter::new(parts, op, seat, &*memory)?;
                self.rounds(collective, &mut this)?;
                Ok(this.outputs.into())
            }
            Op::AllReduce { buffers, op } => {
                let mut this = AllReduce::new(buffers, op, seat);
                self.rounds(collective, &mut this)?;
                Ok(this.buffers.into())
            }
            Op::Broadcast { buffers, root } => {
                let mut this = Broadcast::new(buffers, root, seat);
                self.rounds(collective, &mut this)?;
                Ok(this.buffers.into())
            }
            Op::AllToAll { parts, memory } => {
                let mut this = AllToAll::new(parts, seat, &*memory)?;
                self.rounds(collective, &mut this)?;
                Ok(this.outputs.into())
            }
            Op::Barrier => {
                self.rounds(collective, &mut AllGather::barrier(seat))?;
                Ok(CollectiveOutput::default())
            }
        }
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let during = During { collective, end: 0 };
        let all_well = || self.watch.all_well(&self.port, during, ranks);
        Ok(Box::new(SharedMemory::join(self.meet.again(), group, &all_well)?))
    }

    fn fail(&mut self, why: &Failure) {
        self.sight().fail(why);
    }

    fn lookout(&self) -> Option<Arc<dyn Lookout>> {
        Some(Arc::new(self.sight()))
    }
}
