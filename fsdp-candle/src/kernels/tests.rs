//! Compares each kernel with a plain computation in f64, for every float dtype, also for no elements and in the middle
//! of a buffer.

use std::cell::Cell;

use candle_core::{Device, DeviceLocation};
use fsdp_core::{BLOCK, BlockFormat, Buffer, DType, View};

use super::{
    AdamUpdate, EightBits, Kernels, NormType, Rows, STATE_BLOCK, SgdUpdate, Slice, SliceMut, id_of, of, of_device,
    of_device_or_cpu,
};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
/// No elements, fewer than a run, not a multiple of a run, and more than a chunk of the norm.
const LENGTHS: [usize; 4] = [0, 3, 37, 600];

thread_local! {
    static ON: Cell<&'static dyn Kernels> = Cell::new(of_device_or_cpu(&Device::Cpu));
}

/// Returns the kernels of the tested device.
fn kernels() -> &'static dyn Kernels {
    ON.get()
}

/// A step of Adam.
const ADAM: AdamUpdate = AdamUpdate {
    factor: 1.,
    l2: 0.,
    decay: 0.99,
    beta1: 0.9,
    beta2: 0.95,
    step_size: 0.1,
    root_bias_correction2: 0.7,
    eps: 1e-6,
};

/// Runs a test on the CPU, and on a CUDA device if there is one.
fn on_every_device(test: impl Fn()) {
    test();
    #[cfg(feature = "cuda")]
    if super::device_count().is_ok_and(|count| count > 0) {
        ON.set(of_device(&super::candle_device(0).unwrap()).unwrap());
        test();
        ON.set(of_device_or_cpu(&Device::Cpu));
    }
}

/// Copies elements to the device.
fn uploaded(host: Buffer) -> Buffer {
    let mut to = kernels().zeros(host.dtype(), host.len()).unwrap();
    kernels().write((&mut to).into(), &mut |bytes| bytes.copy_from_slice(host.bytes())).unwrap();
    to
}

fn zeros(dtype: DType, len: usize) -> Buffer {
    kernels().zeros(dtype, len).unwrap()
}

/// Returns the elements as bytes.
fn bytes(buffer: &Buffer) -> Vec<u8> {
    let mut all = vec![];
    kernels().read(buffer.into(), &mut |bytes| all.extend_from_slice(bytes)).unwrap();
    all
}

/// Returns the number that a kernel writes.
fn number(kernel: impl FnOnce(SliceMut<'_>) -> candle_core::Result<()>) -> f64 {
    let mut to = buffer(DType::F64, &[-1.]);
    kernel((&mut to).into()).unwrap();
    values(&to)[0]
}

/// Returns numbers that every float dtype represents exactly.
fn numbers(len: usize, seed: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 7919 + seed * 31) % 64) as f64 / 8. - 4.).collect()
}

fn buffer(dtype: DType, values: &[f64]) -> Buffer {
    let mut to = kernels().zeros(dtype, values.len()).unwrap();
    kernels().cast((&uploaded(values.to_vec().into())).into(), (&mut to).into()).unwrap();
    to
}

fn values(buffer: &Buffer) -> Vec<f64> {
    let mut to = kernels().zeros(DType::F64, buffer.len()).unwrap();
    kernels().cast(buffer.into(), (&mut to).into()).unwrap();
    bytemuck::pod_collect_to_vec(&bytes(&to))
}

/// Rounds a value to the dtype.
fn rounded(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::BF16 => half::bf16::from_f64(value).to_f64(),
        DType::F16 => half::f16::from_f64(value).to_f64(),
        _ => value,
    }
}

/// Runs `kernel` in the middle of a longer buffer. The rest must not change.
fn in_the_middle(dtype: DType, own: &[f64], kernel: impl FnOnce(SliceMut<'_>)) -> Vec<f64> {
    let mut memory = buffer(dtype, &[&[5., 6.], own, &[7.]].concat());
    kernel(SliceMut::from(&mut memory).range(2..2 + own.len()).unwrap());
    let all = values(&memory);
    assert_eq!((&all[..2], &all[2 + own.len()..]), (&[5., 6.][..], &[7.][..]));
    all[2..2 + own.len()].to_vec()
}

fn every_float_and_length(mut check: impl FnMut(DType, usize)) {
    FLOATS.iter().for_each(|&dtype| LENGTHS.iter().for_each(|&len| check(dtype, len)));
}

#[test]
fn sums_and_scales_are_rounded_once() {
    on_every_device(|| {
        every_float_and_length(|dtype, len| {
            let (a, b) = (numbers(len, 1), numbers(len + 1, 2));
            let more = buffer(dtype, &b);
            let more = Slice::from(&more).range(1..len + 1).unwrap();
            let sums = in_the_middle(dtype, &a, |sum| kernels().add(sum, more).unwrap());
            assert!(sums.iter().zip(a.iter().zip(&b[1..])).all(|(sum, (a, b))| *sum == rounded(dtype, a + b)));
            let new = kernels().sum((&buffer(dtype, &a)).into(), more).unwrap();
            assert_eq!(values(&new), sums);
            let scaled = in_the_middle(dtype, &a, |values| kernels().scale(values, 1. / 3.).unwrap());
            let factor = if dtype == DType::F64 { 1. / 3. } else { f64::from(1f32 / 3.) };
            let want = |v: &f64| if dtype == DType::F64 { v * factor } else { f64::from(*v as f32 * factor as f32) };
            assert!(scaled.iter().zip(&a).all(|(scaled, v)| *scaled == rounded(dtype, want(v))));
        });
    });
}

#[test]
fn casts_round_to_the_dtype() {
    on_every_device(|| {
        let awkward = [0.1, -1. / 3., 65504., 65536., 1e-8, 1.00390625, 1.01171875, f64::INFINITY, -0.];
        for from in FLOATS {
            let source = buffer(from, &awkward);
            for to in FLOATS {
                let cast = in_the_middle(to, &[0.; 9], |to| kernels().cast((&source).into(), to).unwrap());
                let want = values(&source).iter().map(|&value| rounded(to, value)).collect::<Vec<_>>();
                assert_eq!(cast, want, "{from} to {to}");
            }
        }
        assert!(values(&buffer(DType::BF16, &[f64::NAN]))[0].is_nan());
    });
}

#[test]
fn copies_rows_of_every_dtype() {
    on_every_device(|| {
        for dtype in DType::ALL {
            let mut from = Buffer::zeros(dtype, 12);
            from.bytes_mut().iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
            let from = uploaded(from);
            let mut to = kernels().zeros(dtype, 7).unwrap();
            let rows = Rows { count: 3, len: 2, from_stride: 4, to_stride: 2 };
            let part = Slice::from(&from).range(1..12).unwrap();
            kernels().copy_rows(part, SliceMut::from(&mut to).range(1..7).unwrap(), rows).unwrap();
            let element =
                |buffer: &Buffer, at: usize| bytes(buffer)[at * dtype.size()..(at + 1) * dtype.size()].to_vec();
            for (at, source) in [1, 2, 5, 6, 9, 10].into_iter().enumerate() {
                assert_eq!(element(&to, at + 1), element(&from, source));
            }
            let none = Rows { count: 0, ..rows };
            kernels().copy_rows(part, (&mut to).into(), none).unwrap();
            for too_much in
                [Rows { count: 4, ..rows }, Rows { from_stride: usize::MAX, ..rows }, Rows { len: 8, ..rows }]
            {
                kernels().copy_rows(part, (&mut to).into(), too_much).unwrap_err();
            }
            kernels().copy(Slice::from(&from), (&mut to).into()).unwrap_err();
        }
    });
}

#[test]
fn norms_match_plain_sums() {
    on_every_device(|| {
        every_float_and_length(|dtype, len| {
            let all = numbers(len + 1, 3);
            let memory = buffer(dtype, &all);
            let part = Slice::from(&memory).range(1..len + 1).unwrap();
            let powers = |norm| number(|sum| kernels().powers(part, norm, sum));
            // Squares of eighths up to 4, and their sums here, are exact in f32.
            assert_eq!(powers(NormType::Two), all[1..].iter().map(|v| v * v).sum::<f64>());
            assert_eq!(powers(NormType::P(1.)), all[1..].iter().map(|v| v.abs()).sum::<f64>());
            let cubes = all[1..].iter().map(|v| v.abs().powf(3.)).sum::<f64>();
            assert!((powers(NormType::P(3.)) - cubes).abs() <= 1e-12 * cubes);
            assert_eq!(powers(NormType::Infinity), all[1..].iter().fold(0., |max: f64, v| max.max(v.abs())));
            assert_eq!(number(|count| kernels().count_non_finite(part, count)), 0.);
        });
        let wide = uploaded(vec![3e30f32, 4e30].into());
        let squares = number(|sum| kernels().powers((&wide).into(), NormType::Two, sum));
        assert_eq!(squares.sqrt() as f32, 5e30);
        for dtype in FLOATS {
            let bad = buffer(dtype, &[1., f64::NAN, f64::INFINITY, 2.]);
            assert_eq!(number(|count| kernels().count_non_finite((&bad).into(), count)), 2.);
            assert!(number(|sum| kernels().powers((&bad).into(), NormType::Infinity, sum)).is_nan());
        }
    });
}

#[test]
fn eight_bit_codes_are_within_half_a_step() {
    on_every_device(|| {
        let all = numbers(100, 5).into_iter().map(|v| v as f32).collect::<Vec<_>>();
        for (bits, block) in [(EightBits::E4M3, 64), (EightBits::E4M3, 100), (EightBits::E4M3, 0)] {
            let blocks = 100usize.div_ceil(block.max(1));
            let (mut codes, mut scales) = (zeros(DType::U8, 100), zeros(DType::F32, blocks));
            let source = uploaded(all.clone().into());
            kernels().quantise(bits, block, (&source).into(), (&mut codes).into(), (&mut scales).into()).unwrap();
            for dtype in FLOATS {
                let mut back = kernels().zeros(dtype, 100).unwrap();
                kernels().dequantise(bits, block, (&codes).into(), (&scales).into(), (&mut back).into()).unwrap();
                for (got, want) in values(&back).into_iter().zip(&all) {
                    let bound = want.abs() / 16. + 0.01;
                    assert!((got - f64::from(*want)).abs() <= f64::from(bound), "{bits:?} {dtype}: {got} {want}");
                }
            }
            let mut short = zeros(DType::F32, 99);
            kernels().dequantise(bits, block, (&codes).into(), (&scales).into(), (&mut short).into()).unwrap_err();
        }
        let (mut codes, mut scales) = (zeros(DType::U8, 2), zeros(DType::F32, 1));
        // The largest magnitude divided by 448 is 0.
        let (tiny, mut back) = (uploaded(vec![1e-44f32, 0.].into()), zeros(DType::F32, 2));
        kernels().quantise(EightBits::E4M3, 2, (&tiny).into(), (&mut codes).into(), (&mut scales).into()).unwrap();
        kernels().dequantise(EightBits::E4M3, 2, (&codes).into(), (&scales).into(), (&mut back).into()).unwrap();
        assert!(values(&back)[0].abs() < 1e-38 && values(&back)[1] == 0., "{:?}", values(&back));
        let bad = uploaded(vec![1f32, f32::INFINITY].into());
        kernels().quantise(EightBits::E4M3, 2, (&bad).into(), (&mut codes).into(), (&mut scales).into()).unwrap();
        assert!(values(&scales)[0].is_nan());
    });
}

#[test]
fn blocks_have_the_values_of_their_format() {
    on_every_device(|| {
        for format in BlockFormat::ALL {
            for len in [0, BLOCK, 37 * BLOCK] {
                let all = numbers(len, 5).into_iter().map(|v| v as f32).collect::<Vec<_>>();
                let mut blocks = vec![0; format.bytes(len)];
                format.encode(&all, &mut blocks);
                let mut want = vec![0f32; len];
                format.decode(&blocks, &mut want, |value| value);
                let blocks = uploaded(blocks.into());
                for dtype in FLOATS {
                    let (mut got, mut rounded) = (zeros(dtype, len), zeros(dtype, len));
                    kernels().decode_blocks(format, (&blocks).into(), (&mut got).into()).unwrap();
                    let want = uploaded(want.clone().into());
                    kernels().cast((&want).into(), (&mut rounded).into()).unwrap();
                    assert_eq!(bytes(&got), bytes(&rounded), "{format:?} {dtype} {len}");
                }
                let mut short = zeros(DType::F32, len + 1);
                kernels().decode_blocks(format, (&blocks).into(), (&mut short).into()).unwrap_err();
            }
        }
    });
}

#[test]
fn rejects_dtypes_and_lengths_that_do_not_fit() {
    on_every_device(|| {
        let (single, double, bytes) =
            (buffer(DType::F32, &[1.; 4]), buffer(DType::F64, &[1.; 4]), uploaded(vec![1u8].into()));
        let short = buffer(DType::F32, &[1.; 3]);
        let k = kernels();
        let to = || single.clone();
        k.add((&mut to()).into(), (&double).into()).unwrap_err();
        k.add((&mut to()).into(), (&short).into()).unwrap_err();
        k.add((&mut bytes.clone()).into(), (&bytes).into()).unwrap_err();
        k.scale((&mut bytes.clone()).into(), 2.).unwrap_err();
        k.cast((&bytes).into(), (&mut short.clone()).into()).unwrap_err();
        k.cast((&double).into(), (&mut short.clone()).into()).unwrap_err();
        k.copy((&double).into(), (&mut to()).into()).unwrap_err();
        k.mix((&mut to()).into(), 1., (&short).into(), 1.).unwrap_err();
        k.mix((&mut to()).into(), 1., (&bytes).into(), 1.).unwrap_err();
        k.powers((&bytes).into(), NormType::Two, (&mut double.clone()).into()).unwrap_err();
        k.powers((&single).into(), NormType::Two, (&mut to()).into()).unwrap_err();
        let sgd = SgdUpdate { factor: 1., l2: 0., kept: 1., taken: 1., nesterov: None, lr: 1. };
        for (grad, mean) in [(&double, &single), (&single, &double), (&short, &single), (&single, &short)] {
            let (mut mean, mut square) = (mean.clone(), to());
            let moments = [(&mut mean).into(), (&mut square).into()];
            k.adam(&ADAM, (&mut to()).into(), grad.into(), moments).unwrap_err();
            k.sgd(&sgd, (&mut to()).into(), grad.into(), Some((&mut mean).into())).unwrap_err();
        }
        assert!(Slice::from(&single).range(3..5).is_err() && Slice::from(&single).range(1..usize::MAX).is_err());
        assert!(SliceMut::from(&mut to()).range(4..usize::MAX).is_err());
    });
}

#[test]
fn converts_between_tensors_and_buffers_without_a_copy() {
    on_every_device(|| {
        for dtype in DType::ALL {
            let buffer = zeros(dtype, 8);
            let at = address(&buffer);
            let mut storage = kernels().storage(buffer).unwrap();
            let slice = kernels().slice(&storage, 2..5).unwrap();
            assert_eq!((slice.dtype(), slice.len()), (dtype, 3));
            let slice = kernels().slice_mut((&mut storage).into(), 2..5).unwrap();
            kernels().write(slice, &mut |bytes| bytes.fill(1)).unwrap();
            let buffer = kernels().buffer(storage).unwrap();
            assert_eq!((buffer.dtype(), address(&buffer)), (dtype, at));
            let set = |at: usize| (2 * dtype.size()..5 * dtype.size()).contains(&at);
            assert!(bytes(&buffer).iter().enumerate().all(|(at, &byte)| byte == u8::from(set(at))));
        }
        let mut freed = kernels().freed_storage().unwrap();
        assert_eq!(freed.dtype(), candle_core::DType::F4);
        assert!(kernels().slice(&freed, 0..0).is_err() && kernels().slice_mut((&mut freed).into(), 0..0).is_err());
        assert!(kernels().buffer(freed).is_none());
    });
}

/// Returns a buffer's address in its device's memory.
fn address(buffer: &Buffer) -> u64 {
    match Slice::from(buffer).view() {
        View::Host(bytes) => bytes.as_ptr() as u64,
        #[cfg(feature = "cuda")]
        View::Cuda(view) => view.address(),
        _ => 0,
    }
}

/// Accumulating matrix products and table rows, of whole numbers, whose sums are exact in any order.
#[cfg(feature = "cuda")]
#[test]
fn products_and_rows_accumulate() {
    use super::cuda::{Matrix, add_product, add_rows};

    on_every_device(|| {
        if let View::Host(_) = Slice::from(&zeros(DType::F32, 1)).view() {
            return;
        }
        let whole = |len, seed| numbers(len, seed).into_iter().map(|v| (v * 2.).round()).collect::<Vec<_>>();
        let (m, n) = (3, 5);
        for dtype in FLOATS {
            for k in [0, 4] {
                let (a, b, c) = (whole(m * k, 1), whole(k * n, 2), whole(m * n, 3));
                let (left, right) = (buffer(dtype, &a), buffer(dtype, &b));
                let transposed = |v: &[f64], rows: usize, cols: usize| {
                    let at = |i: usize| v[i % rows * cols + i / rows];
                    buffer(dtype, &(0..rows * cols).map(at).collect::<Vec<_>>())
                };
                let (left_t, right_t) = (transposed(&a, m, k), transposed(&b, k, n));
                for accumulate in [false, true] {
                    let want: Vec<f64> = (0..m * n)
                        .map(|i| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum::<f64>())
                        .zip(&c)
                        .map(|(sum, old)| rounded(dtype, sum + if accumulate { *old } else { 0. }))
                        .collect();
                    let plain = |buffer, rows, cols| Matrix::new(Slice::from(buffer), rows, cols).unwrap();
                    for (lhs, rhs) in [
                        (plain(&left, m, k), plain(&right, k, n)),
                        (plain(&left_t, k, m).t(), plain(&right, k, n)),
                        (plain(&left, m, k), plain(&right_t, n, k).t()),
                        (plain(&left_t, k, m).t(), plain(&right_t, n, k).t()),
                    ] {
                        let mut to = buffer(dtype, &c);
                        add_product(&mut to, accumulate, lhs, rhs).unwrap();
                        assert_eq!(values(&to), want, "{dtype} {k} {accumulate}");
                    }
                }
            }
            let (ids, width) = ([2u32, 0, 2, u32::MAX, 2], 3);
            let (rows, table) = (whole(5 * width, 4), whole(4 * width, 5));
            let tables = [Some(dtype), (dtype == DType::BF16).then_some(DType::F32)].into_iter().flatten();
            for (table_dtype, accumulate) in tables.flat_map(|table| [(table, false), (table, true)]) {
                let mut want = if accumulate { table.clone() } else { vec![0.; table.len()] };
                for (at, &id) in ids.iter().enumerate().filter(|(_, id)| **id < 4) {
                    (0..width).for_each(|i| want[id as usize * width + i] += rows[at * width + i]);
                }
                let (ids, from) = (uploaded(ids.to_vec().into()), buffer(dtype, &rows));
                let mut to = buffer(table_dtype, &table);
                add_rows((&ids).into(), (&from).into(), &mut to, accumulate, width).unwrap();
                assert_eq!(values(&to), want, "{dtype} {table_dtype} {accumulate}");
            }
        }
    });
}

/// Rows of one id are added up in the order of the tokens, which the bits of the sum show. The tokens are more than a
/// block sorts, and not a multiple.
#[cfg(feature = "cuda")]
#[test]
fn rows_are_added_in_the_order_of_tokens() {
    use super::cuda::add_rows;

    on_every_device(|| {
        if let View::Host(_) = Slice::from(&zeros(DType::F32, 1)).view() {
            return;
        }
        for (count, rows, width) in [(1, 1, 300), (255, 3, 2), (257, 40, 1), (1300, 7, 2), (1024, 900, 1)] {
            let ids: Vec<u32> = (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 7).collect();
            let ids: Vec<u32> =
                ids.into_iter().map(|id| if id % 5 == 0 { u32::MAX } else { id % (rows as u32 + 1) }).collect();
            let from: Vec<f32> = (0..count * width).map(|i| ((i * 7919) % 1000) as f32 * 0.1 - 31.7).collect();
            let mut sums = vec![0f32; rows * width];
            for (at, &id) in ids.iter().enumerate().filter(|(_, id)| (**id as usize) < rows) {
                (0..width).for_each(|i| sums[id as usize * width + i] += from[at * width + i]);
            }
            let want: Vec<f64> = sums.into_iter().map(|sum| f64::from(sum + 0.3)).collect();
            let mut table = uploaded(vec![0.3f32; rows * width].into());
            let (ids, from) = (uploaded(ids.into()), uploaded(from.into()));
            add_rows((&ids).into(), (&from).into(), &mut table, true, width).unwrap();
            assert_eq!(values(&table), want, "{count} {rows} {width}");
        }
    });
}

/// Asserts that a result is close to the formula, for operands of this dtype.
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
fn adam_matches_the_formula() {
    on_every_device(|| {
        for l2 in [0., 0.25] {
            let update = AdamUpdate { l2, ..ADAM };
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
fn sgd_matches_the_formula() {
    on_every_device(|| {
        for (l2, has_buffer, nesterov) in
            [(0., false, None), (0.25, false, None), (0., true, None), (0.25, true, None), (0.25, true, Some(0.8))]
        {
            let update = SgdUpdate { factor: 1., l2, kept: 0.9, taken: 0.75, nesterov, lr: 0.1 };
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

/// A step by a factor, of a parameter, a gradient, two moments, and two moments of 8 bits with their scales.
type ScaledStep<'a> = dyn Fn(f64, SliceMut<'_>, Slice<'_>, [SliceMut<'_>; 6]) + 'a;

/// Each step has the bits of a step on the gradient that `scale` multiplied before.
#[test]
fn a_step_multiplies_and_rounds_the_gradient_as_a_pass_before_it() {
    const FACTOR: f64 = 0.37;
    on_every_device(|| {
        every_float_and_length(|dtype, len| {
            let grad = buffer(dtype, &numbers(len, 2));
            let mut scaled = grad.clone();
            kernels().scale((&mut scaled).into(), FACTOR).unwrap();
            // Parameter, moments and 8-bit moments after a step, as bytes.
            let stepped = |grad: &Buffer, step: &dyn Fn(SliceMut<'_>, Slice<'_>, [SliceMut<'_>; 6])| {
                let [mut p, mut m] = [1, 3].map(|seed| buffer(dtype, &numbers(len, seed)));
                let mut v = buffer(dtype, &numbers(len, 4).into_iter().map(f64::abs).collect::<Vec<_>>());
                let blocks = len.div_ceil(STATE_BLOCK);
                let [mut codes1, mut codes2] = [(); 2].map(|()| zeros(DType::U8, len));
                let [mut scales1, mut scales2] = [(); 2].map(|()| zeros(DType::F32, blocks));
                let state = [&mut m, &mut v, &mut codes1, &mut scales1, &mut codes2, &mut scales2];
                step((&mut p).into(), grad.into(), state.map(SliceMut::from));
                [p, m, v, codes1, scales1, codes2, scales2].map(|buffer| bytes(&buffer))
            };
            let check = |what: &str, step: &ScaledStep<'_>| {
                let want = stepped(&scaled, &|p, g, state| step(1., p, g, state));
                assert!(stepped(&grad, &|p, g, state| step(FACTOR, p, g, state)) == want, "{what}, {dtype}, {len}");
                assert!(len == 0 || stepped(&grad, &|p, g, state| step(1., p, g, state)) != want, "{what}, {dtype}");
            };
            for l2 in [0., 0.25] {
                check("Adam", &|factor, param, grad, [m, v, ..]| {
                    kernels().adam(&AdamUpdate { factor, l2, ..ADAM }, param, grad, [m, v]).unwrap();
                });
                for (has_buffer, nesterov) in [(false, None), (true, None), (true, Some(0.8))] {
                    check("SGD", &|factor, param, grad, [m, ..]| {
                        let update = SgdUpdate { factor, l2, kept: 0.9, taken: 0.75, nesterov, lr: 0.1 };
                        kernels().sgd(&update, param, grad, has_buffer.then_some(m)).unwrap();
                    });
                }
            }
            if dtype != DType::F64 {
                check("AdamW of 8 bits", &|factor, param, grad, [_, _, moments @ ..]| {
                    kernels().adam_8bit(&AdamUpdate { factor, ..ADAM }, param, grad, moments).unwrap();
                });
            }
        });
    });
}

#[test]
fn mixes_any_two_float_dtypes() {
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
fn adam_8bit_matches_the_formula() {
    on_every_device(|| {
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
            let step = |param: SliceMut<'_>, means: &mut (_, _), roots: &mut (_, _)| {
                let moments = [&mut means.0, &mut means.1, &mut roots.0, &mut roots.1].map(SliceMut::from);
                kernels().adam_8bit(&ADAM, param, (&grad).into(), moments)
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
            // Decoded values have the same codes again, so a saved and loaded state is unchanged.
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

#[test]
fn errors_name_devices_without_kernels() {
    assert!(of_device(&Device::Cpu).is_ok());
    for (location, name) in [
        (DeviceLocation::Cuda { gpu_id: 99 }, "CUDA device 99"),
        (DeviceLocation::Metal { gpu_id: 0 }, "Metal device 0"),
    ] {
        let Err(crate::error::Error::Device(message)) = id_of(location).and_then(of) else {
            panic!("{name} has kernels")
        };
        assert!(message.contains(name), "{message}");
        assert!(cfg!(feature = "cuda") || message.contains("Device::Cpu"), "{message}");
    }
}
