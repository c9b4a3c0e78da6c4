//! Fully connected layers in 8-bit floats against the recipes' definition: values and gradients, on the CPU and on a
//! device.

use candle_core::{DType, Device, Result, Tensor, Var};
use float8::{F8E4M3, F8E5M2};

use super::super::linear::affine;
use super::{assert_close, cuda_device, message, random};
use crate::float8::Float8Recipe::{self, Rowwise, RowwiseWithGwHp, Tensorwise};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// A matrix in row-major order.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

/// Values that share a scale.
#[derive(Clone, Copy, PartialEq)]
enum Shared {
    All,
    Row,
    Column,
}

impl Matrix {
    fn of(tensor: &Tensor, cols: usize) -> Self {
        let values = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        let values = values.to_vec1::<f64>().unwrap();
        Matrix { rows: values.len() / cols, cols, values }
    }

    fn t(&self) -> Self {
        let values = (0..self.cols).flat_map(|col| (0..self.rows).map(move |row| row * self.cols + col));
        Matrix { rows: self.cols, cols: self.rows, values: values.map(|at| self.values[at]).collect() }
    }

    fn times(&self, rhs: &Self) -> Self {
        let sum = |row: usize, col: usize| {
            (0..self.cols).map(|k| self.values[row * self.cols + k] * rhs.values[k * rhs.cols + col]).sum()
        };
        let values = (0..self.rows).flat_map(|row| (0..rhs.cols).map(move |col| (row, col)));
        let values = values.map(|(row, col)| sum(row, col)).collect();
        Matrix { rows: self.rows, cols: rhs.cols, values }
    }

    /// torchao's cast: `to_float8(x * scale) / scale` with `scale = largest float / max|x|`.
    fn cast(&self, shared: Shared, is_e5m2: bool, power_of_two: bool) -> Self {
        let group = |at: usize| match shared {
            Shared::All => 0,
            Shared::Row => at / self.cols,
            Shared::Column => at % self.cols,
        };
        let mut largest = vec![0f64; self.rows.max(self.cols).max(1)];
        self.values.iter().enumerate().for_each(|(at, x)| largest[group(at)] = largest[group(at)].max(x.abs()));
        let values = self.values.iter().enumerate().map(|(at, &x)| {
            let most = if is_e5m2 { 57_344. } else { 448. };
            let mut scale = (most / largest[group(at)].max(1e-12)) as f32;
            if power_of_two {
                scale = scale.log2().floor().exp2();
            }
            let scaled = (x as f32 * scale).clamp(-most as f32, most as f32);
            let code = if is_e5m2 { F8E5M2::from_f32(scaled).to_f64() } else { F8E4M3::from_f32(scaled).to_f64() };
            code / f64::from(scale)
        });
        Matrix { values: values.collect(), ..*self }
    }
}

/// The output of `x W^T`, and the gradients of `x` and `W` for `dy`.
fn expected(recipe: Float8Recipe, x: &Matrix, w: &Matrix, dy: &Matrix) -> [Matrix; 3] {
    let rounds = recipe != Tensorwise;
    let by = |shared| if rounds { shared } else { Shared::All };
    let y = x.cast(by(Shared::Row), false, rounds).times(&w.cast(by(Shared::Row), false, rounds).t());
    let of_weight = if recipe == Rowwise { Shared::Column } else { Shared::All };
    let dx = dy.cast(by(Shared::Row), !rounds, rounds).times(&w.cast(of_weight, false, rounds));
    let dw = match recipe {
        RowwiseWithGwHp => dy.t().times(x),
        _ => dy.cast(by(Shared::Column), !rounds, rounds).t().times(&x.cast(by(Shared::Column), false, rounds)),
    };
    [y, dx, dw]
}

/// Values with outliers, so that scales matter.
fn spread(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let (values, powers) = (random(seed, shape, DType::F32), random(seed + 1, shape, DType::F32));
    let powers = (powers.as_tensor() * 0.7).unwrap().exp().unwrap();
    (values.as_tensor() * powers).unwrap().to_dtype(dtype).unwrap().detach()
}

fn check(
    recipe: Float8Recipe,
    dtype: DType,
    outer: &[usize],
    [inputs, outputs]: [usize; 2],
    in_out: bool,
    on: &Device,
) {
    let what = format!("{recipe:?} {dtype:?} {outer:?} {inputs} to {outputs}, {in_out}, {:?}", on.location());
    let x = spread(1, &[outer, &[inputs]].concat(), dtype);
    let w = spread(5, &if in_out { [inputs, outputs] } else { [outputs, inputs] }, dtype);
    let b = random(9, &[outputs], dtype).as_detached_tensor();
    let dy = spread(13, &[outer, &[outputs]].concat(), dtype);
    let vars = [&x, &w, &b].map(|t| Var::from_tensor(&t.to_device(on).unwrap()).unwrap());
    let run = |bias: Option<&Tensor>| -> Result<_> {
        let y = affine("Linear", vars[0].as_tensor(), vars[1].as_tensor(), bias, in_out, Some(recipe))?;
        let grads = (&y * dy.to_device(on)?)?.sum_all()?.backward()?;
        Ok((y.detach(), grads))
    };
    let (y, grads) = run(None).unwrap();
    let weight = Matrix::of(&w, w.dims()[1]);
    let weight = if in_out { weight.t() } else { weight };
    let [of_y, of_x, of_w] = expected(recipe, &Matrix::of(&x, inputs), &weight, &Matrix::of(&dy, outputs));
    let of_w = if in_out { of_w.t() } else { of_w };
    for (part, found, expected) in [
        ("output", &y, of_y),
        ("gradient of the input", grads.get(&vars[0]).unwrap(), of_x),
        ("gradient of the weight", grads.get(&vars[1]).unwrap(), of_w),
    ] {
        let found = found.to_device(&Device::Cpu).unwrap();
        let expected = Tensor::from_vec(expected.values, found.shape(), &Device::Cpu).unwrap();
        let precision = match dtype {
            DType::BF16 => 8e-3,
            DType::F16 => 1e-3,
            _ => 2e-6,
        };
        assert_close(&format!("{what}: {part}"), &found, &expected.to_dtype(dtype).unwrap(), precision);
    }
    let (with_bias, grads) = run(Some(vars[2].as_tensor())).unwrap();
    let sum = y.to_dtype(DType::F32).unwrap().broadcast_add(&vars[2].to_dtype(DType::F32).unwrap()).unwrap();
    let to_f32 = |t: &Tensor| t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    assert_close(&format!("{what}: with a bias"), &to_f32(&with_bias), &to_f32(&sum), 1.6e-2);
    assert!(grads.get(&vars[2]).is_some());
}

#[test]
fn layers_compute_the_recipes() {
    let devices = [Some(Device::Cpu), cuda_device()];
    for device in devices.iter().flatten() {
        for recipe in [Tensorwise, Rowwise, RowwiseWithGwHp] {
            for dtype in DTYPES {
                for in_out in [false, true] {
                    check(recipe, dtype, &[3, 7], [32, 48], in_out, device);
                }
                check(recipe, dtype, &[1], [16, 16], false, device);
            }
            // Several stretches of rows and tiles, and whole runs of rows.
            check(recipe, DType::F32, &[2, 200], [80, 144], false, device);
        }
    }
}

#[test]
fn views_and_empty_inputs_work() {
    for device in [Some(Device::Cpu), cuda_device()].iter().flatten() {
        for recipe in [Tensorwise, Rowwise, RowwiseWithGwHp] {
            let x = Var::from_tensor(&spread(1, &[32, 6], DType::F32).to_device(device).unwrap()).unwrap();
            let w = Var::from_tensor(&spread(2, &[32, 16], DType::F32).to_device(device).unwrap()).unwrap();
            let run = |x: &Tensor, w: &Tensor| affine("Linear", x, w, None, false, Some(recipe)).unwrap();
            let (x_t, w_t) = (x.t().unwrap(), w.t().unwrap());
            let (found, whole) = (run(&x_t, &w_t), run(&x_t.contiguous().unwrap(), &w_t.contiguous().unwrap()));
            let host = |t: &Tensor| t.to_device(&Device::Cpu).unwrap();
            assert_close("views", &host(&found), &host(&whole), 1e-6);
            // A view of a weight has a gradient of its own.
            assert!(found.sum_all().unwrap().backward().unwrap().get(&w).is_some());
            let none = Tensor::zeros((2, 0, 32), DType::F32, device).unwrap();
            let y = run(&none, &w_t);
            assert_eq!(y.dims(), [2, 0, 16]);
            let grads = y.sum_all().unwrap().backward().unwrap();
            let of_weight = host(grads.get(&w).unwrap()).abs().unwrap().sum_all().unwrap();
            assert_eq!(of_weight.to_scalar::<f32>().unwrap(), 0.);
        }
    }
}

#[test]
fn values_that_are_not_finite_reach_the_output() {
    for device in [Some(Device::Cpu), cuda_device()].iter().flatten() {
        for recipe in [Tensorwise, Rowwise] {
            let mut values = vec![1f32; 32];
            values[3] = f32::NAN;
            let x = Tensor::from_vec(values, (2, 16), device).unwrap();
            let w = Tensor::ones((16, 16), DType::F32, device).unwrap();
            let y = affine("Linear", &x, &w, None, false, Some(recipe)).unwrap();
            let y = y.to_device(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
            assert!(y[0].iter().all(|y| y.is_nan()), "{recipe:?}: {y:?}");
            // With scales of rows, other rows are not affected.
            assert!(y[1].iter().all(|y| if recipe == Rowwise { *y == 16. } else { y.is_nan() }), "{recipe:?}: {y:?}");
        }
    }
}

#[test]
fn unsuitable_weights_are_refused() {
    let of = |shape: (usize, usize), dtype| {
        let w = Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
        message(affine(
            "Linear",
            &Tensor::ones((2, shape.1), dtype, &Device::Cpu).unwrap(),
            &w,
            None,
            false,
            Some(Rowwise),
        ))
    };
    for shape in [(24, 16), (16, 24)] {
        let found = of(shape, DType::F32);
        assert!(found.contains("multiples of 16") && found.contains("convert_to_float8_training"), "{found}");
    }
    let found = of((16, 16), DType::F64);
    assert!(found.contains("f32, f16 and bf16") && found.contains("F64"), "{found}");
}
