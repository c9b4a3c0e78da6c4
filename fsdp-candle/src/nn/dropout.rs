//! Dropout. It keeps no mask: backward draws it again from the random state.

use candle_core::{DType, ModuleT, Result, Tensor, bail};

use super::cpu::{map_rows, tensor_like, to_vec};
use super::cuda::Cuda;
use super::weight::has_cpu_kernels;
use crate::context_parallel::Positions;
use crate::graph::{Reads, graph_op};
use crate::random::Mask;
use crate::storage::take;

/// Sets elements to 0 with the probability `drop_p`, in `[0, 1)`, and multiplies the others by `1 / (1 - drop_p)`. The
/// input has any shape and float dtype. The dropped elements follow from this thread's [random state](crate::random),
/// and no mask is kept. Fails if the probability is not in `[0, 1)`, or `xs` is not of the size that its
/// [part](crate::random::Part) implies.
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
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    drop_elements(xs, check_probability("dropout", f64::from(drop_p))?)
}

/// Returns the probability if it is in `[0, 1)`.
pub(super) fn check_probability(function: &str, probability: f64) -> Result<f64> {
    if !(0. ..1.).contains(&probability) {
        bail!("{function}: the probability of dropping an element must be in [0, 1), found {probability}")
    }
    Ok(probability)
}

/// [`dropout`] with a checked probability.
pub(super) fn drop_elements(xs: &Tensor, probability: f64) -> Result<Tensor> {
    if probability == 0. {
        return Ok(xs.clone());
    }
    if !xs.dtype().is_float() {
        bail!("dropout: the input must have a float dtype, found {:?}", xs.dtype())
    }
    drop_by(xs, Mask::draw(probability, xs.dims())?)
}

/// [`drop_elements`] for probabilities of attention, whose queries are at these positions.
pub(super) fn drop_probabilities(xs: &Tensor, probability: f64, queries: Option<Positions>) -> Result<Tensor> {
    if probability == 0. {
        return Ok(xs.clone());
    }
    drop_by(xs, Mask::draw_at(probability, xs.dims(), queries)?)
}

/// Drops the elements of a draw.
fn drop_by(xs: &Tensor, mask: Mask) -> Result<Tensor> {
    let y = dropped(xs, &mask)?;
    graph_op("dropout", &[xs], take(&y)?, xs.shape(), Reads::Nothing, move |_, _, dy| Ok([Some(dropped(dy, &mask)?)]))
}

/// Returns the tensor with the dropped elements set to 0, in its own memory and outside the graph.
fn dropped(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let apply = |values: &mut [f32]| {
        map_rows(values, 1, 1, |first, values| mask.apply(first, values));
    };
    if has_cpu_kernels(x) {
        let mut values = to_vec(x)?;
        apply(&mut values);
        return tensor_like(values, x);
    }
    if let Some(cuda) = Cuda::of(x) {
        return cuda.dropped(x, mask);
    }
    let mut mask = vec![1f32; x.elem_count()];
    apply(&mut mask);
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mask = Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(wide)?;
    x.detach().to_dtype(wide)?.mul(&mask)?.to_dtype(x.dtype())
}

/// [`dropout`] as a layer.
///
/// ```
/// use candle_core::{Device, ModuleT, Tensor};
/// use fsdp_candle::nn::Dropout;
///
/// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = Dropout::new(0.5).forward_t(&x, false)?; // in evaluation, nothing is dropped
/// assert_eq!(y.to_vec1::<f32>()?, [1., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// Returns a layer that drops elements with this probability.
    pub fn new(drop_p: f32) -> Dropout {
        Dropout { drop_p }
    }

    /// Drops elements if `train`, else returns `xs`. Errors: see [`dropout`].
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train { dropout(xs, self.drop_p) } else { Ok(xs.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}
