//! What stands for a parameter in the graph.
//!
//! It is `shard -> Anchor -> Unshard`: [`Unshard`] is what Candle's layers use; this crate's own layers use the anchor
//! and leave their gradient with the parameter directly. Both report to the anchor, whose backward therefore runs
//! exactly once, when the whole gradient is there.

use std::cell::Cell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, Var, bail};

use super::events::Listener;
use crate::storage;
use crate::unit::{FsdpParam, Nodes};

/// The nodes of a parameter of this shape and compute dtype. The full tensor has no memory yet. A frozen one gets no
/// edges.
pub(crate) fn nodes_of(shard: &Var, shape: &Shape, dtype: DType, trainable: bool, to: Listener) -> Result<Nodes> {
    let unshard = Unshard { shape: shape.clone(), dtype };
    let shard = shard.as_tensor();
    if trainable {
        let anchor = shard.apply_op1(Anchor(to))?;
        let full = anchor.apply_op1(unshard)?;
        Ok(Nodes { anchor, full })
    } else {
        let anchor = shard.apply_op1_no_bwd(&Anchor(to))?;
        let full = anchor.apply_op1_no_bwd(&unshard)?;
        Ok(Nodes { anchor, full })
    }
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

impl CustomOp1 for Anchor {
    fn name(&self) -> &'static str {
        "fsdp-anchor"
    }

    fn cpu_fwd(&self, _shard: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.]), Shape::from(())))
    }

    fn bwd(&self, _shard: &Tensor, anchor: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        if UNREPORTED.get() > 0 {
            return Ok(None); // the outer graph has this anchor too, and knows of all uses
        }
        let param = behind(anchor)?;
        self.0.of_parameter(&param)?.gradient_complete(&param)?;
        Ok(None) // the sharded gradient is inserted at the end of backward
    }
}

struct Unshard {
    shape: Shape,
    dtype: DType,
}

impl CustomOp1 for Unshard {
    fn name(&self) -> &'static str {
        "fsdp-unshard"
    }

    fn cpu_fwd(&self, _anchor: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage::empty(self.dtype)?, self.shape.clone()))
    }

    fn bwd(&self, anchor: &Tensor, full: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        behind(full)?.gradient().add(grad)?;
        Ok(Some(anchor.zeros_like()?))
    }
}
