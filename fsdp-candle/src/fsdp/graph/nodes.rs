//! What stands for a parameter in the graph.
//!
//! It is `leaf -> Anchor -> Unshard`. The leaf is a scalar in place of the shard, which may be in the memory of another
//! device: a graph is of one. [`Unshard`] is what Candle's layers use; this crate's own layers use the anchor
//! and leave their gradient with the parameter directly. Both report to the anchor, whose backward therefore runs
//! exactly once, when the whole gradient is there. Where a unit runs again before backward, the parameter gets another
//! anchor on top of the first for each further pass, which reports when backward is done with that pass.
//!
//! A frozen parameter has the same nodes, for it may be trained later: while it is frozen, this crate's layers leave
//! them out of the graph, and what Candle's own leave there ends here.

use std::cell::Cell;
use std::sync::Arc;

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use super::events::Listener;
use crate::fsdp::unit::{FsdpParam, Nodes};
use crate::kernels::{Backward, node};
use crate::storage;

/// The nodes of a parameter of this shape and compute dtype, which layers compute with on `device`. The full tensor has
/// no memory yet.
pub(crate) fn nodes_of(device: &Device, shape: &Shape, dtype: DType, to: Listener) -> Result<Nodes> {
    let leaf = Tensor::from_storage(storage::scalar(device)?, (), BackpropOp::none(), true);
    let anchor = node(&leaf, storage::scalar(device)?, Shape::from(()), Anchor(to.clone()))?;
    let full = node(&anchor, storage::empty(dtype, device)?, shape.clone(), Unshard)?;
    let of_pass = move |anchor: &Tensor, pass: usize| {
        let memory = storage::scalar(anchor.device())?;
        node(anchor, memory, Shape::from(()), PassAnchor { pass, to: to.clone() })
    };
    Ok(Nodes { leaf: leaf.id(), anchor, full, of_pass: Box::new(of_pass) })
}

thread_local! {
    static UNREPORTED: Cell<usize> = const { Cell::new(0) };
}

/// Runs a backward within backward: parameters collect its gradients, and their anchors stay silent.
pub(crate) fn without_reports<T>(backward: impl FnOnce() -> T) -> T {
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            UNREPORTED.set(UNREPORTED.get() - 1);
        }
    }
    UNREPORTED.set(UNREPORTED.get() + 1);
    let _guard = Guard;
    backward()
}

/// The parameter that a node stands for.
fn behind(node: &Tensor) -> Result<Arc<FsdpParam>> {
    match FsdpParam::of(node) {
        Some(param) => Ok(param),
        None => bail!("a sharded parameter was dropped before backward: keep the ShardedVarMap alive until after it"),
    }
}

struct Anchor(Listener);

impl Backward for Anchor {
    fn name(&self) -> &'static str {
        "fsdp-anchor"
    }

    fn backward(&self, _leaf: &Tensor, anchor: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        if UNREPORTED.get() > 0 {
            return Ok(None); // the outer graph has this anchor too, and knows of all uses
        }
        let param = behind(anchor)?;
        if param.trainable() {
            self.0.of_parameter(&param)?.gradient_complete(&param)?;
        }
        Ok(None) // the sharded gradient is inserted at the end of backward
    }
}

/// The anchor of a further pass.
struct PassAnchor {
    pass: usize,
    to: Listener,
}

impl Backward for PassAnchor {
    fn name(&self) -> &'static str {
        "fsdp-pass-anchor"
    }

    fn backward(&self, anchor: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let param = behind(anchor)?;
        if UNREPORTED.get() == 0 && param.trainable() {
            self.to.of_parameter(&param)?.pass_complete(&param, self.pass)?;
        }
        Ok(Some(anchor.zeros_like()?))
    }
}

struct Unshard;

impl Backward for Unshard {
    fn name(&self) -> &'static str {
        "fsdp-unshard"
    }

    fn backward(&self, anchor: &Tensor, full: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let param = behind(full)?;
        if param.trainable() {
            param.gradient().add(grad)?;
        }
        Ok(Some(anchor.zeros_like()?))
    }
}
