//! The backend of groups with a single rank: outputs are the inputs.

use super::{
    backend::{Backend, CollectiveOutput, Guarantees},
    collective::{Collective, Failure},
    host::memory::{Copy, read, take_all},
    op::{ExchangePart, Op, ScatterPart},
    options::Membership,
};
use crate::{Buffer, DeviceId, Error, Result};

/// Backend of a single rank, for memory of a device and of the host.
pub(super) struct SingleRank(pub(super) DeviceId);

impl Backend for SingleRank {
    fn device(&self) -> DeviceId {
        self.0
    }

    // On a device, a collective is an enqueued copy.
    fn runs_when_issued(&self) -> bool {
        self.0 != DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees::ALL
    }

    /// On a device, a single rank does not communicate.
    fn registers_memory(&self) -> Result<(), String> {
        match self.0 {
            DeviceId::Host => Err("it is a group of the host, without a device".into()),
            _ => Ok(()),
        }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let rank = collective.group().rank;
        #[cfg(feature = "cuda")]
        let on_device = op.device() != DeviceId::Host;
        let outputs: Vec<Buffer> = match op {
            #[cfg(feature = "cuda")]
            Op::AllGather { parts, memory } if on_device => {
                return super::device_memory::copies_of(parts, &*memory, rank);
            }
            Op::AllGather { parts, memory } => {
                let sizes = parts.iter().map(|part| (part.input.dtype(), part.input.len()));
                let mut outputs = take_all(&*memory, sizes, rank)?;
                let copy = Copy::for_output_of(outputs.iter().map(|output| output.bytes().len()).sum());
                for (index, (part, output)) in parts.iter().zip(&mut outputs).enumerate() {
                    let to = output.bytes_mut();
                    if !to.is_empty() {
                        read(&*part.input, 0..to.len(), index, rank, |from| copy.copy(to, from))?;
                    }
                }
                outputs
            }
            Op::ReduceScatter { parts, .. } => parts.into_iter().map(|ScatterPart { input, .. }| input).collect(),
            Op::AllToAll { parts, .. } => parts.into_iter().map(|ExchangePart { input, .. }| input).collect(),
            Op::AllReduce { buffers, .. } | Op::Broadcast { buffers, .. } => buffers,
            Op::Gather(messages) | Op::Scatter(messages) => vec![Buffer::U8(messages.input)],
            Op::Barrier => Vec::new(),
        };
        Ok(outputs.into())
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], _: &Membership) -> Result<Box<dyn Backend>> {
        Err(Error::Internal {
            rank: collective.group().rank,
            what: format!("a group of a single rank was split into the ranks {ranks:?}"),
        })
    }

    fn fail(&mut self, _: &Failure) {}
}
