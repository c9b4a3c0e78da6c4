//! Distribution and redistribution.

use super::*;
use crate::common::{address, alone};
use fsdp_candle::{distribute_tensor, distribute_tensor_from};

#[test]
fn redistributes_between_all_layouts() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        on_meshes(|mesh| {
            for shape in [&[5, 3][..], &[4, 2], &[1, 4], &[0, 2]] {
                let full = numbers(shape, dtype);
                let all = layouts(mesh.layout(), shape, &[Replicate, Shard(0), Shard(1), SUM, MAX]);
                for (at, from) in all.iter().enumerate() {
                    let tensor = laid_out(&full, mesh, from);
                    assert_is(&tensor, &full, &format!("{tensor:?}"));
                    // With two mesh dimensions there are many cases: some of them, different ones for each shape.
                    let step = if mesh.layout().shape().len() == 1 { 1 } else { 5 };
                    for to in all.iter().skip(at % step).step_by(step) {
                        match tensor.redistribute(to) {
                            Ok(moved) => assert_is(&moved, &full, &format!("{tensor:?} to {moved:?}")),
                            Err(error) => assert!(error.to_string().contains("a shard is not a term"), "{error}"),
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn distributes_the_source_ranks_data() {
    on_mesh(&[2, 2], |mesh| {
        let mine = Tensor::full(mesh.rank() as f32, (3, 2), &device()).unwrap();
        for placements in [[Shard(0), Shard(1)], [Replicate, Shard(0)], [strided(0, 2), Shard(0)]] {
            for root in 0..4 {
                let sent = distribute_tensor_from(&mine, mesh, &placements, Some(root)).unwrap();
                assert_is(&sent, &Tensor::full(root as f32, (3, 2), &device()).unwrap(), "sent");
            }
            let of_0 = distribute_tensor(&mine, mesh, &placements).unwrap();
            assert_eq!(values(&of_0.full_tensor().unwrap()), [0.; 6]);
            let own = distribute_tensor_from(&mine, mesh, &placements, None).unwrap();
            assert!(values(own.to_local()).iter().all(|&value| value == mesh.rank() as f64));
        }
        refused(
            distribute_tensor_from(&mine, mesh, &[Shard(0), Shard(0)], Some(4)),
            &["rank 4 is outside mesh (a: 2, b: 2) of ranks 0..4"],
        );
    });
}

#[test]
fn equal_layouts_share_memory() {
    let world = alone();
    let mesh = world.mesh(&[("dp", 1)]).unwrap();
    let local = Tensor::zeros((2, 3), DType::F32, &device()).unwrap();
    let tensor = DTensor::from_local(&local, (2, 3), &mesh, &[Replicate]).unwrap();
    assert_eq!(address(tensor.to_local()), address(&local));
    assert_eq!(address(tensor.redistribute(&[Replicate]).unwrap().to_local()), address(&local));
    assert_eq!(address(&tensor.full_tensor().unwrap()), address(&local));
    // The shard on a mesh of one rank is a copy: writing to it does not change the full tensor.
    let sharded = distribute_tensor_from(&local, &mesh, &[Shard(0)], None).unwrap();
    assert_ne!(address(sharded.to_local()), address(&local));
}

#[test]
fn conversions_keep_placements() {
    on_mesh(&[2], |mesh| {
        let full = numbers(&[3, 2], DType::F32);
        for placement in [Replicate, Shard(0), SUM, AVG, MAX] {
            let tensor = laid_out(&full, mesh, &[placement]);
            for dtype in [DType::BF16, DType::F16, DType::F64] {
                let converted = tensor.to_dtype(dtype).unwrap();
                assert_eq!(converted.placements(), [placement]);
                assert_is(&converted, &full.to_dtype(dtype).unwrap(), "converted");
            }
            let host = tensor.to_device(&Device::Cpu).unwrap();
            assert!(host.device().is_cpu());
            assert_eq!(values(&host.full_tensor().unwrap()), values(&full));
        }
        let positive = full.abs().unwrap();
        let largest = laid_out(&positive, mesh, &[MAX]).relu().unwrap();
        let integers = positive.to_dtype(DType::U32).unwrap();
        assert_is(&largest.to_dtype(DType::U32).unwrap(), &integers, "to integers");
        refused(
            laid_out(&full, mesh, &[SUM]).to_dtype(DType::I64),
            &["to_dtype of F32 [3, 2] as [P(sum)] on (a: 2): the sum along mesh"],
        );
    });
}

#[test]
fn refuses_bad_arguments_before_communication() {
    on_mesh(&[2], |mesh| {
        // On one rank only: none of this may wait for the other.
        if mesh.rank() == 1 {
            return;
        }
        let local = |rows: usize| Tensor::zeros((rows, 3), DType::F32, &device()).unwrap();
        let tensor = DTensor::from_local(&local(2), (3, 3), mesh, &[Shard(0)]).unwrap();
        for (result, part) in [
            (
                DTensor::from_local(&local(3), (3, 3), mesh, &[Shard(0)]),
                "rank 0 of the mesh: the local tensor has shape [3, 3], expected [2, 3] for F32 [3, 3]",
            ),
            (DTensor::from_local(&local(2), (3, 3), mesh, &[Shard(2)]), "no dimension 2"),
            (distribute_tensor(&local(3), mesh, &[Shard(0); 2]), "found 2 placements"),
            (tensor.redistribute(&[]), "found 0 placements"),
            (tensor.redistribute(&[SUM]), "from S(0) to P(sum)"),
        ] {
            refused(result, &[part]);
        }
        assert_eq!(format!("{tensor:?}"), "DTensor(F32 [3, 3] as [S(0)] on (a: 2); rank 0 holds [2, 3])");
    });
}
