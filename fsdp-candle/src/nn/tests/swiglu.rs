use candle_core::{DType, Device, Module, Result, Tensor, Var};

use super::super::{Linear, SwiGlu, linear as linear_file, mixture_of_experts};
use super::{DTYPES, assert_close, check, message, random};

fn layer(weights: &[Var]) -> SwiGlu {
    let linear = |weight: &Var| Linear::new(weight.as_tensor().clone(), None);
    SwiGlu::new(linear(&weights[0]), linear(&weights[1]), linear(&weights[2]))
}

fn weights(seed: u64, [inputs, inner, outputs]: [usize; 3], dtype: DType) -> Vec<Var> {
    let shapes = [[inner, inputs], [inner, inputs], [outputs, inner]];
    (seed..).zip(shapes).map(|(seed, shape)| random(seed, &shape, dtype)).collect()
}

/// The layer as a chain of Candle's operations.
fn reference(x: &Tensor, weights: &[Var]) -> Result<Tensor> {
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

/// Four experts, of which the third has no token, and all tokens of the first are the last.
fn chosen() -> Tensor {
    Tensor::new(&[[1u32, 3], [3, 1], [1, 3], [3, 1], [0, 3]], &Device::Cpu).unwrap()
}

#[test]
fn mixtures_match_every_expert_on_every_token() {
    for dtype in DTYPES {
        let x = random(1, &[5, 6], dtype);
        let experts: Vec<Vec<Var>> = (0..4).map(|i| weights(10 + 3 * i, [6, 8, 4], dtype)).collect();
        let of_routes = random(2, &[5, 2], DType::F32);
        let vars: Vec<&Var> = [&x, &of_routes].into_iter().chain(experts.iter().flatten()).collect();
        let layers: Vec<SwiGlu> = experts.iter().map(|expert| layer(expert)).collect();
        let every = || {
            // [N, E]: the weight of each expert, or zero.
            let one_hot = candle_nn::encoding::one_hot(chosen(), 4, 1f32, 0f32)?;
            let dense = one_hot.broadcast_mul(&of_routes.unsqueeze(2)?)?.sum(1)?.to_dtype(dtype)?;
            let outputs = experts
                .iter()
                .enumerate()
                .map(|(i, expert)| reference(&x, expert)?.broadcast_mul(&dense.narrow(1, i, 1)?));
            outputs.reduce(|a, b| a? + b?).unwrap()
        };
        check(&format!("{dtype:?}"), &vars, || mixture_of_experts(&x, &layers, &chosen(), &of_routes), every);
    }
}

#[test]
fn mixtures_refuse_what_does_not_fit() {
    let experts: Vec<SwiGlu> = (0..4).map(|i| layer(&weights(10 + i, [6, 8, 6], DType::F32))).collect();
    let (x, of_routes) = (random(1, &[5, 6], DType::F32), random(2, &[5, 2], DType::F32));
    let m = message(mixture_of_experts(&x, &experts[..3], &chosen(), &of_routes));
    assert!(m.contains("expert 3 (element 1 of 10) is out of range: the number of experts is 3"), "{m}");
    let m = message(mixture_of_experts(&x, &experts, &chosen(), &random(2, &[5, 3], DType::F32)));
    assert!(m.contains("chosen [5, 2] and weights [5, 3] do not fit the input [5, 6]"), "{m}");
    let m = message(mixture_of_experts(&x, &[], &chosen(), &of_routes));
    assert!(m.contains("0 experts"), "{m}");
}
