//! Compares every layer with a chain of Candle's differentiable operations: values and all gradients.

mod attention;
#[cfg(feature = "cuda")]
mod devices;
mod experts;
mod float8;
mod layers;
mod loss;
mod mirror;
#[cfg(feature = "cuda")]
mod random_on_devices;
mod sinks;
mod swiglu;

use candle_core::{DType, Device, Result, Tensor, Var};

/// Returns a CUDA device, if there is one. The device double has eight.
fn cuda_device() -> Option<Device> {
    use crate::kernels::{candle_device, device_count};

    device_count().is_ok_and(|count| count > 0).then(|| candle_device(0).unwrap())
}

/// Returns a repeatable variable with roughly normal values (sums of uniform ones).
fn random(seed: u64, shape: &[usize], dtype: DType) -> Var {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| 2.0 * (uniform() + uniform() + uniform())).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    Var::from_tensor(&tensor).unwrap()
}

/// Returns repeatable u32 values below `bound`.
fn random_ids(seed: u64, shape: &[usize], bound: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let ids: Vec<u32> =
        (0..count as u64).map(|i| ((i * 2_654_435_761 + seed * 40_503) % bound as u64) as u32).collect();
    Tensor::from_vec(ids, shape, &Device::Cpu).unwrap()
}

/// A repeatable source of choices.
struct Choices(u64);

impl Choices {
    fn between(&mut self, least: usize, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        least + (self.0 >> 33) as usize % (most - least + 1)
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.between(0, list.len() - 1)]
    }

    #[cfg(feature = "cuda")]
    fn maybe<T>(&mut self, value: T) -> Option<T> {
        (self.between(0, 2) == 0).then_some(value)
    }
}

/// Returns the positions of each row of `x`, from an offset on.
fn positions(offset: usize, x: &Tensor) -> Vec<u32> {
    let (batch, steps) = (x.dim(0).unwrap(), x.dim(1).unwrap());
    (0..batch).flat_map(|_| (offset as u32..).take(steps)).collect()
}

/// Returns the allowed difference, relative to the largest expected element. For 16 bits it is three and two units in
/// the last place; differences up to 1.3 were seen with AVX2 products.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2.4e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims(), "{what}: shape");
    assert_eq!(found.dtype(), expected.dtype(), "{what}: dtype");
    let values = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (found, expected) = (values(found), values(expected));
    let largest = expected.iter().fold(1e-30f64, |a, x| a.max(x.abs()));
    let worst = found
        .iter()
        .zip(&expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |a: f64, x| if x > a || x.is_nan() { x } else { a });
    assert!(worst <= tolerance * largest, "{what}: differs by {worst:e} where the largest value is {largest:e}");
}

/// Compares `fused` with `reference`: the result, and the gradients of all `vars` under a loss that weighs every
/// element differently.
fn check(what: &str, vars: &[&Var], fused: impl Fn() -> Result<Tensor>, reference: impl Fn() -> Result<Tensor>) {
    let dtype = vars[0].dtype();
    let run = |f: &dyn Fn() -> Result<Tensor>| {
        let y = f().unwrap();
        let weights = random(99, y.dims(), y.dtype());
        let loss = (&y * weights.as_detached_tensor()).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
        (y.detach(), loss.backward().unwrap())
    };
    let (y, grads) = run(&fused);
    let (expected_y, expected_grads) = run(&reference);
    let tolerance = tolerance(dtype);
    assert_close(&format!("{what}: result"), &y, &expected_y, tolerance);
    for (i, var) in vars.iter().enumerate() {
        let grad = grads.get(var).unwrap_or_else(|| panic!("{what}: no gradient for argument {i}"));
        let expected = expected_grads.get(var).unwrap();
        assert_close(&format!("{what}: gradient of argument {i}"), grad, expected, 2.0 * tolerance);
    }
}

fn on_host(tensor: &Tensor) -> Tensor {
    tensor.to_device(&Device::Cpu).unwrap()
}

/// Returns the elements. A dropped element is 0 or -0.
fn bits(tensor: &Tensor) -> Vec<u64> {
    let host = on_host(tensor).to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    host.to_vec1::<f64>().unwrap().into_iter().map(|x| (x + 0.).to_bits()).collect()
}

/// Compares `f` of these inputs on a device with `f` in f64 on the CPU: the result, and all gradients under a loss that
/// weighs every element differently. Returns those of the device.
fn compare_within(
    what: &str,
    tolerance: f64,
    device: &Device,
    inputs: &[Var],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Vec<Tensor> {
    let dtype = inputs[0].dtype();
    let found = run(what, inputs, &|x| x.to_device(device), &f);
    let expected = run(what, inputs, &|x| x.to_dtype(DType::F64), &f);
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let (part, factor) = if i == 0 { ("result".into(), 1.) } else { (format!("gradient of input {}", i - 1), 2.) };
        let expected = expected.to_dtype(found.dtype()).unwrap();
        assert_close(&format!("{what} {dtype:?}: {part}"), found, &expected, factor * tolerance);
    }
    found
}

/// Returns the result of `f` and the gradient of each input, on the host. `of` places an input.
fn run(
    what: &str,
    inputs: &[Var],
    of: &dyn Fn(&Tensor) -> Result<Tensor>,
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Vec<Tensor> {
    let place = |x: &Var| Var::from_tensor(&of(&x.as_detached_tensor()).unwrap()).unwrap();
    let vars: Vec<Var> = inputs.iter().map(place).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors).unwrap_or_else(|error| panic!("{what}: {error}"));
    // Odd numbers of sixteenths, so that each dtype has the same weights, and none is 0.
    let weights = (random(99, y.dims(), DType::F32).as_detached_tensor() * 8.).unwrap().floor().unwrap();
    let weights = weights.affine(0.125, 0.0625).unwrap().to_dtype(y.dtype()).unwrap().to_device(y.device()).unwrap();
    let mut grads = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let mut found = vec![on_host(&y.detach())];
    for (i, var) in vars.iter().enumerate() {
        let grad = grads.remove(var).unwrap_or_else(|| panic!("{what}: no gradient for input {i}"));
        found.push(on_host(&grad));
    }
    found
}

/// Returns the message of an expected error.
fn message(result: Result<Tensor>) -> String {
    result.map(|t| t.dims().to_vec()).unwrap_err().to_string()
}

const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];
