//! Deep stacks for recursion over a graph: a stack that can't be had is an error.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use candle_core::Result;
use memmap2::MmapMut;

use crate::error::Error;

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
    fn a_stack_that_can_not_be_had_is_an_error_that_says_how_much_was_wanted() {
        assert_eq!(on_a_stack_of(1 << 20, "a test", || 7).unwrap(), 7);
        let error = on_a_stack_of(1 << 50, "a test", || 7).unwrap_err().to_string();
        assert!(error.contains("no memory for the stack of a test") && error.contains("1048576.0 GiB"), "{error}");
        let panic = catch_unwind(|| on_a_stack_of(1 << 20, "a test", || panic!("its own"))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"its own"));
    }
}
