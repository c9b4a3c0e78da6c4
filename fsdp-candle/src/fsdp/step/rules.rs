//! When units communicate, as far as it can be set.

use crate::fsdp::policy::ReshardAfterForward;

/// What can be changed of a whole model's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSettings {
    /// Whether the next backward ends the iteration, and so waits for reductions and hands gradients out.
    pub(crate) is_last_backward: bool,
    /// Whether `finalize_backward` does that instead of backward.
    pub(crate) manual_finalization: bool,
    /// Whether a unit gathers the next one's parameters ahead when it has no list of its own.
    pub(crate) implicit_prefetch: bool,
    /// How many units' unsharded gradients may be on their way through a reduce-scatter; one more waits for the oldest.
    pub(crate) max_reductions: usize,
    /// Whether ranks may use different units, so that the order of collectives follows from how the model was built.
    pub(crate) fixed_order: bool,
}

impl Default for StepSettings {
    fn default() -> Self {
        StepSettings {
            is_last_backward: true,
            manual_finalization: false,
            implicit_prefetch: true,
            max_reductions: 1,
            fixed_order: false,
        }
    }
}

/// When one unit communicates.
#[derive(Clone, Debug)]
pub(crate) struct UnitRules {
    /// How many of its parameters get gradients.
    pub(crate) trainable: usize,
    /// Whether some get none.
    pub(crate) has_frozen: bool,
    /// The unit that made this one by name and is called in its place.
    pub(crate) by_name_in: Option<usize>,
    /// The units made by name that are around this one.
    pub(crate) around: Vec<usize>,
    pub(crate) reshard_after_forward: ReshardAfterForward,
    pub(crate) reshard_after_backward: bool,
    pub(crate) unshard_in_backward: bool,
    /// Units to gather when this one's forward begins, in place of the one that followed last time.
    pub(crate) forward_prefetch: Vec<usize>,
    /// Units to gather when this one's backward begins.
    pub(crate) backward_prefetch: Vec<usize>,
}

impl UnitRules {
    pub(crate) fn new(trainable: usize, reshard_after_forward: ReshardAfterForward) -> Self {
        UnitRules {
            trainable,
            has_frozen: false,
            by_name_in: None,
            around: vec![],
            reshard_after_forward,
            reshard_after_backward: true,
            unshard_in_backward: true,
            forward_prefetch: vec![],
            backward_prefetch: vec![],
        }
    }
}
