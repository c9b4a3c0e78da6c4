use candle_core::{DType, Device, Tensor};

use super::super::loss::cross_entropy::composite;
use super::super::{cross_entropy, linear_cross_entropy};
use super::{DTYPES, check, message, random, random_ids};

#[test]
fn cross_entropy_matches_the_composite() {
    for dtype in DTYPES {
        for (shape, classes) in [(vec![1], 1), (vec![7], 5), (vec![2, 3], 129), (vec![3, 2, 2], 64)] {
            let mut dims = shape.clone();
            dims.push(classes);
            let logits = random(1, &dims, dtype);
            let targets = random_ids(2, &shape, classes);
            check("cross_entropy", &[&logits], || cross_entropy(&logits, &targets), || composite(&logits, &targets));
        }
    }
}

#[test]
fn cross_entropy_matches_candle_nn_and_survives_large_logits() {
    let logits = random(1, &[6, 50], DType::F32);
    let targets = random_ids(2, &[6], 50);
    check(
        "cross_entropy",
        &[&logits],
        || cross_entropy(&logits, &targets),
        || candle_nn::loss::cross_entropy(&logits, &targets),
    );
    let large = (logits.as_detached_tensor() * 1e4).unwrap();
    assert!(cross_entropy(&large, &targets).unwrap().to_scalar::<f32>().unwrap().is_finite());
}

#[test]
fn the_loss_of_half_floats_is_f32() {
    let logits = random(1, &[4, 9], DType::BF16);
    assert_eq!(cross_entropy(&logits, &random_ids(1, &[4], 9)).unwrap().dtype(), DType::F32);
}

#[test]
fn a_view_of_the_logits_gets_its_gradient() {
    let logits = random(1, &[2, 6, 9], DType::F32);
    let targets = random_ids(2, &[2, 5], 9);
    let view = || logits.narrow(1, 0, 5);
    check("view", &[&logits], || cross_entropy(&view()?, &targets), || composite(&view()?.contiguous()?, &targets));
}

#[test]
fn the_fused_head_matches_linear_then_loss() {
    for dtype in DTYPES {
        // 1.2 million classes make stretches of 13 rows.
        for (shape, width, classes) in [(vec![5], 4, 7), (vec![2, 9], 8, 33), (vec![30], 1, 1_200_000)] {
            if classes > 1000 && dtype != DType::F32 {
                continue;
            }
            let mut dims = shape.clone();
            dims.push(width);
            let hidden = random(1, &dims, dtype);
            let w = random(2, &[classes, width], dtype);
            let targets = random_ids(3, &shape, classes);
            check(
                &format!("fused head {dtype:?} {classes}"),
                &[&hidden, &w],
                || linear_cross_entropy(&hidden, &w, &targets),
                || {
                    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
                    let (hidden, w) = (hidden.to_dtype(wide)?, w.to_dtype(wide)?);
                    composite(&super::super::linear::affine::composite(&hidden, &w, None, false)?, &targets)
                },
            );
        }
    }
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
