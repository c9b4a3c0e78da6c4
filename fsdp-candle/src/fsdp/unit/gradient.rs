//! A parameter's gradient, from the uses that add to it to the shard that an optimizer gets.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{Error, Result, Tensor, WithDType};
use fsdp_core::{Buffer, DType};

use super::room::Room;
use crate::kernels::host_elements;
use crate::storage::{add, copy_out};

/// How far the reduction of a gradient has come.
#[derive(Clone, Copy)]
pub(crate) enum Stage {
    /// Unsharded, in the reduce dtype, of earlier backwards that did not communicate.
    Unreduced,
    /// A shard, reduced over the shard ranks but not yet over the replicas.
    PartlyReduced,
    /// A shard, reduced over all, until a backward hands it out.
    Reduced,
}

/// The gradient of one parameter.
pub(crate) struct Gradient {
    room: Arc<Room>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    now: Now,
    unreduced: Option<Buffer>,
    partly_reduced: Option<Buffer>,
    reduced: Option<Buffer>,
    /// Whether some rank used the parameter in what was reduced since the last gradient was handed out.
    used: bool,
}

/// What belongs to the backward that runs: a new one for each, and none between them.
#[derive(Default)]
struct Now {
    /// The unsharded gradient so far, in the compute dtype.
    collected: Option<Buffer>,
    /// Whether every use has been processed.
    complete: bool,
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
    pub(super) fn new(room: Arc<Room>) -> Self {
        Gradient { room, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Begins or ends a backward. Drops what one that was refused left.
    pub(super) fn renew(&self) {
        let last = std::mem::take(&mut self.state().now);
        if let Some(buffer) = last.collected {
            self.room.give(buffer);
        }
    }

    /// Whether the backward that runs needs the parameter's values no more.
    pub(crate) fn is_complete(&self) -> bool {
        self.state().now.complete
    }

    /// Notes that every use has been processed.
    pub(crate) fn complete(&self) {
        self.state().now.complete = true;
    }

    /// Lets `write(buffer, accumulate)` leave a use's gradient of the whole parameter. The first use of a backward
    /// overwrites, later ones add.
    pub(crate) fn write<T: WithDType>(&self, write: impl FnOnce(&mut [T], bool) -> Result<()>) -> Result<()> {
        self.write_in(|buffer, accumulate| {
            if T::DTYPE != self.room.dtype {
                return Err(Error::msg(format!(
                    "parameter `{}` computes in {:?}; its gradient came in {:?}",
                    self.room.name,
                    self.room.dtype,
                    T::DTYPE
                )));
            }
            match host_elements(buffer) {
                Some(elements) => write(elements, accumulate),
                None => Err(Error::msg("gradient buffer of another dtype or device")),
            }
        })
    }

    /// [`Gradient::write`], in memory of the parameter's device.
    pub(crate) fn write_in(&self, write: impl FnOnce(&mut Buffer, bool) -> Result<()>) -> Result<()> {
        let (mut buffer, accumulate) = self.take_or_allocate()?;
        let outcome = write(&mut buffer, accumulate);
        self.state().now.collected = Some(buffer);
        outcome
    }

    /// Adds a gradient that came as a tensor, through Candle's own layers.
    pub(crate) fn add(&self, grad: &Tensor) -> Result<()> {
        let (mut buffer, accumulate) = self.take_or_allocate()?;
        let outcome = if accumulate {
            let mut more = self.room.take(buffer.len())?;
            let added = copy_out(grad, &mut more).and_then(|()| add(&mut buffer, &more));
            self.room.give(more);
            added
        } else {
            copy_out(grad, &mut buffer)
        };
        self.state().now.collected = Some(buffer);
        outcome
    }

    fn take_or_allocate(&self) -> Result<(Buffer, bool)> {
        let collected = self.take_collected();
        Ok(match collected {
            Some(buffer) => (buffer, true),
            None => (self.room.take(self.room.elements)?, false),
        })
    }

    /// The unsharded gradient that has collected, if any use of the parameter left one.
    pub(super) fn take_collected(&self) -> Option<Buffer> {
        self.state().now.collected.take()
    }

    /// A gradient of zeros of the whole parameter.
    pub(super) fn zeros(&self, dtype: DType) -> Result<Buffer> {
        self.room.zeros(dtype)
    }

    /// Where gradients wait between backwards that do not end in a whole reduction.
    pub(super) fn accumulate(&self, stage: Stage, more: Buffer) -> Result<()> {
        let mut state = self.state();
        let slot = state.slot(stage);
        match slot {
            Some(sum) => {
                add(sum, &more)?;
                self.room.give(more);
            }
            None => *slot = Some(more),
        }
        Ok(())
    }

    /// What has accumulated.
    pub(super) fn take(&self, stage: Stage) -> Option<Buffer> {
        self.state().slot(stage).take()
    }

    /// Notes whether some rank used the parameter in what was reduced.
    pub(super) fn note_used(&self, used: bool) {
        self.state().used |= used;
    }

    /// Whether some rank has used it since a gradient was handed out.
    pub(super) fn is_used(&self) -> bool {
        self.state().used
    }

    pub(super) fn take_used(&self) -> bool {
        std::mem::take(&mut self.state().used)
    }

    /// Drops everything: the step failed.
    pub(super) fn forget(&self) {
        let State { now, unreduced, partly_reduced, reduced, used: _ } = std::mem::take(&mut *self.state());
        [now.collected, unreduced, partly_reduced, reduced]
            .into_iter()
            .flatten()
            .for_each(|buffer| self.room.give(buffer));
    }
}
