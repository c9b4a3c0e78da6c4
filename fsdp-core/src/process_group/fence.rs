//! The end of a collective on a stream of its own.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::landing::Fence;
use crate::{Allocator, Buffer, Readable, Result, device::cuda::failed};

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
