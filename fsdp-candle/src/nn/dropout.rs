//! Dropout whose mask backward draws again, as `candle_nn::Dropout` with a mask that is kept.

use candle_core::{DType, ModuleT, Result, Tensor, bail};

use super::cpu::parallel::map_rows;
use super::cpu::values::{floats, served, storage};
use crate::kernels::{Backward, node};
use crate::random::Mask;
use crate::storage::take;

/// Sets elements to 0 with the probability `drop_p`, in `[0, 1)`, and multiplies the others by `1 / (1 - drop_p)`. Any
/// shape and float dtype. What is dropped follows from this thread's [random state](crate::random), and is kept
/// nowhere.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::{nn::ops::dropout, random};
///
/// random::manual_seed(3);
/// let y = dropout(&Tensor::ones(1000, DType::F32, &Device::Cpu)?, 0.5)?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|y| *y == 0. || *y == 2.));
/// assert!((400..600).contains(&y.iter().filter(|y| **y == 0.).count()));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the probability is not in `[0, 1)`, or `xs` can't be the [part](crate::random::Part) that it is said to be.
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    dropped(xs, check("dropout", f64::from(drop_p))?)
}

/// The probability, if it is one that elements can be dropped with.
pub(in crate::nn) fn check(function: &str, probability: f64) -> Result<f64> {
    if !(0. ..1.).contains(&probability) {
        bail!("{function}: the probability of dropping an element must be in [0, 1), found {probability}")
    }
    Ok(probability)
}

/// [`dropout`] with a probability that was checked.
pub(in crate::nn) fn dropped(xs: &Tensor, probability: f64) -> Result<Tensor> {
    if probability == 0. {
        return Ok(xs.clone());
    }
    if !xs.dtype().is_float() {
        bail!("dropout: the input must be of floats, found {:?}", xs.dtype())
    }
    let mask = Dropped(Mask::draw(probability, xs.dims())?);
    let y = mask.apply(xs)?;
    node(xs, take(&y)?, xs.shape().clone(), mask)
}

struct Dropped(Mask);

impl Dropped {
    /// The tensor with what is dropped set to 0, in memory of its own and outside the graph.
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let elements = x.elem_count();
        let apply = |values: &mut [f32]| {
            map_rows(values, 1, 1, |first, values| self.0.apply(first, values));
        };
        if served(x) {
            let (guard, layout) = x.storage_and_layout();
            let candle_core::Storage::Cpu(cpu) = &*guard else { bail!("dropout: the input left the host") };
            let mut values = floats(cpu, layout)?.into_owned();
            apply(&mut values);
            let storage = candle_core::Storage::Cpu(storage(values, x.dtype())?);
            let none = candle_core::op::BackpropOp::none();
            return Ok(Tensor::from_storage(storage, x.shape().clone(), none, false));
        }
        let mut mask = vec![1f32; elements];
        apply(&mut mask);
        let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let mask = Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(wide)?;
        x.detach().to_dtype(wide)?.mul(&mask)?.to_dtype(x.dtype())
    }
}

impl Backward for Dropped {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn backward(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.apply(gradient).map(Some)
    }
}

/// [`dropout`] as a layer.
///
/// ```
/// use candle_core::{Device, ModuleT, Tensor};
/// use fsdp_candle::nn::Dropout;
///
/// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = Dropout::new(0.5).forward_t(&x, false)?; // not while training: nothing is dropped
/// assert_eq!(y.to_vec1::<f32>()?, [1., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// A layer that drops elements with this probability.
    pub fn new(drop_p: f32) -> Dropout {
        Dropout { drop_p }
    }

    /// Drops elements while training, and none else.
    ///
    /// # Errors
    /// As those of [`dropout`].
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train { dropout(xs, self.drop_p) } else { Ok(xs.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}
