//! The end of a unit's frozen parameters in backward.

use std::iter;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::backward_nodes::BackwardNodes;
use crate::autograd::next_number;

/// One call of a unit with frozen parameters. A unit of several modules has a call of each, and one pass of all.
///
/// Frozen parameters get no gradient, so they have no hook of their own in backward. They are freed after the backward
/// of the call's last input, where the order of the graph's nodes shows that nothing inside the call follows.
pub(super) struct FrozenCall {
    /// Index of the unit.
    unit: usize,
    /// Node numbers of the call's hooked inputs.
    inputs: Mutex<Vec<usize>>,
    end: OnceLock<CallEnd>,
    /// Number of inputs whose backward has still to come. It stays 0 in a backward that must not free parameters after
    /// the last of them.
    left: AtomicUsize,
}

struct CallEnd {
    /// A number greater than the numbers of all nodes that the call made.
    number: usize,
    /// Whether the backward of the outputs unshards the unit.
    unshards: bool,
}

impl FrozenCall {
    pub(super) fn new(unit: usize) -> Self {
        FrozenCall { unit, inputs: Mutex::default(), end: OnceLock::new(), left: AtomicUsize::new(0) }
    }

    /// Adds an input, by the number of its hook's node.
    pub(super) fn add_input(&self, node: usize) {
        self.inputs.lock().push(node);
    }

    /// Records the end of the call. Called once.
    pub(super) fn end(&self, unshards: bool) {
        let _ = self.end.set(CallEnd { number: next_number(), unshards });
    }

    /// Returns the first and the last position of the nodes that the call made.
    fn span(&self, nodes: &BackwardNodes) -> Option<(usize, usize)> {
        let begin = self.inputs.lock().iter().max().copied()?;
        nodes.span(begin + 1..self.end.get().map_or(usize::MAX, |end| end.number), iter::empty())
    }

    /// Records the backward of an input. Returns whether the unit's frozen parameters can be freed.
    pub(super) fn input_done(&self) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) == Ok(1)
    }
}

/// Decides which calls free frozen parameters, for a backward over `nodes`. A call frees them after the backward of its
/// last input, unless backward is then inside a call of the same unit. That happens if the closure of a call captured a
/// tensor with a graph beside its inputs. Other frozen parameters are freed when backward ends.
pub(super) fn plan_frozen_calls(calls: &[Arc<FrozenCall>], nodes: &BackwardNodes) {
    let spans: Vec<_> = calls.iter().map(|call| call.span(nodes)).collect();
    for call in calls {
        let inputs: Vec<usize> = call.inputs.lock().iter().filter_map(|&input| nodes.position(input)).collect();
        let over = inputs.iter().max().is_some_and(|&end| {
            calls.iter().zip(&spans).filter(|(other, _)| other.unit == call.unit).all(|(other, span)| {
                let unshards = other.end.get().is_some_and(|end| end.unshards);
                span.is_none_or(|(first, last)| last < end || unshards && first > end)
            })
        });
        call.left.store(if over { inputs.len() } else { 0 }, Ordering::Relaxed);
    }
}
