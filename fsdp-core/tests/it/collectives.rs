//! Random collectives in chunks of any size, and the groups of meshes, with ranks as threads.

use std::{sync::Arc, time::Duration};

use fsdp_core::{
    Allocator, Buffer, DType, DeviceMesh, GatherPart, ProcessGroup, ReduceOp,
    process_group::{Options, local},
};
use fsdp_test_support::conformance::Case;
use proptest::prelude::*;

fn options(chunk_bytes: usize) -> Options {
    Options::default().with_timeout(Duration::from_secs(60)).with_chunk_bytes(chunk_bytes)
}

fn op() -> impl Strategy<Value = ReduceOp> {
    prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product])
}

fn part() -> impl Strategy<Value = (DType, Vec<Vec<usize>>)> {
    let count = prop_oneof![2 => Just(0usize), 3 => 0usize..20, 3 => 0usize..700];
    (prop::sample::select(DType::ALL.to_vec()), prop::collection::vec(prop::collection::vec(count, 4), 4))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn collectives_give_what_one_thread_computes(
        size in 1usize..=4,
        chunk in prop::sample::select(vec![1usize, 700, 4096, 1 << 18]),
        seed: u64,
        op in op(),
        root in 0usize..4,
        parts in prop::collection::vec(part(), 0..5),
    ) {
        let case = Case { seed, op, root, parts };
        local::run_with(size, options(chunk), |group| case.check(&group).unwrap());
    }
}

#[test]
fn groups_of_meshes_and_slices_follow_the_layout() {
    local::run_with(12, options(4096), |world| {
        let rank = world.rank();
        let mesh = DeviceMesh::new(&world, &[("pp", 2), ("dp", 3), ("tp", 2)]).unwrap();
        let members = |group: &ProcessGroup| group.gather_values(vec![rank as i64]).unwrap();
        let along = |dim| mesh.layout().ranks_along(dim, rank).unwrap().into_iter().map(|rank| rank as i64);
        let coordinate = mesh.coordinate();
        let expected: Vec<_> = (0..3).map(|dim| along(dim).collect::<Vec<_>>()).collect();
        for dim in 0..3 {
            let group = mesh.group(dim).unwrap();
            assert_eq!((group.rank(), members(group)), (coordinate[dim], expected[dim].clone()));
        }
        for dims in [[0, 1], [1, 2], [0, 2], [2, 0]] {
            let slice = mesh.slice(&dims.map(|dim| mesh.layout().names()[dim].as_str())).unwrap();
            assert_eq!(slice.coordinate(), dims.map(|dim| coordinate[dim]));
            for (at, dim) in dims.into_iter().enumerate() {
                assert_eq!(members(slice.group(at).unwrap()), expected[dim]);
            }
        }
    });
}

// On the group's own thread, the collective drops the last handle.
#[test]
fn a_collective_may_drop_the_group() {
    struct Holds {
        _group: ProcessGroup,
    }
    impl Allocator for Holds {
        fn take(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
            Buffer::try_zeros(dtype, len)
        }
        fn give(&self, _: Buffer) {}
    }
    for is_blocking in [true, false] {
        let group = ProcessGroup::single_rank(Duration::from_secs(60)).unwrap();
        let issuer = if is_blocking { group.blocking() } else { group.clone() };
        let part = GatherPart { input: Arc::new(Buffer::F32(vec![1.])), counts: vec![1] };
        let work = issuer.all_gather(vec![part], Arc::new(Holds { _group: group }));
        drop(issuer);
        assert_eq!(work.wait().unwrap(), [Buffer::F32(vec![1.])]);
    }
}
