//! Matrix products.

use super::*;

/// The placement of the product along one mesh dimension, if no communication is needed.
fn product(left: Placement, right: Placement, linear: &[Placement]) -> Option<Placement> {
    match (left, right) {
        (Replicate, Replicate) => Some(Replicate),
        (Shard(0), Replicate) => Some(Shard(0)),
        (Replicate, Shard(1)) => Some(Shard(1)),
        (Shard(1), Shard(0)) => Some(SUM),
        (p, Replicate) | (Replicate, p) => linear.contains(&p).then_some(p),
        _ => None,
    }
}

#[test]
fn matmul_keeps_placements_or_names_the_redistribution() {
    for (dtype, inner) in [(DType::F32, 3), (DType::F32, 1), (DType::F64, 4), (DType::F16, 3)] {
        on_meshes(|mesh| {
            let (x, y) = (numbers(&[5, inner], dtype), numbers(&[inner, 4], dtype));
            let want = x.matmul(&y).unwrap();
            let of = [Replicate, Shard(0), Shard(1), SUM, AVG, MAX];
            for a in layouts_of(mesh.layout(), &[5, inner], &of) {
                for b in layouts_of(mesh.layout(), &[inner, 4], &of).into_iter().step_by(one_of(5)) {
                    let (l, r) = (laid_out(&x, mesh, &a), laid_out(&y, mesh, &b));
                    let pairs = a.iter().zip(&b).map(|(&a, &b)| product(a, b, &[SUM, AVG]));
                    match (l.matmul(&r), pairs.collect::<Option<Vec<_>>>()) {
                        (Ok(result), Some(expected)) => {
                            assert_eq!(result.placements(), expected);
                            assert_is(&result, &want, &format!("{l:?} by {r:?}"));
                        }
                        (Err(error), None) => {
                            let text = error.to_string();
                            assert!(text.contains("Redistribute to S(0) and R"), "{text}");
                        }
                        (result, expected) => panic!("{l:?} by {r:?}: {result:?}, expected {expected:?}"),
                    }
                }
            }
        });
    }
}

#[test]
fn matmul_of_batches_and_strided_shards() {
    on_mesh(&[3], |mesh| {
        let (x, y) = (numbers(&[4, 2, 3], DType::F32), numbers(&[4, 3, 2], DType::F32));
        let batch = |full| laid_out(full, mesh, &[Shard(0)]);
        let product = batch(&x).matmul(&batch(&y)).unwrap();
        assert_eq!(product.placements(), [Shard(0)]);
        assert_is(&product, &x.matmul(&y).unwrap(), "a batch");
        refused(batch(&x).matmul(&laid_out(&y, mesh, &[Replicate])), &["both by a leading dimension"]);
        refused(batch(&x).matmul(&batch(&x)), &["expected shapes"]);
    });
    on_mesh(&[2, 2], |mesh| {
        let (x, y) = (numbers(&[3, 6], DType::F32), numbers(&[6, 2], DType::F32));
        let l = laid_out(&x, mesh, &[strided(1, 2), Shard(1)]);
        let r = laid_out(&y, mesh, &[strided(0, 2), Shard(0)]);
        let product = l.matmul(&r).unwrap();
        assert_eq!(product.placements(), [SUM, SUM]);
        assert_is(&product, &x.matmul(&y).unwrap(), "strided");
        // The columns of one are not the rows of the other.
        refused(l.matmul(&laid_out(&y, mesh, &[Shard(0), Shard(0)])), &[]);
    });
}

#[test]
fn transposes_keep_layouts() {
    on_meshes(|mesh| {
        let full = numbers(&[5, 3], DType::BF16);
        for placements in layouts(mesh.layout(), &[5, 3], &[Replicate, Shard(0), Shard(1), SUM]) {
            let turned = laid_out(&full, mesh, &placements).t().unwrap();
            assert_is(&turned, &full.t().unwrap(), "turned");
            assert_is(&turned.transpose(0, 1).unwrap(), &full, "turned back");
            let row_sums = turned.sum(0).unwrap();
            let exact = full.to_dtype(DType::F32).unwrap().sum(1).unwrap();
            assert_is(&row_sums, &exact.to_dtype(DType::BF16).unwrap(), "sums of rows");
        }
        let everywhere = vec![Replicate; mesh.layout().shape().len()];
        let cube = DTensor::zeros((2, 2, 2), DType::F32, &device(), mesh, &everywhere).unwrap();
        refused(cube.t(), &["expected two dimensions"]);
    });
}
