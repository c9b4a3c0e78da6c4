//! When the frozen parameters of a unit can go in backward. They get no gradient and so no hook of their own: what
//! tells is the order in which Candle's backward will go through the nodes that a call of the unit made.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle_core::Tensor;

use crate::autograd::{next_number, number};

/// One call of a unit with frozen parameters.
pub(crate) struct FrozenCall {
    /// The unit's index.
    unit: usize,
    /// The numbers of the call's inputs, each behind a hook.
    inputs: Mutex<Vec<usize>>,
    end: OnceLock<End>,
    /// Inputs whose backward has still to come, in a backward in which parameters can go after the last of them; else
    /// 0.
    left: AtomicUsize,
}

struct End {
    /// A number greater than those of all that the call made.
    number: usize,
    /// Whether the backward of its outputs gathers the unit.
    gathers: bool,
}

impl FrozenCall {
    pub(crate) fn of(unit: usize) -> Self {
        FrozenCall { unit, inputs: Mutex::default(), end: OnceLock::new(), left: AtomicUsize::new(0) }
    }

    fn inputs(&self) -> MutexGuard<'_, Vec<usize>> {
        self.inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn add_input(&self, input: &Tensor) {
        self.inputs().push(number(input.id()));
    }

    pub(crate) fn ended(&self, gathers: bool) {
        // A call ends once.
        let _ = self.end.set(End { number: next_number(), gathers });
    }

    /// The positions of the first and the last of `nodes` that the call made.
    fn span(&self, nodes: &[usize]) -> Option<(usize, usize)> {
        let begin = self.inputs().iter().max().copied()?;
        let inside = |node: &usize| *node > begin && self.end.get().is_none_or(|end| *node < end.number);
        Some((nodes.iter().position(inside)?, nodes.iter().rposition(inside)?))
    }

    /// Notes the backward of an input. Returns whether the unit's frozen parameters can go.
    pub(crate) fn input_done(&self) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) == Ok(1)
    }
}

/// Decides for a backward that begins, given the numbers of its nodes in its order, after which calls' inputs
/// parameters can go: where no call of the unit is half-way. One is where its closure captured a tensor with a gradient
/// beside its inputs; what stays is freed when backward ends.
pub(crate) fn begin_backward(calls: &[Arc<FrozenCall>], nodes: &[usize]) {
    let spans: Vec<_> = calls.iter().map(|call| call.span(nodes)).collect();
    for call in calls {
        let inputs = call.inputs().clone();
        let reached = nodes.iter().filter(|node| inputs.contains(node)).count();
        let over = nodes.iter().rposition(|node| inputs.contains(node)).is_some_and(|end| {
            calls.iter().zip(&spans).filter(|(other, _)| other.unit == call.unit).all(|(other, span)| {
                let gathers = other.end.get().is_some_and(|end| end.gathers);
                span.is_none_or(|(first, last)| last < end || gathers && first > end)
            })
        });
        call.left.store(if over { reached } else { 0 }, Ordering::Relaxed);
    }
}
