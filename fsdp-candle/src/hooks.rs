//! The operations in Candle's autograd graph that stand for FSDP's hooks.
//!
//! A parameter is `shard -> Anchor -> Unshard`: [`Unshard`] is what Candle's layers use; this crate's own layers use the anchor and leave their gradient
//! with the parameter directly. Both report to the anchor, whose backward therefore runs exactly once, when the whole gradient is there. A unit's outputs
//! pass through [`PreBackward`], whose backward runs before anything inside the unit.

use std::sync::{Arc, Weak};

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

use crate::group::ParamGroup;
use crate::param::FsdpParam;
use crate::storage;

/// The graph of a parameter: its anchor, and the full tensor that has no memory yet. A frozen one gets no edges.
pub(crate) fn graph_of(param: &Arc<FsdpParam>) -> Result<(Tensor, Tensor)> {
    let weak = Arc::downgrade(param);
    let anchor = Anchor(weak.clone());
    let unshard = Unshard { param: weak, shape: param.shape().clone(), dtype: param.compute_dtype() };
    let shard = param.var().as_tensor();
    if param.trainable() {
        let anchor = shard.apply_op1(anchor)?;
        let full = anchor.apply_op1(unshard)?;
        Ok((anchor, full))
    } else {
        let anchor = shard.apply_op1_no_bwd(&anchor)?;
        let full = anchor.apply_op1_no_bwd(&unshard)?;
        Ok((anchor, full))
    }
}

fn upgrade(param: &Weak<FsdpParam>) -> Result<Arc<FsdpParam>> {
    match param.upgrade() {
        Some(param) => Ok(param),
        None => bail!("a sharded parameter was dropped before backward: keep the ShardedVarMap alive until after it"),
    }
}

struct Anchor(Weak<FsdpParam>);

impl CustomOp1 for Anchor {
    fn name(&self) -> &'static str {
        "fsdp-anchor"
    }

    fn cpu_fwd(&self, _shard: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.]), Shape::from(())))
    }

    fn bwd(&self, _shard: &Tensor, _anchor: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        let param = upgrade(&self.0)?;
        param.group()?.on_gradient_complete(&param)?;
        Ok(None) // the sharded gradient is inserted at the end of backward
    }
}

struct Unshard {
    param: Weak<FsdpParam>,
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

    fn bwd(&self, anchor: &Tensor, _full: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        upgrade(&self.param)?.add_grad(grad)?;
        Ok(Some(anchor.zeros_like()?))
    }
}

/// Passes a unit's output on so that its backward unshards the unit.
pub(crate) fn pre_backward(output: &Tensor, group: &Arc<ParamGroup>) -> Result<Tensor> {
    if !output.dtype().is_float() {
        return Ok(output.clone());
    }
    output.contiguous()?.apply_op1(PreBackward(group.clone()))
}

struct PreBackward(Arc<ParamGroup>);

impl CustomOp1 for PreBackward {
    fn name(&self) -> &'static str {
        "fsdp-pre-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("an FSDP unit's output is not contiguous") };
        let copy = match storage {
            CpuStorage::F32(v) => CpuStorage::F32(v[start..end].to_vec()),
            CpuStorage::F64(v) => CpuStorage::F64(v[start..end].to_vec()),
            CpuStorage::BF16(v) => CpuStorage::BF16(v[start..end].to_vec()),
            CpuStorage::F16(v) => CpuStorage::F16(v[start..end].to_vec()),
            _ => bail!("FSDP unit `{}` returned a tensor that holds no floats", self.0.name()),
        };
        Ok((copy, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.0.pre_backward()?;
        Ok(Some(grad.clone()))
    }
}
