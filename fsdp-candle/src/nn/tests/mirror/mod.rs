//! Tests of the reimplemented items of candle_nn: values against candle_nn, gradients against finite differences in
//! f64, and every dtype and layout against f64.

mod attending;
mod caches;
mod functions;
mod layers;

use candle_core::{DType, Result, Tensor, Var};

use super::{DTYPES, assert_close, random, tolerance};

/// A function of tensors. The first is the input, the others are weights.
type F<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Returns the result, and the gradients of all arguments under a loss that weighs every element differently.
fn run(f: F, args: &[Tensor], of: &[Var]) -> (Tensor, Vec<Tensor>) {
    let y = f(args).unwrap();
    let weights = random(99, y.dims(), DType::F64).as_detached_tensor();
    let loss = (y.to_dtype(DType::F64).unwrap() * weights).unwrap().sum_all().unwrap();
    let mut grads = loss.backward().unwrap();
    let zero = |var: &Var| var.as_detached_tensor().zeros_like().unwrap();
    (y.detach(), of.iter().map(|var| grads.remove(var).unwrap_or_else(|| zero(var))).collect())
}

fn tensors(vars: &[Var]) -> Vec<Tensor> {
    vars.iter().map(|var| var.as_tensor().clone()).collect()
}

/// Compares the gradients with finite differences.
fn check_differences(what: &str, f: F, vars: &[Var], grads: &[Tensor]) {
    let step = 1e-5;
    for (at, (var, grad)) in vars.iter().zip(grads).enumerate() {
        let grad = grad.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let largest = grad.iter().fold(1.0, |a: f64, g| a.max(g.abs()));
        let values = var.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        // Checks a sample of many elements.
        for i in (0..values.len()).step_by(values.len().div_ceil(40)) {
            let loss = |by: f64| {
                let mut moved = values.clone();
                moved[i] += by;
                let mut args: Vec<Tensor> = vars.iter().map(|var| var.as_detached_tensor()).collect();
                args[at] = Tensor::from_vec(moved, var.shape(), var.device()).unwrap();
                let y = f(&args).unwrap();
                let weights = random(99, y.dims(), DType::F64).as_detached_tensor();
                (y * weights).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap()
            };
            let found = (loss(step) - loss(-step)) / (2.0 * step);
            assert!(
                (found - grad[i]).abs() < 1e-6 * largest,
                "{what}: argument {at}, element {i}: the loss changes at {found}, the gradient says {}",
                grad[i]
            );
        }
    }
}

/// Checks a function for arguments of these shapes in each dtype, as the module says. `candle` is the function that it
/// mirrors.
fn check(what: &str, shapes: &[&[usize]], ours: F, candle: Option<F>) {
    let fresh =
        |dtype| -> Vec<Var> { shapes.iter().zip(1..).map(|(shape, seed)| random(seed, shape, dtype)).collect() };
    check_on(what, &fresh, ours, candle);
}

/// [`check`] with a function that creates the arguments.
fn check_on(what: &str, fresh: &dyn Fn(DType) -> Vec<Var>, ours: F, candle: Option<F>) {
    let vars = fresh(DType::F64);
    let (_, grads) = run(ours, &tensors(&vars), &vars);
    check_differences(what, ours, &vars, &grads);
    for dtype in DTYPES {
        let what = format!("{what} {dtype:?}");
        let vars = fresh(dtype);
        let (y, grads) = run(ours, &tensors(&vars), &vars);
        if let Some(candle) = candle.filter(|_| matches!(dtype, DType::F32 | DType::F64)) {
            let expected = candle(&tensors(&vars)).unwrap_or_else(|error| panic!("{what}: candle_nn: {error}"));
            assert_close(&format!("{what}: candle_nn's result"), &y, &expected.detach(), 1e-6);
        }
        // The same numbers in f64.
        let wide: Vec<Var> =
            vars.iter().map(|var| Var::from_tensor(&var.to_dtype(DType::F64).unwrap().detach()).unwrap()).collect();
        let (expected_y, expected_grads) = run(ours, &tensors(&wide), &wide);
        let as_wide = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
        let tolerance = tolerance(dtype);
        assert_close(&format!("{what}: result"), &as_wide(&y), &expected_y, tolerance);
        for (i, (grad, expected)) in grads.iter().zip(&expected_grads).enumerate() {
            // Values close to zero consist of rounding errors.
            let largest =
                as_wide(grad).abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f64>().unwrap();
            if largest > 1e-3 {
                assert_close(&format!("{what}: gradient of argument {i}"), &as_wide(grad), expected, 3.0 * tolerance);
            }
        }
        check_view(&what, ours, &vars, (&y, &grads[0]), tolerance);
    }
}

/// Checks an input that is not contiguous.
fn check_view(what: &str, f: F, vars: &[Var], (y, grad): (&Tensor, &Tensor), tolerance: f64) {
    let last = vars[0].rank().saturating_sub(1);
    if last == 0 {
        return;
    }
    let turned = Var::from_tensor(&vars[0].transpose(0, last).unwrap().contiguous().unwrap().detach()).unwrap();
    let mut args = tensors(vars);
    args[0] = turned.transpose(0, last).unwrap();
    let (found, grads) = run(f, &args, &[turned]);
    assert_close(&format!("{what}: result of a view"), &found, y, tolerance);
    let found = grads[0].transpose(0, last).unwrap().contiguous().unwrap();
    assert_close(&format!("{what}: gradient of a view"), &found, grad, tolerance.max(1e-5));
}
