//! Every collective against the same computed on one thread, with ranks as threads.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::support::{Case, cases, check_all};
use fsdp_core::{
    Allocator, Buffer, DType, DeviceMesh, ExchangePart, GatherPart, Heap, ProcessGroup, ReduceOp, Result, ScatterPart,
    process_group::{Options, local},
};
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
        local::run_with(size, options(chunk), |group| check_all(&*group, &case));
    }
}

#[test]
fn many_collectives_of_one_group_follow_each_other() {
    for size in 1..=4 {
        local::run_with(size, options(1000), |group| cases().iter().for_each(|case| check_all(&*group, case)));
    }
}

#[test]
fn collectives_in_flight_complete_in_the_order_they_were_issued() {
    local::run_with(3, options(256), |group| {
        let works: Vec<_> = (0..300usize)
            .map(|index| {
                let value = (index * 10 + group.rank()) as i64;
                match index % 3 {
                    0 => group.all_reduce(vec![Buffer::I64(vec![value; 1 + index % 90])], ReduceOp::Max),
                    1 => group.broadcast(vec![Buffer::I64(vec![value; 1 + index % 90])], index % 2),
                    _ => group.all_gather(
                        vec![GatherPart { input: Arc::new(Buffer::I64(vec![value])), counts: vec![1; 3] }],
                        Heap::shared(),
                    ),
                }
            })
            .collect();
        // Once the last is done so are all.
        let mut works: Vec<_> = works.into_iter().collect();
        let last = works.pop().unwrap().wait().unwrap();
        assert_eq!(last, [Buffer::I64(vec![2990, 2991, 2992])]);
        for (index, mut work) in works.into_iter().enumerate() {
            assert!(work.is_done());
            let index_ten = index as i64 * 10;
            let expected = match index % 3 {
                0 => vec![index_ten + 2; 1 + index % 90],
                1 => vec![index_ten + (index % 2) as i64; 1 + index % 90],
                _ => vec![index_ten, index_ten + 1, index_ten + 2],
            };
            assert_eq!(work.wait().unwrap(), [Buffer::I64(expected)]);
        }
    });
}

#[test]
fn sums_have_the_same_bits_every_time_and_on_every_rank() {
    let run = || {
        local::run_with(4, options(2048), |group| {
            let values = (0..5000).map(|i| ((i * 37 + group.rank() * 11) as f32).sin() * 1e3).collect();
            group.all_reduce(vec![Buffer::F32(values)], ReduceOp::Avg).wait().unwrap()
        })
    };
    let first = run();
    assert!(first.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(first, run());
}

/// Writes down what is taken from it and given to it.
#[derive(Default)]
struct Ledger(Mutex<Vec<String>>);

impl Allocator for Ledger {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.0.lock().unwrap().push(format!("take {dtype} {len}"));
        Buffer::try_zeros(dtype, len)
    }
    fn give(&self, buffer: Buffer) {
        self.0.lock().unwrap().push(format!("give {} {}", buffer.dtype(), buffer.len()));
    }
}

#[test]
fn inputs_are_back_before_the_work_is_done_and_outputs_are_taken_when_it_runs() {
    local::run_with(2, options(512), |group| {
        let ledger = Arc::new(Ledger::default());
        let part = |len: usize| ScatterPart { input: Buffer::zeros(DType::F32, 2 * len), counts: vec![len; 2] };
        let first = group.reduce_scatter(vec![part(1000), part(10)], ReduceOp::Sum, ledger.clone());
        let exchange =
            ExchangePart { input: Buffer::zeros(DType::U8, 6), send_counts: vec![3; 2], recv_counts: vec![3; 2] };
        let second = group.all_to_all(vec![exchange], ledger.clone());
        second.wait().unwrap();
        assert_eq!(
            *ledger.0.lock().unwrap(),
            ["take F32 1000", "take F32 10", "give F32 2000", "give F32 20", "take U8 6", "give U8 6"]
        );
        first.wait().unwrap();
    });
}

#[test]
fn groups_split_by_color_and_are_ordered_by_key_also_when_nested() {
    local::run_with(4, options(4096), |world| {
        let rank = world.rank();
        // Evens and odds, in reverse.
        let half = world.split(rank % 2, 10 - rank).unwrap();
        assert_eq!((half.size(), half.rank()), (2, 1 - rank / 2));
        let members = half
            .all_gather(
                vec![GatherPart { input: Arc::new(Buffer::U32(vec![rank as u32])), counts: vec![1, 1] }],
                Heap::shared(),
            )
            .wait()
            .unwrap();
        assert_eq!(members, [Buffer::U32(if rank % 2 == 0 { vec![2, 0] } else { vec![3, 1] })]);
        let single = half.split(half.rank(), 0).unwrap();
        assert_eq!((single.size(), single.rank()), (1, 0));
        assert_ne!(single.name(), half.name());
        cases().iter().take(4).for_each(|case| check_all(&*half, case));
        cases().iter().take(4).for_each(|case| check_all(&*single, case));
        // The groups live on without the world.
        drop(world);
        half.barrier().wait().unwrap();
    });
}

#[test]
fn a_mesh_has_a_group_along_each_dimension() {
    local::run_with(4, options(4096), |world| {
        let mesh = DeviceMesh::new(&world, &[("dp", 2), ("tp", 2)]).unwrap();
        let rank = world.rank();
        let sum = |group: &Arc<dyn ProcessGroup>| {
            group.all_reduce(vec![Buffer::U32(vec![rank as u32])], ReduceOp::Sum).wait().unwrap()
        };
        assert_eq!(sum(mesh.group(0).unwrap()), [Buffer::U32(vec![[2, 4][rank % 2]])]);
        assert_eq!(sum(mesh.group(1).unwrap()), [Buffer::U32(vec![[1, 5][rank / 2]])]);
        let tp = mesh.slice(&["tp"]).unwrap();
        assert_eq!((tp.size(), tp.rank()), (2, rank % 2));
        assert_eq!(sum(tp.group(0).unwrap()), [Buffer::U32(vec![[1, 5][rank / 2]])]);
    });
}

#[test]
fn groups_of_a_mesh_and_of_its_slices_hold_the_ranks_that_the_layout_says_in_its_order() {
    local::run_with(12, options(4096), |world| {
        let rank = world.rank();
        let mesh = DeviceMesh::new(&world, &[("pp", 2), ("dp", 3), ("tp", 2)]).unwrap();
        let members = |group: &Arc<dyn ProcessGroup>| {
            let input = Arc::new(Buffer::U32(vec![rank as u32]));
            let parts = vec![GatherPart { input, counts: vec![1; group.size()] }];
            group.all_gather(parts, Heap::shared()).wait().unwrap()
        };
        let along = |dim| mesh.layout().ranks_along(dim, rank).unwrap().into_iter().map(|rank| rank as u32).collect();
        let coordinate = mesh.coordinate();
        let expected: Vec<_> = (0..3).map(|dim| vec![Buffer::U32(along(dim))]).collect();
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
