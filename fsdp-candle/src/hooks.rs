//! The operations in Candle's autograd graph that stand for FSDP's hooks.
//!
//! A parameter is `shard -> Anchor -> Unshard`: [`Unshard`] is what Candle's layers use; this crate's own layers use the anchor and leave their gradient
//! with the parameter directly. Both report to the anchor, whose backward therefore runs exactly once, when the whole gradient is there. A unit's outputs
//! pass through [`PassOn`], whose backward runs before anything inside the unit; the inputs of one with frozen parameters do too, and theirs runs after it
//! (unless the closure captured more: see [`FrozenCall`]).

use std::cell::Cell;
use std::sync::{Arc, Weak};

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

use crate::frozen_call::FrozenCall;
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
        if UNREPORTED.get() > 0 {
            return Ok(None); // the outer graph has this anchor too, and knows of all uses
        }
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
    pass_on(output, PassOn { group: group.clone(), at: At::Output })
}

/// Passes a unit's input on so that its backward, when it comes after everything inside the unit, frees the unit's frozen parameters.
pub(crate) fn post_backward(input: &Tensor, group: &Arc<ParamGroup>, call: &Arc<FrozenCall>) -> Result<Tensor> {
    let passed = pass_on(input, PassOn { group: group.clone(), at: At::Input(call.clone()) })?;
    if input.dtype().is_float() {
        call.add_input(&passed);
    }
    Ok(passed)
}

fn pass_on(tensor: &Tensor, op: PassOn) -> Result<Tensor> {
    if !tensor.dtype().is_float() {
        return Ok(tensor.clone());
    }
    tensor.contiguous()?.apply_op1(op)
}

/// The identity, with a hook in backward.
struct PassOn {
    group: Arc<ParamGroup>,
    at: At,
}

enum At {
    Input(Arc<FrozenCall>),
    Output,
}

impl CustomOp1 for PassOn {
    fn name(&self) -> &'static str {
        match &self.at {
            At::Input(_) => "fsdp-post-backward",
            At::Output => "fsdp-pre-backward",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a tensor at the border of an FSDP unit is not contiguous")
        };
        let copy = match storage {
            CpuStorage::F32(v) => CpuStorage::F32(v[start..end].to_vec()),
            CpuStorage::F64(v) => CpuStorage::F64(v[start..end].to_vec()),
            CpuStorage::BF16(v) => CpuStorage::BF16(v[start..end].to_vec()),
            CpuStorage::F16(v) => CpuStorage::F16(v[start..end].to_vec()),
            _ => bail!("a tensor at the border of FSDP unit `{}` holds no floats", self.group.name()),
        };
        Ok((copy, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match &self.at {
            At::Input(call) if call.input_done() => self.group.post_backward()?,
            At::Input(_) => {}
            At::Output => self.group.pre_backward()?,
        }
        Ok(Some(grad.clone()))
    }
}
