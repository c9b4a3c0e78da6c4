//! Records of the outputs that operations compute, which the graph does not have.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{Tensor, TensorId};

use super::token::followed;

thread_local! {
    /// The outputs of each [`RecordedOutputs`] of this thread, by the ids of their tokens. The newest is the last.
    static RECORDED: RefCell<Vec<HashMap<TensorId, Tensor>>> = const { RefCell::new(vec![]) };
}

/// Records the outputs of this thread's operations. While a newer record exists, it gets the
/// outputs instead.
pub(crate) struct RecordedOutputs {
    depth: usize,
}

impl RecordedOutputs {
    pub(crate) fn begin() -> Self {
        let depth = RECORDED.with_borrow_mut(|recorded| {
            recorded.push(HashMap::new());
            recorded.len()
        });
        RecordedOutputs { depth }
    }

    /// Returns the outputs, each by the id of its token.
    pub(crate) fn end(self) -> HashMap<TensorId, Tensor> {
        RECORDED.with_borrow_mut(|recorded| recorded.get_mut(self.depth - 1).map(std::mem::take)).unwrap_or_default()
    }
}

impl Drop for RecordedOutputs {
    fn drop(&mut self) {
        let ended = RECORDED.with_borrow_mut(|recorded| recorded.split_off(recorded.len().min(self.depth - 1)));
        // Freed graphs may have other outputs.
        drop(ended);
    }
}

/// Adds an output to this thread's newest record.
pub(super) fn record(output: &Tensor) {
    RECORDED.with_borrow_mut(|recorded| {
        recorded.last_mut().map(|outputs| outputs.insert(followed(output), output.clone()))
    });
}

/// Returns the number of records of this thread.
#[cfg(test)]
pub(super) fn records() -> usize {
    RECORDED.with_borrow(Vec::len)
}
