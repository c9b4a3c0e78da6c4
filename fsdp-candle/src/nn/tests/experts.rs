//! Mixtures of experts: beside every expert on every token, and beside f64.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::{SwiGlu, choose_experts, mixture_of_experts};
use super::swiglu::{layer, layer_of, reference, weights};
use super::{Choices, DTYPES, bits, check, compare_within, cuda_device, message, random, run, tolerance};

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

/// The distribution of tokens over experts.
#[derive(Clone, Copy, Debug)]
enum Skew {
    Even,
    /// The last experts have none.
    Unused,
    /// One expert has a route of each token.
    One,
}

/// A mixture with random routes.
#[derive(Debug)]
pub(super) struct Mixture {
    tokens: usize,
    experts: usize,
    per_token: usize,
    /// Widths of the input, of the experts and of the output.
    widths: [usize; 3],
    /// Dtype of the experts' numbers, and whether they are on the host.
    numbers: (DType, bool),
    chosen: Vec<u32>,
}

impl Mixture {
    fn new(choices: &mut Choices, [tokens, experts, per_token]: [usize; 3], widths: [usize; 3], skew: Skew) -> Self {
        let used = if matches!(skew, Skew::Unused) { experts.div_ceil(2).max(per_token) } else { experts };
        let favoured = choices.between(0, used - 1) as u32;
        let mut chosen = vec![];
        for _ in 0..tokens {
            let mut left: Vec<u32> = (0..used as u32).collect();
            let mut own = vec![];
            if matches!(skew, Skew::One) {
                own.push(left.remove(favoured as usize));
            }
            while own.len() < per_token {
                own.push(left.remove(choices.between(0, left.len() - 1)));
            }
            chosen.extend(own);
        }
        let numbers = (choices.one_of(&[DType::U8, DType::U32, DType::I64]), choices.between(0, 1) == 0);
        Mixture { tokens, experts, per_token, widths, numbers, chosen }
    }

    /// Returns a mixture whose products cuBLAS may group, if widths are multiples of 8, or may not.
    pub(super) fn random(choices: &mut Choices) -> Self {
        let experts = choices.between(1, 7);
        let sizes = [choices.between(1, 5) * choices.between(1, 80), experts, choices.between(1, experts.min(3))];
        let unit = choices.one_of(&[1, 4, 8]);
        let widths = std::array::from_fn(|_| unit * choices.between(1, 6));
        let skew = choices.one_of(&[Skew::Even, Skew::Unused, Skew::One]);
        Mixture::new(choices, sizes, widths, skew)
    }

    /// Returns the input, the routes' weights, and each expert's weights.
    pub(super) fn inputs(&self, dtype: DType) -> Vec<Var> {
        let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
        let mut inputs = vec![random(1, &[self.tokens, self.widths[0]], dtype)];
        inputs.push(random(2, &[self.tokens, self.per_token], wide));
        inputs.extend((0..self.experts as u64).flat_map(|i| weights(10 + 3 * i, self.widths, dtype)));
        inputs
    }

    pub(super) fn forward(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let experts: Vec<SwiGlu> = inputs[2..].chunks(3).map(layer_of).collect();
        let device = if self.numbers.1 { &Device::Cpu } else { inputs[0].device() };
        let chosen = Tensor::from_slice(&self.chosen, (self.tokens, self.per_token), &Device::Cpu)?;
        let chosen = chosen.to_dtype(self.numbers.0)?.to_device(device)?;
        mixture_of_experts(&inputs[0], &experts, &chosen, &inputs[1])
    }

    /// Compares with f64, and computes twice.
    fn check(&self, dtype: DType, device: &Device) {
        let (what, inputs) = (format!("{self:?}"), self.inputs(dtype));
        let found = compare_within(&what, tolerance(dtype), device, &inputs, |x| self.forward(x));
        let again = run(&what, &inputs, &|x| x.to_device(device), &|x| self.forward(x));
        assert!(found.iter().map(bits).eq(again.iter().map(bits)), "{what} {dtype:?}: other bits");
    }
}

fn devices() -> impl Iterator<Item = Device> {
    std::iter::once(Device::Cpu).chain(cuda_device())
}

#[test]
fn random_mixtures_match_f64_and_repeat_their_bits() {
    for device in devices() {
        for seed in 0..48 {
            let mut choices = Choices(seed);
            let dtype = DTYPES[seed as usize % DTYPES.len()];
            Mixture::random(&mut choices).check(dtype, &device);
        }
    }
}

/// More routes than a block sorts at once, more experts than a warp has threads, rows that a block shares, and one
/// expert.
#[test]
fn large_mixtures_match_f64() {
    for device in devices() {
        for (sizes, widths) in [
            ([700, 40, 2], [8, 16, 24]),
            ([300, 3, 1], [5, 3, 7]),
            ([20, 4, 2], [16, 1032, 8]),
            ([20, 4, 2], [3, 1030, 5]),
            ([9, 1, 1], [16, 8, 16]),
        ] {
            for (skew, dtype) in [(Skew::Even, DType::F32), (Skew::One, DType::BF16), (Skew::Unused, DType::F64)] {
                Mixture::new(&mut Choices(3), sizes, widths, skew).check(dtype, &device);
            }
        }
    }
}

#[test]
fn a_mixture_of_no_tokens_gives_experts_zeros() {
    for device in devices() {
        for dtype in DTYPES {
            let mixture = Mixture::new(&mut Choices(2), [0, 3, 2], [8, 16, 5], Skew::Even);
            let inputs = mixture.inputs(dtype);
            let vars: Vec<Var> =
                inputs.iter().map(|x| Var::from_tensor(&x.to_device(&device).unwrap()).unwrap()).collect();
            let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let y = mixture.forward(&tensors).unwrap();
            assert_eq!(y.dims(), [0, 5]);
            let grads = y.sum_all().unwrap().backward().unwrap();
            for weight in &vars[2..] {
                let grad = grads.get(weight).unwrap();
                assert_eq!(bits(grad), vec![0; weight.elem_count()], "{dtype:?} on {:?}", device.location());
            }
        }
    }
}

/// An input, route weights and experts without gradients.
#[test]
fn constants_of_a_mixture_get_no_gradient() {
    for device in devices() {
        let mixture = Mixture::new(&mut Choices(5), [12, 4, 2], [8, 8, 8], Skew::Even);
        let inputs = mixture.inputs(DType::F32);
        let all = run("all", &inputs, &|x| x.to_device(&device), &|x| mixture.forward(x));
        for constant in 0..inputs.len() {
            let vars: Vec<Var> =
                inputs.iter().map(|x| Var::from_tensor(&x.to_device(&device).unwrap()).unwrap()).collect();
            let is_constant = |i: usize| i == constant || (constant == 2 && i > 2);
            let tensors: Vec<Tensor> = vars
                .iter()
                .enumerate()
                .map(|(i, var)| if is_constant(i) { var.as_detached_tensor() } else { var.as_tensor().clone() })
                .collect();
            let y = mixture.forward(&tensors).unwrap();
            assert_eq!(bits(&y.detach()), bits(&all[0]));
            let grads = y.sum_all().unwrap().backward().unwrap();
            for (i, var) in vars.iter().enumerate() {
                assert_eq!(grads.get(var).is_some(), !is_constant(i), "input {i}, constant {constant}");
            }
        }
    }
}

#[test]
fn the_first_of_equal_experts_is_chosen() {
    for device in devices() {
        let rows =
            [[0.1f32, 0.6, 0.0, 0.3], [0.5, 0.5, 0.0, -0.0], [0.3, 0.0, 0.0, 0.7], [f32::NAN, 1.0, f32::NAN, 0.]];
        let chosen = |count| choose_experts(&Tensor::new(&rows, &device)?, count)?.to_vec2::<u32>();
        assert_eq!(chosen(2).unwrap(), [[1, 3], [0, 1], [3, 0], [0, 2]]);
        assert_eq!(chosen(4).unwrap(), [[1, 3, 0, 2], [0, 1, 2, 3], [3, 0, 1, 2], [0, 2, 1, 3]]);
        let m = message(Tensor::new(&rows, &device).and_then(|rows| choose_experts(&rows, 5)));
        assert!(m.contains("choose_experts: 5 experts of 4 by probabilities of F32"), "{m}");
        let m = message(Tensor::new(&[[1f64]], &device).and_then(|rows| choose_experts(&rows, 1)));
        assert!(m.contains("the dtype must be F32"), "{m}");
        let nothing = Tensor::zeros((0, 3), DType::F32, &device).unwrap();
        assert_eq!(choose_experts(&nothing, 2).unwrap().dims(), [0, 2]);
        // More experts than a warp has threads, with equal ones.
        let many = Tensor::from_iter((0..5 * 77).map(|i| (i * 31 % 23) as f32), &device).unwrap();
        let many = many.reshape((5, 77)).unwrap();
        let host = many.to_device(&Device::Cpu).unwrap();
        let of = |values: &Tensor| choose_experts(values, 40).unwrap().to_vec2::<u32>().unwrap();
        assert_eq!(of(&many), of(&host));
    }
}

/// A device names the number as the CPU does, also if the host has not read it.
#[test]
fn numbers_of_no_expert_are_named_on_devices() {
    for device in devices() {
        let inputs = Mixture::new(&mut Choices(1), [5, 4, 2], [8, 8, 8], Skew::Even).inputs(DType::F32);
        let inputs: Vec<Tensor> = inputs.iter().map(|x| x.to_device(&device).unwrap()).collect();
        let experts: Vec<SwiGlu> = inputs[2..].chunks(3).map(layer_of).collect();
        let refused = |chosen: Tensor| message(mixture_of_experts(&inputs[0], &experts, &chosen, &inputs[1]));
        let of = |number: i64| Tensor::new(&[[0, 1], [1, 2], [3, number], [0, 1], [2, 3]], &device).unwrap();
        for number in [-1, 4, 1 << 32] {
            let m = refused(of(number));
            let expected = format!("expert {number} (element 5 of 10) is out of range: the number of experts is 4");
            assert!(m.contains(&expected), "{m}");
        }
        let m = refused(of(0).to_dtype(DType::F32).unwrap());
        assert!(m.contains("experts must be u8, u32 or i64, found F32"), "{m}");
    }
}
