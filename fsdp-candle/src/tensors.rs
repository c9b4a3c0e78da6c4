//! Values made of tensors: what forwards take and return.

use candle_core::{Result, Tensor};

/// A value whose tensors can be replaced one by one. Implement it for a type of your own that a forward takes or returns.
pub trait Tensors: Sized {
    /// Replaces each tensor by what `f` makes of it.
    ///
    /// # Errors
    /// Those of `f`.
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Tensors for Tensor {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
}

impl Tensors for () {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(())
    }
}

impl<T: Tensors> Tensors for Option<T> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.map(|value| value.map_tensors(f)).transpose()
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter().map(|value| value.map_tensors(f)).collect()
    }
}

impl<A: Tensors, B: Tensors> Tensors for (A, B) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?))
    }
}

impl<A: Tensors, B: Tensors, C: Tensors> Tensors for (A, B, C) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?, self.2.map_tensors(f)?))
    }
}
