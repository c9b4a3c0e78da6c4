//! Inputs and outputs in the memory of a CUDA device.
//! The end of a collective on a stream of its own.

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

// ---- from process_group/device_memory
/// Calls `f` with an input of the device. The memory stays as long as somebody holds the input.
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

/// Takes an output and checks that it is what was asked for.
pub(super) fn take(memory: &dyn Allocator, dtype: DType, len: usize, rank: usize) -> Result<CudaMemory> {
    let buffer = memory.take(dtype, len)?;
    let (got, device) = (format!("a buffer of {} {}", buffer.len(), buffer.dtype()), buffer.device());
    match buffer {
        Buffer::Cuda(memory) if (memory.dtype(), memory.len()) == (dtype, len) => Ok(memory),
        _ => Err(Error::Argument {
            rank,
            message: format!(
                "the allocator gave {got} where {len} {dtype} on a CUDA device were asked for (it is in the memory of \
                 {device})"
            ),
        }),
    }
}

/// Where a buffer of the device is in its memory. The group has checked that it is there.
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

/// Copies of inputs, in order of the compute stream. What another stream brings to the device is copied there, so that
/// the device computes meanwhile.
pub(super) fn copies_of(inputs: Vec<GatherPart>, memory: &dyn Allocator, rank: usize) -> Result<CollectiveOutput> {
    let inputs: Vec<_> = inputs.into_iter().map(|part| part.input).collect();
    // All of them before the first copy, which needs its output to the end.
    let take = |input: &Arc<dyn Readable>| take(memory, input.dtype(), input.len(), rank);
    let outputs = inputs.iter().map(take).collect::<Result<Vec<_>>>()?;
    let mut brings: Option<(Arc<CudaStream>, Arc<CudaStream>)> = None;
    let copied = inputs.iter().zip(&outputs).try_for_each(|(input, to)| {
        read(&**input, rank, |from| {
            let Some(stream) = from.arrives_on() else { return from.copy_to(to.view(), to.stream()) };
            if brings.is_none() {
                let joined = stream.join(to.stream());
                joined.map_err(|error| failed(stream, "waiting for the compute stream", &error))?;
                brings = Some((stream.clone(), to.stream().clone()));
            }
            from.copy_to(to.view(), stream)
        })
    });
    let end = brings.map(|(stream, compute)| Running::on(&stream, &compute)).transpose()?;
    copied?;
    let outputs = outputs.into_iter().map(Buffer::Cuda).collect::<Vec<_>>();
    Ok(match end {
        None => outputs.into(),
        Some(end) => CollectiveOutput::pending(outputs, Box::new(end.keeping(inputs))),
    })
}

// ---- from process_group/fence
/// The longest pause between two looks at a collective that may be given up.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// A collective that a stream runs, with the memory that it uses.
pub(super) struct Running {
    /// Recorded behind it.
    end: Arc<CudaEvent>,
    compute: Arc<CudaStream>,
    inputs: Vec<Arc<dyn Readable>>,
    /// What goes back.
    consumed: Vec<(Buffer, Arc<dyn Allocator>)>,
    /// Whether it was given up.
    verdict: Option<Box<dyn Fn() -> Result<()> + Send>>,
    is_over: bool,
}

impl Running {
    /// What has been issued on `stream` so far.
    pub(super) fn on(stream: &CudaStream, compute: &Arc<CudaStream>) -> Result<Self> {
        let end = stream.record_event(None).map_err(|error| failed(stream, "recording an event", &error))?;
        let (end, compute) = (Arc::new(end), compute.clone());
        Ok(Running { end, compute, inputs: vec![], consumed: vec![], verdict: None, is_over: false })
    }

    /// What is recorded behind it.
    #[cfg(feature = "nccl")]
    pub(super) fn end(&self) -> &Arc<CudaEvent> {
        &self.end
    }

    /// It may be given up before its end: `verdict` says why. Its outputs are then nothing to use.
    #[cfg(feature = "nccl")]
    pub(super) fn unless(mut self, verdict: impl Fn() -> Result<()> + Send + 'static) -> Self {
        self.verdict = Some(Box::new(verdict));
        self
    }

    /// It reads these.
    pub(super) fn keeping(mut self, inputs: impl IntoIterator<Item = Arc<dyn Readable>>) -> Self {
        self.inputs.extend(inputs);
        self
    }

    /// It reads these, which then go back.
    #[cfg(feature = "nccl")]
    pub(super) fn giving_back(mut self, inputs: Vec<Buffer>, memory: &Arc<dyn Allocator>) -> Self {
        self.consumed.extend(inputs.into_iter().map(|buffer| (buffer, memory.clone())));
        self
    }

    fn verdict(&self) -> Result<()> {
        self.verdict.as_ref().map_or(Ok(()), |verdict| verdict())
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
        self.verdict()
    }

    fn block(&mut self) -> Result<()> {
        self.order()?;
        let failed = |error: DriverError| failed(&self.compute, "waiting for a collective", &error);
        if self.verdict.is_none() {
            return self.end.synchronize().map_err(failed);
        }
        // A collective that was given up never ends where the device does not come to it.
        let started = Instant::now();
        while !self.end.try_is_complete().map_err(failed)? {
            self.verdict()?;
            std::thread::sleep((started.elapsed() / 16).min(LONGEST_NAP));
        }
        self.verdict()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over && self.order().is_err() {
            // The device is lost: whatever becomes of the memory, nothing runs there any more.
            self.release();
        }
    }
}
