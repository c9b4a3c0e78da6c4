//! The outputs that a checkpointed closure keeps, so that backward does not compute them again.
//!
//! A kept output shares its memory with the graph of the first run, which is freed when that run ends. The second run
//! gets a copy and drops the kept output, so there is one extra copy at a time.
//!
//! Kept outputs are identified by the order of the closure's operations, which must be the same in both runs.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use candle_core::{Result, Storage, Tensor, bail};
use scopeguard::{ScopeGuard, guard};

use crate::autograd::keeps_graph;
use crate::storage::{copied_storage, share_memory};

/// A kind of operation of [`nn`](crate::nn)'s layers whose output a closure may keep: operations that cost more to
/// compute than to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// The product with a weight of [`nn::Linear`](crate::nn::Linear), [`nn::Gpt2Linear`](crate::nn::Gpt2Linear) and their
    /// adapters, on the host in f32, f16 and bf16.
    Linear,
    /// [`nn::SwiGlu`](crate::nn::SwiGlu) and [`nn::mixture_of_experts`](crate::nn::mixture_of_experts()), where they are
    /// one operation, with the projections that their backward reads.
    SwiGlu,
    /// [`nn::attention()`](crate::nn::attention()) and its variants, except for f64 on the host.
    Attention,
}

/// An operation of a closure.
#[derive(Clone, Copy, Debug)]
pub struct OperationCall<'a> {
    /// Kind of operation.
    pub operation: Operation,
    /// Number of earlier operations of this kind in the closure.
    pub number: usize,
    /// Shape of the output.
    pub shape: &'a [usize],
}

/// Selects the outputs to keep.
pub(super) type Keep = dyn Fn(&OperationCall<'_>) -> bool + Send + Sync;

/// Values other than the output that an operation's backward needs.
pub(crate) type BackwardState = Arc<dyn Any + Send + Sync>;

/// The output of an operation, and the other values that its backward needs.
pub(crate) type SavedOutput = (Storage, BackwardState);

/// A kept output.
pub(super) struct Kept {
    operation: Operation,
    number: usize,
    output: Tensor,
    state: BackwardState,
}

/// The treatment of operations in the running closure. The innermost closure decides.
enum Frame {
    /// Operations run.
    Passive,
    /// The first run keeps some outputs.
    Recording { keep: Arc<Keep>, counts: HashMap<Operation, usize>, kept: VecDeque<Kept> },
    /// The second run uses kept outputs.
    Replaying { counts: HashMap<Operation, usize>, kept: VecDeque<Kept> },
}

thread_local! {
    static FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(vec![]) };
}

/// Runs `f` within a frame and returns the frame.
fn in_frame<T>(frame: Frame, f: impl FnOnce() -> T) -> (T, Option<Frame>) {
    FRAMES.with_borrow_mut(|frames| frames.push(frame));
    // After a panic of `f` as well.
    let guard = guard((), |()| drop(FRAMES.with_borrow_mut(Vec::pop)));
    let outcome = f();
    ScopeGuard::into_inner(guard);
    (outcome, FRAMES.with_borrow_mut(Vec::pop))
}

/// Runs a closure for the first time and returns the kept outputs.
pub(super) fn record<T>(keep: Option<&Arc<Keep>>, f: impl FnOnce() -> T) -> (T, VecDeque<Kept>) {
    let frame = match keep {
        Some(keep) => Frame::Recording { keep: keep.clone(), counts: HashMap::new(), kept: VecDeque::new() },
        None => Frame::Passive,
    };
    match in_frame(frame, f) {
        (outcome, Some(Frame::Recording { kept, .. })) => (outcome, kept),
        (outcome, _) => (outcome, VecDeque::new()),
    }
}

/// Runs a closure again with its kept outputs.
pub(super) fn replay<T>(kept: VecDeque<Kept>, f: impl FnOnce() -> T) -> T {
    let frame = match kept.is_empty() {
        true => Frame::Passive,
        false => Frame::Replaying { counts: HashMap::new(), kept },
    };
    in_frame(frame, f).0
}

/// Runs an operation. Calls `apply` with the kept output, if any. `apply` returns the output and the other values that
/// backward needs. Fails if the second run differs from the first.
pub(crate) fn operation(
    operation: Operation,
    shape: &[usize],
    apply: impl FnOnce(Option<SavedOutput>) -> Result<(Tensor, BackwardState)>,
) -> Result<Tensor> {
    let found = FRAMES.with_borrow_mut(|frames| match frames.last_mut() {
        Some(Frame::Replaying { counts, kept }) => {
            let number = next(counts, operation);
            let is_next = kept.front().is_some_and(|kept| (kept.operation, kept.number) == (operation, number));
            if is_next { kept.pop_front() } else { None }
        }
        _ => None,
    });
    if let Some(Kept { output, state, .. }) = found {
        if output.dims() != shape {
            bail!(
                "a checkpointed closure must do the same each time it runs: it kept an output of {:?}, but backward \
                 has {shape:?}",
                output.dims()
            )
        }
        let storage = copied_storage(&output)?;
        drop(output);
        return Ok(apply(Some((storage, state)))?.0);
    }
    let (output, state) = apply(None)?;
    FRAMES.with_borrow_mut(|frames| {
        if let Some(Frame::Recording { keep, counts, kept }) = frames.last_mut()
            && keeps_graph()
        {
            let number = next(counts, operation);
            if keep(&OperationCall { operation, number, shape }) {
                kept.push_back(Kept { operation, number, output: output.detach(), state });
            }
        }
    });
    Ok(output)
}

/// Returns whether the running closure has kept this output, whose memory must then not be reused.
pub(crate) fn is_kept(output: &Tensor) -> bool {
    FRAMES.with_borrow(|frames| match frames.last() {
        Some(Frame::Recording { kept, .. }) => kept.iter().any(|kept| share_memory(&kept.output, output)),
        _ => false,
    })
}

/// Returns the number of an operation and counts it.
fn next(counts: &mut HashMap<Operation, usize>, operation: Operation) -> usize {
    let number = counts.entry(operation).or_default();
    *number += 1;
    *number - 1
}
