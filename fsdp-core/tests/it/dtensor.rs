//! DTensors and meshes with ranks as threads, against the same computed on one thread.

use fsdp_core::{
    Buffer, DTensor, DTensorSpec, DType, DeviceMesh, MeshLayout,
    Placement::{self, Partial, Replicate, Shard},
    ProcessGroup, ReduceOp,
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

/// Small whole numbers, which every dtype has and whose sums are exact.
fn buffer(dtype: DType, values: impl Iterator<Item = i64>) -> Buffer {
    match dtype {
        DType::BF16 => Buffer::BF16(values.map(|x| bf16::from_f32(x as f32)).collect()),
        DType::F32 => Buffer::F32(values.map(|x| x as f32).collect()),
        DType::I64 => Buffer::I64(values.collect()),
        other => panic!("{other} is not tested"),
    }
}

/// Element `index` of the global tensor.
fn value(index: usize) -> i64 {
    (index * 7 % 61) as i64
}

/// What `rank` holds of a tensor under `spec`, by asking of every index of the tensor whether one of the rank's boxes
/// has it.
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

/// The term of the reduction over all partial dimensions that a rank holds: whole numbers, so that every order of
/// summing is exact.
fn term(spec: &DTensorSpec, rank: usize, whole: i64) -> i64 {
    let coordinate = spec.mesh().coordinate_of(rank).unwrap();
    let mut value = whole;
    for ((placement, at), &size) in spec.placements().iter().zip(coordinate).zip(spec.mesh().shape()) {
        value = match placement {
            // The first rank has what the others leave.
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_chain_of_redistributions_keeps_the_tensor((mesh_dims, shape, dtype, chain) in case()) {
        let layout = MeshLayout::new(&dims(&mesh_dims)).unwrap();
        // Layouts that can't be are tested elsewhere.
        let chain: Vec<DTensorSpec> =
            chain.iter().filter_map(|p| DTensorSpec::new(layout.clone(), p, &shape, dtype).ok()).collect();
        let Some(first) = chain.first() else { return Ok(()) };
        let total: usize = shape.iter().product();
        let full = buffer(dtype, (0..total).map(value));
        local::run(layout.size(), |world| {
            let mesh = DeviceMesh::new(&world, &dims(&mesh_dims)).unwrap();
            let rank = world.rank();
            let mine = buffer(dtype, model(first, rank).into_iter().map(|whole| term(first, rank, whole)));
            let mut tensor = DTensor::from_local(mine, &shape, &mesh, first.placements()).unwrap();
            assert_eq!(tensor.full_tensor().unwrap(), full, "{first}");
            for spec in &chain[1..] {
                let next = match tensor.redistribute(spec.placements()) {
                    Ok(next) => next,
                    Err(error) => {
                        assert!(error.to_string().contains("a shard is no term"), "{error}");
                        continue;
                    }
                };
                let context = format!("rank {rank}: {} to {spec}", tensor.spec());
                if !spec.placements().iter().any(|placement| matches!(placement, Partial(_))) {
                    assert_eq!(next.local(), &buffer(dtype, model(spec, rank).into_iter()), "{context}");
                }
                assert_eq!(next.local_shape(), spec.local_shape(rank).unwrap());
                assert_eq!(next.full_tensor().unwrap(), full, "{context}");
                tensor = next;
            }
            let garbage = if rank == 0 { full.clone() } else { Buffer::zeros(dtype, total) };
            let distributed = DTensor::distribute_tensor(garbage, &shape, &mesh, first.placements()).unwrap();
            assert_eq!(distributed.full_tensor().unwrap(), full, "{first}");
        });
    }
}

#[test]
fn sums_of_terms_are_reduced_and_scattered() {
    let full: Vec<i64> = (0..15).collect();
    local::run(4, |world| {
        let mesh = DeviceMesh::new(&world, &[("replicate", 2), ("shard", 2)]).unwrap();
        let terms = Buffer::I64(full.iter().map(|x| x * (world.rank() as i64 + 1)).collect());
        let sum = Partial(ReduceOp::Sum);
        let tensor = DTensor::from_local(terms, &[5, 3], &mesh, &[sum, sum]).unwrap();
        let expected: Vec<i64> = full.iter().map(|x| 10 * x).collect();
        let sharded = tensor.redistribute(&[Replicate, Shard(0)]).unwrap();
        let mine = if world.rank() % 2 == 0 { &expected[..9] } else { &expected[9..] };
        assert_eq!(sharded.local(), &Buffer::I64(mine.to_vec()));
        assert_eq!(tensor.full_tensor().unwrap(), Buffer::I64(expected.clone()));
        let back = sharded.redistribute(&[sum, Shard(0)]).unwrap();
        assert_eq!(back.full_tensor().unwrap(), Buffer::I64(expected));
    });
}

#[test]
fn every_operation_is_reduced_as_it_says() {
    for (op, expected) in [
        (ReduceOp::Sum, 9.0),
        (ReduceOp::Avg, 3.0),
        (ReduceOp::Min, 2.0),
        (ReduceOp::Max, 4.0),
        (ReduceOp::Product, 24.0),
    ] {
        let full = local::run(3, |world| {
            let mesh = DeviceMesh::new(&world, &[("dp", 3)]).unwrap();
            let terms = Buffer::F32(vec![world.rank() as f32 + 2.0; 4]);
            let tensor = DTensor::from_local(terms, &[4], &mesh, &[Partial(op)]).unwrap();
            let sharded = tensor.redistribute(&[Shard(0)]).unwrap();
            assert_eq!(sharded.full_tensor().unwrap(), tensor.full_tensor().unwrap());
            tensor.full_tensor().unwrap()
        });
        assert_eq!(full[2], Buffer::F32(vec![expected; 4]), "{op}");
    }
}

#[test]
fn what_tensor_parallelism_and_fsdp_shard_comes_together_again() {
    // 7 rows, of which tensor parallel rank 0 has 4: data parallel rank 2 has none of those and one of the others.
    let full = Buffer::F32((0..14).map(|x| x as f32).collect());
    local::run(6, |world| {
        let mesh = DeviceMesh::new(&world, &[("dp", 3), ("tp", 2)]).unwrap();
        let placements = [strided(0, 2), Shard(0)];
        let tensor = DTensor::distribute_tensor(full.clone(), &[7, 2], &mesh, &placements).unwrap();
        let rows = [2, 1, 2, 1, 0, 1];
        assert_eq!(tensor.local_shape(), [rows[world.rank()], 2]);
        let gathered = tensor.redistribute(&[Replicate, Shard(0)]).unwrap();
        assert_eq!(gathered.local().len(), [8, 6][world.rank() % 2]);
        assert_eq!(tensor.full_tensor().unwrap(), full);
    });
}

#[test]
fn bad_arguments_are_refused_before_any_communication() {
    local::run(2, |world| {
        let mesh = DeviceMesh::new(&world, &[("dp", 2)]).unwrap();
        // One rank alone: nothing of this may wait for the other.
        if world.rank() == 1 {
            return;
        }
        let local = |len: usize| Buffer::F32(vec![0.0; len]);
        let tensor = DTensor::from_local(local(6), &[3, 3], &mesh, &[Shard(0)]).unwrap();
        for (result, part) in [
            (
                DTensor::from_local(local(5), &[3, 3], &mesh, &[Shard(0)]),
                "rank 0 of the mesh: the local tensor has 5 elements",
            ),
            (DTensor::from_local(local(6), &[3, 3], &mesh, &[Shard(2)]), "no dimension 2"),
            (DTensor::distribute_tensor(local(8), &[3, 3], &mesh, &[Shard(0)]), "must have shape [3, 3], 9 elements"),
            (DTensor::distribute_tensor(local(9), &[3, 3], &mesh, &[Shard(0); 2]), "there are 2 placements"),
            (tensor.redistribute(&[]), "there are 0 placements"),
            (tensor.redistribute(&[Partial(ReduceOp::Sum)]), "from S(0) to P(sum)"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    });
}

#[test]
fn what_lies_right_already_is_shared_and_not_copied() {
    local::run(1, |world| {
        let mesh = DeviceMesh::from_group("dp", &world).unwrap();
        let tensor = DTensor::from_local(Buffer::F32(vec![1.0]), &[1], &mesh, &[Shard(0)]).unwrap();
        let same = tensor.redistribute(&[Shard(0)]).unwrap();
        assert_eq!(tensor.local().bytes().as_ptr(), same.local().bytes().as_ptr());
        assert_eq!((same.shape(), same.placements(), same.device_mesh().size()), (&[1][..], &[Shard(0)][..], 1));
    });
}

fn sum(group: &ProcessGroup, rank: usize) -> u32 {
    match &group.all_reduce(vec![Buffer::U32(vec![1 << rank])], ReduceOp::Sum).wait().unwrap()[..] {
        [Buffer::U32(sum)] => sum[0],
        other => panic!("{other:?}"),
    }
}

#[test]
fn dimensions_are_known_by_name() {
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
fn flattened_dimensions_are_one_with_a_group_of_its_own() {
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

        // Dimensions apart, the other way round: rank 4a + 2b + c stands at (c a, b).
        let flat = mesh.flatten(&["tp", "replicate"], "x").unwrap();
        assert_eq!(flat.layout().to_string(), "(shard: 2, x: 4)");
        let (a, b, c) = (rank / 4, rank / 2 % 2, rank % 2);
        assert_eq!(flat.coordinate(), [b, 2 * c + a]);
        let x = flat.group_by_name("x").unwrap();
        assert_eq!((x.rank(), sum(x, rank)), (2 * c + a, 0b0011_0011 << (2 * b)));

        // All of the world in an order of its own, and a slice with its siblings.
        let all = mesh.flatten(&["tp", "shard", "replicate"], "all").unwrap();
        let group = all.group_by_name("all").unwrap();
        assert_eq!((group.rank(), group.size()), (4 * c + 2 * b + a, 8));
        assert_eq!(all.rank(), group.rank());
        let slice = mesh.slice(&["shard", "tp"]).unwrap().flatten(&["shard", "tp"], "inner").unwrap();
        assert_eq!(sum(slice.group(0).unwrap(), rank), 0b1111 << (4 * a));
        let renamed = mesh.flatten(&["tp"], "model").unwrap();
        assert_eq!(renamed.layout().names(), ["replicate", "shard", "model"]);

        // A DTensor over the flattened mesh.
        let tensor = Buffer::U32((0..9).collect());
        let tensor = DTensor::distribute_tensor(tensor, &[9], &all, &[Shard(0)]).unwrap();
        assert_eq!(tensor.full_tensor().unwrap(), Buffer::U32((0..9).collect()));
    });
}

#[test]
fn meshes_that_cannot_be_say_why() {
    local::run(4, |world| {
        let error = DeviceMesh::new(&world, &[("dp", 3), ("tp", 2)]).unwrap_err().to_string();
        assert!(error.contains("mesh (dp: 3, tp: 2) has 6 ranks but the world has 4"), "{error}");
        let mesh = DeviceMesh::new(&world, &[("dp", 2), ("tp", 2)]).unwrap();
        for (result, part) in [
            (mesh.flatten(&[], "x"), "no dimension of mesh (dp: 2, tp: 2) to flatten into \"x\""),
            (mesh.flatten(&["dp", "dp"], "x"), "\"dp\" of mesh (dp: 2, tp: 2) is named twice"),
            (mesh.flatten(&["dp"], "tp"), "a name of its own"),
            (mesh.flatten(&["pp"], "x"), "no dimension \"pp\""),
            (mesh.slice(&["tp", "tp"]), "named twice"),
            (mesh.slice(&[]), "at least one dimension"),
            (DeviceMesh::from_group("", &world), "a name of its own"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    });
}
