//! Values that contain tensors: the inputs and outputs of forwards.

use candle_core::{Result, Tensor};
use candle_nn::rnn::{GRUState, LSTMState};

/// A value whose tensors can be replaced one by one: tensors, states of recurrent layers, and tuples, vectors and
/// options of them. Implement it for your own types that your forwards take or return.
///
/// ```
/// use candle_core::{Result, Tensor};
/// use fsdp_candle::Tensors;
///
/// struct Routed {
///     hidden: Tensor,
///     experts: Vec<usize>,
/// }
///
/// impl Tensors for Routed {
///     fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
///         Ok(Routed { hidden: f(self.hidden)?, experts: self.experts })
///     }
/// }
/// # let hidden = Tensor::ones(2, candle_core::DType::F32, &candle_core::Device::Cpu)?;
/// # let routed = Routed { hidden, experts: vec![1] };
/// # let doubled = routed.map_tensors(&mut |tensor| tensor * 2.)?;
/// # assert_eq!((doubled.hidden.to_vec1::<f32>()?, doubled.experts), (vec![2.; 2], vec![1]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Tensors: Sized {
    /// Replaces each tensor by the result of `f`.
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

/// Returns a value and its tensors.
pub(crate) fn with_tensors<T: Tensors>(value: T) -> Result<(T, Vec<Tensor>)> {
    let mut tensors = vec![];
    let value = value.map_tensors(&mut |tensor| {
        tensors.push(tensor.clone());
        Ok(tensor)
    })?;
    Ok((value, tensors))
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

macro_rules! tuples {
    ($(($($name:ident)*))*) => {$(
        impl<$($name: Tensors),*> Tensors for ($($name,)*) {
            #[allow(non_snake_case)]
            fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
                let ($($name,)*) = self;
                Ok(($($name.map_tensors(f)?,)*))
            }
        }
    )*};
}

tuples! { (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }

impl Tensors for LSTMState {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(LSTMState { h: f(self.h)?, c: f(self.c)? })
    }
}

impl Tensors for GRUState {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(GRUState { h: f(self.h)? })
    }
}
