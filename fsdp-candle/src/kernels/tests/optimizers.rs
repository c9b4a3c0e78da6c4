//! Steps of optimizers against the formulas in f64.

use fsdp_core::DType;

use super::super::eight_bits::{EightBits, STATE_BLOCK};
use super::super::update::{AdamUpdate, SgdUpdate};
use super::{
    FLOATS, buffer, bytes, every_float_and_length, in_the_middle, kernels, numbers, on_every_device, uploaded, values,
    zeros,
};

/// How far from the formula a result may be, whose operands are of this dtype.
fn near(dtype: DType, got: f64, want: f64) {
    let precision = match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 1e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    assert!((got - want).abs() <= precision * want.abs().max(1.), "{dtype}: {got} {want}");
}

#[test]
fn adam_steps_as_it_is_written() {
    on_every_device(|| {
        for l2 in [0., 0.25] {
            let update = AdamUpdate {
                l2,
                decay: 0.99,
                beta1: 0.9,
                beta2: 0.95,
                step_size: 0.1,
                root_bias_correction2: 0.7,
                eps: 1e-6,
            };
            every_float_and_length(|dtype, len| {
                let [p, g, m] = [1, 2, 3].map(|seed| numbers(len, seed));
                let v: Vec<f64> = numbers(len, 4).into_iter().map(f64::abs).collect();
                let (grad, mut means, mut squares) = (buffer(dtype, &g), buffer(dtype, &m), buffer(dtype, &v));
                let stepped = in_the_middle(dtype, &p, |param| {
                    let moments = [(&mut means).into(), (&mut squares).into()];
                    kernels().adam(&update, param, (&grad).into(), moments).unwrap();
                });
                let [means, squares] = [means, squares].map(|moment| values(&moment));
                for i in 0..len {
                    let g = g[i] + l2 * p[i];
                    let (mean, square) = (0.9 * m[i] + 0.1 * g, 0.95 * v[i] + 0.05 * g * g);
                    near(dtype, means[i], mean);
                    near(dtype, squares[i], square);
                    near(dtype, stepped[i], 0.99 * p[i] - 0.1 * mean / (square.sqrt() / 0.7 + 1e-6));
                }
            });
        }
    });
}

#[test]
fn sgd_steps_as_it_is_written() {
    on_every_device(|| {
        for (l2, has_buffer, nesterov) in
            [(0., false, None), (0.25, false, None), (0., true, None), (0.25, true, None), (0.25, true, Some(0.8))]
        {
            let update = SgdUpdate { l2, kept: 0.9, taken: 0.75, nesterov, lr: 0.1 };
            every_float_and_length(|dtype, len| {
                let [p, g, b] = [1, 2, 3].map(|seed| numbers(len, seed));
                let (grad, mut buffers) = (buffer(dtype, &g), buffer(dtype, &b));
                let stepped = in_the_middle(dtype, &p, |param| {
                    let buffer = has_buffer.then(|| (&mut buffers).into());
                    kernels().sgd(&update, param, (&grad).into(), buffer).unwrap();
                });
                let buffers = values(&buffers);
                for i in 0..len {
                    let g = g[i] + l2 * p[i];
                    let moved = if has_buffer { 0.9 * b[i] + 0.75 * g } else { b[i] };
                    near(dtype, buffers[i], moved);
                    let along = match (has_buffer, nesterov) {
                        (false, _) => g,
                        (true, None) => moved,
                        (true, Some(nesterov)) => g + nesterov * moved,
                    };
                    near(dtype, stepped[i], p[i] - 0.1 * along);
                }
            });
        }
    });
}

#[test]
fn mixtures_are_of_any_two_floats() {
    on_every_device(|| {
        every_float_and_length(|dtype, len| {
            for other in FLOATS {
                let (values, more) = (numbers(len, 1), numbers(len, 2));
                let memory = buffer(other, &more);
                let mixed = in_the_middle(dtype, &values, |values| {
                    kernels().mix(values, 0.75, (&memory).into(), -0.5).unwrap();
                });
                for i in 0..len {
                    near(dtype, mixed[i], 0.75 * values[i] - 0.5 * more[i]);
                }
            }
        });
    });
}

#[test]
fn adam_of_8_bits_steps_as_it_is_written_and_keeps_what_its_codes_stand_for() {
    on_every_device(|| {
        let update = AdamUpdate {
            l2: 0.,
            decay: 0.99,
            beta1: 0.9,
            beta2: 0.95,
            step_size: 0.1,
            root_bias_correction2: 0.7,
            eps: 1e-6,
        };
        every_float_and_length(|dtype, len| {
            let blocks = len.div_ceil(STATE_BLOCK);
            let codes = |bits: EightBits, all: &[f64]| {
                let (mut codes, mut scales) = (zeros(DType::U8, len), zeros(DType::F32, blocks));
                let values = buffer(DType::F32, all);
                let to = ((&mut codes).into(), (&mut scales).into());
                kernels().quantise(bits, STATE_BLOCK, (&values).into(), to.0, to.1).unwrap();
                (codes, scales)
            };
            let decoded = |bits, (codes, scales): &(fsdp_core::Buffer, fsdp_core::Buffer)| {
                let mut to = zeros(DType::F32, len);
                kernels().dequantise(bits, STATE_BLOCK, codes.into(), scales.into(), (&mut to).into()).unwrap();
                values(&to)
            };
            let [p, g, m] = [1, 2, 3].map(|seed| numbers(len, seed));
            let r: Vec<f64> = numbers(len, 4).into_iter().map(f64::abs).collect();
            let (mut means, mut roots) = (codes(EightBits::Signed, &m), codes(EightBits::Unsigned, &r));
            let (m, r) = (decoded(EightBits::Signed, &means), decoded(EightBits::Unsigned, &roots));
            let grad = buffer(dtype, &g);
            let step = |param: super::SliceMut<'_>, means: &mut (_, _), roots: &mut (_, _)| {
                let moments = [&mut means.0, &mut means.1, &mut roots.0, &mut roots.1].map(super::SliceMut::from);
                kernels().adam_8bit(&update, param, (&grad).into(), moments)
            };
            if dtype == DType::F64 {
                step((&mut buffer(dtype, &p)).into(), &mut means, &mut roots).unwrap_err();
                return;
            }
            let stepped = in_the_middle(dtype, &p, |param| step(param, &mut means, &mut roots).unwrap());
            let (new_m, new_r) = (decoded(EightBits::Signed, &means), decoded(EightBits::Unsigned, &roots));
            for i in 0..len {
                let (mean, square) = (0.9 * m[i] + 0.1 * g[i], 0.95 * r[i] * r[i] + 0.05 * g[i] * g[i]);
                near(dtype, stepped[i], 0.99 * p[i] - 0.1 * mean / (square.sqrt() / 0.7 + 1e-6));
                // Half a step of the coarsest magnitudes of a block whose largest value is below 5.
                assert!((new_m[i] - mean).abs() <= 0.04, "{} {mean}", new_m[i]);
                assert!((new_r[i] - square.sqrt()).abs() <= 0.02, "{} {square}", new_r[i]);
            }
            // What is decoded has the same codes again, so that a state that is saved and loaded is the same.
            for (bits, values, kept) in [(EightBits::Signed, new_m, means), (EightBits::Unsigned, new_r, roots)] {
                let again = codes(bits, &values);
                assert_eq!((bytes(&again.0), bytes(&again.1)), (bytes(&kept.0), bytes(&kept.1)), "{bits:?}");
            }
        });
        let (mut codes, mut scales) = (zeros(DType::U8, 2), zeros(DType::F32, 1));
        let bad = uploaded(vec![1f32, f32::NAN].into());
        let block = STATE_BLOCK;
        let k = kernels();
        k.quantise(EightBits::Signed, block, (&bad).into(), (&mut codes).into(), (&mut scales).into()).unwrap();
        assert!(values(&scales)[0].is_nan());
    });
}
