//! Compares the layers on a CUDA device with the same layers on the CPU in f64, where they are chains of Candle's
//! operations: values and all gradients. The tests need a device; the device double has one.

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp_core::device::cuda::DeviceMemory;

use super::super::*;
use super::{DTYPES, bits, compare_within, cuda_device as device, on_host, random};
use crate::kernels::cuda::{compute_stream, uninit};
use crate::random::{Part, RngState, in_part, set_rng_state};

/// Dropout on a device sets the CPU's elements to 0, whatever part of a tensor it draws for.
#[test]
fn dropout_draws_the_bits_of_the_cpu() {
    let Some(device) = device() else { return };
    let part = |dim, index, count| Some(Part { dim, index, count });
    for dtype in DTYPES {
        for (shape, part) in [
            (vec![1], None),
            (vec![4, 5, 7], None),
            (vec![3, 4, 1000], None),
            (vec![4, 5, 7], part(1, 1, 3)),
            (vec![4, 6, 8], part(2, 2, 4)),
            (vec![2, 3], part(0, 1, 2)),
        ] {
            let x = random(1, &shape, dtype).as_detached_tensor();
            let run = |x: &Tensor| {
                set_rng_state(RngState { calls: 5, first_row: 3, ..RngState::new(11) });
                let x = Var::from_tensor(x)?;
                let drop = || ops::dropout(&x, 0.3);
                let y = part.map_or_else(drop, |part| in_part(part, drop))?;
                let dx = y.sqr()?.backward()?.remove(&x);
                Result::Ok((y.detach(), dx.unwrap()))
            };
            let ((y, dx), (expected, expected_dx)) = (run(&x.to_device(&device).unwrap()).unwrap(), run(&x).unwrap());
            for (found, expected) in [(y, expected), (dx, expected_dx)] {
                // The CPU multiplies f64 by the same f32 factor.
                assert_eq!(bits(&found), bits(&expected), "{dtype:?} {shape:?} {part:?}");
            }
        }
        let nothing = Tensor::zeros((0, 3), dtype, &device).unwrap();
        assert_eq!(ops::dropout(&nothing, 0.3).unwrap().dims(), [0, 3]);
        // In the middle of a storage, at an address that is not a multiple of four elements.
        let x = random(2, &[40], dtype).as_detached_tensor();
        let run = |x: &Tensor| {
            set_rng_state(RngState::new(3));
            ops::dropout(&x.narrow(0, 3, 30).unwrap(), 0.5).unwrap()
        };
        assert_eq!(bits(&run(&x.to_device(&device).unwrap())), bits(&run(&x)), "{dtype:?}");
    }
}

/// Returns the tolerance relative to the largest value: rounding of the result, and of f32's arithmetic.
fn precision(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 8e-3,
        DType::F16 => 1e-3,
        DType::F32 => 2e-5,
        _ => 1e-12,
    }
}

/// Compares `f` of these inputs on the device with `f` in f64 on the CPU: the result, and all gradients under a loss
/// that weighs every element differently.
fn compare(what: &str, device: &Device, inputs: &[Var], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    compare_within(what, precision(inputs[0].dtype()), device, inputs, f);
}

/// Rows of a warp and of a block, with and without packs, and more rows than a stretch of the weights' sums.
#[test]
fn norms_match_f64() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for shape in [vec![3, 2], vec![5, 7], vec![2, 3, 64], vec![2, 1030], vec![3, 1028], vec![70, 36]] {
            let hidden = shape[shape.len() - 1];
            let x = Var::from_tensor(&(random(1, &shape, dtype).as_tensor() + 3.).unwrap()).unwrap();
            let inputs = [x, random(2, &[hidden], dtype), random(3, &[hidden], dtype)];
            compare(&format!("layer norm {shape:?}"), &device, &inputs, |x| {
                LayerNorm::new(x[1].clone(), x[2].clone(), 1e-2).forward(&x[0])
            });
            compare(&format!("rms norm {shape:?}"), &device, &inputs[..2], |x| {
                RmsNorm::new(x[1].clone(), 1e-2).forward(&x[0])
            });
        }
        // Views, and no rows.
        let inputs = [random(4, &[9, 5], dtype), random(5, &[11], dtype)];
        compare("rms norm of views", &device, &inputs, |x| {
            RmsNorm::new(x[1].narrow(0, 1, 9)?, 1e-2).forward(&x[0].t()?)
        });
        let nothing = Tensor::zeros((0, 4), dtype, &device).unwrap();
        let norm = RmsNorm::new(Tensor::ones(4, dtype, &device).unwrap(), 1e-2);
        assert_eq!(norm.forward(&nothing).unwrap().dims(), [0, 4]);
    }
}

/// The same bits from each call, whatever the order of threads.
#[test]
fn norms_are_deterministic() {
    let Some(device) = device() else { return };
    let x = random(1, &[300, 40], DType::F32).as_detached_tensor().to_device(&device).unwrap();
    let grad = || {
        let weight = Var::ones(40, DType::F32, &device).unwrap();
        let y = RmsNorm::new(weight.as_tensor().clone(), 1e-5).forward(&x).unwrap();
        bits(&y.sqr().unwrap().sum_all().unwrap().backward().unwrap().remove(&weight).unwrap())
    };
    assert_eq!(grad(), grad());
}

#[test]
fn rotary_matches_f64() {
    let Some(device) = device() else { return };
    let options = RotaryOptions { head_dim: Some(7), factor: 1.5 };
    let new = |device: &Device| Rotary::with_options(&[1.0, 0.25], options, 9, device).unwrap();
    let (own, on_device) = (new(&Device::Cpu), new(&device));
    let of = |x: &Tensor| if x.device().is_cpu() { &own } else { &on_device };
    let documents = Documents::new(vec![vec![2, 3], vec![4, 1]]).unwrap();
    for dtype in DTYPES {
        for (shape, offset) in [(vec![2, 5, 3, 7], 0), (vec![1, 2, 21], 7), (vec![3, 9, 700], 0), (vec![2, 0, 7], 3)] {
            let x = [random(1, &shape, dtype)];
            if shape[1] == 0 {
                let x = x[0].to_device(&device).unwrap();
                assert_eq!(on_device.apply(&x, offset).unwrap().dims(), shape);
                continue;
            }
            compare(&format!("rotary {shape:?}"), &device, &x, |x| of(&x[0]).apply(&x[0], offset));
        }
        let x = [random(1, &[2, 14, 5], dtype)];
        compare("rotary of a view in documents", &device, &x, |x| {
            of(&x[0]).apply_in_documents(&x[0].transpose(1, 2)?, &documents)
        });
    }
}

#[test]
fn ropes_match_f64() {
    let Some(device) = device() else { return };
    type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let ropes: [(&str, Rope, bool); 3] = [
        ("rope", rotary_emb::rope, true),
        ("rope_i", rotary_emb::rope_i, true),
        ("rope_thd", rotary_emb::rope_thd, false),
    ];
    for dtype in DTYPES {
        for (name, rope, heads_first) in ropes {
            let shape = if heads_first { [2, 3, 4, 6] } else { [2, 4, 3, 6] };
            for tables in [vec![5, 3], vec![2, 5, 3]] {
                let (cos, sin) = (random(2, &tables, dtype), random(3, &tables, dtype));
                compare(&format!("{name} {tables:?}"), &device, &[random(1, &shape, dtype)], |x| {
                    let table = |t: &Var| t.as_detached_tensor().to_dtype(x[0].dtype())?.to_device(x[0].device());
                    rope(&x[0], &table(&cos)?, &table(&sin)?)
                });
                // Learned tables have gradients.
                let inputs = [random(1, &shape, dtype), cos.clone(), sin.clone()];
                if dtype == DType::F64 {
                    compare(&format!("learned {name}"), &device, &inputs, |x| rope(&x[0], &x[1], &x[2]));
                }
            }
        }
    }
}

/// Returns the formula's GELU on the CPU. The coefficients of Candle's gradient have six digits.
fn exact_gelu(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cuda() {
        return gelu(x);
    }
    let argument = ((x.sqr()? * x)? * 0.044715)?;
    x * candle_nn::ops::sigmoid(&((x + argument)? * (8. / std::f64::consts::PI).sqrt())?)?
}

#[test]
fn activations_match_f64() {
    let Some(device) = device() else { return };
    type Function = fn(&Tensor) -> Result<Tensor>;
    let functions: [(&str, Function); 3] = [("silu", silu), ("gelu", exact_gelu), ("gelu_erf", gelu_erf)];
    for dtype in DTYPES {
        for shape in [vec![1], vec![3, 37], vec![4, 5, 8]] {
            let inputs = [random(1, &shape, dtype), random(2, &shape, dtype)];
            for (name, function) in functions {
                // The coefficients of Candle's gradient in f64 have six digits.
                if name == "gelu_erf" && dtype == DType::F64 {
                    continue;
                }
                compare(&format!("{name} {shape:?}"), &device, &inputs[..1], |x| function(&x[0]));
            }
            compare(&format!("silu_mul {shape:?}"), &device, &inputs, |x| silu_mul(&x[0], &x[1]));
        }
        for shape in [[3, 8], [3, 10]] {
            let inputs = [random(5, &shape, dtype)];
            compare(&format!("swiglu {shape:?}"), &device, &inputs, |x| ops::swiglu(&x[0]));
            compare("silu of a view", &device, &inputs, |x| silu(&x[0].t()?));
            compare("swiglu of a view", &device, &[random(5, &[6, 5], dtype)], |x| ops::swiglu(&x[0].t()?));
        }
        let nothing = Tensor::zeros((0, 4), dtype, &device).unwrap();
        assert_eq!(silu(&nothing).unwrap().dims(), [0, 4]);
        assert_eq!(ops::swiglu(&nothing).unwrap().dims(), [0, 2]);
    }
}

#[test]
fn activations_of_extreme_values_are_finite_on_devices() {
    let Some(device) = device() else { return };
    let x = Var::new(&[-1e30f32, -1000., -100., 100., 1000., 1e30], &device).unwrap();
    for (name, y) in [("silu", silu(&x)), ("gelu", gelu(&x)), ("gelu_erf", gelu_erf(&x))] {
        let y = y.unwrap();
        let slopes = y.backward().unwrap().remove(&x).unwrap().to_vec1::<f32>().unwrap();
        let y = y.to_vec1::<f32>().unwrap();
        assert!(y[..3].iter().all(|y| y.abs() < 1e-30) && y[3..] == [100., 1000., 1e30], "{name}: {y:?}");
        assert!(slopes[..3].iter().all(|slope| slope.abs() < 1e-30) && slopes[3..] == [1.; 3], "{name}: {slopes:?}");
    }
}

fn every_option() -> impl Iterator<Item = CrossEntropyOptions> {
    let reductions = [Reduction::Mean, Reduction::Sum, Reduction::None];
    reductions.into_iter().flat_map(|reduction| {
        [(0., None), (0.1, None), (0.1, Some(0.7))].map(|(label_smoothing, softcap)| CrossEntropyOptions {
            label_smoothing,
            reduction,
            softcap,
            ..Default::default()
        })
    })
}

/// Targets below `classes`; some are ignored, or none is.
fn targets_of(shape: &[usize], classes: usize) -> [Tensor; 2] {
    let all = super::random_ids(5, shape, classes);
    let ids: Vec<u32> = all.flatten_all().unwrap().to_vec1().unwrap();
    let gaps = ids.into_iter().enumerate().map(|(row, id)| if row % 3 == 1 { IGNORED } else { id });
    [Tensor::from_vec(gaps.collect::<Vec<_>>(), shape, &Device::Cpu).unwrap(), all]
}

#[test]
fn cross_entropies_match_f64() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for (shape, classes) in [(vec![2], 1), (vec![7], 5), (vec![3, 4], 1100)] {
            let logits = [random(4, &[&shape[..], &[classes]].concat(), dtype)];
            for targets in targets_of(&shape, classes) {
                for options in every_option() {
                    compare(&format!("{shape:?} {classes} {options:?}"), &device, &logits, |x| {
                        cross_entropy_with(&x[0], &targets, &options)
                    });
                }
            }
        }
    }
}

/// Several stretches of rows, of which the last one is shorter.
#[test]
fn fused_heads_match_f64() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for (shape, width, classes) in [(vec![5], 4, 7), (vec![2, 9], 8, 33), (vec![4], 2, 700)] {
            let hidden = random(1, &[&shape[..], &[width]].concat(), dtype);
            let inputs = [hidden, random(2, &[classes, width], dtype), random(4, &[classes], dtype)];
            for targets in targets_of(&shape, classes) {
                for options in every_option() {
                    compare(&format!("head {shape:?} {classes} {options:?}"), &device, &inputs[..2], |x| {
                        linear_cross_entropy_with(&x[0], &x[1], &targets, &options)
                    });
                    compare(&format!("head with bias {shape:?} {classes} {options:?}"), &device, &inputs, |x| {
                        Linear::new(x[1].clone(), Some(x[2].clone())).cross_entropy(&x[0], &targets, &options)
                    });
                }
            }
        }
    }
}

#[test]
fn ignored_rows_have_no_gradient_on_devices() {
    let Some(device) = device() else { return };
    let values = |x: &Tensor| on_host(x).to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    for dtype in DTYPES {
        let on_device = |seed, shape: &[usize]| {
            Var::from_tensor(&random(seed, shape, dtype).as_detached_tensor().to_device(&device).unwrap()).unwrap()
        };
        let (hidden, w) = (on_device(1, &[2, 4]), on_device(2, &[7, 4]));
        let none = Tensor::new(&[IGNORED, IGNORED], &Device::Cpu).unwrap();
        for options in every_option() {
            let plain = cross_entropy_with(&hidden, &none, &options).unwrap();
            let head = linear_cross_entropy_with(&hidden, &w, &none, &options).unwrap();
            for (loss, vars) in [(plain, vec![&hidden]), (head, vec![&hidden, &w])] {
                let is_mean = options.reduction == Reduction::Mean;
                assert!(
                    values(&loss).iter().all(|loss| if is_mean { loss.is_nan() } else { *loss == 0. }),
                    "{options:?}"
                );
                let grads = loss.sum_all().unwrap().backward().unwrap();
                for var in vars {
                    assert!(values(grads.get(var).unwrap()).iter().all(|slope| *slope == 0.), "{dtype:?} {options:?}");
                }
            }
        }
    }
    // Masked logits have no probability, and those of an ignored row are not read.
    let (masked, infinite) = (f32::NEG_INFINITY, f32::INFINITY);
    let logits = Var::new(&[[masked, 1., 2., masked, 0.5], [infinite; 5]], &device).unwrap();
    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let loss = cross_entropy_with(&logits, &Tensor::new(&[2u32, IGNORED], &Device::Cpu).unwrap(), &options).unwrap();
    let grad = values(&loss.backward().unwrap().remove(&logits).unwrap());
    let [a, b, c] = [1f64, 2., 0.5].map(f64::exp);
    assert!((values(&loss)[0] - ((a + b + c) / b).ln()).abs() < 1e-6);
    for (found, expected) in grad.iter().zip([0., a / (a + b + c), -(a + c) / (a + b + c), 0., c / (a + b + c)]) {
        assert!((found - expected).abs() < 1e-6, "{grad:?}");
    }
    assert!(grad[5..].iter().all(|slope| *slope == 0.));
}

/// Most rows of the table have several tokens.
#[test]
fn embeddings_match_f64() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for (ids, vocabulary) in [(vec![2, 3], 9), (vec![30, 20], 11)] {
            let ids = super::random_ids(1, &ids, vocabulary);
            compare("embedding", &device, &[random(3, &[vocabulary, 6], dtype)], |x| {
                Embedding::new(x[0].clone(), 6).forward(&ids.to_device(x[0].device())?)
            });
        }
    }
}

#[test]
fn rejects_too_large_scores_of_the_composite_on_a_device() {
    const SCORES: usize = 85_895_824_000;
    let Some(device) = device() else { return };
    // Beside it, the scores do not fit.
    let free = DeviceMemory::of(&compute_stream(&device).unwrap()).unwrap().free as usize;
    let ballast = uninit(&device, fsdp_core::DType::U8, free.saturating_sub(SCORES) + (1 << 23)).unwrap();
    let error = |steps: usize| {
        let zeros = Tensor::zeros((1, 1, steps, 1), DType::F64, &device).unwrap();
        let q = Var::from_tensor(&zeros).unwrap();
        ops::sdpa(&q, &zeros, &zeros, None, true, 1., 1.).unwrap_err().to_string()
    };
    let parts = ["[1, 1, 46341, 46341] has 2147488281 elements", "fewer than 2147483648 (2^31)"];
    let said = error(46341);
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    let parts = [&format!("take 80.00 GiB ({SCORES} bytes) in 5 matrices of f64"), "GiB free of "];
    let said = error(46340);
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    drop(ballast);
}
