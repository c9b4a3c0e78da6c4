//! The data of an optimizer's update of a shard.

use crate::kernels::{Kernels, Slice, SliceMut};

/// A shard to update, and the kernels of its device.
pub struct ShardUpdate<'a> {
    pub(super) kernels: &'a dyn Kernels,
    pub(super) param: SliceMut<'a>,
    pub(super) grad: Slice<'a>,
    /// The tensors of all moments, in order.
    pub(super) parts: Vec<SliceMut<'a>>,
}
