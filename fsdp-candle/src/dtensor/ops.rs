//! Operations that keep to the placement rules: element by element, reductions, norms and matrix products.

use candle_core::shape::{Dim, Dims};
use candle_core::{DType, Shape, Tensor};
use fsdp_core::{DTensorSpec, Placement};

use super::placement_rules::{self as rules, Binary, Reduction, Unary};
use super::tensor::{DTensor, zeros};
use crate::error::{Error, Result};
use crate::kernels::{NormType, SliceMut, of_device};
use crate::storage::{to_dtype, to_tensor, with_slice};

/// The right operand of [`DTensor::add`] and other operations: a DTensor on the same mesh, or a number.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A DTensor, broadcast along dimensions of size 1 and missing dimensions.
    DTensor(&'a DTensor),
    /// A number, the same on every rank.
    Number(f64),
}

impl<'a> From<&'a DTensor> for Operand<'a> {
    fn from(tensor: &'a DTensor) -> Self {
        Operand::DTensor(tensor)
    }
}

impl From<f64> for Operand<'_> {
    fn from(number: f64) -> Self {
        Operand::Number(number)
    }
}

/// Operations of one operand: PyTorch's name, Candle's, the effect on partials, and a line of documentation.
macro_rules! unary {
    ($($name:ident: $candle:ident, $kind:ident, $doc:literal;)*) => {
        impl DTensor {$(
            #[doc = $doc]
            ///
            /// Fails for partials that the operation does not keep: redistribute first.
            pub fn $name(&self) -> Result<Self> {
                self.unary(stringify!($name), Unary::$kind, Tensor::$candle)
            }
        )*}
    };
}

unary! {
    neg: neg, Negation, "Negates each element. Keeps partial sums and averages. A partial minimum becomes a maximum.";
    exp: exp, Increasing, "Computes the exponential of each element. Keeps partial minima and maxima.";
    log: log, Other, "Computes the natural logarithm of each element.";
    sqrt: sqrt, Other, "Computes the square root of each element.";
    tanh: tanh, Increasing, "Computes the hyperbolic tangent of each element. Keeps partial minima and maxima.";
    erf: erf, Increasing, "Computes the error function of each element. Keeps partial minima and maxima.";
    relu: relu, Increasing, "Replaces negative elements by 0. Keeps partial minima and maxima.";
    ceil: ceil, Increasing, "Rounds each element up. Keeps partial minima and maxima.";
    floor: floor, Increasing, "Rounds each element down. Keeps partial minima and maxima.";
    round: round, Increasing, "Rounds each element to the nearest integer. Keeps partial minima and maxima.";
    sign: sign, Increasing, "Computes the sign of each element: -1, 0 or 1. Keeps partial minima and maxima.";
    abs: abs, Other, "Computes the absolute value of each element.";
    square: sqr, Other, "Squares each element.";
    reciprocal: recip, Other, "Computes the reciprocal of each element.";
    sin: sin, Other, "Computes the sine of each element.";
    cos: cos, Other, "Computes the cosine of each element.";
    gelu: gelu_erf, Other, "Applies the Gaussian error linear unit, by the error function.";
    silu: silu, Other, "Applies the sigmoid linear unit.";
}

/// Operations of two operands: the name and a line of documentation.
macro_rules! binary {
    ($($name:ident: $op:ident, $doc:literal;)*) => {
        impl DTensor {$(
            #[doc = $doc]
            ///
            /// Fails if meshes or dtypes differ, shapes do not broadcast, or the placements need communication. The
            /// error names the operand to redistribute.
            pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Self> {
                self.binary(Binary::$op, other.into())
            }
        )*}
    };
}

binary! {
    add: Add, "Adds two tensors. Keeps partials of equal reductions.";
    sub: Sub, "Subtracts two tensors. Keeps partials of equal reductions.";
    mul: Mul, "Multiplies two tensors element by element. Keeps a partial sum if the other operand is replicated.";
    div: Div, "Divides two tensors element by element. Keeps a partial sum if the divisor is replicated.";
    maximum: Maximum, "Computes the maximum of two tensors element by element. Keeps partial maxima.";
    minimum: Minimum, "Computes the minimum of two tensors element by element. Keeps partial minima.";
}

impl DTensor {
    /// Raises each element to a power. Fails for partials: redistribute first.
    pub fn pow(&self, exponent: f64) -> Result<Self> {
        self.unary("pow", Unary::Other, |local| local.powf(exponent))
    }

    fn unary(
        &self,
        name: &str,
        kind: Unary,
        compute: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let placements = rules::unary(name, kind, self.spec())?;
        self.result(self.shape(), &placements, |_| Ok(compute(self.to_local())?))
    }

    fn binary(&self, op: Binary, other: Operand<'_>) -> Result<Self> {
        let local = self.to_local();
        match other {
            Operand::Number(number) => {
                let placements = rules::scalar(op, self.spec())?;
                self.result(self.shape(), &placements, |_| {
                    Ok(match op {
                        Binary::Add => (local + number)?,
                        Binary::Sub => (local - number)?,
                        Binary::Mul => (local * number)?,
                        Binary::Div => (local / number)?,
                        Binary::Maximum => local.maximum(number)?,
                        Binary::Minimum => local.minimum(number)?,
                    })
                })
            }
            Operand::DTensor(other) => {
                self.check_operands(op.name(), other)?;
                if op == Binary::Div && !self.dtype().is_float() {
                    // Quotients of integers are rounded, so quotients of terms do not add up.
                    rules::unary("div", Unary::Other, self.spec())?;
                }
                let (shape, placements) = rules::binary(op, self.spec(), other.spec())?;
                let right = other.to_local();
                self.result(&shape, &placements, |_| {
                    Ok(match op {
                        Binary::Add => local.broadcast_add(right)?,
                        Binary::Sub => local.broadcast_sub(right)?,
                        Binary::Mul => local.broadcast_mul(right)?,
                        Binary::Div => local.broadcast_div(right)?,
                        Binary::Maximum => local.broadcast_maximum(right)?,
                        Binary::Minimum => local.broadcast_minimum(right)?,
                    })
                })
            }
        }
    }

    /// Returns an error unless meshes and dtypes match.
    pub(super) fn check_operands(&self, name: &str, other: &DTensor) -> Result<()> {
        let (mesh, theirs) = (self.device_mesh(), other.device_mesh());
        let is_same = mesh.rank() == theirs.rank() && mesh.covers(theirs) && theirs.covers(mesh);
        rules::same_mesh(name, self.spec(), other.spec(), is_same)?;
        if self.dtype() != other.dtype() {
            return Err(Error::Argument(format!(
                "{name} of {} and {}: the dtypes differ; convert one operand with `to_dtype`",
                self.spec(),
                other.spec()
            )));
        }
        Ok(())
    }
}

/// Reductions: the name over some dimensions, the operation, the names with dimensions kept and over all dimensions,
/// and a line of documentation.
macro_rules! reductions {
    ($($name:ident: $what:ident, $keepdim:ident, $all:ident, $doc:literal;)*) => {
        impl DTensor {$(
            #[doc = $doc]
            ///
            /// Fails if the tensor does not have such a dimension, and for partials of another reduction: redistribute
            /// first.
            pub fn $name(&self, dims: impl Dims) -> Result<Self> {
                self.reduce(Reduction::$what, dims, false)
            }

            #[doc = concat!("[`DTensor::", stringify!($name), "`] with reduced dimensions of size 1.")]
            pub fn $keepdim(&self, dims: impl Dims) -> Result<Self> {
                self.reduce(Reduction::$what, dims, true)
            }

            #[doc = concat!("[`DTensor::", stringify!($name), "`] over all dimensions: a scalar.")]
            pub fn $all(&self) -> Result<Self> {
                self.reduce(Reduction::$what, (0..self.shape().len()).collect::<Vec<_>>(), false)
            }
        )*}
    };
}

reductions! {
    sum: Sum, sum_keepdim, sum_all,
    "Sums over dimensions, in the tensor's dtype. Each rank accumulates bf16 and f16 in f32 and rounds once. Over a \
     sharded dimension the result is a `Partial(Sum)`. Keeps partial sums and averages.";
    mean: Mean, mean_keepdim, mean_all,
    "Averages over dimensions. Over a sharded dimension the result is a `Partial(Sum)` of terms weighted by the ranks' \
     numbers of elements. Keeps partial sums and averages.";
    max: Max, max_keepdim, max_all,
    "Computes the maximum over dimensions: a `Partial(Max)` over a sharded dimension. Keeps partial maxima.";
    min: Min, min_keepdim, min_all,
    "Computes the minimum over dimensions: a `Partial(Min)` over a sharded dimension. Keeps partial minima.";
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
                return Err(Error::Argument(format!("{name} of {spec} over dimensions {dims:?}: no elements")));
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
                0 => neutral_element(what, local_shape, self.dtype(), local)?,
                _ => local_reduction(what, local, &dims, elements)?,
            };
            Ok(reduced.reshape(local_shape)?)
        })
    }
}

/// Returns this rank's reduction, with the dimensions kept. Means are over `elements`, the number of all ranks.
fn local_reduction(what: Reduction, local: &Tensor, dims: &[usize], elements: usize) -> candle_core::Result<Tensor> {
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

/// Returns the neutral element of a reduction, for a rank without elements.
fn neutral_element(what: Reduction, shape: &[usize], dtype: DType, like: &Tensor) -> Result<Tensor> {
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

/// A norm of a DTensor: PyTorch's partial norm. Each rank holds the share of its own elements;
/// [`PartialNorm::full_tensor`] combines the shares.
#[derive(Clone, Debug)]
pub struct PartialNorm {
    powers: DTensor,
    norm: NormType,
    dtype: DType,
}

impl DTensor {
    /// Returns the norm of all elements, accumulated in f64. Does not communicate: each rank along a sharded dimension
    /// holds a share. Fails for partials, for elements that are not floating-point numbers, and for a norm whose order
    /// is not positive.
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
    /// Returns the placements of the shares: `Partial` along mesh dimensions that sharded the DTensor, `Replicate`
    /// along the others.
    pub fn placements(&self) -> &[Placement] {
        self.powers.placements()
    }

    /// Returns the norm on every rank: a scalar of F32, or of F64 for a tensor of F64. Collective over the mesh where a
    /// placement is partial.
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

impl DTensor {
    /// Multiplies matrices of shapes `[.., m, k]` and `[.., k, n]` with equal leading dimensions. The left may be
    /// sharded by rows, the right by columns, or both by batch. If the inner dimension is sharded, the product is a
    /// `Partial(Sum)`. Terms of a sum or average on one side stay terms. Fails if shapes, dtypes or meshes do not
    /// match, or when the placements need communication. The error lists the possible placements.
    ///
    /// ```
    /// # use candle_core::DType;
    /// # use fsdp_candle::{DTensor, Placement::{Partial, Replicate, Shard}, ReduceOp, World};
    /// # let world = World::single()?;
    /// # let mesh = world.mesh(&[("tp", 1)])?;
    /// let ones = |rows, columns, placement| {
    ///     DTensor::ones((rows, columns), DType::F32, world.device(), &mesh, &[placement])
    /// };
    /// let hidden = ones(4, 8, Replicate)?.matmul(&ones(8, 6, Shard(1))?)?;
    /// assert_eq!(hidden.placements(), [Shard(1)]);
    /// let terms = hidden.matmul(&ones(6, 2, Shard(0))?)?;
    /// assert_eq!(terms.placements(), [Partial(ReduceOp::Sum)]);
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    pub fn matmul(&self, other: &DTensor) -> Result<Self> {
        self.check_operands("matmul", other)?;
        let (left, right) = (self.shape(), other.shape());
        let fits = left.len() >= 2
            && left.len() == right.len()
            && left[..left.len() - 2] == right[..right.len() - 2]
            && left[left.len() - 1] == right[right.len() - 2];
        if !fits {
            return Err(Error::Argument(format!(
                "matmul of {} and {}: expected shapes [.., m, k] and [.., k, n] with equal leading dimensions",
                self.spec(),
                other.spec()
            )));
        }
        let placements = rules::matmul(self.spec(), other.spec())?;
        let mut shape = left.to_vec();
        shape[left.len() - 1] = right[right.len() - 1];
        self.result(&shape, &placements, |local_shape| match self.to_local().elem_count() {
            // A rank without inner elements adds zero.
            0 => zeros(local_shape, self.dtype(), self.device()),
            _ => Ok(self.to_local().matmul(other.to_local())?),
        })
    }

    /// Exchanges two dimensions, in the same memory. Fails if the tensor does not have such a dimension.
    pub fn transpose(&self, dim1: impl Dim, dim2: impl Dim) -> Result<Self> {
        let of = Shape::from(self.shape());
        let (dim1, dim2) = (dim1.to_index(&of, "transpose")?, dim2.to_index(&of, "transpose")?);
        let mut shape = self.shape().to_vec();
        shape.swap(dim1, dim2);
        let transposed = |placement: &Placement| match placement.shard_dim() {
            Some(dim) if dim == dim1 => rules::at_dim(*placement, dim2),
            Some(dim) if dim == dim2 => rules::at_dim(*placement, dim1),
            _ => *placement,
        };
        let placements: Vec<_> = self.placements().iter().map(transposed).collect();
        let mesh = self.device_mesh();
        let spec = DTensorSpec::new(mesh.layout().clone(), &placements, &shape, self.spec().dtype())?;
        Ok(DTensor::at(self.to_local().transpose(dim1, dim2)?, spec, mesh))
    }

    /// Transposes a matrix. Fails if the tensor does not have two dimensions.
    pub fn t(&self) -> Result<Self> {
        match self.shape().len() {
            2 => self.transpose(0, 1),
            _ => Err(Error::Argument(format!("t of {}: expected two dimensions; use `transpose`", self.spec()))),
        }
    }
}
