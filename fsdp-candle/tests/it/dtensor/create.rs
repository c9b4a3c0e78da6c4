//! Creating DTensors.

use super::*;
use fsdp_candle::initializer::{Initializer, Philox, ShardRequest};
use fsdp_core::layout::Region;

#[test]
fn constants_under_all_placements() {
    on_meshes(|mesh| {
        for placements in layouts(mesh.layout(), &[5, 3], &[Replicate, Shard(0), Shard(1), SUM, AVG, MIN]) {
            for dtype in [DType::F32, DType::BF16, DType::I64, DType::U8] {
                if !dtype.is_float() && placements.contains(&AVG) {
                    continue;
                }
                let full = |value: f64| Tensor::full(value, (5, 3), &device()).unwrap().to_dtype(dtype).unwrap();
                let zeros = DTensor::zeros((5, 3), dtype, &device(), mesh, &placements).unwrap();
                assert_eq!(zeros.placements(), placements);
                assert_is(&zeros, &full(0.), "zeros");
                assert_is(&DTensor::ones((5, 3), dtype, &device(), mesh, &placements).unwrap(), &full(1.), "ones");
                let sevens = DTensor::full(7., (5, 3), dtype, &device(), mesh, &placements).unwrap();
                assert_is(&sevens, &full(7.), "sevens");
            }
        }
        let product = vec![Partial(ReduceOp::Product); mesh.layout().shape().len()];
        refused(DTensor::ones(3, DType::F32, &device(), mesh, &product), &["from R to P(product)"]);
    });
}

/// The values that a generator with this seed draws for a full tensor.
fn drawn(init: candle_nn::Init, shape: &[usize]) -> Tensor {
    let region = Region::whole(shape);
    let mut bytes = vec![0u8; 4 * region.elements()];
    let request = ShardRequest { name: "", shape, dtype: DType::F32, region: &region, init };
    Philox::new(7).fill(&request, &mut bytes).unwrap();
    Tensor::from_vec(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), shape, &device()).unwrap()
}

#[test]
fn random_values_are_the_same_on_any_mesh() {
    let shape = [9, 5];
    on_meshes(|mesh| {
        let uniform = drawn(candle_nn::Init::Uniform { lo: 0., up: 1. }, &shape);
        let normal = drawn(candle_nn::Init::Randn { mean: 0., stdev: 1. }, &shape);
        assert!(values(&uniform).iter().all(|x| (0. ..=1.).contains(x)));
        assert!(values(&normal).iter().any(|x| *x < -1.));
        for placements in layouts(mesh.layout(), &shape, &[Replicate, Shard(0), Shard(1), SUM, MAX]) {
            let rand = DTensor::rand(7, (9, 5), DType::F32, &device(), mesh, &placements).unwrap();
            assert_is(&rand, &uniform, &format!("{rand:?}"));
            let randn = DTensor::randn(7, (9, 5), DType::F32, &device(), mesh, &placements).unwrap();
            assert_is(&randn, &normal, &format!("{randn:?}"));
            let half = DTensor::randn(7, (9, 5), DType::BF16, &device(), mesh, &placements).unwrap();
            assert_is(&half, &normal.to_dtype(DType::BF16).unwrap(), &format!("{half:?}"));
        }
        let everywhere = vec![Replicate; mesh.layout().shape().len()];
        refused(DTensor::rand(7, 3, DType::I64, &device(), mesh, &everywhere), &["cannot draw random values of I64"]);
    });
}

/// Each rank holds a chunk of every part: several 2-D regions.
#[test]
fn draws_strided_shards() {
    on_mesh(&[2, 2], |mesh| {
        let normal = drawn(candle_nn::Init::Randn { mean: 0., stdev: 1. }, &[7, 9]);
        let placements = [strided(0, 2), strided(1, 3)];
        let randn = DTensor::randn(7, (7, 9), DType::F32, &device(), mesh, &placements).unwrap();
        assert!(randn.spec().local_regions(mesh.rank()).unwrap().len() > 3);
        assert_is(&randn, &normal, "boxes");
    });
}
