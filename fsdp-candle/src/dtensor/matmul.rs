//! Products of matrices, and what turns them.

use candle_core::Shape;
use candle_core::shape::Dim;
use fsdp_core::{DTensorSpec, Placement};

use super::rules;
use super::tensor::{DTensor, zeros};
use crate::error::{Error, Result};

impl DTensor {
    /// The product of matrices, of shapes `[.., m, k]` and `[.., k, n]` with equal dimensions before. It is made where
    /// it takes no communication: rows of the left, columns of the right or batches of both may be sharded, and where
    /// the inner dimension is, the product is a `Partial(Sum)`; terms of a sum or average on one side remain such.
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
    ///
    /// # Errors
    /// When the shapes don't go together, the dtypes differ, the two are not on one mesh, or they lie otherwise: the
    /// message says how they may.
    pub fn matmul(&self, other: &DTensor) -> Result<Self> {
        self.check_goes_with("matmul", other)?;
        let (left, right) = (self.shape(), other.shape());
        let fits = left.len() >= 2
            && left.len() == right.len()
            && left[..left.len() - 2] == right[..right.len() - 2]
            && left[left.len() - 1] == right[right.len() - 2];
        if !fits {
            return Err(Error::Argument(format!(
                "matmul of {} and {}: the shapes are to be [.., m, k] and [.., k, n], with equal dimensions before",
                self.spec(),
                other.spec()
            )));
        }
        let placements = rules::matmul(self.spec(), other.spec())?;
        let mut shape = left.to_vec();
        shape[left.len() - 1] = right[right.len() - 1];
        self.result(&shape, &placements, |local_shape| match self.to_local().elem_count() {
            // A rank without a share of the inner dimension adds nothing.
            0 => zeros(local_shape, self.dtype(), self.device()),
            _ => Ok(self.to_local().matmul(other.to_local())?),
        })
    }

    /// The tensor with two dimensions exchanged, in the same memory.
    ///
    /// # Errors
    /// When it has no such dimension.
    pub fn transpose(&self, dim1: impl Dim, dim2: impl Dim) -> Result<Self> {
        let of = Shape::from(self.shape());
        let (dim1, dim2) = (dim1.to_index(&of, "transpose")?, dim2.to_index(&of, "transpose")?);
        let mut shape = self.shape().to_vec();
        shape.swap(dim1, dim2);
        let turned = |placement: &Placement| match placement.shard_dim() {
            Some(dim) if dim == dim1 => rules::at_dim(*placement, dim2),
            Some(dim) if dim == dim2 => rules::at_dim(*placement, dim1),
            _ => *placement,
        };
        let placements: Vec<_> = self.placements().iter().map(turned).collect();
        let mesh = self.device_mesh();
        let spec = DTensorSpec::new(mesh.layout().clone(), &placements, &shape, self.spec().dtype())?;
        Ok(DTensor::at(self.to_local().transpose(dim1, dim2)?, spec, mesh))
    }

    /// The transpose of a matrix.
    ///
    /// # Errors
    /// When the tensor has not two dimensions.
    pub fn t(&self) -> Result<Self> {
        match self.shape().len() {
            2 => self.transpose(0, 1),
            _ => Err(Error::Argument(format!("t of {}: a matrix has two dimensions; use `transpose`", self.spec()))),
        }
    }
}
