//! Reductions over tensor dimensions.

use candle_core::shape::Dims;
use candle_core::{DType, Shape, Tensor};

use super::rules::{self, Reduction};
use super::tensor::{DTensor, zeros};
use crate::error::{Error, Result};
use crate::storage::to_dtype;

/// Reductions: the name over some dimensions and what is done, the names with dimensions kept and over all, and a line
/// of documentation.
macro_rules! reductions {
    ($($name:ident: $what:ident, $keepdim:ident, $all:ident, $doc:literal;)*) => {
        impl DTensor {$(
            #[doc = $doc]
            ///
            /// # Errors
            /// When the tensor has no such dimension, and for terms of another reduction: they are to be redistributed
            /// first.
            pub fn $name(&self, dims: impl Dims) -> Result<Self> {
                self.reduce(Reduction::$what, dims, false)
            }

            #[doc = concat!("[`DTensor::", stringify!($name), "`] that leaves dimensions of size 1.")]
            ///
            /// # Errors
            /// The same.
            pub fn $keepdim(&self, dims: impl Dims) -> Result<Self> {
                self.reduce(Reduction::$what, dims, true)
            }

            #[doc = concat!("[`DTensor::", stringify!($name), "`] over all dimensions: a scalar.")]
            ///
            /// # Errors
            /// The same.
            pub fn $all(&self) -> Result<Self> {
                self.reduce(Reduction::$what, (0..self.shape().len()).collect::<Vec<_>>(), false)
            }
        )*}
    };
}

reductions! {
    sum: Sum, sum_keepdim, sum_all,
    "The sum over dimensions, in the tensor's dtype; each rank's of bf16 and f16 is made in f32 and rounded once. Over \
     a dimension that ranks share it is a `Partial(Sum)`; terms of a sum or average remain such.";
    mean: Mean, mean_keepdim, mean_all,
    "The mean over dimensions. Over a dimension that ranks share it is a `Partial(Sum)`, of terms that count as much \
     as the ranks have elements; terms of a sum or average remain such.";
    max: Max, max_keepdim, max_all,
    "The largest over dimensions. Over a dimension that ranks share it is a `Partial(Max)`, and terms of a largest \
     remain such.";
    min: Min, min_keepdim, min_all,
    "The smallest over dimensions. Over a dimension that ranks share it is a `Partial(Min)`, and terms of a smallest \
     remain such.";
}

impl DTensor {
    fn reduce(&self, what: Reduction, dims: impl Dims, keepdim: bool) -> Result<Self> {
        let dims = dims.to_indexes(&Shape::from(self.shape()), what.name())?;
        let placements = rules::reduce(what, self.spec(), &dims, keepdim)?;
        let elements: usize = dims.iter().map(|&dim| self.shape()[dim]).product();
        match what {
            Reduction::Mean if !self.dtype().is_float() => {
                return Err(Error::Argument(format!(
                    "mean of {}: convert to a floating point type first",
                    self.spec()
                )));
            }
            Reduction::Max | Reduction::Min if elements == 0 => {
                let (name, spec) = (what.name(), self.spec());
                return Err(Error::Argument(format!("{name} of {spec} over dimensions {dims:?}: there is no element")));
            }
            _ => {}
        }
        let shape: Vec<usize> = (self.shape().iter().enumerate())
            .filter(|(dim, _)| keepdim || !dims.contains(dim))
            .map(|(dim, &size)| if dims.contains(&dim) { 1 } else { size })
            .collect();
        self.result(&shape, &placements, |local_shape| {
            let local = self.to_local();
            let reduced = match local.elem_count() {
                0 => neutral(what, local_shape, self.dtype(), local)?,
                _ => reduced(what, local, &dims, elements)?,
            };
            Ok(reduced.reshape(local_shape)?)
        })
    }
}

/// A rank's own reduction, with the dimensions kept. Means are of `elements` over all ranks.
fn reduced(what: Reduction, local: &Tensor, dims: &[usize], elements: usize) -> candle_core::Result<Tensor> {
    let sum = || match local.dtype() {
        DType::BF16 | DType::F16 => local.to_dtype(DType::F32)?.sum_keepdim(dims),
        _ => local.sum_keepdim(dims),
    };
    match what {
        Reduction::Mean => (sum()? * (1. / elements as f64))?.to_dtype(local.dtype()),
        Reduction::Max => dims.iter().try_fold(local.clone(), |local, &dim| local.max_keepdim(dim)),
        Reduction::Min => dims.iter().try_fold(local.clone(), |local, &dim| local.min_keepdim(dim)),
        _ => sum()?.to_dtype(local.dtype()),
    }
}

/// What a rank without elements adds to a reduction: nothing.
fn neutral(what: Reduction, shape: &[usize], dtype: DType, like: &Tensor) -> Result<Tensor> {
    let device = like.device();
    let lowest = what == Reduction::Max;
    Ok(match what {
        Reduction::Max | Reduction::Min => match dtype {
            DType::U8 => Tensor::full(if lowest { u8::MIN } else { u8::MAX }, shape, device)?,
            DType::U32 => Tensor::full(if lowest { u32::MIN } else { u32::MAX }, shape, device)?,
            DType::I64 => Tensor::full(if lowest { i64::MIN } else { i64::MAX }, shape, device)?,
            _ => {
                let infinity = if lowest { f64::NEG_INFINITY } else { f64::INFINITY };
                to_dtype(&Tensor::full(infinity, shape, device)?, dtype)?
            }
        },
        _ => zeros(shape, dtype, device)?,
    })
}
