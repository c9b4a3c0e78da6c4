//! Inputs and outputs in the memory of a CUDA device, and collectives that run on a stream of their own.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::{
    backend::{CollectiveOutput, Fence},
    op::GatherPart,
};
use crate::{
    Allocator, Buffer, DType, Error, Readable, Result, View,
    device::cuda::{CudaMemory, CudaView, failed},
};

/// Calls `f` with a view of an input on the device. The memory stays valid while the input is referenced.
pub(super) fn read<T>(input: &dyn Readable, rank: usize, f: impl FnOnce(CudaView<'_>) -> Result<T>) -> Result<T> {
    let refuse = |why: String| Error::Argument { rank, message: format!("an input can't be read: {why}") };
    let (mut f, mut outcome) = (Some(f), None);
    let view = &mut |view: View<'_>| {
        if let (View::Cuda(view), Some(f)) = (view, f.take()) {
            outcome = Some(f(view));
        }
    };
    input.view(view).map_err(refuse)?;
    outcome.unwrap_or_else(|| Err(refuse(format!("it is in the memory of {}", input.device()))))
}

/// Allocates an output on the device and checks its dtype and length.
pub(super) fn take(memory: &dyn Allocator, dtype: DType, len: usize, rank: usize) -> Result<CudaMemory> {
    let buffer = memory.take(dtype, len)?;
    let (got, device) = (format!("a buffer of {} {}", buffer.len(), buffer.dtype()), buffer.device());
    match buffer {
        Buffer::Cuda(memory) if (memory.dtype(), memory.len()) == (dtype, len) => Ok(memory),
        _ => Err(Error::Argument {
            rank,
            message: format!("the allocator gave {got} on {device}, expected {len} {dtype} on a CUDA device"),
        }),
    }
}

/// Returns the address of a buffer. The group has checked that it is on the device.
#[cfg(feature = "nccl")]
pub(super) fn address(buffer: &Buffer, rank: usize) -> Result<cudarc::driver::sys::CUdeviceptr> {
    match buffer {
        Buffer::Cuda(memory) => Ok(memory.view().address()),
        other => Err(Error::Internal {
            rank,
            what: format!("a buffer in the memory of {} came to an engine for a CUDA device", other.device()),
        }),
    }
}

/// Copies inputs in the order of the compute stream. Inputs that another stream copies to the device are copied on that
/// stream, so that the device computes in the meantime.
pub(super) fn copies_of(inputs: Vec<GatherPart>, memory: &dyn Allocator, rank: usize) -> Result<CollectiveOutput> {
    let inputs: Vec<_> = inputs.into_iter().map(|part| part.input).collect();
    // Allocates all outputs before the first copy, which needs its output to the end.
    let take = |input: &Arc<dyn Readable>| take(memory, input.dtype(), input.len(), rank);
    let outputs = inputs.iter().map(take).collect::<Result<Vec<_>>>()?;
    let mut copying: Option<(Arc<CudaStream>, Arc<CudaStream>)> = None;
    let copied = inputs.iter().zip(&outputs).try_for_each(|(input, to)| {
        read(&**input, rank, |from| {
            let Some(stream) = from.arrives_on() else { return from.copy_to(to.view(), to.stream()) };
            if copying.is_none() {
                let joined = stream.join(to.stream());
                joined.map_err(|error| failed(stream, "waiting for the compute stream", &error))?;
                copying = Some((stream.clone(), to.stream().clone()));
            }
            from.copy_to(to.view(), stream)
        })
    });
    let end = copying.map(|(stream, compute)| Running::on(&stream, &compute)).transpose()?;
    copied?;
    let outputs = outputs.into_iter().map(Buffer::Cuda).collect::<Vec<_>>();
    Ok(match end {
        None => outputs.into(),
        Some(end) => CollectiveOutput::pending(outputs, Box::new(end.keeping(inputs))),
    })
}

/// The longest pause between two checks of a collective that may be aborted.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// A collective that a stream runs, with the memory that it uses.
pub(super) struct Running {
    /// Recorded after the collective.
    end: Arc<CudaEvent>,
    compute: Arc<CudaStream>,
    inputs: Vec<Arc<dyn Readable>>,
    /// Inputs to give back, with their allocators.
    consumed: Vec<(Buffer, Arc<dyn Allocator>)>,
    /// Returns an error if the collective was aborted.
    check: Option<Box<dyn Fn() -> Result<()> + Send>>,
    is_over: bool,
}

impl Running {
    /// Covers everything that has been issued on `stream` so far.
    pub(super) fn on(stream: &CudaStream, compute: &Arc<CudaStream>) -> Result<Self> {
        let end = stream.record_event(None).map_err(|error| failed(stream, "recording an event", &error))?;
        let (end, compute) = (Arc::new(end), compute.clone());
        Ok(Running { end, compute, inputs: vec![], consumed: vec![], check: None, is_over: false })
    }

    /// Returns the event recorded after the collective.
    #[cfg(feature = "nccl")]
    pub(super) fn end(&self) -> &Arc<CudaEvent> {
        &self.end
    }

    /// Sets the check for an abort. After an abort, the outputs are unspecified.
    #[cfg(feature = "nccl")]
    pub(super) fn with_check(mut self, check: impl Fn() -> Result<()> + Send + 'static) -> Self {
        self.check = Some(Box::new(check));
        self
    }

    /// Keeps inputs alive until the collective has read them.
    pub(super) fn keeping(mut self, inputs: impl IntoIterator<Item = Arc<dyn Readable>>) -> Self {
        self.inputs.extend(inputs);
        self
    }

    /// Gives inputs back once the collective has read them.
    #[cfg(feature = "nccl")]
    pub(super) fn giving_back(mut self, inputs: Vec<Buffer>, memory: &Arc<dyn Allocator>) -> Self {
        self.consumed.extend(inputs.into_iter().map(|buffer| (buffer, memory.clone())));
        self
    }

    fn check(&self) -> Result<()> {
        self.check.as_ref().map_or(Ok(()), |check| check())
    }

    fn release(&mut self) {
        self.is_over = true;
        self.inputs.clear();
        self.consumed.drain(..).for_each(|(buffer, memory)| memory.give(buffer));
    }
}

impl Fence for Running {
    fn order(&mut self) -> Result<()> {
        let outcome = self.compute.wait(&self.end);
        outcome.map_err(|error: DriverError| failed(&self.compute, "waiting for a collective", &error))?;
        self.release();
        self.check()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.order()?;
        let failed = |error: DriverError| failed(&self.compute, "waiting for a collective", &error);
        if self.check.is_none() {
            return self.end.synchronize().map_err(failed);
        }
        // An aborted collective never ends if the device did not reach it.
        let started = Instant::now();
        while !self.end.try_is_complete().map_err(failed)? {
            self.check()?;
            std::thread::sleep((started.elapsed() / 16).min(LONGEST_NAP));
        }
        self.check()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over && self.order().is_err() {
            // The device is lost, so nothing uses the memory any more.
            self.release();
        }
    }
}
