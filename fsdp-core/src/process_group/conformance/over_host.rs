//! An engine of a device, held to what every backend must do with the host's memory.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{CudaStream, DriverError, result};

use super::super::{
    backend::{Backend, Promises},
    collective::Collective,
    failure::Failure,
    group::ProcessGroup,
    host::buffers::read,
    landing::CollectiveOutput,
    lookout::Lookout,
    membership::Membership,
    on_device::{DeviceEngine, beside},
    parts::{ExchangePart, GatherPart, Op, ScatterPart},
};
use crate::{
    Allocator, Buffer, DType, DeviceId, Error, Readable, Result,
    device::cuda::{CudaMemory, failed},
};

/// A group of the ranks of `host` that moves the host's memory and runs every collective on a device, by `engine`: it
/// copies there, waits for the device, and copies back. `compute` is the stream that the engine takes for the compute
/// stream.
///
/// # Errors
/// As [`ProcessGroup::new`].
pub fn over_host(host: ProcessGroup, engine: Box<dyn DeviceEngine>, compute: &Arc<CudaStream>) -> Result<ProcessGroup> {
    let membership = host.membership().clone();
    let inner = beside(host, engine);
    ProcessGroup::new(membership, Box::new(OverHost { inner, compute: compute.clone() }))
}

struct OverHost {
    inner: Box<dyn Backend>,
    compute: Arc<CudaStream>,
}

impl OverHost {
    fn up(&self, bytes: &[u8], dtype: DType) -> Result<CudaMemory> {
        let memory = CudaMemory::uninit(&self.compute, dtype, bytes.len() / dtype.size())?;
        if !bytes.is_empty() {
            let what = |error: DriverError| failed(&self.compute, "copying to the device", &error);
            self.compute.context().bind_to_thread().map_err(what)?;
            // SAFETY: both are of this length, and pageable memory is read before the call returns.
            let copy = unsafe { result::memcpy_htod_async(memory.view().address(), bytes, self.compute.cu_stream()) };
            copy.map_err(what)?;
        }
        Ok(memory)
    }

    fn all_up(&self, buffers: &[Buffer]) -> Result<Vec<Buffer>> {
        buffers.iter().map(|buffer| Ok(Buffer::Cuda(self.up(buffer.bytes(), buffer.dtype())?))).collect()
    }

    fn run_there(&self, landing: CollectiveOutput, to: Vec<Buffer>, rank: usize) -> Result<Vec<Buffer>> {
        let CollectiveOutput { outputs, fence } = landing;
        if let Some(mut fence) = fence {
            fence.block()?;
        }
        let (mut filled, mut to) = (vec![], to.into_iter());
        for from in outputs {
            let Buffer::Cuda(from) = from else {
                let what = format!("an output of an engine for a device is in the memory of {}", from.device());
                return Err(Error::Internal { rank, what });
            };
            // A group of one hands inputs over as outputs.
            let mut to = to.next().map_or_else(|| Buffer::try_zeros(from.dtype(), from.len()), Ok)?;
            to.bytes_mut().copy_from_slice(&from.to_host()?);
            filled.push(to);
        }
        Ok(filled)
    }
}

/// Gives memory of the device where the host's is asked for, and takes and gives the host's at the same time.
struct Beside {
    compute: Arc<CudaStream>,
    host: Arc<dyn Allocator>,
    inputs: Mutex<VecDeque<Buffer>>,
    outputs: Mutex<Vec<Buffer>>,
}

impl Allocator for Beside {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let output = self.host.take(dtype, len)?;
        let beside = CudaMemory::uninit(&self.compute, output.dtype(), output.len());
        lock(&self.outputs).push(output);
        beside.map(Buffer::Cuda)
    }

    fn give(&self, buffer: Buffer) {
        drop(buffer);
        let input = lock(&self.inputs).pop_front();
        input.into_iter().for_each(|input| self.host.give(input));
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OverHost {
    fn beside(&self, host: Arc<dyn Allocator>, inputs: Vec<Buffer>) -> Arc<Beside> {
        let (inputs, outputs) = (Mutex::new(inputs.into()), Mutex::default());
        Arc::new(Beside { compute: self.compute.clone(), host, inputs, outputs })
    }
}

impl Backend for OverHost {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn promises(&self) -> Promises {
        self.inner.promises()
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let rank = collective.group().rank;
        let (there, beside, own) = match op {
            Op::AllGather { parts, memory } => {
                let mut up = vec![];
                for (index, GatherPart { input, counts }) in parts.into_iter().enumerate() {
                    let (dtype, mut memory) = (input.dtype(), Ok(None));
                    read(&*input, 0..input.len() * dtype.size(), index, rank, |bytes| {
                        memory = self.up(bytes, dtype).map(Some);
                    })?;
                    if let Some(memory) = memory? {
                        let input: Arc<dyn Readable> = Arc::new(Buffer::Cuda(memory));
                        up.push(GatherPart { input, counts });
                    }
                }
                let beside = self.beside(memory, vec![]);
                (Op::AllGather { parts: up, memory: beside.clone() }, Some(beside), vec![])
            }
            Op::ReduceScatter { parts, op, memory } => {
                let (inputs, counts): (Vec<_>, Vec<_>) =
                    parts.into_iter().map(|part| (part.input, part.counts)).unzip();
                let up = self.all_up(&inputs)?.into_iter().zip(counts);
                let parts = up.map(|(input, counts)| ScatterPart { input, counts }).collect();
                let beside = self.beside(memory, inputs);
                (Op::ReduceScatter { parts, op, memory: beside.clone() }, Some(beside), vec![])
            }
            Op::AllToAll { parts, memory } => {
                let (inputs, counts): (Vec<_>, Vec<_>) =
                    parts.into_iter().map(|part| (part.input, (part.send_counts, part.recv_counts))).unzip();
                let up = self.all_up(&inputs)?.into_iter().zip(counts);
                let part = |(input, (send_counts, recv_counts))| ExchangePart { input, send_counts, recv_counts };
                let beside = self.beside(memory, inputs);
                let op = Op::AllToAll { parts: up.map(part).collect(), memory: beside.clone() };
                (op, Some(beside), vec![])
            }
            Op::AllReduce { buffers, op } => (Op::AllReduce { buffers: self.all_up(&buffers)?, op }, None, buffers),
            Op::Broadcast { buffers, root } => (Op::Broadcast { buffers: self.all_up(&buffers)?, root }, None, buffers),
            Op::Barrier => (Op::Barrier, None, vec![]),
        };
        let landing = self.inner.run(collective, there)?;
        let to = beside.map_or(own, |beside| std::mem::take(&mut *lock(&beside.outputs)));
        Ok(self.run_there(landing, to, rank)?.into())
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let inner = self.inner.split(collective, ranks, group)?;
        Ok(Box::new(OverHost { inner, compute: self.compute.clone() }))
    }

    fn fail(&mut self, why: &Failure) {
        self.inner.fail(why);
    }

    fn lookout(&self) -> Option<Arc<dyn Lookout>> {
        self.inner.lookout()
    }
}
