//! Values that contain tensors: the inputs and outputs of forwards.

use candle_core::{Result, Tensor};
use candle_nn::rnn::{GRUState, LSTMState};

/// A value whose tensors can be replaced one by one: tensors, states of recurrent layers, and tuples, vectors and
/// options of them. Derive it for your own types that your forwards take or return, as PyTorch finds tensors in
/// dataclasses. Fields without tensors have the attribute `#[tensors(skip)]`.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// use fsdp_candle::Tensors;
///
/// #[derive(Tensors)]
/// struct Routed {
///     hidden: Tensor,
///     scores: Option<Tensor>,
///     #[tensors(skip)]
///     experts: Vec<usize>,
/// }
///
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// let routed = model.call(|layer| {
///     let hidden = layer.forward(&x)?;
///     Ok::<_, candle_core::Error>(Routed { hidden, scores: None, experts: vec![1] })
/// })?;
/// assert_eq!(routed.experts, [1]);
/// let grads = model.backward(&routed.hidden.sum_all()?)?;
/// # let doubled = routed.map_tensors(&mut |tensor| tensor * 2.)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say where its tensors are",
    note = "derive `Tensors` for your own type, and mark a field without tensors by `#[tensors(skip)]`"
)]
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
