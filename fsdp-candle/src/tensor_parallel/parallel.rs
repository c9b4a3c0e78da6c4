//! What a parameter is under tensor parallelism.

use fsdp_core::{DeviceMesh, ProcessGroup, Result};

use super::style::ParallelStyle;

/// A parameter of a module that a plan names.
pub(crate) struct Parallel {
    /// Of the mesh dimension.
    name: String,
    group: ProcessGroup,
    style: ParallelStyle,
    cut: Option<usize>,
    partial: bool,
}

impl Parallel {
    pub(super) fn new(mesh: &DeviceMesh, style: ParallelStyle, cut: Option<usize>, partial: bool) -> Result<Self> {
        let name = mesh.layout().names()[0].clone();
        Ok(Parallel { name, group: mesh.group(0)?.clone(), style, cut, partial })
    }

    /// The name of the mesh dimension that its ranks are along.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The tensor-parallel ranks.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Its module's style.
    pub(crate) fn style(&self) -> ParallelStyle {
        self.style
    }

    /// The dimension of the parameter of which each rank has a chunk, of equal sizes. It is whole on every rank else.
    pub(crate) fn cut(&self) -> Option<usize> {
        self.cut
    }

    /// Whether each rank's gradient is a term: its reduction sums them over the ranks.
    pub(crate) fn is_partial(&self) -> bool {
        self.partial
    }

    /// Whether its layer must know of it.
    pub(crate) fn needs_layer(&self) -> bool {
        self.style.needs_layer()
    }

    /// What layers hold of a parameter of this shape.
    pub(crate) fn local(&self, shape: &[usize]) -> Vec<usize> {
        let mut local = shape.to_vec();
        if let Some(size) = self.cut.and_then(|dim| local.get_mut(dim)) {
            *size /= self.group.size();
        }
        local
    }
}
