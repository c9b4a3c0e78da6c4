//! Elementwise operations.

use super::*;
use fsdp_candle::Result;

/// A unary operation on DTensors and on plain tensors, and the partial placements that it keeps.
type Unary = (
    &'static str,
    fn(&DTensor) -> Result<DTensor>,
    fn(&Tensor) -> candle_core::Result<Tensor>,
    &'static [[Placement; 2]],
);

const INCREASING: &[[Placement; 2]] = &[[MAX, MAX], [MIN, MIN]];

const UNARY: [Unary; 25] = [
    ("neg", DTensor::neg, Tensor::neg, &[[SUM, SUM], [AVG, AVG], [MAX, MIN], [MIN, MAX]]),
    ("exp", DTensor::exp, Tensor::exp, INCREASING),
    ("tanh", DTensor::tanh, Tensor::tanh, INCREASING),
    ("erf", DTensor::erf, Tensor::erf, INCREASING),
    ("relu", DTensor::relu, Tensor::relu, INCREASING),
    ("ceil", DTensor::ceil, Tensor::ceil, INCREASING),
    ("floor", DTensor::floor, Tensor::floor, INCREASING),
    ("round", DTensor::round, Tensor::round, INCREASING),
    ("sign", DTensor::sign, Tensor::sign, INCREASING),
    ("abs", DTensor::abs, Tensor::abs, &[]),
    ("square", DTensor::square, Tensor::sqr, &[]),
    ("reciprocal", |x| x.add(20.)?.reciprocal(), |x| (x + 20.)?.recip(), &[]),
    ("sin", DTensor::sin, Tensor::sin, &[]),
    ("cos", DTensor::cos, Tensor::cos, &[]),
    ("gelu", DTensor::gelu, Tensor::gelu_erf, &[]),
    ("silu", DTensor::silu, Tensor::silu, &[]),
    ("log", |x| x.add(20.)?.log(), |x| (x + 20.)?.log(), &[]),
    ("sqrt", |x| x.add(20.)?.sqrt(), |x| (x + 20.)?.sqrt(), &[]),
    ("pow", |x| x.pow(3.), |x| x.powf(3.), &[]),
    ("add a number", |x| x.add(1.5), |x| x + 1.5, &[[AVG, AVG], [MAX, MAX], [MIN, MIN]]),
    ("sub a number", |x| x.sub(1.5), |x| x - 1.5, &[[AVG, AVG], [MAX, MAX], [MIN, MIN]]),
    ("mul a number", |x| x.mul(-2.), |x| x * -2., &[[SUM, SUM], [AVG, AVG]]),
    ("div a number", |x| x.div(-2.), |x| x / -2., &[[SUM, SUM], [AVG, AVG]]),
    ("maximum of a number", |x| x.maximum(1.), |x| x.maximum(1.), INCREASING),
    ("minimum of a number", |x| x.minimum(1.), |x| x.minimum(1.), INCREASING),
];

#[test]
fn unary_operations_keep_placements_or_name_the_redistribution() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        on_meshes(|mesh| {
            let full = numbers(&[3, 2], dtype);
            for placements in layouts(mesh.layout(), &[3, 2], &[Replicate, Shard(0), Shard(1), SUM, AVG, MAX, MIN]) {
                let tensor = laid_out(&full, mesh, &placements);
                for (name, op, plain, kept) in UNARY {
                    let context = format!("{name} of {tensor:?}");
                    let kept_as = |p: &Placement| match p {
                        Partial(_) => kept.iter().find(|[from, _]| from == p).map(|[_, to]| *to),
                        other => Some(*other),
                    };
                    match (op(&tensor), placements.iter().map(kept_as).collect::<Option<Vec<_>>>()) {
                        (Ok(result), Some(expected)) => {
                            assert_eq!(result.placements(), expected, "{context}");
                            assert_is(&result, &plain(&full).unwrap(), &context);
                        }
                        (Err(error), None) => {
                            assert!(error.to_string().contains("redistribute to ["), "{context}: {error}");
                        }
                        (Ok(_), None) => panic!("{context} is not an error"),
                        (Err(error), Some(_)) => panic!("{context}: {error}"),
                    }
                }
            }
        });
    }
}

/// A binary operation on DTensors and on plain tensors, and the partial placements of both that it takes, with the
/// result's.
type Binary = (
    &'static str,
    fn(&DTensor, &DTensor) -> Result<DTensor>,
    fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    &'static [[Placement; 3]],
);

const SUMS: &[[Placement; 3]] = &[
    [SUM, SUM, SUM],
    [AVG, AVG, AVG],
    [AVG, Replicate, AVG],
    [MAX, Replicate, MAX],
    [Replicate, AVG, AVG],
    // Not for a difference, which is smallest where its right side is largest.
    [Replicate, MAX, MAX],
];
const PRODUCTS: &[[Placement; 3]] =
    &[[SUM, Replicate, SUM], [AVG, Replicate, AVG], [Replicate, SUM, SUM], [Replicate, AVG, AVG]];
const LARGEST: &[[Placement; 3]] = &[[MAX, Replicate, MAX], [Replicate, MAX, MAX], [MAX, MAX, MAX]];

const BINARY: [Binary; 6] = [
    ("add", |x, y| x.add(y), Tensor::broadcast_add, SUMS),
    ("sub", |x, y| x.sub(y), Tensor::broadcast_sub, SUMS.split_at(5).0),
    ("mul", |x, y| x.mul(y), Tensor::broadcast_mul, PRODUCTS),
    ("div", |x, y| x.div(y), Tensor::broadcast_div, PRODUCTS.split_at(2).0),
    ("maximum", |x, y| x.maximum(y), Tensor::broadcast_maximum, LARGEST),
    // The minimum of two maxima is not one.
    ("minimum", |x, y| x.minimum(y), Tensor::broadcast_minimum, LARGEST.split_at(2).0),
];

/// The placement of the result of two operands along one mesh dimension, if no communication is needed.
fn together(shapes: [&[usize]; 2], pair: [Placement; 2], partial: &[[Placement; 3]]) -> Option<Placement> {
    let out = shapes[0].len().max(shapes[1].len());
    let full = |at: usize, dim: usize| {
        shapes[0].iter().rev().nth(out - 1 - dim).copied().max(shapes[1].iter().rev().nth(out - 1 - dim).copied())
            == shapes[at].iter().rev().nth(out - 1 - dim).copied()
    };
    let outer = |at: usize| pair[at].shard_dim().map(|dim| dim + out - shapes[at].len());
    match (outer(0), outer(1)) {
        (None, None) if pair == [Replicate; 2] => Some(Replicate),
        (None, None) => partial.iter().find(|rule| rule[..2] == pair).map(|rule| rule[2]),
        // Dimensions that both shapes have are equal here.
        (Some(l), Some(r)) => (l == r && full(0, l) && full(1, r)).then_some(Shard(l)),
        (Some(l), None) => (pair[1] == Replicate && full(0, l) && !full(1, l)).then_some(Shard(l)),
        (None, Some(r)) => (pair[0] == Replicate && full(1, r) && !full(0, r)).then_some(Shard(r)),
    }
}

#[test]
fn binary_operations_keep_placements_or_name_the_redistribution() {
    on_meshes(|mesh| {
        let shapes: [[&[usize]; 2]; 5] =
            [[&[5, 3], &[5, 3]], [&[5, 3], &[3]], [&[5, 3], &[5, 1]], [&[3], &[5, 3]], [&[4], &[]]];
        for [left, right] in shapes {
            let (x, y) = (numbers(left, DType::F32), (numbers(right, DType::F32) + 20.).unwrap());
            for a in layouts_of(mesh.layout(), left, &[Replicate, Shard(0), Shard(1), SUM, AVG, MAX]) {
                let of = [Replicate, Shard(0), Shard(1), SUM, AVG, MAX];
                for b in layouts_of(mesh.layout(), right, &of).into_iter().step_by(one_of(5)) {
                    let (l, r) = (laid_out(&x, mesh, &a), laid_out(&y, mesh, &b));
                    for (name, op, plain, partial) in BINARY {
                        let context = format!("{name} of {l:?} and {r:?}");
                        let pairs = a.iter().zip(&b).map(|(&a, &b)| together([left, right], [a, b], partial));
                        // A maximum of sums and a sum of maxima are ambiguous.
                        let can_be = |p: &Vec<Placement>| !p.contains(&MAX) || !(p.contains(&SUM) || p.contains(&AVG));
                        match (op(&l, &r), pairs.collect::<Option<Vec<_>>>().filter(can_be)) {
                            (Ok(result), Some(expected)) => {
                                assert_eq!(result.placements(), expected, "{context}");
                                let want = plain(&x, &y).unwrap();
                                let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-6 * b.abs().max(1.);
                                let got = values(&result.full_tensor().unwrap());
                                assert!(got.into_iter().zip(values(&want)).all(near), "{context}");
                            }
                            (Err(error), None) => {
                                let text = error.to_string();
                                assert!(text.contains("redistribute the ") && text.contains(" first"), "{text}");
                            }
                            (result, expected) => panic!("{context}: {result:?}, expected {expected:?}"),
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn strided_shards_need_equal_placements() {
    on_mesh(&[2, 2], |mesh| {
        let (x, y) = (numbers(&[7, 2], DType::F32), numbers(&[7, 1], DType::F32));
        let placements = [strided(0, 2), Shard(0)];
        let (l, r) = (laid_out(&x, mesh, &placements), laid_out(&y, mesh, &placements));
        let sum = l.add(&r).unwrap();
        assert_eq!(sum.placements(), placements);
        assert_is(&sum, &x.broadcast_add(&y).unwrap(), "strided");
        refused(
            l.add(&laid_out(&y, mesh, &[Shard(0), Shard(0)])),
            &["redistribute the right to [_S(0, 2), S(0)] first"],
        );
    });
}

#[test]
fn errors_name_layouts_and_fix() {
    on_mesh(&[2], |mesh| {
        let full = numbers(&[4, 2], DType::F32);
        let on = |placement| laid_out(&full, mesh, &[placement]);
        let other = laid_out(&numbers(&[3], DType::F32), mesh, &[Replicate]);
        for (result, part) in [
            (
                on(SUM).exp(),
                "exp of F32 [4, 2] as [P(sum)] on (a: 2): the sum along mesh dimension \"a\" is partial, and exp does \
                 not keep it; redistribute to [R] first",
            ),
            (
                on(Shard(0)).add(&on(Replicate)),
                "along mesh dimension \"a\", S(0) and R need communication; redistribute the right to [S(0)] first",
            ),
            (on(Replicate).add(&on(Shard(1))), "redistribute the left to [S(1)] first"),
            (on(Shard(1)).mul(&on(Shard(0))), "redistribute the right to [S(1)] first"),
            (on(Shard(1)).mul(&on(SUM)), "redistribute the right to [S(1)] first"),
            (on(SUM).mul(&on(SUM)), "redistribute the left to [R] and the right to [R] first"),
            (on(SUM).add(&on(Replicate)), "redistribute the left to [R] first"),
            (on(Shard(0)).add(&other), "the shapes do not broadcast"),
            (on(Shard(0)).add(&on(Shard(0)).to_dtype(DType::F64).unwrap()), "convert one operand"),
        ] {
            refused(result, &[part]);
        }
    });
    on_mesh(&[2, 2], |mesh| {
        let full = numbers(&[4, 2], DType::F32);
        let rows = laid_out(&full, &mesh.slice(&["a"]).unwrap(), &[Shard(0)]);
        let columns = laid_out(&full, &mesh.slice(&["b"]).unwrap(), &[Shard(0)]);
        refused(rows.add(&columns), &["the meshes (a: 2) and (b: 2) do not have the same ranks"]);
    });
}
