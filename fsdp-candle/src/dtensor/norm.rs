//! Norms.

use candle_core::{DType, Tensor};
use fsdp_core::Placement;

use super::rules::{self, Reduction};
use super::tensor::DTensor;
use crate::error::{Error, Result};
use crate::kernels::{NormType, SliceMut, of_device};
use crate::storage::{to_tensor, with_slice};

/// A norm of a DTensor, of which each rank has the share of its own elements: PyTorch's partial norm. What all ranks'
/// shares come to takes [`PartialNorm::full_tensor`].
#[derive(Clone, Debug)]
pub struct PartialNorm {
    powers: DTensor,
    norm: NormType,
    dtype: DType,
}

impl DTensor {
    /// The norm of all elements together, accumulated in f64. No communication: ranks that share a dimension have a
    /// share of the norm each.
    ///
    /// # Errors
    /// For terms of a reduction, which are to be redistributed first; when the elements are no floating point numbers,
    /// and when the order of the norm is not positive.
    pub fn norm(&self, norm: NormType) -> Result<PartialNorm> {
        norm.check()?;
        if !self.dtype().is_float() {
            return Err(Error::Argument(format!("norm of {}: convert to a floating point type first", self.spec())));
        }
        let what = match norm {
            NormType::Infinity => Reduction::LargestMagnitude,
            _ => Reduction::Powers,
        };
        let dims: Vec<_> = (0..self.shape().len()).collect();
        let placements = rules::reduce(what, self.spec(), &dims, false)?;
        let local = self.to_local();
        let mut sum = of_device(local.device())?.zeros(fsdp_core::DType::F64, 1)?;
        if local.elem_count() > 0 {
            with_slice(&local.contiguous()?, |kernels, values| kernels.powers(values, norm, SliceMut::from(&mut sum)))?;
        }
        let sum = to_tensor(sum, &[], local.device())?;
        let powers = DTensor::from_local(&sum, (), self.device_mesh(), &placements)?;
        let dtype = if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        Ok(PartialNorm { powers, norm, dtype })
    }
}

impl PartialNorm {
    /// Where ranks' shares are still to be put together, one placement a mesh dimension: `Partial` where the DTensor
    /// was sharded, `Replicate` where all ranks hold the same.
    pub fn placements(&self) -> &[Placement] {
        self.powers.placements()
    }

    /// The norm, a scalar of F32 (F64 of a tensor of F64) on every rank. Collective over the mesh where a placement is
    /// partial.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn full_tensor(&self) -> Result<Tensor> {
        let total = self.powers.full_tensor()?;
        let norm = match self.norm {
            NormType::Two => total.sqrt()?,
            NormType::P(1.) | NormType::Infinity => total,
            NormType::P(p) => total.powf(1. / p)?,
        };
        Ok(norm.to_dtype(self.dtype)?)
    }
}
