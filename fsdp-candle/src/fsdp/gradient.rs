//! The gradient of one parameter, from the uses that add to it to the shard that an optimizer gets.

use std::sync::Arc;

use candle_core::{DType, Error, Result, Tensor, WithDType};
use fsdp_core::{Allocator, Buffer};
use parking_lot::Mutex;

use super::unsharded_memory::ParamAllocator;
use crate::kernels::host_elements;
use crate::storage::{add, copy_out, to_dtype};

/// Progress of a gradient's reduction. Gradients accumulate within a stage.
#[derive(Clone, Copy)]
pub(super) enum Stage {
    /// The full gradient in the reduce dtype, of earlier backwards without synchronisation.
    Unreduced,
    /// A shard, reduced over the shard ranks and not over the replicas.
    PartlyReduced,
    /// A shard, reduced over all ranks, until a backward hands it out.
    Reduced,
}

/// The gradient of one parameter.
pub(crate) struct Gradient {
    allocator: Arc<ParamAllocator>,
    /// Dtype in which a backward accumulates it.
    dtype: DType,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    current: Current,
    unreduced: Option<Buffer>,
    partly_reduced: Option<Buffer>,
    reduced: Option<Buffer>,
    /// Whether some rank used the parameter in any reduction since the last gradient was handed out.
    used: bool,
}

/// State of the running backward.
#[derive(Default)]
struct Current {
    /// The full gradient so far, in [`Gradient::dtype`].
    accumulated: Option<Buffer>,
    /// Whether backward has processed every use.
    complete: bool,
    /// Whether a reduction has ended.
    reduced: bool,
}

impl State {
    fn slot(&mut self, stage: Stage) -> &mut Option<Buffer> {
        match stage {
            Stage::Unreduced => &mut self.unreduced,
            Stage::PartlyReduced => &mut self.partly_reduced,
            Stage::Reduced => &mut self.reduced,
        }
    }
}

impl Gradient {
    pub(super) fn new(allocator: Arc<ParamAllocator>, dtype: DType) -> Self {
        Gradient { allocator, dtype, state: Mutex::default() }
    }

    /// Returns the dtype in which a backward accumulates it.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Drops the gradient that no reduction took, when a backward begins or ends.
    pub(super) fn clear_current(&self) {
        let last = std::mem::take(&mut self.state.lock().current);
        if let Some(buffer) = last.accumulated {
            self.allocator.pool.give(buffer);
        }
    }

    /// Returns whether the running backward has processed every use, and does not need the values again.
    pub(super) fn is_complete(&self) -> bool {
        self.state.lock().current.complete
    }

    /// Records that backward has processed every use.
    pub(super) fn set_complete(&self) {
        self.state.lock().current.complete = true;
    }

    /// Returns whether a reduction of the running backward has ended.
    pub(super) fn is_reduced(&self) -> bool {
        self.state.lock().current.reduced
    }

    /// Records that a reduction has ended.
    pub(super) fn set_reduced(&self) {
        self.state.lock().current.reduced = true;
    }

    /// Calls `write(buffer, accumulate)` to leave the full gradient of one use. The first use of a backward overwrites
    /// the buffer, later uses add to it.
    pub(crate) fn write<T: WithDType>(&self, write: impl FnOnce(&mut [T], bool) -> Result<()>) -> Result<()> {
        self.write_in(|buffer, accumulate| {
            if T::DTYPE != self.dtype {
                return Err(Error::msg(format!(
                    "parameter `{}` has gradients of {:?}, found one of {:?}",
                    self.allocator.name,
                    self.dtype,
                    T::DTYPE
                )));
            }
            match host_elements(buffer) {
                Some(elements) => write(elements, accumulate),
                None => Err(Error::msg("gradient buffer of another dtype or device")),
            }
        })
    }

    /// As [`Gradient::write`], with the buffer in memory of the parameter's device.
    pub(crate) fn write_in(&self, write: impl FnOnce(&mut Buffer, bool) -> Result<()>) -> Result<()> {
        let (mut buffer, accumulate) = self.take_or_allocate()?;
        let outcome = write(&mut buffer, accumulate);
        self.state.lock().current.accumulated = Some(buffer);
        outcome
    }

    /// Adds a gradient tensor, which Candle's own layers compute.
    pub(crate) fn add(&self, grad: &Tensor) -> Result<()> {
        let grad = to_dtype(grad, self.dtype)?;
        let (mut buffer, accumulate) = self.take_or_allocate()?;
        let outcome = if accumulate {
            let mut more = self.allocator.take_of(self.dtype, buffer.len())?;
            let added = copy_out(&grad, &mut more).and_then(|()| add(&mut buffer, &more));
            self.allocator.pool.give(more);
            added
        } else {
            copy_out(&grad, &mut buffer)
        };
        self.state.lock().current.accumulated = Some(buffer);
        outcome
    }

    fn take_or_allocate(&self) -> Result<(Buffer, bool)> {
        Ok(match self.take_accumulated() {
            Some(buffer) => (buffer, true),
            None => (self.allocator.take_of(self.dtype, self.allocator.elements)?, false),
        })
    }

    /// Takes the full gradient of the running backward, if any use left one.
    pub(super) fn take_accumulated(&self) -> Option<Buffer> {
        self.state.lock().current.accumulated.take()
    }

    /// Allocates a full gradient of zeros.
    pub(super) fn zeros(&self, dtype: fsdp_core::DType) -> Result<Buffer> {
        self.allocator.zeros(dtype)
    }

    /// Adds to the gradient of a stage.
    pub(super) fn accumulate(&self, stage: Stage, more: Buffer) -> Result<()> {
        let mut state = self.state.lock();
        match state.slot(stage) {
            Some(sum) => {
                add(sum, &more)?;
                self.allocator.pool.give(more);
            }
            slot => *slot = Some(more),
        }
        Ok(())
    }

    /// Takes the gradient of a stage.
    pub(super) fn take(&self, stage: Stage) -> Option<Buffer> {
        self.state.lock().slot(stage).take()
    }

    /// Takes the gradient of a stage, with `more` added.
    pub(super) fn take_with(&self, stage: Stage, more: Option<Buffer>) -> Result<Option<Buffer>> {
        match (self.take(stage), more) {
            (Some(mut sum), Some(more)) => {
                add(&mut sum, &more)?;
                self.allocator.pool.give(more);
                Ok(Some(sum))
            }
            (sum, more) => Ok(sum.or(more)),
        }
    }

    /// Records whether some rank used the parameter in a reduction.
    pub(super) fn note_used(&self, used: bool) {
        self.state.lock().used |= used;
    }

    /// Returns whether some rank used the parameter since a gradient was handed out.
    pub(super) fn is_used(&self) -> bool {
        self.state.lock().used
    }

    pub(super) fn take_used(&self) -> bool {
        std::mem::take(&mut self.state.lock().used)
    }

    /// Returns the bytes of all stages.
    pub(super) fn bytes(&self) -> usize {
        let state = self.state.lock();
        let buffers = [&state.current.accumulated, &state.unreduced, &state.partly_reduced, &state.reduced];
        buffers.into_iter().flatten().map(|buffer| buffer.len() * buffer.dtype().size()).sum()
    }

    /// Drops the gradients of all stages.
    pub(super) fn clear(&self) {
        let State { current, unreduced, partly_reduced, reduced, used: _ } = std::mem::take(&mut *self.state.lock());
        let buffers = [current.accumulated, unreduced, partly_reduced, reduced];
        buffers.into_iter().flatten().for_each(|buffer| self.allocator.pool.give(buffer));
    }
}
