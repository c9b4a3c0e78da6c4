//! Redistributions and meshes with ranks as threads, compared with a computation on one thread.

use std::sync::Arc;

use fsdp_core::{
    Buffer, DTensorSpec, DType, DeviceMesh, Heap, MeshLayout,
    Placement::{self, Partial, Replicate, Shard},
    ProcessGroup, ReduceOp, Result,
    dtensor::Redistribution,
    process_group::local,
};
use half::bf16;
use proptest::prelude::*;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn dims(sizes: &[usize]) -> Vec<(&'static str, usize)> {
    NAMES.into_iter().zip(sizes.iter().copied()).collect()
}

fn strided(dim: usize, split_factor: usize) -> Placement {
    Placement::StridedShard { dim, split_factor }
}

/// Small integers: exact in every dtype, as are their sums.
fn buffer(dtype: DType, values: impl Iterator<Item = i64>) -> Buffer {
    match dtype {
        DType::BF16 => Buffer::BF16(values.map(|x| bf16::from_f32(x as f32)).collect()),
        DType::F32 => Buffer::F32(values.map(|x| x as f32).collect()),
        DType::I64 => Buffer::I64(values.collect()),
        other => panic!("{other} is not tested"),
    }
}

/// Returns element `index` of the global tensor.
fn value(index: usize) -> i64 {
    (index * 7 % 61) as i64
}

/// Returns the elements that `rank` holds under `spec`: tests for every index whether one of the rank's boxes contains
/// it.
fn model(spec: &DTensorSpec, rank: usize) -> Vec<i64> {
    let regions = spec.local_regions(rank).unwrap();
    let total: usize = spec.shape().iter().product();
    let held = |index: usize| {
        let mut rest = index;
        let mut at: Vec<usize> = spec.shape().iter().rev().map(|&n| (rest % n, rest /= n).0).collect();
        at.reverse();
        regions.iter().any(|region| {
            at.iter()
                .zip(&region.offsets)
                .zip(&region.sizes)
                .all(|((at, start), size)| (*start..start + size).contains(at))
        })
    };
    (0..total).filter(|&index| held(index)).map(value).collect()
}

/// Returns the term that a rank holds of the reduction over all partial dimensions. Terms are integers, so every order
/// of summation is exact.
fn term(spec: &DTensorSpec, rank: usize, whole: i64) -> i64 {
    let coordinate = spec.mesh().coordinate_of(rank).unwrap();
    let mut value = whole;
    for ((placement, at), &size) in spec.placements().iter().zip(coordinate).zip(spec.mesh().shape()) {
        value = match placement {
            // The first rank holds the rest.
            Partial(ReduceOp::Sum) if at == 0 => value - 3 * (size as i64 - 1),
            Partial(ReduceOp::Sum) => 3,
            Partial(ReduceOp::Avg) => value + 2 * at as i64 - (size as i64 - 1),
            Partial(ReduceOp::Max) => value - at as i64,
            Partial(ReduceOp::Min) => value + at as i64,
            _ => value,
        };
    }
    value
}

fn placement(partial: ReduceOp) -> impl Strategy<Value = Placement> {
    prop_oneof![
        5 => (0usize..3).prop_map(Shard),
        2 => (0usize..2, 1usize..4).prop_map(|(dim, split_factor)| strided(dim, split_factor)),
        1 => (0usize..3, 0usize..3).prop_map(|(dim, rank)| Placement::OwnedBy { dim, rank }),
        3 => Just(Replicate),
        2 => Just(Partial(partial)),
    ]
}

fn case() -> impl Strategy<Value = (Vec<usize>, Vec<usize>, DType, Vec<Vec<Placement>>)> {
    let meshes: [&[usize]; 8] = [&[1], &[2], &[3], &[4], &[2, 2], &[2, 3], &[3, 2], &[2, 2, 2]];
    let mesh = prop::sample::select(meshes.map(<[usize]>::to_vec).to_vec());
    let op = prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max]);
    (mesh, op).prop_flat_map(|(mesh, op)| {
        let placements = prop::collection::vec(prop::collection::vec(placement(op), mesh.len()), 3);
        let shape = prop_oneof![1 => prop::collection::vec(0usize..3, 3), 5 => prop::collection::vec(1usize..9, 3)];
        (Just(mesh), shape, prop::sample::select(vec![DType::F32, DType::BF16]), placements)
    })
}

/// Redistributes this rank's elements.
fn redistribute(mesh: &DeviceMesh, from: &DTensorSpec, to: &DTensorSpec, local: Buffer) -> Result<Buffer> {
    let local = Arc::new(local);
    let output = Redistribution::issue(from, to, mesh, local.clone(), Arc::new(Heap), None)?.wait()?;
    Ok(output.unwrap_or_else(|| (*local).clone()))
}

/// Gathers the whole tensor.
fn full(mesh: &DeviceMesh, spec: &DTensorSpec, local: &Buffer) -> Buffer {
    let replicate = spec.with_placements(&vec![Replicate; spec.placements().len()]).unwrap();
    redistribute(mesh, spec, &replicate, local.clone()).unwrap()
}

fn spec(mesh: &DeviceMesh, placements: &[Placement], shape: &[usize], dtype: DType) -> DTensorSpec {
    DTensorSpec::new(mesh.layout().clone(), placements, shape, dtype).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_chain_of_redistributions_keeps_the_tensor((mesh_dims, shape, dtype, chain) in case()) {
        let layout = MeshLayout::new(&dims(&mesh_dims)).unwrap();
        // The unit tests of specs cover invalid layouts.
        let chain: Vec<DTensorSpec> =
            chain.iter().filter_map(|p| DTensorSpec::new(layout.clone(), p, &shape, dtype).ok()).collect();
        let Some(first) = chain.first() else { return Ok(()) };
        let whole = buffer(dtype, (0..shape.iter().product()).map(value));
        local::run(layout.size(), |world| {
            let mesh = DeviceMesh::new(&world, &dims(&mesh_dims)).unwrap();
            let rank = world.rank();
            let mut local = buffer(dtype, model(first, rank).into_iter().map(|whole| term(first, rank, whole)));
            let mut at = first;
            assert_eq!(full(&mesh, at, &local), whole, "{first}");
            for spec in &chain[1..] {
                let next = match redistribute(&mesh, at, spec, local.clone()) {
                    Ok(next) => next,
                    Err(error) => {
                        assert!(error.to_string().contains("a shard is not a term"), "{error}");
                        continue;
                    }
                };
                let context = format!("rank {rank}: {at} to {spec}");
                if !spec.placements().iter().any(|placement| matches!(placement, Partial(_))) {
                    assert_eq!(next, buffer(dtype, model(spec, rank).into_iter()), "{context}");
                }
                assert_eq!(full(&mesh, spec, &next), whole, "{context}");
                (at, local) = (spec, next);
            }
        });
    }
}

#[test]
fn sums_of_terms_are_reduced_and_scattered() {
    let whole: Vec<i64> = (0..15).collect();
    local::run(4, |world| {
        let mesh = DeviceMesh::new(&world, &[("replicate", 2), ("shard", 2)]).unwrap();
        let sum = Partial(ReduceOp::Sum);
        let spec = |placements: [Placement; 2]| spec(&mesh, &placements, &[5, 3], DType::I64);
        let (terms, sharded) = (spec([sum, sum]), spec([Replicate, Shard(0)]));
        let own = Buffer::I64(whole.iter().map(|x| x * (world.rank() as i64 + 1)).collect());
        let expected: Vec<i64> = whole.iter().map(|x| 10 * x).collect();
        let rows = redistribute(&mesh, &terms, &sharded, own.clone()).unwrap();
        let mine = if world.rank() % 2 == 0 { &expected[..9] } else { &expected[9..] };
        assert_eq!(rows, Buffer::I64(mine.to_vec()));
        assert_eq!(full(&mesh, &terms, &own), Buffer::I64(expected.clone()));
        let back = redistribute(&mesh, &sharded, &spec([sum, Shard(0)]), rows).unwrap();
        assert_eq!(full(&mesh, &spec([sum, Shard(0)]), &back), Buffer::I64(expected));
    });
}

#[test]
fn every_reduce_op_reduces_partials() {
    for (op, expected) in [
        (ReduceOp::Sum, 9.0),
        (ReduceOp::Avg, 3.0),
        (ReduceOp::Min, 2.0),
        (ReduceOp::Max, 4.0),
        (ReduceOp::Product, 24.0),
    ] {
        local::run(3, |world| {
            let mesh = DeviceMesh::new(&world, &[("dp", 3)]).unwrap();
            let spec = |placement| spec(&mesh, &[placement], &[4], DType::F32);
            let terms = Buffer::F32(vec![world.rank() as f32 + 2.0; 4]);
            let shard = redistribute(&mesh, &spec(Partial(op)), &spec(Shard(0)), terms.clone()).unwrap();
            for reduced in [full(&mesh, &spec(Partial(op)), &terms), full(&mesh, &spec(Shard(0)), &shard)] {
                assert_eq!(reduced, Buffer::F32(vec![expected; 4]), "{op}");
            }
        });
    }
}

#[test]
fn invalid_arguments_are_refused_before_communication() {
    local::run(2, |world| {
        let mesh = DeviceMesh::new(&world, &[("dp", 2)]).unwrap();
        // On one rank only: a check that communicated would block.
        if world.rank() == 1 {
            return;
        }
        let from = spec(&mesh, &[Shard(0)], &[3, 3], DType::F32);
        let sum = from.with_placements(&[Partial(ReduceOp::Sum)]).unwrap();
        for (to, elements, part) in
            [(&from, 5, "rank 0 of the mesh: the local tensor has 5 elements"), (&sum, 6, "from S(0) to P(sum)")]
        {
            let error = redistribute(&mesh, &from, to, Buffer::F32(vec![0.0; elements])).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    });
}

fn sum(group: &ProcessGroup, rank: usize) -> u32 {
    match &group.all_reduce(vec![Buffer::U32(vec![1 << rank])], ReduceOp::Sum).wait().unwrap()[..] {
        [Buffer::U32(sum)] => sum[0],
        other => panic!("{other:?}"),
    }
}

#[test]
fn dimensions_have_names() {
    local::run(6, |world| {
        let mesh = DeviceMesh::new(&world, &[("dp", 2), ("tp", 3)]).unwrap();
        let rank = world.rank();
        assert_eq!((mesh.size_of("dp").unwrap(), mesh.size_of("tp").unwrap()), (2, 3));
        assert_eq!((mesh.get_local_rank("dp").unwrap(), mesh.get_local_rank("tp").unwrap()), (rank / 3, rank % 3));
        assert_eq!(mesh.coordinate(), [rank / 3, rank % 3]);
        assert_eq!(sum(mesh.group_by_name("tp").unwrap(), rank), 0b111 << (rank / 3 * 3));
        for error in [
            mesh.group_by_name("pp").map(|_| ()).unwrap_err(),
            mesh.size_of("pp").map(|_| ()).unwrap_err(),
            mesh.get_local_rank("pp").map(|_| ()).unwrap_err(),
        ] {
            assert!(error.to_string().contains("no dimension \"pp\"; it has [\"dp\", \"tp\"]"), "{error}");
        }
    });
}

#[test]
fn flattened_dimensions_have_a_group() {
    local::run(8, |world| {
        let rank = world.rank();
        let mesh = DeviceMesh::new(&world, &[("replicate", 2), ("shard", 2), ("tp", 2)]).unwrap();
        let flat = mesh.flatten(&["replicate", "shard"], "dp").unwrap();
        assert_eq!(flat.layout().to_string(), "(dp: 4, tp: 2)");
        assert_eq!((flat.rank(), flat.get_local_rank("dp").unwrap()), (rank, rank / 2));
        let dp = flat.group_by_name("dp").unwrap();
        assert_eq!((dp.rank(), dp.size()), (rank / 2, 4));
        assert_eq!(sum(dp, rank), 0b0101_0101 << (rank % 2));
        assert_eq!(sum(flat.group_by_name("tp").unwrap(), rank), 0b11 << (rank / 2 * 2));

        // Separate dimensions in reverse order: rank 4a + 2b + c has coordinates (b, 2c + a).
        let flat = mesh.flatten(&["tp", "replicate"], "x").unwrap();
        assert_eq!(flat.layout().to_string(), "(shard: 2, x: 4)");
        let (a, b, c) = (rank / 4, rank / 2 % 2, rank % 2);
        assert_eq!(flat.coordinate(), [b, 2 * c + a]);
        let x = flat.group_by_name("x").unwrap();
        assert_eq!((x.rank(), sum(x, rank)), (2 * c + a, 0b0011_0011 << (2 * b)));

        // The whole world in another order, and a slice with its siblings.
        let all = mesh.flatten(&["tp", "shard", "replicate"], "all").unwrap();
        let group = all.group_by_name("all").unwrap();
        assert_eq!((group.rank(), group.size()), (4 * c + 2 * b + a, 8));
        assert_eq!(all.rank(), group.rank());
        let slice = mesh.slice(&["shard", "tp"]).unwrap().flatten(&["shard", "tp"], "inner").unwrap();
        assert_eq!(sum(slice.group(0).unwrap(), rank), 0b1111 << (4 * a));
        let renamed = mesh.flatten(&["tp"], "model").unwrap();
        assert_eq!(renamed.layout().names(), ["replicate", "shard", "model"]);

        // A redistribution over the flattened mesh.
        let shards = spec(&all, &[Shard(0)], &[9], DType::U32);
        let own = shards.local_region(all.rank()).unwrap();
        let own = Buffer::U32((own.offsets[0] as u32..).take(own.sizes[0]).collect());
        assert_eq!(full(&all, &shards, &own), Buffer::U32((0..9).collect()));
    });
}

#[test]
fn invalid_meshes_are_refused() {
    local::run(4, |world| {
        let error = DeviceMesh::new(&world, &[("dp", 3), ("tp", 2)]).unwrap_err().to_string();
        assert!(error.contains("mesh (dp: 3, tp: 2) has 6 ranks, the world 4"), "{error}");
        let mesh = DeviceMesh::new(&world, &[("dp", 2), ("tp", 2)]).unwrap();
        for (result, part) in [
            (mesh.flatten(&[], "x"), "cannot flatten no dimensions of mesh (dp: 2, tp: 2) into \"x\""),
            (mesh.flatten(&["dp", "dp"], "x"), "\"dp\" of mesh (dp: 2, tp: 2) is named twice"),
            (mesh.flatten(&["dp"], "tp"), "a unique name"),
            (mesh.flatten(&["pp"], "x"), "no dimension \"pp\""),
            (mesh.slice(&["tp", "tp"]), "named twice"),
            (mesh.slice(&[]), "at least one dimension"),
            (DeviceMesh::from_group("", &world), "a unique name"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    });
}
