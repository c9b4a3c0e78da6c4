//! A backend for host memory that runs every collective on a device engine, for the conformance suite.

use std::{collections::VecDeque, sync::Arc};

use cudarc::driver::{CudaStream, DriverError, result};
use fsdp_core::{
    Allocator, Buffer, DType, DeviceId, Error, ExchangePart, GatherPart, ProcessGroup, Readable, Result, ScatterPart,
    View,
    device::cuda::{CudaMemory, failed},
    process_group::{
        Backend, Collective, CollectiveOutput, DeviceEngine, Failure, Guarantees, Membership, Op, PeerMonitor,
        device_backend,
    },
};
use parking_lot::Mutex;

/// Creates a group for host memory that copies inputs to the device, runs collectives by `engine`, and copies outputs
/// back. `compute` is the engine's compute stream.
pub(crate) fn over_host(
    host: ProcessGroup,
    engine: Box<dyn DeviceEngine>,
    compute: &Arc<CudaStream>,
) -> Result<ProcessGroup> {
    let membership = host.membership().clone();
    let inner = device_backend(host, engine);
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

    fn run_there(&self, output: CollectiveOutput, to: Vec<Buffer>, rank: usize) -> Result<Vec<Buffer>> {
        let CollectiveOutput { outputs, fence } = output;
        if let Some(mut fence) = fence {
            fence.synchronize()?;
        }
        let (mut filled, mut to) = (vec![], to.into_iter());
        for from in outputs {
            let Buffer::Cuda(from) = from else {
                let what = format!("an output of an engine for a device is in the memory of {}", from.device());
                return Err(Error::Internal { rank, what });
            };
            // The outputs of a single rank are its inputs.
            let mut to = to.next().map_or_else(|| Buffer::try_zeros(from.dtype(), from.len()), Ok)?;
            to.bytes_mut().copy_from_slice(&from.to_host()?);
            filled.push(to);
        }
        Ok(filled)
    }
}

/// Allocates device memory, and takes and gives host memory of the same sizes at the same time.
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
        self.outputs.lock().push(output);
        beside.map(Buffer::Cuda)
    }

    fn give(&self, buffer: Buffer) {
        drop(buffer);
        let input = self.inputs.lock().pop_front();
        input.into_iter().for_each(|input| self.host.give(input));
    }
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

    fn guarantees(&self) -> Guarantees {
        self.inner.guarantees()
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let rank = collective.group().rank;
        let (there, beside, own) = match op {
            Op::AllGather { parts, memory } => {
                let mut up = vec![];
                for (index, GatherPart { input, counts }) in parts.into_iter().enumerate() {
                    let (dtype, mut memory) = (input.dtype(), Ok(None));
                    read(&*input, index, rank, &mut |bytes| memory = self.up(bytes, dtype).map(Some))?;
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
            // Messages stay in host memory.
            messages @ (Op::Gather(_) | Op::Scatter(_)) => return self.inner.run(collective, messages),
            other => (other, None, vec![]),
        };
        let output = self.inner.run(collective, there)?;
        let to = beside.map_or(own, |beside| std::mem::take(&mut *beside.outputs.lock()));
        Ok(self.run_there(output, to, rank)?.into())
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let inner = self.inner.split(collective, ranks, group)?;
        Ok(Box::new(OverHost { inner, compute: self.compute.clone() }))
    }

    fn fail(&mut self, why: &Failure) {
        self.inner.fail(why);
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        self.inner.peer_monitor()
    }
}

/// Passes the bytes of an all-gather's input to `f`, with the errors of a backend for the host.
fn read(input: &dyn Readable, part: usize, rank: usize, f: &mut dyn FnMut(&[u8])) -> Result<()> {
    let len = input.len() * input.dtype().size();
    let mut is_read = false;
    let outcome = input.view(&mut |view| {
        if let View::Host(bytes) = view
            && let Some(bytes) = bytes.get(..len)
        {
            f(bytes);
            is_read = true;
        }
    });
    let why = match outcome {
        Ok(()) if is_read => return Ok(()),
        Ok(()) => "it has fewer bytes than its length says".to_string(),
        Err(why) => why,
    };
    Err(Error::Argument { rank, message: format!("all_gather: part {part}: the input can't be read: {why}") })
}
