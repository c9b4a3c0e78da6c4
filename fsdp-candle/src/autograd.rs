//! Candle's autograd graph: whether one is kept, the order of its nodes, and the stack that its recursion needs.

use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use candle_core::{DType, Device, Result, Tensor, TensorId};
use memmap2::MmapMut;

use crate::error::Error;

thread_local! {
    static NO_GRAD: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` without a graph, for evaluation: what [`FsdpModule`](crate::FsdpModule)s return has none, the layers of
/// [`nn`](crate::nn) use their weights as constants, and each unit frees its parameters when it is done with, whatever
/// its [`ReshardAfterForward`](crate::ReshardAfterForward). As `torch.no_grad()`, it holds for this thread, whatever
/// models `f` calls.
///
/// Candle itself always keeps a graph: what layers of other crates do with trainable parameters is kept until the call
/// around them ends.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// let y = fsdp_candle::no_grad(|| model.forward(&x))?;
/// assert!(!y.track_op());
/// assert!(model.params().iter().all(|param| !param.is_unsharded())); // the root's are freed as well
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    set(true, f)
}

/// Runs `f`, which belongs to a backward, with a graph.
pub(crate) fn with_grad<T>(f: impl FnOnce() -> T) -> T {
    set(false, f)
}

pub(crate) fn keeps_graph() -> bool {
    !NO_GRAD.get()
}

fn set<T>(no_grad: bool, f: impl FnOnce() -> T) -> T {
    struct Guard(bool);
    impl Drop for Guard {
        fn drop(&mut self) {
            NO_GRAD.set(self.0);
        }
    }
    let _guard = Guard(NO_GRAD.replace(no_grad));
    f()
}

/// Candle numbers its tensors in the order in which they are made, and shows the number to hashers only.
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

/// A number greater than those of all tensors before, and smaller than those of all that follow.
pub(crate) fn next_number() -> usize {
    // A byte of host memory is always there. Without it, no node would belong to a pass.
    Tensor::zeros((), DType::U8, &Device::Cpu).map_or(usize::MAX, |tensor| number(tensor.id()))
}

/// Room for the recursion over a deep graph in Candle's backward; only touched pages cost memory.
pub(crate) const BACKWARD_STACK_BYTES: usize = 256 << 20;

/// Runs `f` on a new stack of so many bytes, which `what` needs. Only touched pages cost memory, but all of it is
/// address space.
pub(crate) fn on_a_stack_of<T>(bytes: usize, what: &str, f: impl FnOnce() -> T) -> Result<T> {
    let missing = || {
        let what = format!("the stack of {what}: a recursion over the graph, whose depth grows with the model's");
        candle_core::Error::from(Error::from(fsdp_core::Error::Memory { what, bytes: bytes as u128 }))
    };
    // `stacker` panics where it gets no memory, which a user would see: ask for as much before it does, as it does.
    if MmapMut::map_anon(bytes).is_err() {
        return Err(missing());
    }
    let mut begun = false;
    let run = || {
        begun = true;
        f()
    };
    // Another thread may have taken the memory meanwhile.
    let outcome = catch_unwind(AssertUnwindSafe(|| stacker::grow(bytes, run)));
    outcome.or_else(|panic| if begun { resume_unwind(panic) } else { Err(missing()) })
}

/// Runs `f` where there are `least` bytes of stack: on this one, or a new one as [`on_a_stack_of`] makes it.
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
    fn a_stack_that_can_not_be_had_is_an_error_that_says_how_much_was_wanted() {
        assert_eq!(on_a_stack_of(1 << 20, "a test", || 7).unwrap(), 7);
        let error = on_a_stack_of(1 << 50, "a test", || 7).unwrap_err().to_string();
        assert!(error.contains("no memory for the stack of a test") && error.contains("1048576.0 GiB"), "{error}");
        let panic = catch_unwind(|| on_a_stack_of(1 << 20, "a test", || panic!("its own"))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"its own"));
    }
}
