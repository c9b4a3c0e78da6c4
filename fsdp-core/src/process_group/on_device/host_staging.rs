//! Collectives of device memory through the host, for ranks that share a device and builds without NCCL.

use std::{collections::BTreeMap, sync::Arc};

use cudarc::driver::{CudaStream, DriverError, result};

use super::{
    super::{
        backend::{CollectiveOutput, Guarantees},
        collective::{Collective, Failure},
        device_memory::{Running, read, take},
        group::ProcessGroup,
        op::{GatherPart, Op},
    },
    DeviceEngine,
};
use crate::{
    Allocator, Buffer, DType, DeviceId, Heap, Readable, Result,
    device::cuda::{CudaMemory, CudaView, failed, id},
};

/// Engine that copies inputs to the host, runs the collective there, and copies the outputs back. It uses a stream of
/// its own, on the group's thread, and has the guarantees of the host group.
pub struct HostStaging {
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
}

impl HostStaging {
    /// Creates the engine of the device that computes on `compute`.
    ///
    /// # Errors
    /// [`crate::Error::Device`] if the device refuses a stream.
    pub fn new(compute: &Arc<CudaStream>) -> Result<Self> {
        let stream = compute.context().new_stream().map_err(|error| failed(compute, "making a stream", &error))?;
        Ok(HostStaging { compute: compute.clone(), stream })
    }

    fn driver<T>(&self, what: &str, outcome: std::result::Result<T, DriverError>) -> Result<T> {
        outcome.map_err(|error| failed(&self.stream, what, &error))
    }

    /// Makes the stream wait for the compute stream.
    fn follow(&self) -> Result<()> {
        self.driver("waiting for the compute stream", self.stream.join(&self.compute))
    }

    /// Copies device memory to the host. Blocks.
    fn down(&self, views: &[(DType, CudaView<'_>)]) -> Result<Vec<Buffer>> {
        let mut host = vec![];
        for (dtype, view) in views {
            let mut buffer = Buffer::try_zeros(*dtype, view.bytes() / dtype.size())?;
            if view.bytes() > 0 {
                view.order(&self.stream)?;
                // SAFETY: both have this length, and stay until the stream has been waited for below.
                let copy =
                    unsafe { result::memcpy_dtoh_async(buffer.bytes_mut(), view.address(), self.stream.cu_stream()) };
                self.driver("copying to the host", copy)?;
            }
            host.push(buffer);
        }
        self.driver("copying to the host", self.stream.synchronize())?;
        Ok(host)
    }

    /// Copies to unused device memory.
    fn up(&self, host: &[Buffer], to: &[CudaMemory]) -> Result<()> {
        // Memory given back since may still be in use by the compute stream.
        self.follow()?;
        for (buffer, to) in host.iter().zip(to) {
            if !buffer.is_empty() {
                // SAFETY: both have this length. Pageable memory is read before the call returns.
                let copy =
                    unsafe { result::memcpy_htod_async(to.view().address(), buffer.bytes(), self.stream.cu_stream()) };
                self.driver("copying to the device", copy)?;
            }
        }
        Ok(())
    }

    /// Allocates outputs before a peer relies on this rank, runs the collective on the host, and copies its outputs.
    fn through(
        &self,
        collective: &Collective<'_>,
        op: Op,
        host: &ProcessGroup,
        memory: &dyn Allocator,
    ) -> Result<CollectiveOutput> {
        let rank = collective.group().rank;
        let take = |(dtype, len)| take(memory, dtype, len, rank);
        let landed = outputs(&op, rank).into_iter().map(take).collect::<Result<Vec<_>>>()?;
        let outputs = host.issue(Ok(collective.call().clone()), op).wait()?;
        self.up(&outputs, &landed)?;
        self.hand_over(landed)
    }

    fn hand_over(&self, outputs: Vec<CudaMemory>) -> Result<CollectiveOutput> {
        let end = Running::on(&self.stream, &self.compute)?;
        Ok(CollectiveOutput::pending(outputs.into_iter().map(Buffer::Cuda).collect(), Box::new(end)))
    }

    /// Copies buffers of the device to the host.
    fn down_all<'b>(&self, buffers: impl Iterator<Item = &'b Buffer>) -> Result<Vec<Buffer>> {
        let view = |buffer: &'b Buffer| match buffer {
            Buffer::Cuda(memory) => Some((memory.dtype(), memory.view())),
            _ => None,
        };
        self.down(&buffers.filter_map(view).collect::<Vec<_>>())
    }

    /// Replaces inputs by copies on the host, and gives them back to their allocator.
    fn move_down<'b>(&self, inputs: impl Iterator<Item = &'b mut Buffer>, memory: &dyn Allocator) -> Result<()> {
        let inputs: Vec<_> = inputs.collect();
        let copies = self.down_all(inputs.iter().map(|input| &**input))?;
        inputs.into_iter().zip(copies).for_each(|(input, copy)| memory.give(std::mem::replace(input, copy)));
        Ok(())
    }
}

/// Returns dtype and length of each output of an operation.
fn outputs(op: &Op, rank: usize) -> Vec<(DType, usize)> {
    match op {
        Op::AllGather { parts, .. } => {
            parts.iter().map(|part| (part.input.dtype(), part.counts.iter().sum())).collect()
        }
        Op::ReduceScatter { parts, .. } => parts.iter().map(|part| (part.input.dtype(), part.counts[rank])).collect(),
        Op::AllToAll { parts, .. } => {
            parts.iter().map(|part| (part.input.dtype(), part.recv_counts.iter().sum())).collect()
        }
        Op::AllReduce { .. } | Op::Broadcast { .. } | Op::Gather(_) | Op::Scatter(_) | Op::Barrier => vec![],
    }
}

impl DeviceEngine for HostStaging {
    fn device(&self) -> DeviceId {
        id(&self.compute)
    }

    fn guarantees(&self, host: Guarantees) -> Guarantees {
        host
    }

    /// False: it blocks, so it runs on the group's thread.
    fn runs_when_issued(&self) -> bool {
        false
    }

    fn registers_memory(&self) -> Result<(), String> {
        Err("its collectives copy through the host, not by NCCL".into())
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op, host: &ProcessGroup) -> Result<CollectiveOutput> {
        self.driver("using the device", self.stream.context().bind_to_thread())?;
        self.follow()?;
        let rank = collective.group().rank;
        match op {
            Op::AllGather { parts, memory } => {
                let mut down = vec![];
                for GatherPart { input, counts } in parts {
                    let dtype = input.dtype();
                    let mut copy = read(&*input, rank, |view| self.down(&[(dtype, view)]))?;
                    let input: Arc<dyn Readable> = Arc::new(copy.remove(0));
                    down.push(GatherPart { input, counts });
                }
                self.through(collective, Op::AllGather { parts: down, memory: Heap::shared() }, host, &*memory)
            }
            Op::ReduceScatter { mut parts, op, memory } => {
                self.move_down(parts.iter_mut().map(|part| &mut part.input), &*memory)?;
                self.through(collective, Op::ReduceScatter { parts, op, memory: Heap::shared() }, host, &*memory)
            }
            Op::AllToAll { mut parts, memory } => {
                self.move_down(parts.iter_mut().map(|part| &mut part.input), &*memory)?;
                self.through(collective, Op::AllToAll { parts, memory: Heap::shared() }, host, &*memory)
            }
            Op::AllReduce { buffers, op } => {
                let down = self.down_all(buffers.iter())?;
                self.in_place(collective, Op::AllReduce { buffers: down, op }, buffers, host)
            }
            Op::Broadcast { buffers, root } => {
                let down = self.down_all(buffers.iter())?;
                self.in_place(collective, Op::Broadcast { buffers: down, root }, buffers, host)
            }
            // Messages are host memory, as a barrier has none of the device.
            Op::Gather(_) | Op::Scatter(_) | Op::Barrier => {
                Ok(host.issue(Ok(collective.call().clone()), op).wait()?.into())
            }
        }
    }

    fn split(&mut self, _: &Collective<'_>, _: &[usize], _: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
        Ok(Box::new(HostStaging::new(&self.compute)?))
    }

    fn fail(&mut self, _: &Failure) {}
}

impl HostStaging {
    /// Runs the collective on the host, and copies its outputs to the inputs' memory.
    fn in_place(
        &self,
        collective: &Collective<'_>,
        op: Op,
        to: Vec<Buffer>,
        host: &ProcessGroup,
    ) -> Result<CollectiveOutput> {
        let outputs = host.issue(Ok(collective.call().clone()), op).wait()?;
        let memory = |buffer| match buffer {
            Buffer::Cuda(memory) => Some(memory),
            _ => None,
        };
        let to: Vec<_> = to.into_iter().filter_map(memory).collect();
        self.up(&outputs, &to)?;
        self.hand_over(to)
    }
}

/// Returns the groups of ranks that compute on the same device. Collective over the group; blocks.
///
/// The result is the same on all ranks, and empty if each rank has its own device. NCCL refuses ranks that share a
/// device, unless it takes them for ranks of several hosts ([`ranks_nccl_refuses`]); they need
/// [`HostStaging`](super::HostStaging).
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the device has no UUID, and errors of a collective.
pub fn ranks_sharing_devices(host: &ProcessGroup, compute: &Arc<CudaStream>) -> Result<Vec<Vec<usize>>> {
    let own = device_on(rustix::system::uname().nodename().to_bytes(), compute)?;
    Ok(sharing(host.gather_bytes(own)?))
}

/// Returns the groups of ranks that NCCL sees on one device of one host, and so refuses. Collective over the group;
/// blocks.
///
/// NCCL takes ranks for ranks of several hosts if `NCCL_HOSTID` differs. From 2.30 on it also accepts ranks that share a
/// device, if `NCCL_MULTI_RANK_GPU_ENABLE=1`; the result is then empty, and older versions refuse later. The result is
/// the same on all ranks.
///
/// # Errors
/// As [`ranks_sharing_devices`].
pub fn ranks_nccl_refuses(host: &ProcessGroup, compute: &Arc<CudaStream>) -> Result<Vec<Vec<usize>>> {
    let accepts = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    let name = std::env::var("NCCL_HOSTID").map(String::into_bytes);
    let name = name.unwrap_or_else(|_| rustix::system::uname().nodename().to_bytes().into());
    let mut own = device_on(&name, compute)?;
    if accepts {
        own.extend(host.rank().to_le_bytes());
    }
    Ok(sharing(host.gather_bytes(own)?))
}

/// Identifies the device of `compute`, on a host.
fn device_on(host: &[u8], compute: &Arc<CudaStream>) -> Result<Vec<u8>> {
    let uuid = compute.context().uuid().map_err(|error| failed(compute, "asking for the device's UUID", &error))?;
    Ok(uuid.bytes.iter().map(|&byte| byte as u8).chain(host.iter().copied()).collect())
}

/// Groups the ranks with equal devices, ordered by their first rank.
fn sharing(devices: Vec<Vec<u8>>) -> Vec<Vec<usize>> {
    let mut ranks: BTreeMap<Vec<u8>, Vec<usize>> = BTreeMap::new();
    for (rank, device) in devices.into_iter().enumerate() {
        ranks.entry(device).or_default().push(rank);
    }
    let mut shared: Vec<_> = ranks.into_values().filter(|ranks| ranks.len() > 1).collect();
    shared.sort_unstable();
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_device_are_told_device_by_device() {
        let of = |devices: &[u8]| sharing(devices.iter().map(|&device| vec![device]).collect());
        assert!(of(&[1, 2, 3]).is_empty());
        assert_eq!(of(&[9, 2, 9, 2, 5, 9]), [vec![0, 2, 5], vec![1, 3]]);
    }
}
