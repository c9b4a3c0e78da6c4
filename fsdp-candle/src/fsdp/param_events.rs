//! The calls of a parameter to its unit and to its model, which stand on higher floors.

use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};

use super::gradient::Gradient;
use super::unit_path::UnitId;

/// The model of a parameter, whose units share one order of collectives.
pub(crate) trait ParamModel: Send + Sync {
    /// Returns whether a forward or backward runs.
    fn is_running(&self) -> bool;

    /// Runs before a layer uses a parameter of a unit by name. `misses` tells whether the layer needs values that are
    /// sharded.
    fn pre_use(&self, unit: &UnitId, misses: bool) -> Result<()>;

    /// Records that backward runs a checkpointed closure again when it comes to `node`. The closure made the nodes
    /// numbered `made` in forward.
    fn add_recomputation(&self, made: Range<usize>, node: usize);

    /// Runs after the backward of every use of the parameter at a position of its unit: its gradient is complete, and
    /// its values are not needed any more.
    fn post_accumulate_grad(&self, unit: &UnitId, position: usize, gradient: &Gradient) -> Result<()>;

    /// Runs after the backward of every use of the parameter in one pass of its unit.
    fn post_pass(&self, unit: &UnitId, position: usize, pass: usize) -> Result<()>;

    /// Runs the backward of the outermost unit around `unit`, for a step that follows at once. Fails before it if the
    /// gradients would not be those of a step, and after it if no parameter got one.
    fn backward_for_step(&self, unit: &UnitId, loss: &Tensor) -> Result<GradStore>;

    /// Returns whether a hook takes the reduced gradients, instead of the backward's caller.
    fn hands_out_to_hook(&self) -> bool;

    /// Warns on rank 0, for all ranks.
    fn warn(&self, message: &str);
}

/// The unit of a parameter.
pub(crate) trait ParamUnit: Send + Sync {
    /// Returns whether any full parameter has memory.
    fn is_unsharded(&self) -> bool;

    /// Records that the user may write a shard, while the parameters are unsharded.
    fn note_write(&self);

    /// Frees the full parameters and the gathered shards, since a shard is about to change.
    fn reshard_stale(&self) -> Result<()>;
}
