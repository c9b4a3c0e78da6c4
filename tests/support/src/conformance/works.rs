//! Correct use: results, order, memory, nested groups, signatures and small values.

use std::{sync::Arc, time::Duration};

use fsdp_core::{
    Allocator, Buffer, DType, ExchangePart, GatherPart, Heap, ProcessGroup, ReduceOp, Result, ScatterPart, Stream,
    process_group::{Options, Signature, Subject},
};
use parking_lot::Mutex;

use super::{Join, Wrong, case::Case, ensure};

pub(super) fn options(chunk_bytes: usize) -> Options {
    Options::default().with_timeout(Duration::from_secs(60)).with_chunk_bytes(chunk_bytes)
}

pub(super) fn all(join: Join<'_>) -> Result<(), Wrong> {
    // Small and large chunks.
    for chunk_bytes in [1000, 32 << 10] {
        let world = join(options(chunk_bytes))?;
        for case in Case::all() {
            case.check(&world)?;
        }
    }
    let world = join(options(512))?;
    order(&world)?;
    bits(&world)?;
    memory(&world)?;
    signatures(&world)?;
    values(&world)?;
    groups(world)
}

/// Collectives in flight complete in the order in which they were issued.
fn order(group: &ProcessGroup) -> Result<(), Wrong> {
    let size = group.size();
    let issue = |index: usize| {
        let value = (index * 10 + group.rank()) as i64;
        match index % 3 {
            0 => group.all_reduce(vec![Buffer::I64(vec![value; 1 + index % 90])], ReduceOp::Max),
            1 => group.broadcast(vec![Buffer::I64(vec![value; 1 + index % 90])], index % size),
            _ => group.all_gather(
                vec![GatherPart { input: Arc::new(Buffer::I64(vec![value])), counts: vec![1; size] }],
                Heap::shared(),
            ),
        }
    };
    let expected = |index: usize| {
        let of = |rank: usize| (index * 10 + rank) as i64;
        vec![Buffer::I64(match index % 3 {
            0 => vec![of(size - 1); 1 + index % 90],
            1 => vec![of(index % size); 1 + index % 90],
            _ => (0..size).map(of).collect(),
        })]
    };
    let mut works: Vec<_> = (0..300).map(issue).collect();
    let Some(last) = works.pop() else { return Ok(()) };
    ensure!(last.then(Stream::Host)? == expected(299), "the last of 300 collectives gave something else");
    // When the last one is done, all are.
    for (index, mut work) in works.into_iter().enumerate() {
        ensure!(work.is_done(), "collective {index} is not done though a later one is");
        ensure!(work.wait()? == expected(index), "collective {index} of 300 gave something else");
    }
    Ok(())
}

/// Sums have the same bits on every rank and, if the backend guarantees it, every time.
fn bits(group: &ProcessGroup) -> Result<(), Wrong> {
    let sum = || {
        let values = (0..5000).map(|i| ((i * 37 + group.rank() * 11) as f32).sin() * 1e3).collect();
        group.all_reduce(vec![Buffer::F32(values)], ReduceOp::Avg).wait()
    };
    let first = sum()?;
    let bytes: Vec<u8> = first.iter().flat_map(|buffer| buffer.bytes().to_vec()).collect();
    let others = group.differing_ranks(&bytes)?;
    ensure!(others.is_empty(), "the average of ranks {others:?} has other bits than that of rank {}", group.rank());
    ensure!(!group.guarantees().fixed_order || sum()? == first, "a second average has other bits than the first");
    Ok(())
}

/// An allocator that records its calls.
#[derive(Default)]
struct Ledger(Mutex<Vec<String>>);

impl Allocator for Ledger {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.0.lock().push(format!("take {dtype} {len}"));
        Buffer::try_zeros(dtype, len)
    }
    fn give(&self, buffer: Buffer) {
        let line = format!("give {} {}", buffer.dtype(), buffer.len());
        self.0.lock().push(line);
    }
}

/// Inputs are released before the work is done, and outputs are allocated when it runs.
fn memory(group: &ProcessGroup) -> Result<(), Wrong> {
    if group.size() == 1 {
        return Ok(());
    }
    let (ledger, size) = (Arc::new(Ledger::default()), group.size());
    let part = |len: usize| ScatterPart { input: Buffer::zeros(DType::F32, size * len), counts: vec![len; size] };
    let first = group.reduce_scatter(vec![part(1000), part(10)], ReduceOp::Sum, ledger.clone());
    let exchange = ExchangePart {
        input: Buffer::zeros(DType::U8, 3 * size),
        send_counts: vec![3; size],
        recv_counts: vec![3; size],
    };
    group.all_to_all(vec![exchange], ledger.clone()).wait()?;
    let mut lines = ledger.0.lock().clone();
    let [large, small, bytes] = [1000 * size, 10 * size, 3 * size];
    let mut expected = [
        format!("give F32 {large}"),
        format!("give F32 {small}"),
        "take F32 10".to_string(),
        "take F32 1000".to_string(),
        format!("give U8 {bytes}"),
        format!("take U8 {bytes}"),
    ];
    // Collectives run in order. Within one, outputs may be allocated before or after inputs are read.
    ensure!(lines.len() == expected.len(), "memory was taken and given so: {lines:?}, instead of {expected:?}");
    for both in [&mut lines[..], &mut expected[..]] {
        both[..4].sort();
        both[4..].sort();
    }
    ensure!(lines == expected, "memory was taken and given so: {lines:?}, instead of {expected:?}");
    first.wait()?;
    Ok(())
}

/// A signature costs nothing if ranks agree, and is passed on to subgroups.
fn signatures(group: &ProcessGroup) -> Result<(), Wrong> {
    let subject = Subject::new("unit `x`", ["a".to_string(), "b".to_string()]);
    let signed = group.signed(Signature::new(&subject, [1]));
    ensure!(signed.is(group) && signed.name() == group.name(), "a signed handle is of another group");
    let sum = |group: &ProcessGroup| group.all_reduce(vec![Buffer::U32(vec![1])], ReduceOp::Sum);
    let (first, second) = (sum(&signed), sum(group));
    drop(signed);
    let expected = [Buffer::U32(vec![group.size() as u32])];
    ensure!(first.wait()? == expected && second.wait()? == expected, "a signed sum, or the next, is wrong");
    Ok(())
}

/// Numbers, messages and agreement.
fn values(group: &ProcessGroup) -> Result<(), Wrong> {
    let (rank, size) = (group.rank(), group.size());
    let sum = group.all_reduce_values(vec![rank as f64, 1.0], ReduceOp::Sum)?;
    ensure!(sum == [(size * (size - 1) / 2) as f64, size as f64], "the sum of ranks and of ones is {sum:?}");
    let largest = group.all_reduce_scalar(rank as u32, ReduceOp::Max)?;
    ensure!(largest as usize == size - 1, "the largest rank is {largest}");
    let all = group.gather_values(vec![rank as i64, -1])?;
    ensure!(all == (0..size as i64).flat_map(|rank| [rank, -1]).collect::<Vec<_>>(), "gathered values are {all:?}");
    let messages = group.gather_bytes(vec![7; rank])?;
    ensure!(messages == (0..size).map(|rank| vec![7; rank]).collect::<Vec<_>>(), "gathered messages are {messages:?}");
    let nothing = group.gather_bytes(Vec::new())?;
    ensure!(nothing == vec![Vec::<u8>::new(); size], "gathered messages of no bytes are {nothing:?}");
    let root = size - 1;
    for (base, scale) in [(0, 0), (0, 1), (1, 0), (5, 70_001)] {
        let message = |rank: usize| vec![rank as u8; base + scale * rank];
        let all: Vec<Vec<u8>> = (0..size).map(message).collect();
        let gathered = group.gather_bytes_to(root, message(rank))?;
        ensure!(gathered == (rank == root).then(|| all.clone()), "messages gathered to rank {root} are wrong");
        let scattered = group.scatter_bytes(root, if rank == root { all } else { vec![] })?;
        ensure!(scattered == message(rank), "the message scattered to rank {rank} is wrong");
        let sent = group.broadcast_bytes(root, if rank == root { message(root) } else { vec![] })?;
        ensure!(sent == message(root), "the message of rank {root} is wrong on rank {rank}");
    }
    let others = group.differing_ranks(if rank == 0 { b"this" } else { b"that" })?;
    let expected: Vec<usize> = if rank == 0 { (1..size).collect() } else { vec![0] };
    ensure!(others == expected, "{others:?} differ from rank {rank}, instead of {expected:?}");
    let others = group.differing_ranks(b"this")?;
    ensure!(others.is_empty(), "{others:?} differ though all are the same");
    Ok(())
}

/// Groups are split by color and ordered by key, also when nested, and outlive the world.
fn groups(world: ProcessGroup) -> Result<(), Wrong> {
    let (rank, size) = (world.rank(), world.size());
    // Even and odd ranks, in reverse order.
    let half = world.split(rank % 2, 10 - rank)?;
    let members: Vec<u32> = (0..size).rev().filter(|other| other % 2 == rank % 2).map(|other| other as u32).collect();
    let place = members.iter().position(|&member| member as usize == rank);
    ensure!((half.size(), Some(half.rank())) == (members.len(), place), "{half:?} is not {members:?}");
    let gathered = half.gather_values(vec![rank as u32])?;
    ensure!(gathered == members, "{half:?} gathers from {gathered:?} instead of {members:?}");
    let single = half.split(half.rank(), 0)?;
    ensure!((single.size(), single.rank()) == (1, 0), "{single:?} is not of one");
    ensure!(single.name() != half.name() && half.name() != world.name(), "{single:?} and {half:?} have one name");
    drop(world);
    for case in Case::all().iter().take(4) {
        case.check(&half)?;
        case.check(&single)?;
    }
    Ok(half.barrier().wait().map(drop)?)
}
