//! The operations whose outputs a checkpointed closure keeps: they are not computed again.
//!
//! What is kept shares its memory with the graph of the first run, which goes when that run ends. The second run gets a
//! copy, and what was kept goes: a kept output is there once, but for one copy at a time.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use candle_core::{Result, Storage, Tensor, bail};

use crate::autograd::keeps_graph;
use crate::storage::{copied_storage, share_memory};

/// A kind of operation that [`nn`](crate::nn)'s layers do and a closure may keep the output of: those that cost more to
/// compute than to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// The product with a weight of [`nn::Linear`](crate::nn::Linear), [`nn::Conv1D`](crate::nn::Conv1D) and their
    /// adapters, on the host in f32, f16 and bf16.
    Linear,
    /// [`nn::attention()`](crate::nn::attention()) and its like, on the host in f32, f16 and bf16.
    Attention,
}

/// An operation that a closure comes to.
#[derive(Clone, Copy, Debug)]
pub struct OperationCall<'a> {
    /// What it is.
    pub operation: Operation,
    /// How many of this kind the closure has come to before.
    pub number: usize,
    /// The shape of its output.
    pub shape: &'a [usize],
}

/// Chooses what is kept.
pub(super) type Keep = dyn Fn(&OperationCall<'_>) -> bool + Send + Sync;

/// What beside its output an operation needs for its backward.
pub(crate) type Beside = Arc<dyn Any + Send + Sync>;

/// The output of an operation, and what it needs beside it.
pub(crate) type Outcome = (Storage, Beside);

/// An output that is kept.
pub(super) struct Kept {
    operation: Operation,
    number: usize,
    output: Tensor,
    beside: Beside,
}

/// What the closure that runs does with its operations. The innermost closure decides.
enum Frame {
    /// Nothing.
    Passive,
    /// Keeps some outputs.
    Keeping { keep: Arc<Keep>, come_to: HashMap<Operation, usize>, kept: VecDeque<Kept> },
    /// Uses those that were kept.
    Using { come_to: HashMap<Operation, usize>, kept: VecDeque<Kept> },
}

thread_local! {
    static FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(vec![]) };
}

/// Runs `f` within a frame, which it returns.
fn within<T>(frame: Frame, f: impl FnOnce() -> T) -> (T, Option<Frame>) {
    struct Guard(usize);
    impl Drop for Guard {
        fn drop(&mut self) {
            FRAMES.with_borrow_mut(|frames| frames.truncate(self.0));
        }
    }
    let guard = FRAMES.with_borrow_mut(|frames| {
        frames.push(frame);
        Guard(frames.len() - 1)
    });
    let outcome = f();
    let frame = FRAMES.with_borrow_mut(Vec::pop);
    drop(guard);
    (outcome, frame)
}

/// Runs a closure for the first time, and returns what it keeps.
pub(super) fn keeping<T>(keep: Option<&Arc<Keep>>, f: impl FnOnce() -> T) -> (T, VecDeque<Kept>) {
    let frame = match keep {
        Some(keep) => Frame::Keeping { keep: keep.clone(), come_to: HashMap::new(), kept: VecDeque::new() },
        None => Frame::Passive,
    };
    match within(frame, f) {
        (outcome, Some(Frame::Keeping { kept, .. })) => (outcome, kept),
        (outcome, _) => (outcome, VecDeque::new()),
    }
}

/// Runs a closure again with what it kept.
pub(super) fn using<T>(kept: VecDeque<Kept>, f: impl FnOnce() -> T) -> T {
    let frame = match kept.is_empty() {
        true => Frame::Passive,
        false => Frame::Using { come_to: HashMap::new(), kept },
    };
    within(frame, f).0
}

/// Runs an operation whose output has this shape: `apply` with its outcome, where it was kept, and else with none. It
/// returns the output and what a backward needs beside it.
///
/// # Errors
/// Those of `apply`, and when the closure does something else than the first time.
pub(crate) fn operation(
    operation: Operation,
    shape: &[usize],
    apply: impl FnOnce(Option<Outcome>) -> Result<(Tensor, Beside)>,
) -> Result<Tensor> {
    let found = FRAMES.with_borrow_mut(|frames| match frames.last_mut() {
        Some(Frame::Using { come_to, kept }) => {
            let number = next(come_to, operation);
            let is_next = kept.front().is_some_and(|kept| (kept.operation, kept.number) == (operation, number));
            if is_next { kept.pop_front() } else { None }
        }
        _ => None,
    });
    if let Some(Kept { output, beside, .. }) = found {
        if output.dims() != shape {
            bail!(
                "a checkpointed closure must do the same each time it runs: it kept an output of {:?}, which is \
                 {shape:?} in backward",
                output.dims()
            )
        }
        let storage = copied_storage(&output)?;
        drop(output);
        return Ok(apply(Some((storage, beside)))?.0);
    }
    let (output, beside) = apply(None)?;
    FRAMES.with_borrow_mut(|frames| {
        if let Some(Frame::Keeping { keep, come_to, kept }) = frames.last_mut()
            && keeps_graph()
        {
            let number = next(come_to, operation);
            if keep(&OperationCall { operation, number, shape }) {
                kept.push_back(Kept { operation, number, output: output.detach(), beside });
            }
        }
    });
    Ok(output)
}

/// Whether the closure that runs has kept this output of an operation, whose memory is then not to be used up.
pub(crate) fn is_kept(output: &Tensor) -> bool {
    FRAMES.with_borrow(|frames| match frames.last() {
        Some(Frame::Keeping { kept, .. }) => kept.iter().any(|kept| share_memory(&kept.output, output)),
        _ => false,
    })
}

/// The number of an operation that is come to.
fn next(come_to: &mut HashMap<Operation, usize>, operation: Operation) -> usize {
    let number = come_to.entry(operation).or_default();
    *number += 1;
    *number - 1
}
