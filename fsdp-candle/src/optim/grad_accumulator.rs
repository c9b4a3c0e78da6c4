//! Accumulation of gradients of several micro-batches in f32.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::storage::{to_dtype, with_slice, with_slice_mut};

/// Accumulates sharded gradients of several micro-batches in F32, for BF16 and F16 parameters. `GradStore::extend`
/// rounds each sum to the parameters' dtype, which loses small gradients beside a large sum. F32 and F64 gradients keep
/// their dtype.
///
/// A unit that accumulates gradients itself (`set_requires_gradient_sync(false, ..)`) does so in `reduce_dtype`, which
/// should then be F32.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::BF16), |vb| nn::linear_no_bias(1, 1, vb))?;
/// # let weight = vars.params()[0].clone();
/// use fsdp_candle::GradAccumulator;
///
/// let mut sum = GradAccumulator::new(vars.trainable());
/// for x in [256f32, 0.75, 0.75] {
///     let x = Tensor::new(&[[x]], world.device())?.to_dtype(DType::BF16)?;
///     sum.add(model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// }
/// let grads = sum.finish()?.expect("three were added");
/// // A sum in BF16, whose numbers are even here, would have stayed at 256.
/// assert_eq!(grads.get(weight.var()).unwrap().to_dtype(DType::F32)?.to_vec2::<f32>()?, [[258.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GradAccumulator {
    params: Vec<Arc<FsdpParam>>,
    sums: Vec<Option<Tensor>>,
    rest: Option<GradStore>,
}

impl GradAccumulator {
    /// Accumulates gradients of these parameters ([`crate::ShardedVarMap::trainable`]). Gradients of other variables
    /// are added as `GradStore::extend` does.
    pub fn new(params: Vec<Arc<FsdpParam>>) -> Self {
        let sums = params.iter().map(|_| None).collect();
        GradAccumulator { params, sums, rest: None }
    }

    /// Adds the gradients of a backward. Does not communicate.
    pub fn add(&mut self, mut grads: GradStore) -> Result<()> {
        for (param, sum) in self.params.iter().zip(&mut self.sums) {
            let Some(grad) = grads.remove(param.var()) else { continue };
            match sum {
                Some(sum) => {
                    let grad = grad.contiguous()?;
                    with_slice_mut(sum, |kernels, sum| with_slice(&grad, |_, grad| kernels.mix(sum, 1., grad, 1.)))?;
                }
                // Copied, because others may hold the gradient.
                None if matches!(grad.dtype(), DType::F32 | DType::F64) => *sum = Some(grad.force_contiguous()?),
                None => *sum = Some(to_dtype(&grad, DType::F32)?.contiguous()?),
            }
        }
        match &mut self.rest {
            Some(rest) => rest.extend(grads)?,
            None => self.rest = Some(grads),
        }
        Ok(())
    }

    /// Returns the sums, rounded once to the parameters' dtype, or `None` if nothing was added. Starts again from zero.
    pub fn finish(&mut self) -> Result<Option<GradStore>> {
        let Some(mut grads) = self.rest.take() else { return Ok(None) };
        for (param, sum) in self.params.iter().zip(&mut self.sums) {
            if let Some(sum) = sum.take() {
                grads.insert(param.var(), to_dtype(&sum, param.dtype())?);
            }
        }
        Ok(Some(grads))
    }
}
