use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::linear::composite as linear_composite;
use super::super::loss::cross_entropy::composite;
use super::super::{
    CrossEntropyOptions, IGNORED, Linear, Reduction, cross_entropy, cross_entropy_with, linear_cross_entropy,
    linear_cross_entropy_with, vocab_parallel_cross_entropy,
};
use super::{DTYPES, assert_close, check, message, random, random_ids, tolerance};

/// Computes the loss as a chain of Candle's operations.
fn composed(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
    composite(logits, &options.rows("composed", targets, *logits.dims().last().unwrap(), None)?)
}

/// Returns every combination of options.
fn all_options() -> Vec<CrossEntropyOptions> {
    let mut all = vec![];
    for reduction in [Reduction::Mean, Reduction::Sum] {
        for (label_smoothing, softcap) in [(0., None), (0.1, None), (1., None), (0., Some(0.7)), (0.1, Some(3.))] {
            all.push(CrossEntropyOptions { label_smoothing, reduction, softcap, ..Default::default() });
        }
    }
    all
}

/// Returns targets below `classes`. Every third row is ignored.
fn with_gaps(seed: u64, shape: &[usize], classes: usize) -> Tensor {
    let ids: Vec<u32> = random_ids(seed, shape, classes).flatten_all().unwrap().to_vec1().unwrap();
    let ids = ids.into_iter().enumerate().map(|(row, id)| if row % 3 == 1 { IGNORED } else { id });
    Tensor::from_vec(ids.collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
}

/// Computes the loss and the logits' gradient by the formula, element by element.
fn by_formula(logits: &[f64], targets: &[u32], classes: usize, options: &CrossEntropyOptions) -> (f64, Vec<f64>) {
    let counted = targets.iter().filter(|&&target| target != IGNORED).count();
    let share = if options.reduction == Reduction::Mean { 1. / counted as f64 } else { 1. };
    let (mut loss, mut grad) = (0., vec![0.; logits.len()]);
    let capped = |x: f64| options.softcap.map_or(x, |cap| cap * (x / cap).tanh());
    let slope = |x: f64| options.softcap.map_or(1., |cap| 1. - (x / cap).tanh().powi(2));
    for (row, &target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORED) {
        let logits = &logits[row * classes..][..classes];
        let total: f64 = logits.iter().map(|x| capped(*x).exp()).sum();
        for class in 0..classes {
            let hit = if class == target as usize { 1. - options.label_smoothing } else { 0. };
            let wanted = hit + options.label_smoothing / classes as f64;
            let found = capped(logits[class]).exp() / total;
            loss -= share * wanted * found.ln();
            grad[row * classes + class] = share * (found - wanted) * slope(logits[class]);
        }
    }
    (loss, grad)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn options_follow_the_formula_in_every_dtype() {
    for dtype in DTYPES {
        for (shape, classes) in [(vec![2], 1), (vec![7], 5), (vec![3, 4], 129), (vec![3, 2, 2], 64)] {
            let logits = random(4, &[&shape[..], &[classes]].concat(), dtype);
            let targets = with_gaps(5, &shape, classes);
            let ids: Vec<u32> = targets.flatten_all().unwrap().to_vec1().unwrap();
            for options in all_options() {
                let loss = cross_entropy_with(&logits, &targets, &options).unwrap();
                let grad = loss.backward().unwrap().remove(&logits).unwrap();
                let (expected, slopes) = by_formula(&values(&logits), &ids, classes, &options);
                let what = format!("{dtype:?} {shape:?} {classes} {options:?}");
                let expected = Tensor::new(expected, &Device::Cpu).unwrap().to_dtype(loss.dtype()).unwrap();
                assert_close(&what, &loss, &expected, 1e-5);
                let slopes = Tensor::from_vec(slopes, logits.dims(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                assert_close(&what, &grad, &slopes, tolerance(dtype));
            }
        }
    }
}

#[test]
fn the_fused_head_matches_linear_then_loss() {
    for dtype in DTYPES {
        // Fewer counted rows than hidden elements, more rows than a chunk has, and a row in each chunk.
        for (shape, width, classes) in [(vec![5], 8, 7), (vec![2, 9], 8, 33), (vec![2, 9], 4, 33), (vec![9], 2, 300)] {
            let hidden = random(1, &[&shape[..], &[width]].concat(), dtype);
            let (w, b) = (random(2, &[classes, width], dtype), random(4, &[classes], dtype));
            for targets in [with_gaps(3, &shape, classes), random_ids(3, &shape, classes)] {
                for options in all_options() {
                    let what = format!("fused head {dtype:?} {shape:?} {width} {classes} {options:?}");
                    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
                    let expected = |bias: Option<&Tensor>| {
                        let bias = bias.map(|bias| bias.to_dtype(wide)).transpose()?;
                        let (hidden, w) = (hidden.to_dtype(wide)?, w.to_dtype(wide)?);
                        composed(&linear_composite(&hidden, &w, bias.as_ref(), false)?, &targets, &options)
                    };
                    let plain = || linear_cross_entropy_with(&hidden, &w, &targets, &options);
                    check(&what, &[&hidden, &w], plain, || expected(None));
                    let layer = Linear::new(w.as_tensor().clone(), Some(b.as_tensor().clone()));
                    let with_bias = || layer.cross_entropy(&hidden, &targets, &options);
                    check(&what, &[&hidden, &w, &b], with_bias, || expected(Some(&b)));
                    let frozen = w.as_detached_tensor();
                    let of_hidden = || linear_cross_entropy_with(&hidden, &frozen, &targets, &options);
                    check(&what, &[&hidden], of_hidden, || expected(None));
                }
            }
        }
    }
}

/// The losses of rows, weighted differently, against the formula and against Candle's operations.
#[test]
fn losses_of_rows_are_not_combined() {
    for dtype in DTYPES {
        for (shape, width, classes) in [(vec![5], 4, 7), (vec![2, 9], 8, 33), (vec![9], 2, 300)] {
            let (hidden, w) = (random(1, &[&shape[..], &[width]].concat(), dtype), random(2, &[classes, width], dtype));
            let none = Tensor::full(IGNORED, shape.as_slice(), &Device::Cpu).unwrap();
            for targets in [with_gaps(3, &shape, classes), random_ids(3, &shape, classes), none] {
                for label_smoothing in [0., 0.1] {
                    let options =
                        CrossEntropyOptions { label_smoothing, reduction: Reduction::None, ..Default::default() };
                    let what = format!("{dtype:?} {shape:?} {classes} {label_smoothing}");
                    let head = || linear_cross_entropy_with(&hidden, &w, &targets, &options);
                    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
                    let logits =
                        || linear_composite(&hidden.to_dtype(wide)?, &w.to_dtype(wide)?, None, false)?.to_dtype(wide);
                    check(&what, &[&hidden, &w], head, || composed(&logits()?, &targets, &options));
                    check(
                        &what,
                        &[&hidden, &w],
                        || cross_entropy_with(&logits()?, &targets, &options),
                        || composed(&logits()?, &targets, &options),
                    );
                    let found = cross_entropy_with(&logits().unwrap(), &targets, &options).unwrap();
                    assert_eq!(found.dims(), shape, "{what}");
                    let (logits, ids) = (values(&logits().unwrap()), targets.flatten_all().unwrap());
                    let ids: Vec<u32> = ids.to_vec1().unwrap();
                    let of_row = |row: usize| {
                        by_formula(&logits[row * classes..][..classes], &ids[row..=row], classes, &options).0
                    };
                    let expected = Tensor::from_iter((0..ids.len()).map(of_row), &Device::Cpu).unwrap();
                    let expected = expected.reshape(shape.as_slice()).unwrap().to_dtype(found.dtype()).unwrap();
                    assert_close(&what, &found, &expected, 1e-5);
                }
            }
        }
    }
}

#[test]
fn losses_of_rows_over_a_sharded_vocabulary() {
    let logits = random(1, &[2, 3, 8], DType::F32).as_detached_tensor();
    let targets = with_gaps(3, &[2, 3], 8);
    let options = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    let weights = random(7, &[2, 3], DType::F32).as_detached_tensor();
    let run = |logits: Tensor, group: Option<&fsdp_core::ProcessGroup>| {
        let logits = Var::from_tensor(&logits)?;
        let losses = match group {
            Some(group) => vocab_parallel_cross_entropy(&logits, &targets, group, &options)?,
            None => cross_entropy_with(&logits, &targets, &options)?,
        };
        let grad = (&losses * &weights)?.sum_all()?.backward()?.remove(&logits);
        Result::Ok((losses, grad.unwrap()))
    };
    let (losses, grad) = run(logits.clone(), None).unwrap();
    fsdp_core::process_group::local::try_run(2, |group| {
        let part = |whole: &Tensor| whole.narrow(2, 4 * group.rank(), 4)?.contiguous();
        let (found, found_grad) = run(part(&logits)?, Some(&group))?;
        assert_close("losses", &found, &losses, 1e-6);
        assert_close("gradient", &found_grad, &part(&grad)?, 1e-6);
        Result::Ok(())
    })
    .unwrap();
}

/// Compares the gradient along a direction with the difference of two losses.
#[test]
fn gradients_match_differences_of_the_loss() {
    let classes = 9;
    let targets = with_gaps(2, &[8], classes);
    for options in all_options() {
        let loss = |logits: &Tensor| cross_entropy_with(logits, &targets, &options).unwrap();
        for (dtype, step, tolerance) in [(DType::F64, 1e-5, 1e-8), (DType::F32, 1e-2, 2e-3)] {
            let logits = random(1, &[8, classes], dtype);
            let direction = random(3, &[8, classes], dtype).as_detached_tensor();
            let at = |step: f64| values(&loss(&(logits.as_tensor() + (&direction * step).unwrap()).unwrap()))[0];
            let difference = (at(step) - at(-step)) / (2. * step);
            let grad = loss(&logits).backward().unwrap().remove(&logits).unwrap();
            let product = values(&(grad * direction).unwrap().sum_all().unwrap())[0];
            let error = (product - difference).abs();
            assert!(error < tolerance * product.abs().max(1.), "{dtype:?} {options:?}: {product} {difference}");
        }
    }
}

/// The logits have the probabilities 1/8, 2/8 and 5/8, so that losses can be worked out by hand.
#[test]
fn losses_worked_out_by_hand() {
    let row = [1f32.ln(), 2f32.ln(), 5f32.ln()];
    let logits = Var::new(&[row, row, row], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[2u32, IGNORED, 0], &Device::Cpu).unwrap();
    let (ln8, ln4, ln1_6) = (8f64.ln(), 4f64.ln(), 1.6f64.ln());
    let of = |label_smoothing, reduction| {
        let options = CrossEntropyOptions { label_smoothing, reduction, ..Default::default() };
        let loss = cross_entropy_with(&logits, &targets, &options).unwrap();
        (values(&loss)[0], values(&loss.backward().unwrap().remove(&logits).unwrap()))
    };
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    let (loss, grad) = of(0., Reduction::Sum);
    near(loss, ln1_6 + ln8);
    let expected = [0.125, 0.25, -0.375, 0., 0., 0., -0.875, 0.25, 0.625];
    grad.iter().zip(expected).for_each(|(&found, expected)| near(found, expected));
    near(of(0., Reduction::Mean).0, (ln1_6 + ln8) / 2.);
    // Seven tenths of the target's loss, and a tenth of each class's.
    let (loss, grad) = of(0.3, Reduction::Sum);
    near(loss, 0.7 * (ln1_6 + ln8) + 2. * 0.1 * (ln8 + ln4 + ln1_6));
    let expected = [0.025, 0.15, -0.175, 0., 0., 0., -0.675, 0.15, 0.525];
    grad.iter().zip(expected).for_each(|(&found, expected)| near(found, expected));
    near(of(1., Reduction::Mean).0, (ln8 + ln4 + ln1_6) / 3.);
}

#[test]
fn ignoring_all_rows_gives_nan_or_zero_and_zero_gradients() {
    for dtype in DTYPES {
        let (hidden, w) = (random(1, &[2, 4], dtype), random(2, &[7, 4], dtype));
        let targets = Tensor::new(&[IGNORED, IGNORED], &Device::Cpu).unwrap();
        for options in all_options() {
            let plain = cross_entropy_with(&hidden, &targets, &options).unwrap();
            let head = linear_cross_entropy_with(&hidden, &w, &targets, &options).unwrap();
            for (loss, vars) in [(plain, vec![&hidden]), (head, vec![&hidden, &w])] {
                let value = values(&loss)[0];
                let as_said = if options.reduction == Reduction::Sum { value == 0. } else { value.is_nan() };
                assert!(as_said, "{dtype:?} {options:?}: {value}");
                let grads = loss.backward().unwrap();
                for var in vars {
                    assert!(values(grads.get(var).unwrap()).iter().all(|&slope| slope == 0.), "{dtype:?} {options:?}");
                }
            }
        }
    }
}

/// An ignored row may have any target of any integer dtype, and any logits.
#[test]
fn ignored_rows_do_not_count() {
    let logits = random(1, &[3, 5], DType::F32);
    let kept = Tensor::new(&[4u32, 1], &Device::Cpu).unwrap();
    let rows = logits.index_select(&Tensor::new(&[0u32, 2], &Device::Cpu).unwrap(), 0).unwrap();
    let expected = cross_entropy(&rows, &kept).unwrap().to_scalar::<f32>().unwrap();
    let of = |logits: &Tensor, targets: Tensor, ignore_index| {
        let options = CrossEntropyOptions { ignore_index: Some(ignore_index), ..Default::default() };
        cross_entropy_with(logits, &targets, &options).unwrap().to_scalar::<f32>().unwrap()
    };
    let infinite = Tensor::full(f32::INFINITY, (1, 5), &Device::Cpu).unwrap();
    let infinite = Tensor::cat(&[&rows.narrow(0, 0, 1).unwrap(), &infinite, &rows.narrow(0, 1, 1).unwrap()], 0);
    for logits in [logits.as_tensor(), &infinite.unwrap()] {
        assert_eq!(of(logits, Tensor::new(&[4i64, -100, 1], &Device::Cpu).unwrap(), -100), expected);
        assert_eq!(of(logits, Tensor::new(&[4u32, 0, 1], &Device::Cpu).unwrap(), 0), expected);
        assert_eq!(of(logits, Tensor::new(&[4u8, 255, 1], &Device::Cpu).unwrap(), 255), expected);
    }
}

#[test]
fn rejects_wrong_options_and_targets() {
    let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let targets = Tensor::new(&[0u32, IGNORED], &Device::Cpu).unwrap();
    for label_smoothing in [-0.1, 1.5, f64::NAN] {
        let options = CrossEntropyOptions { label_smoothing, ..Default::default() };
        for m in [
            message(cross_entropy_with(&logits, &targets, &options)),
            message(linear_cross_entropy_with(&logits, &logits, &targets, &options)),
        ] {
            assert!(m.contains("label_smoothing") && m.contains("from 0 to 1"), "{m}");
        }
    }
    for softcap in [0., -1., f64::NAN, f64::INFINITY] {
        let options = CrossEntropyOptions { softcap: Some(softcap), ..Default::default() };
        let m = message(cross_entropy_with(&logits, &targets, &options));
        assert!(m.contains(&format!("softcap is {softcap}; it must be positive and finite")), "{m}");
    }
    let bias = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let m = message(Linear::new(logits.clone(), Some(bias)).cross_entropy(&logits, &targets, &Default::default()));
    assert!(m.contains("the bias [3] must be [2]"), "{m}");
    // Without options, no row is ignored.
    let m = message(cross_entropy(&logits, &targets));
    assert!(m.contains("target 4294967295 (element 1 of 2) is out of range"), "{m}");
    let options = CrossEntropyOptions { ignore_index: Some(-100), ..Default::default() };
    assert!(message(cross_entropy_with(&logits, &targets, &options)).contains("target 4294967295"));
    let nothing = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
    let ignored = Tensor::new(&[IGNORED, IGNORED], &Device::Cpu).unwrap();
    assert!(message(cross_entropy_with(&nothing, &ignored, &Default::default())).contains("number of classes is 0"));
    let m = message(linear_cross_entropy_with(
        &nothing,
        &Tensor::zeros((3, 0), DType::F32, &Device::Cpu).unwrap(),
        &ignored,
        &Default::default(),
    ));
    assert!(m.contains("one column"), "{m}");
}

#[test]
fn losses_of_large_logits_are_finite() {
    let large = (random(1, &[6, 50], DType::F32).as_detached_tensor() * 1e4).unwrap();
    assert!(cross_entropy(&large, &random_ids(2, &[6], 50)).unwrap().to_scalar::<f32>().unwrap().is_finite());
}

#[test]
fn losses_of_half_floats_are_f32() {
    let logits = random(1, &[4, 9], DType::BF16);
    assert_eq!(cross_entropy(&logits, &random_ids(1, &[4], 9)).unwrap().dtype(), DType::F32);
}

#[test]
fn views_of_logits_get_their_gradient() {
    let logits = random(1, &[2, 6, 9], DType::F32);
    let targets = random_ids(2, &[2, 5], 9);
    let view = || logits.narrow(1, 0, 5);
    check(
        "view",
        &[&logits],
        || cross_entropy(&view()?, &targets),
        || composed(&view()?.contiguous()?, &targets, &CrossEntropyOptions::default()),
    );
}

#[test]
fn errors_name_targets_and_shapes() {
    let t = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let ids = |ids: &[u32]| Tensor::new(ids, &Device::Cpu).unwrap();
    let m = message(cross_entropy(&t(&[3, 5]), &ids(&[0, 5, 1])));
    assert!(m.contains("target 5") && m.contains("element 1 of 3") && m.contains("classes is 5"), "{m}");
    let m = message(cross_entropy(&t(&[3, 5]), &ids(&[0, 1])));
    assert!(m.contains("[2]") && m.contains("[3, 5]"), "{m}");
    assert!(message(cross_entropy(&t(&[0, 5]), &ids(&[]))).contains("cross_entropy"));
    assert!(message(cross_entropy(&t(&[]), &ids(&[]))).contains("dimension"));
    let m = message(linear_cross_entropy(&t(&[3, 4]), &t(&[5, 4]), &ids(&[0, 9, 1])));
    assert!(m.contains("linear_cross_entropy") && m.contains("target 9"), "{m}");
    let m = message(linear_cross_entropy(&t(&[3, 4]), &t(&[5, 3]), &ids(&[0, 1, 1])));
    assert!(m.contains("[3, 4]") && m.contains("[5, 3]"), "{m}");
}
