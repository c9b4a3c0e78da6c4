//! The layers' operations on CUDA devices, in a build without the feature `cuda`: no value of [`Cuda`] exists.

use std::convert::Infallible;

use candle_core::{Result, Tensor};

use super::input::Input;
use super::target_rows::TargetRows;
use super::weight::Weight;
use crate::float8::Float8Recipe;
use crate::kernels::{Normalization, Rotation};
use crate::random::Mask;

/// The layers' operations on a CUDA device.
#[derive(Clone, Copy)]
pub(super) struct Cuda(Infallible);

impl Cuda {
    pub(super) fn of(_: &Tensor) -> Option<Self> {
        None
    }

    pub(super) fn activate(self, _: &'static str, _: &Tensor) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn silu_mul(self, _: &Tensor, _: &Tensor) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn silu_mul_halves(self, _: &Tensor, _: usize) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn dropped(self, _: &Tensor, _: &Mask) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn normalize(
        self,
        _: &'static str,
        _: &Tensor,
        _: Weight,
        _: Option<Weight>,
        _: Normalization,
    ) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn rotate(
        self,
        _: &'static str,
        _: &Tensor,
        _: [Tensor; 2],
        _: Option<Tensor>,
        _: Rotation,
    ) -> Result<Tensor> {
        match self.0 {}
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn affine(
        self,
        _: &'static str,
        _: Input<'_>,
        _: Tensor,
        _: Weight,
        _: Option<Weight>,
        _: bool,
        _: Option<Float8Recipe>,
    ) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn float8_output(self, _: &Tensor, _: &Tensor, _: bool, _: Float8Recipe) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn choose_experts(self, _: &Tensor, _: usize) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn is_one_operation(self, _: &[[&Tensor; 3]]) -> bool {
        match self.0 {}
    }

    pub(super) fn mixture(
        self,
        _: &'static str,
        _: &Tensor,
        _: &[[&Tensor; 3]],
        _: &Tensor,
        _: &Tensor,
    ) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn lookup(self, _: Tensor, _: Weight, _: &Tensor) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn cross_entropy(self, _: &'static str, _: &Tensor, _: TargetRows) -> Result<Tensor> {
        match self.0 {}
    }

    pub(super) fn linear_cross_entropy(
        self,
        _: &'static str,
        _: Input<'_>,
        _: Weight,
        _: Option<Weight>,
        _: TargetRows,
    ) -> Result<Tensor> {
        match self.0 {}
    }
}
