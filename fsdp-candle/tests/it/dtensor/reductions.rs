//! Sums, means, minima, maxima and norms.

use super::*;
use fsdp_candle::NormType;

const DIMS: [&[usize]; 5] = [&[0], &[1], &[2], &[0, 2], &[0, 1, 2]];

fn largest(tensor: &Tensor, dims: &[usize]) -> Tensor {
    dims.iter().fold(tensor.clone(), |tensor, &dim| tensor.max_keepdim(dim).unwrap())
}

fn smallest(tensor: &Tensor, dims: &[usize]) -> Tensor {
    largest(&tensor.neg().unwrap(), dims).neg().unwrap()
}

/// The placement of a reduction's result; none if it can't be computed from partial values.
fn after(
    placement: Placement,
    dims: &[usize],
    keepdim: bool,
    across: Placement,
    of: &[Placement],
) -> Option<Placement> {
    match placement {
        Shard(dim) if dims.contains(&dim) => Some(across),
        Shard(dim) if !keepdim => Some(Shard(dim - dims.iter().filter(|&&gone| gone < dim).count())),
        Partial(_) => of.contains(&placement).then_some(placement),
        other => Some(other),
    }
}

#[test]
fn reductions_are_partial_over_sharded_dimensions() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        on_meshes(|mesh| {
            let shape = [3, 2, 4];
            let full = numbers(&shape, dtype);
            let exact = full.to_dtype(DType::F32).unwrap();
            let of = [Replicate, Shard(0), Shard(1), Shard(2), SUM, AVG, MAX];
            for placements in layouts_of(mesh.layout(), &shape, &of).into_iter().step_by(one_of(3)) {
                let tensor = laid_out(&full, mesh, &placements);
                for (dims, keepdim) in DIMS.into_iter().flat_map(|dims| [(dims, false), (dims, true)]) {
                    let plain = |all: Tensor| match keepdim {
                        true => all,
                        false => dims.iter().rev().fold(all, |all, &dim| all.squeeze(dim).unwrap()),
                    };
                    let of_sums: &[Placement] = &[SUM, AVG];
                    for (name, result, want, across, of) in [
                        (
                            "sum",
                            if keepdim { tensor.sum_keepdim(dims) } else { tensor.sum(dims) },
                            exact.sum_keepdim(dims).unwrap(),
                            SUM,
                            of_sums,
                        ),
                        (
                            "max",
                            if keepdim { tensor.max_keepdim(dims) } else { tensor.max(dims) },
                            largest(&exact, dims),
                            MAX,
                            &[MAX],
                        ),
                        (
                            "min",
                            if keepdim { tensor.min_keepdim(dims) } else { tensor.min(dims) },
                            smallest(&exact, dims),
                            MIN,
                            &[],
                        ),
                    ] {
                        let context = format!("{name} over {dims:?} of {tensor:?}");
                        let after = |&p: &Placement| after(p, dims, keepdim, across, of);
                        match (result, placements.iter().map(after).collect::<Option<Vec<_>>>()) {
                            (Ok(result), Some(expected)) => {
                                assert_eq!(result.placements(), expected, "{context}");
                                assert_is(&result, &plain(want).to_dtype(dtype).unwrap(), &context);
                            }
                            (Err(error), None) => {
                                assert!(error.to_string().contains("redistribute to ["), "{context}: {error}");
                            }
                            (result, expected) => panic!("{context}: {result:?}, expected {expected:?}"),
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn means_count_every_element_once() {
    on_meshes(|mesh| {
        // Five rows: uneven shards, and an empty one on four ranks.
        let full = numbers(&[5, 3], DType::F32);
        for placements in layouts(mesh.layout(), &[5, 3], &[Replicate, Shard(0), Shard(1), SUM, AVG]) {
            let tensor = laid_out(&full, mesh, &placements);
            for (got, want) in [
                (tensor.mean(0).unwrap(), full.mean(0).unwrap()),
                (tensor.mean_keepdim(1).unwrap(), full.mean_keepdim(1).unwrap()),
                (tensor.mean_all().unwrap(), full.mean_all().unwrap()),
            ] {
                assert_eq!(got.shape(), want.dims());
                let near = |(a, b): (f64, f64)| (a - b).abs() < 1e-5;
                let full = values(&got.full_tensor().unwrap());
                assert!(full.into_iter().zip(values(&want)).all(near), "{tensor:?}");
            }
        }
    });
}

#[test]
fn ranks_without_elements_add_nothing() {
    on_mesh(&[4], |mesh| {
        let negative = (numbers(&[2, 3], DType::F32) - 9.).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::I64] {
            let tensor = laid_out(&negative.to_dtype(dtype).unwrap(), mesh, &[Shard(0)]);
            assert_eq!(tensor.to_local().elem_count(), if mesh.rank() < 2 { 3 } else { 0 });
            let of = |x: DTensor| values(&x.full_tensor().unwrap());
            let whole = values(&negative);
            assert_eq!(of(tensor.sum_all().unwrap()), [whole.iter().sum::<f64>()]);
            assert_eq!(of(tensor.max_all().unwrap()), [whole.iter().copied().fold(f64::MIN, f64::max)]);
            assert_eq!(of(tensor.min_all().unwrap()), [whole.iter().copied().fold(f64::MAX, f64::min)]);
        }
        let counts = DTensor::ones((2, 3), DType::U32, &device(), mesh, &[Shard(0)]).unwrap();
        assert_eq!(values(&counts.min_all().unwrap().full_tensor().unwrap()), [1.]);
        let none = DTensor::zeros((0, 3), DType::F32, &device(), mesh, &[Shard(0)]).unwrap();
        assert_eq!(values(&none.sum(0).unwrap().full_tensor().unwrap()), [0.; 3]);
        refused(none.max(0), &["no elements"]);
        refused(counts.mean_all(), &["convert to a floating point type first"]);
        refused(none.sum(2), &["out of range"]);
    });
}

#[test]
fn norms_are_partial() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        on_meshes(|mesh| {
            let full = numbers(&[5, 3], dtype);
            let all = values(&full);
            for placements in layouts(mesh.layout(), &[5, 3], &[Replicate, Shard(0), Shard(1)]) {
                let tensor = laid_out(&full, mesh, &placements);
                for (norm, want) in [
                    (NormType::Two, all.iter().map(|x| x * x).sum::<f64>().sqrt()),
                    (NormType::P(1.), all.iter().map(|x| x.abs()).sum()),
                    (NormType::P(3.), all.iter().map(|x| x.abs().powi(3)).sum::<f64>().cbrt()),
                    (NormType::Infinity, all.iter().fold(0., |max, x| x.abs().max(max))),
                ] {
                    let partial = tensor.norm(norm).unwrap();
                    let share = if norm == NormType::Infinity { MAX } else { SUM };
                    let expected = placements.iter().map(|p| if p.shard_dim().is_some() { share } else { *p });
                    assert_eq!(partial.placements(), expected.collect::<Vec<_>>());
                    let got = partial.full_tensor().unwrap();
                    assert_eq!(got.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 });
                    let got = values(&got)[0];
                    assert!((got - want).abs() < 1e-6 * want, "{norm:?} of {tensor:?}: {got} instead of {want}");
                }
            }
            let terms = laid_out(&full, mesh, &vec![SUM; mesh.layout().shape().len()]);
            refused(terms.norm(NormType::Two), &["norm does not keep it"]);
            refused(terms.norm(NormType::P(0.)), &["a norm of order 0"]);
        });
    }
}
