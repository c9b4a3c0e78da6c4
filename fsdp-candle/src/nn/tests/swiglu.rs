use candle_core::{DType, Module, Result, Tensor, Var};

use super::super::{Linear, SwiGlu, linear as linear_file};
use super::{DTYPES, assert_close, check, message, random};

pub(super) fn layer(weights: &[Var]) -> SwiGlu {
    layer_of(&weights.iter().map(|weight| weight.as_tensor().clone()).collect::<Vec<_>>())
}

/// Returns the layer of weights for gate, up and down.
pub(super) fn layer_of(weights: &[Tensor]) -> SwiGlu {
    let linear = |weight: &Tensor| Linear::new(weight.clone(), None);
    SwiGlu::new(linear(&weights[0]), linear(&weights[1]), linear(&weights[2]))
}

pub(super) fn weights(seed: u64, [inputs, inner, outputs]: [usize; 3], dtype: DType) -> Vec<Var> {
    let shapes = [[inner, inputs], [inner, inputs], [outputs, inner]];
    (seed..).zip(shapes).map(|(seed, shape)| random(seed, &shape, dtype)).collect()
}

/// The layer as a chain of Candle's operations.
pub(super) fn reference(x: &Tensor, weights: &[Var]) -> Result<Tensor> {
    let linear = |x: &Tensor, weight: &Var| linear_file::composite(x, weight, None, false);
    linear(&(linear(x, &weights[0])?.silu()? * linear(x, &weights[1])?)?, &weights[2])
}

#[test]
fn swiglu_matches_the_composite() {
    for dtype in DTYPES {
        for (shape, dims) in
            [(vec![2, 5, 6], [6, 8, 6]), (vec![3, 7], [7, 5, 4]), (vec![1], [1, 1, 1]), (vec![150, 64], [64, 300, 64])]
        {
            let (x, weights) = (random(1, &shape, dtype), weights(2, dims, dtype));
            let vars: Vec<&Var> = std::iter::once(&x).chain(&weights).collect();
            check(&format!("{shape:?}"), &vars, || layer(&weights).forward(&x), || reference(&x, &weights));
        }
        let (x, weights) = (random(1, &[6, 4], dtype), weights(2, [6, 5, 6], dtype));
        check("a view", &[&x], || layer(&weights).forward(&x.t()?), || reference(&x.t()?, &weights));
    }
}

#[test]
fn no_rows_give_weights_zeros() {
    let (x, weights) = (random(1, &[0, 6], DType::F32), weights(2, [6, 5, 4], DType::F32));
    let y = layer(&weights).forward(&x).unwrap();
    assert_eq!(y.dims(), [0, 4]);
    let grads = y.sum_all().unwrap().backward().unwrap();
    for weight in &weights {
        let gradient = grads.get(weight).unwrap();
        assert_eq!(gradient.dims(), weight.dims());
        assert_eq!(gradient.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.);
    }
}

#[test]
fn a_constant_input_of_swiglu_gets_no_gradient() {
    let (x, weights) = (random(1, &[4, 6], DType::F32).as_detached_tensor(), weights(2, [6, 5, 6], DType::F32));
    let grads = layer(&weights).forward(&x).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&x).is_none());
    let expected = reference(&x, &weights).unwrap().sum_all().unwrap().backward().unwrap();
    for weight in &weights {
        assert_close("weight", grads.get(weight).unwrap(), expected.get(weight).unwrap(), 1e-5);
    }
}

#[test]
fn weights_of_swiglu_that_do_not_fit_are_named_by_their_layer() {
    let mut weights = weights(1, [6, 5, 4], DType::F32);
    let x = random(2, &[3, 7], DType::F32);
    let m = message(layer(&weights).forward(&x));
    assert!(m.contains("Linear: the input [3, 7] must end in 6"), "{m}");
    weights[1] = random(3, &[6, 6], DType::F32);
    let m = message(layer(&weights).forward(&random(2, &[3, 6], DType::F32)));
    assert!(m.contains("silu_mul: gate [3, 5] and up [3, 6]"), "{m}");
}
