//! Gradient clipping over shards.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor, bail};
use fsdp_core::{Buffer, ReduceOp};
use half::{bf16, f16};

use crate::var_map::ShardedVarMap;
use crate::{Error, Result};

/// Scales the sharded gradients so that their global 2-norm is at most `max_norm`; returns the norm before, the same on every rank. Collective.
///
/// As PyTorch's `clip_grad_norm_`: the factor is `max_norm / (norm + 1e-6)`, at most 1.
///
/// # Errors
/// Those of the all-reduce.
pub fn clip_grad_norm(vars: &ShardedVarMap, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
    let norm = grad_norm(vars, grads)?;
    let factor = max_norm / (norm + 1e-6);
    if factor < 1. {
        for param in vars.trainable() {
            if let Some(grad) = grads.get(param.var()) {
                grad.inplace_op1(&Scale(factor))?;
            }
        }
    }
    Ok(norm)
}

/// The 2-norm of all sharded gradients together, accumulated in f64. Collective.
///
/// # Errors
/// Those of the all-reduce.
pub fn grad_norm(vars: &ShardedVarMap, grads: &GradStore) -> Result<f64> {
    let mut squares = 0.;
    for param in vars.trainable() {
        if let Some(grad) = grads.get(param.var()) {
            squares += sum_of_squares(grad)?;
        }
    }
    let total = vars.shard_ranks()?.all_reduce(vec![Buffer::F64(vec![squares])], ReduceOp::Sum).wait()?;
    match total.first() {
        Some(Buffer::F64(total)) if total.len() == 1 => Ok(total[0].sqrt()),
        _ => Err(Error::Device("an all-reduce of one F64 returned something else".into())),
    }
}

fn sum_of_squares(grad: &Tensor) -> Result<f64> {
    let grad = grad.contiguous()?;
    let (storage, layout) = grad.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(Error::Device("gradients are in host memory".into()));
    };
    /// Sums short runs in f32 lanes and the runs in f64: fast and exact enough.
    fn sum<T: Copy>(values: &[T], to_f32: impl Fn(T) -> f32) -> f64 {
        values
            .chunks(256)
            .map(|chunk| {
                let mut lanes = [0f32; 16];
                for run in chunk.chunks(16) {
                    for (lane, &value) in lanes.iter_mut().zip(run) {
                        let value = to_f32(value);
                        *lane += value * value;
                    }
                }
                lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>()
            })
            .sum()
    }
    Ok(match storage {
        CpuStorage::F32(v) => sum(&v[start..end], |v| v),
        CpuStorage::BF16(v) => sum(&v[start..end], bf16::to_f32),
        CpuStorage::F16(v) => sum(&v[start..end], f16::to_f32),
        CpuStorage::F64(v) => v[start..end].iter().map(|v| v * v).sum(),
        _ => return Err(Error::Device("gradients are floating point".into())),
    })
}

struct Scale(f64);

impl InplaceOp1 for Scale {
    fn name(&self) -> &'static str {
        "scale-gradient"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("a sharded gradient is contiguous") };
        let factor = self.0 as f32;
        match storage {
            CpuStorage::F32(v) => v[start..end].iter_mut().for_each(|v| *v *= factor),
            CpuStorage::F64(v) => v[start..end].iter_mut().for_each(|v| *v *= self.0),
            CpuStorage::BF16(v) => v[start..end].iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() * factor)),
            CpuStorage::F16(v) => v[start..end].iter_mut().for_each(|v| *v = f16::from_f32(v.to_f32() * factor)),
            _ => bail!("gradients are floating point"),
        }
        Ok(())
    }
}
