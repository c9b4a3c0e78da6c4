//! Mixtures of experts and other functions on no rows: empty outputs, and gradients of zeros, in every dtype.

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use fsdp_candle::nn::{self, Activation, Linear, SwiGlu};

const DEVICE: Device = Device::Cpu;
/// Width of the inputs.
const C: usize = 6;

/// A function of an input and parameters.
type Function = Box<dyn Fn(&Tensor, &[Tensor]) -> Result<Tensor>>;

struct Case {
    name: &'static str,
    input: Vec<usize>,
    params: Vec<Vec<usize>>,
    output: Vec<usize>,
    function: Function,
}

fn case(
    name: &'static str,
    input: &[usize],
    params: &[&[usize]],
    output: &[usize],
    function: impl Fn(&Tensor, &[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    let params = params.iter().map(|dims| dims.to_vec()).collect();
    Case { name, input: input.to_vec(), params, output: output.to_vec(), function: Box::new(function) }
}

fn experts(params: &[Tensor], with_bias: bool) -> Vec<SwiGlu> {
    let linear = |weight: &Tensor| {
        let bias = with_bias.then(|| Tensor::ones(weight.dim(0)?, weight.dtype(), &DEVICE)).transpose()?;
        Result::Ok(Linear::new(weight.clone(), bias))
    };
    let expert = |of: &[Tensor]| Result::Ok(SwiGlu::new(linear(&of[0])?, linear(&of[1])?, linear(&of[2])?));
    params.chunks(3).map(|of| expert(of).unwrap()).collect()
}

fn cases() -> Vec<Case> {
    let mlp: &[&[usize]] = &[&[8, C], &[8, C], &[5, 8]];
    let two_mlps = &[mlp, mlp].concat()[..];
    let mixture = |with_bias: bool| {
        move |x: &Tensor, params: &[Tensor]| {
            let chosen = Tensor::zeros((0, 2), DType::U32, &DEVICE)?;
            nn::mixture_of_experts(x, &experts(params, with_bias), &chosen, &Tensor::zeros((0, 2), x.dtype(), &DEVICE)?)
        }
    };
    let moe_gemm = |weighted: bool| {
        move |x: &Tensor, params: &[Tensor]| {
            let ids = Tensor::zeros(0, DType::U32, &DEVICE)?;
            let weights = weighted.then(|| Tensor::zeros((0, 2), DType::F32, &DEVICE)).transpose()?;
            nn::moe::moe_gemm(x, &params[0], &weights, &ids, &ids, 2, true)
        }
    };
    vec![
        case("Linear", &[0, C], &[&[5, C]], &[0, 5], |x, p| Linear::new(p[0].clone(), None).forward(x)),
        case("mixture_of_experts", &[0, C], two_mlps, &[0, 5], mixture(false)),
        case("mixture_of_experts with biases", &[0, C], two_mlps, &[0, 5], mixture(true)),
        case("moe_gemm", &[0, C], &[&[3, 5, C]], &[0, 5], moe_gemm(false)),
        case("moe_gemm with weights", &[0, C], &[&[3, 5, C]], &[0, 5], moe_gemm(true)),
        case("silu", &[0, C], &[], &[0, C], |x, _| nn::silu(x)),
        case("gelu", &[0, C], &[], &[0, C], |x, _| nn::gelu(x)),
        case("gelu_erf", &[0, C], &[], &[0, C], |x, _| nn::gelu_erf(x)),
        case("silu_mul", &[0, C], &[], &[0, C], |x, _| nn::silu_mul(x, &(x * 2.)?)),
        case("mish", &[0, C], &[], &[0, C], |x, _| Activation::Mish.forward(x)),
        case("add", &[0, C], &[], &[0, C], |x, _| nn::add(x, &(x * 2.)?)),
        case("dropout", &[0, C], &[], &[0, C], |x, _| nn::Dropout::new(0.5).forward_t(x, true)),
        case("rope", &[0, 2, 4, C], &[], &[0, 2, 4, C], |x, _| {
            let angles = Tensor::ones((4, C / 2), x.dtype(), &DEVICE)?;
            nn::rotary_emb::rope(x, &angles, &angles)
        }),
        case("Conv2d", &[0, 3, 8, 8], &[&[5, 3, 2, 2]], &[0, 5, 7, 7], |x, p| {
            nn::Conv2d::new(p[0].clone(), None, Default::default()).forward(x)
        }),
        case("depthwise Conv1d", &[0, 3, 8], &[&[3, 1, 2]], &[0, 3, 7], |x, p| {
            nn::Conv1d::new(p[0].clone(), None, nn::Conv1dConfig { groups: 3, ..Default::default() }).forward(x)
        }),
        case("ConvTranspose2d", &[0, 3, 8, 8], &[&[3, 5, 2, 2]], &[0, 5, 9, 9], |x, p| {
            nn::ConvTranspose2d::new(p[0].clone(), None, Default::default()).forward(x)
        }),
        case("softmax_last_dim", &[0, C], &[], &[0, C], |x, _| nn::ops::softmax_last_dim(x)),
        case("softmax", &[0, C], &[], &[0, C], |x, _| nn::ops::softmax(x, 1)),
        case("swiglu", &[0, C], &[], &[0, C / 2], |x, _| nn::ops::swiglu(x)),
        case("LayerNorm", &[0, C], &[&[C], &[C]], &[0, C], |x, p| {
            nn::LayerNorm::new(p[0].clone(), p[1].clone(), 1e-5).forward(x)
        }),
        case("RmsNorm", &[0, C], &[&[C]], &[0, C], |x, p| nn::RmsNorm::new(p[0].clone(), 1e-5).forward(x)),
        case("GroupNorm", &[0, C, 4], &[&[C], &[C]], &[0, C, 4], |x, p| {
            nn::GroupNorm::new(p[0].clone(), p[1].clone(), C, 2, 1e-5)?.forward(x)
        }),
        case("Rotary", &[0, 2, 4, C], &[], &[0, 2, 4, C], |x, _| nn::Rotary::new(1e4, C, 8, &DEVICE)?.apply(x, 0)),
        case("attention", &[0, 4, 8], &[], &[0, 4, 8], |x, _| {
            nn::attention(x, &(x * 2.)?, x, 2, 2, &nn::AttentionOptions::causal(0.5))
        }),
        case("max_pool2d", &[0, 3, 8, 8], &[], &[0, 3, 4, 4], |x, _| nn::max_pool2d(x, 2)),
        case("avg_pool2d", &[0, 3, 8, 8], &[], &[0, 3, 4, 4], |x, _| nn::avg_pool2d(x, 2)),
    ]
}

/// Checks one case. Returns what is wrong.
fn check(case: &Case, dtype: DType) -> std::result::Result<(), String> {
    let text = |error: candle_core::Error| error.to_string().lines().next().unwrap_or_default().to_owned();
    let var = |dims: &Vec<usize>| Var::ones(dims.as_slice(), dtype, &DEVICE).unwrap();
    let (input, params) = (var(&case.input), case.params.iter().map(var).collect::<Vec<_>>());
    let tensors: Vec<Tensor> = params.iter().map(|param| param.as_tensor().clone()).collect();
    let y = (case.function)(input.as_tensor(), &tensors).map_err(|error| format!("forward: {}", text(error)))?;
    if y.dims() != case.output {
        return Err(format!("the output is {:?}, expected {:?}", y.dims(), case.output));
    }
    let loss = y.sum_all().and_then(|sum| sum.to_dtype(DType::F32)).map_err(text)?;
    let value = loss.to_scalar::<f32>().map_err(text)?;
    if value != 0. {
        return Err(format!("the sum of the outputs is {value}"));
    }
    let grads = loss.backward().map_err(|error| format!("backward: {}", text(error)))?;
    for (at, var) in std::iter::once(&input).chain(&params).enumerate() {
        let Some(grad) = grads.get(var) else { return Err(format!("argument {at} has no gradient")) };
        let grad_values =
            grad.to_dtype(DType::F64).and_then(|grad| grad.flatten_all()?.to_vec1::<f64>()).map_err(text)?;
        if grad.dims() != var.dims() || grad_values.iter().any(|value| *value != 0.) {
            return Err(format!("argument {at} has the gradient {grad_values:?} of {:?}", grad.dims()));
        }
    }
    Ok(())
}

#[test]
fn no_rows_give_empty_outputs_and_gradients_of_zeros() {
    let mut wrong = vec![];
    for case in cases() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            if let Err(why) = check(&case, dtype) {
                wrong.push(format!("{} in {}: {why}", case.name, dtype.as_str()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
