//! The end of a collective on a stream of its own.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::super::landing::Fence;
use crate::{Allocator, Buffer, Readable, Result, device::cuda::failed};

/// A collective that a stream runs, with the memory that it uses.
pub(super) struct Running {
    /// Recorded behind it.
    end: CudaEvent,
    compute: Arc<CudaStream>,
    inputs: Vec<Arc<dyn Readable>>,
    /// What goes back.
    consumed: Vec<(Buffer, Arc<dyn Allocator>)>,
    is_over: bool,
}

impl Running {
    /// What has been issued on `stream` so far.
    pub(super) fn on(stream: &CudaStream, compute: &Arc<CudaStream>) -> Result<Self> {
        let end = stream.record_event(None).map_err(|error| failed(stream, "recording an event", &error))?;
        Ok(Running { end, compute: compute.clone(), inputs: vec![], consumed: vec![], is_over: false })
    }

    /// It reads these.
    pub(super) fn keeping(mut self, inputs: impl IntoIterator<Item = Arc<dyn Readable>>) -> Self {
        self.inputs.extend(inputs);
        self
    }

    /// It reads these, which then go back.
    pub(super) fn giving_back(mut self, inputs: Vec<Buffer>, memory: &Arc<dyn Allocator>) -> Self {
        self.consumed.extend(inputs.into_iter().map(|buffer| (buffer, memory.clone())));
        self
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
        Ok(())
    }

    fn block(&mut self) -> Result<()> {
        self.order()?;
        self.end.synchronize().map_err(|error| failed(&self.compute, "waiting for a collective", &error))
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
