//! Candle's autograd graph: whether operations record it, the order of its nodes, and the stack that its recursion
//! needs.

use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use candle_core::{DType, Device, Result, Tensor, TensorId};
use memmap2::MmapMut;
use scopeguard::defer;

use crate::error::Error;

thread_local! {
    static NO_GRAD: Cell<bool> = const { Cell::new(false) };
    static CHECKPOINTS: Cell<usize> = const { Cell::new(0) };
    static OFFLOADS: Cell<usize> = const { Cell::new(0) };
}

/// Runs `f` without a graph, for evaluation: PyTorch's `torch.no_grad()`. It holds for this thread and all models that
/// `f` calls. The outputs of an [`FsdpModule`](crate::FsdpModule) have no graph, and the layers of [`nn`](crate::nn)
/// use their weights as constants. Each unit frees its parameters after forward, whatever its
/// [`ReshardAfterForward`](crate::ReshardAfterForward), unless you unsharded them by hand.
///
/// Candle itself always records a graph: layers of other crates keep it for trainable parameters until the unit's call
/// ends.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// let y = fsdp_candle::no_grad(|| model.forward(&x))?;
/// assert!(!y.track_op());
/// assert!(model.params().iter().all(|param| !param.is_unsharded())); // the root's parameters are freed as well
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    set(true, f)
}

/// Runs `f` with a graph, inside [`no_grad`] as well: `f` is a part of a backward.
pub(crate) fn with_grad<T>(f: impl FnOnce() -> T) -> T {
    set(false, f)
}

pub(crate) fn keeps_graph() -> bool {
    !NO_GRAD.get()
}

fn set<T>(no_grad: bool, f: impl FnOnce() -> T) -> T {
    let before = NO_GRAD.replace(no_grad);
    defer!(NO_GRAD.set(before));
    f()
}

/// Counts a closure that this thread checkpoints.
pub(crate) fn count_checkpoint() {
    CHECKPOINTS.set(CHECKPOINTS.get().wrapping_add(1));
}

/// Returns the number of closures that this thread has checkpointed. The graph does not show their operations.
pub(crate) fn checkpoints() -> usize {
    CHECKPOINTS.get()
}

/// Counts an input that an activation checkpoint of this thread offloads.
pub(crate) fn count_offload() {
    OFFLOADS.set(OFFLOADS.get().wrapping_add(1));
}

/// Returns the number of inputs that activation checkpoints of this thread have offloaded.
pub(crate) fn offloads() -> usize {
    OFFLOADS.get()
}

/// Returns the number of a tensor. Candle numbers tensors in the order in which they are made, and shows the number
/// only to hashers.
pub(crate) fn number(id: TensorId) -> usize {
    struct Number(usize);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            bytes.iter().for_each(|&byte| self.0 = self.0 << 8 | usize::from(byte));
        }
        fn write_usize(&mut self, number: usize) {
            self.0 = number;
        }
        fn finish(&self) -> u64 {
            self.0 as u64
        }
    }
    let mut hasher = Number(0);
    id.hash(&mut hasher);
    hasher.0
}

/// Returns a number between those of all earlier and all later tensors.
pub(crate) fn next_number() -> usize {
    // Allocating a byte of host memory does not fail. If it did, no node would belong to a pass.
    Tensor::zeros((), DType::U8, &Device::Cpu).map_or(usize::MAX, |tensor| number(tensor.id()))
}

/// Stack for Candle's backward, which recurses over the graph. Only touched pages cost memory.
pub(crate) const BACKWARD_STACK_BYTES: usize = 256 << 20;

/// Runs `f` on a new stack of `bytes`, which `what` needs. Only touched pages cost memory, but all of it takes address
/// space. Fails if the stack cannot be allocated.
pub(crate) fn on_a_stack_of<T>(bytes: usize, what: &str, f: impl FnOnce() -> T) -> Result<T> {
    let missing = || {
        let what = format!("the stack of {what}: it recurses over the graph, whose depth grows with the model");
        candle_core::Error::from(Error::from(fsdp_core::Error::Memory { what, bytes: bytes as u128 }))
    };
    // `stacker` panics without memory, so this asks for as much memory first, in the same way.
    if MmapMut::map_anon(bytes).is_err() {
        return Err(missing());
    }
    let mut begun = false;
    let run = || {
        begun = true;
        f()
    };
    // Another thread may take the memory in between.
    let outcome = catch_unwind(AssertUnwindSafe(|| stacker::grow(bytes, run)));
    outcome.or_else(|panic| if begun { resume_unwind(panic) } else { Err(missing()) })
}

/// Runs `f` with at least `least` bytes of stack: on this stack, or on a new one as [`on_a_stack_of`] does.
pub(crate) fn on_at_least<T>(least: usize, bytes: usize, what: &str, f: impl FnOnce() -> T) -> Result<T> {
    match stacker::remaining_stack() {
        Some(left) if left >= least => Ok(f()),
        _ => on_a_stack_of(bytes, what, f),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_tensors_have_greater_numbers() {
        let numbers: Vec<usize> = (0..600).map(|_| next_number()).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_stack_without_memory_is_an_error() {
        assert_eq!(on_a_stack_of(1 << 20, "a test", || 7).unwrap(), 7);
        let error = on_a_stack_of(1 << 50, "a test", || 7).unwrap_err().to_string();
        assert!(error.contains("no memory for the stack of a test") && error.contains("1048576.0 GiB"), "{error}");
        let panic = catch_unwind(|| on_a_stack_of(1 << 20, "a test", || panic!("its own"))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"its own"));
    }
}
