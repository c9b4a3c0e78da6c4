//! The nodes of a parameter in Candle's graph: `leaf -> Anchor -> Unshard` ([`param_nodes`]). The backward of the
//! anchor reports that the gradient is complete.

use std::cell::Cell;
use std::sync::{Arc, OnceLock, Weak};

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, bail};
use scopeguard::defer;

use crate::graph::{Backward, lasting_node};
use crate::storage;

/// The parameter that its nodes call in backward.
pub(super) trait NodeOwner: Send + Sync {
    fn is_trained(&self) -> bool;

    /// Adds a gradient of one use.
    fn add_gradient(&self, gradient: &Tensor) -> Result<()>;

    /// Runs after the backward of every use.
    fn post_accumulate_grad(&self) -> Result<()>;

    /// Runs after the backward of every use in one pass of the unit.
    fn post_pass(&self, pass: usize) -> Result<()>;
}

/// The owner of nodes, which is made after them.
#[derive(Clone, Default)]
pub(super) struct Owner(Arc<OnceLock<Weak<dyn NodeOwner>>>);

impl Owner {
    /// Sets the owner. Called once.
    pub(super) fn set(&self, owner: Weak<dyn NodeOwner>) {
        let _ = self.0.set(owner);
    }

    fn get(&self) -> Result<Arc<dyn NodeOwner>> {
        match self.0.get().and_then(Weak::upgrade) {
            Some(owner) => Ok(owner),
            None => {
                bail!("a sharded parameter was dropped before backward: keep the ShardedVarMap alive until after it")
            }
        }
    }
}

/// The nodes of a parameter, on the device that computes.
pub(crate) struct ParamNodes {
    pub(crate) leaf: TensorId,
    pub(crate) anchor: Tensor,
    pub(crate) full: Tensor,
    pub(super) owner: Owner,
}

/// Makes the nodes of a parameter. The full tensor has no memory yet.
///
/// The leaf is a scalar in place of the shard, since a graph is on one device and the shard may be on another. Candle's
/// layers use the full tensor. The layers of `nn` use the anchor, and leave their gradient with the parameter. Both
/// lead to the anchor, so its backward runs once, when the gradient is complete.
///
/// A frozen parameter has the same nodes, since it may be trained later. The layers of `nn` leave them out of the graph
/// while it is frozen.
pub(crate) fn param_nodes(device: &Device, shape: &Shape, dtype: DType) -> Result<ParamNodes> {
    let leaf = Tensor::from_storage(storage::scalar(device)?, (), BackpropOp::none(), true);
    let owner = Owner::default();
    let anchor = lasting_node(&leaf, storage::scalar(device)?, Shape::from(()), Anchor(owner.clone()))?;
    let full = lasting_node(&anchor, storage::empty(dtype, device)?, shape.clone(), Unshard(owner.clone()))?;
    Ok(ParamNodes { leaf: leaf.id(), anchor, full, owner })
}

/// Makes the anchor of a further pass, on top of the parameter's anchor. Its backward reports the end of the pass.
pub(super) fn pass_anchor(anchor: &Tensor, owner: &Owner, pass: usize) -> Result<Tensor> {
    let node = PassAnchor { owner: owner.clone(), pass };
    lasting_node(anchor, storage::scalar(anchor.device())?, Shape::from(()), node)
}

thread_local! {
    static UNREPORTED: Cell<usize> = const { Cell::new(0) };
}

/// Runs a backward inside a backward: parameters accumulate gradients, and anchors report nothing.
pub(crate) fn without_reports<T>(backward: impl FnOnce() -> T) -> T {
    let outer = UNREPORTED.get();
    UNREPORTED.set(outer + 1);
    defer!(UNREPORTED.set(outer));
    backward()
}

struct Anchor(Owner);

impl Backward for Anchor {
    fn name(&self) -> &'static str {
        "fsdp-anchor"
    }

    fn backward(&self, _leaf: &Tensor, _anchor: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        if UNREPORTED.get() > 0 {
            return Ok(None); // the outer graph has the same anchor, after all uses
        }
        let param = self.0.get()?;
        if param.is_trained() {
            param.post_accumulate_grad()?;
        }
        Ok(None) // the sharded gradient is stored when backward ends
    }
}

struct PassAnchor {
    owner: Owner,
    pass: usize,
}

impl Backward for PassAnchor {
    fn name(&self) -> &'static str {
        "fsdp-pass-anchor"
    }

    fn backward(&self, anchor: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let param = self.owner.get()?;
        if UNREPORTED.get() == 0 && param.is_trained() {
            param.post_pass(self.pass)?;
        }
        Ok(Some(anchor.detach()))
    }
}

struct Unshard(Owner);

impl Backward for Unshard {
    fn name(&self) -> &'static str {
        "fsdp-unshard"
    }

    fn backward(&self, anchor: &Tensor, _full: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let param = self.0.get()?;
        if param.is_trained() {
            param.add_gradient(grad)?;
        }
        Ok(Some(anchor.detach()))
    }
}
