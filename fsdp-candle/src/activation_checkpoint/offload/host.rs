//! Inputs of layers on a device, in page-locked host memory.
//!
//! Copies run on streams beside the compute stream. The device memory of an input is kept until the compute stream waits
//! for its copy, which it does when the second input after it is copied away. So at most two inputs are in both memories,
//! and the device waits only for copies that take longer than two layers.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, Weak};

use candle_core::op::BackpropOp;
use candle_core::{Result, Tensor};
use fsdp_core::Buffer;
use parking_lot::Mutex;

use super::{Away, Failure, Input};
use crate::error::{self, Error};
use crate::kernels::{self, HostMemory, PendingCopy};
use crate::storage::{to_storage, with_slice};

/// Number of inputs that are in both memories.
const LEAVING: usize = 2;

/// The host memory of a rank's inputs.
pub(super) struct HostPlace {
    rank: usize,
    /// Memory of earlier inputs. Page-locking takes long.
    idle: Mutex<Vec<Box<dyn HostMemory>>>,
    /// Inputs that are being copied away, oldest first.
    leaving: Mutex<VecDeque<Weak<OnHost>>>,
}

/// An input in host memory.
pub(super) struct OnHost {
    place: Arc<HostPlace>,
    input: Input,
    state: Mutex<State>,
}

struct State {
    /// Memory on the host. `None` after the input is dropped.
    memory: Option<Box<dyn HostMemory>>,
    /// The copy to the host, and the input while the copy reads it.
    leaving: Option<(Box<dyn PendingCopy>, Tensor)>,
    /// The copy from the host, and the memory that it writes.
    coming: Option<(Box<dyn PendingCopy>, Buffer)>,
}

impl HostPlace {
    pub(super) fn new(rank: usize) -> Arc<Self> {
        Arc::new(HostPlace { rank, idle: Mutex::default(), leaving: Mutex::default() })
    }

    /// Starts to copy an input to the host. Returns `None` if it is there.
    pub(super) fn save(self: &Arc<Self>, input: Input, tensor: Tensor) -> Result<Option<Arc<OnHost>>> {
        let Some(mut memory) = self.memory(&input)? else { return Ok(None) };
        let copying = with_slice(&tensor, |_, elements| memory.download(elements))?;
        let state = State { memory: Some(memory), leaving: Some((copying, tensor)), coming: None };
        let saved = Arc::new(OnHost { place: self.clone(), input, state: Mutex::new(state) });
        let left = {
            let mut leaving = self.leaving.lock();
            leaving.push_back(Arc::downgrade(&saved));
            if leaving.len() > LEAVING { leaving.pop_front() } else { None }
        };
        if let Some(left) = left.and_then(|left| left.upgrade()) {
            left.leave()?;
        }
        Ok(Some(saved))
    }

    /// Returns idle or new memory for an input.
    fn memory(&self, input: &Input) -> Result<Option<Box<dyn HostMemory>>> {
        let (dtype, len) = (input.dtype, input.shape.elem_count());
        {
            let mut idle = self.idle.lock();
            if let Some(at) = idle.iter().position(|memory| (memory.dtype(), memory.len()) == (dtype, len)) {
                return Ok(Some(idle.swap_remove(at)));
            }
            // Inputs of other sizes come no more, or less often.
            idle.pop();
        }
        let memory = kernels::of_device(&input.device)?.host_memory(dtype, len, true);
        memory.map_err(|error| {
            let message = format!("{error}. Offload to disk, use more ranks, or use smaller batches");
            Failure { kind: ErrorKind::OutOfMemory, message }.of(self.rank, None).into()
        })
    }
}

impl OnHost {
    /// Lets the device reuse the input's memory after the copy.
    fn leave(&self) -> Result<()> {
        let left = self.state.lock().leaving.take();
        left.map_or(Ok(()), |(copying, _tensor)| copying.order())
    }
}

impl Away for OnHost {
    fn fetch(self: Arc<Self>) -> error::Result<()> {
        let mut state = self.state.lock();
        let State { memory: Some(memory), leaving: None, coming: coming @ None } = &mut *state else { return Ok(()) };
        let buffer = kernels::of_device(&self.input.device)?.zeros(self.input.dtype, self.input.shape.elem_count())?;
        *coming = Some((memory.upload(&buffer)?, buffer));
        Ok(())
    }

    fn take(self: Arc<Self>) -> error::Result<Tensor> {
        let mut state = self.state.lock();
        if let Some((_, tensor)) = &state.leaving {
            return Ok(tensor.clone());
        }
        let Some((copying, buffer)) = state.coming.take() else {
            let message = "an input was not copied back: this is an error of fsdp-candle".to_owned();
            return Err(Failure { kind: ErrorKind::Other, message }.of(self.place.rank, None));
        };
        copying.order()?;
        Ok(Tensor::from_storage(to_storage(buffer)?, self.input.shape.clone(), BackpropOp::none(), true))
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // The memory on the device is used again in the compute stream's order.
        let leaving = state.leaving.as_ref().map_or(Ok(()), |(copying, _)| copying.order());
        let coming = state.coming.as_ref().map_or(Ok(()), |(copying, _)| copying.order());
        if let Err(error) = leaving.and(coming).map_err(Error::from) {
            tracing::warn!(%error, "dropping activations that were copied to the host");
        }
        self.place.idle.lock().extend(state.memory.take());
    }
}
