//! What collectives should give, computed on one thread, and running all of them against it.

use std::sync::Arc;

use fsdp_core::{Buffer, DType, ExchangePart, GatherPart, Heap, ProcessGroup, ReduceOp, ScatterPart};
use half::{bf16, f16};

/// Element `index` of part `part` of rank `rank`: any of a few hundred values, some negative, for floats also fractions.
fn value(seed: u64, rank: usize, part: usize, index: usize) -> i64 {
    let mut x = seed ^ (rank as u64) << 48 ^ (part as u64) << 40 ^ index as u64;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ x >> 31) % 500) as i64 - 250
}

fn float(value: i64) -> f64 {
    value as f64 / 7.0
}

/// What rank `rank` passes as part `part`.
pub(crate) fn input(seed: u64, rank: usize, part: usize, dtype: DType, len: usize) -> Buffer {
    let values = (0..len).map(|index| value(seed, rank, part, index));
    match dtype {
        DType::U8 => Buffer::U8(values.map(|v| v as u8).collect()),
        DType::U32 => Buffer::U32(values.map(|v| v as u32).collect()),
        DType::I64 => Buffer::I64(values.collect()),
        DType::BF16 => Buffer::BF16(values.map(|v| bf16::from_f64(float(v))).collect()),
        DType::F16 => Buffer::F16(values.map(|v| f16::from_f64(float(v))).collect()),
        DType::F32 => Buffer::F32(values.map(|v| float(v) as f32).collect()),
        DType::F64 => Buffer::F64(values.map(float).collect()),
        other => panic!("a dtype this test does not know: {other}"),
    }
}

macro_rules! fold {
    ($inputs:expr, $variant:ident, $acc:ty, $widen:expr, $narrow:expr, $add:expr, $mul:expr, $op:expr) => {{
        let columns: Vec<_> =
            $inputs.iter().map(|b| if let Buffer::$variant(v) = b { v } else { panic!("dtypes differ") }).collect();
        Buffer::$variant(
            (0..columns[0].len())
                .map(|i| {
                    let values = columns.iter().map(|c| $widen(c[i]));
                    let result: $acc = match $op {
                        ReduceOp::Sum | ReduceOp::Avg => values.reduce($add),
                        ReduceOp::Product => values.reduce($mul),
                        ReduceOp::Min => values.reduce(|a, b| if a < b { a } else { b }),
                        ReduceOp::Max => values.reduce(|a, b| if a > b { a } else { b }),
                    }
                    .unwrap();
                    $narrow(if $op == ReduceOp::Avg { result / columns.len() as $acc } else { result })
                })
                .collect(),
        )
    }};
}

/// The reduction of all ranks' inputs, in rank order.
pub(crate) fn reduced(inputs: &[Buffer], op: ReduceOp) -> Buffer {
    let same = |x| x;
    match inputs[0].dtype() {
        DType::U8 => fold!(inputs, U8, u8, |x: u8| x, |x: u8| x, u8::wrapping_add, u8::wrapping_mul, op),
        DType::U32 => fold!(inputs, U32, u32, |x: u32| x, |x: u32| x, u32::wrapping_add, u32::wrapping_mul, op),
        DType::I64 => fold!(inputs, I64, i64, |x: i64| x, |x: i64| x, i64::wrapping_add, i64::wrapping_mul, op),
        DType::BF16 => fold!(inputs, BF16, f32, bf16::to_f32, bf16::from_f32, |a, b| a + b, |a, b| a * b, op),
        DType::F16 => fold!(inputs, F16, f32, f16::to_f32, f16::from_f32, |a, b| a + b, |a, b| a * b, op),
        DType::F32 => fold!(inputs, F32, f32, same, |x: f32| x, |a, b| a + b, |a, b| a * b, op),
        DType::F64 => fold!(inputs, F64, f64, |x: f64| x, |x: f64| x, |a, b| a + b, |a, b| a * b, op),
        other => panic!("a dtype this test does not know: {other}"),
    }
}

/// The concatenation of buffers of one dtype.
pub(crate) fn concat(dtype: DType, parts: &[Buffer]) -> Buffer {
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.bytes().iter().copied()).collect();
    let mut all = Buffer::zeros(dtype, bytes.len() / dtype.size());
    all.bytes_mut().copy_from_slice(&bytes);
    all
}

/// Elements `start..start + len` of a buffer.
pub(crate) fn slice(buffer: &Buffer, start: usize, len: usize) -> Buffer {
    let mut part = Buffer::zeros(buffer.dtype(), len);
    let size = buffer.dtype().size();
    part.bytes_mut().copy_from_slice(&buffer.bytes()[start * size..(start + len) * size]);
    part
}

pub(crate) fn start(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// Equality of bits: NaN is NaN, and zero is not minus zero.
pub(crate) fn assert_same(got: &[Buffer], expected: &[Buffer], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: number of outputs");
    for (part, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!((got.dtype(), got.len()), (expected.dtype(), expected.len()), "{what}: part {part}");
        assert!(got.bytes() == expected.bytes(), "{what}: part {part}: {got:?} instead of {expected:?}");
    }
}

/// A list of parts: for each a dtype, and for each pair of ranks how many elements go from the one to the other.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    pub(crate) parts: Vec<(DType, Vec<Vec<usize>>)>,
}

impl Case {
    fn dtypes(&self) -> impl Iterator<Item = (usize, DType, &Vec<Vec<usize>>)> {
        self.parts.iter().enumerate().map(|(part, (dtype, matrix))| (part, *dtype, matrix))
    }

    /// Floats where the operation needs them.
    fn reducible(&self, dtype: DType) -> DType {
        if self.op == ReduceOp::Avg && !dtype.is_float() { DType::F32 } else { dtype }
    }
}

/// Runs every collective on the case, all in flight at once, and compares.
pub(crate) fn check_all(group: &dyn ProcessGroup, case: &Case) {
    let (rank, size, seed) = (group.rank(), group.size(), case.seed);
    let root = case.root % size;

    let gather: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| {
            let counts = matrix[0][..size].to_vec();
            GatherPart { input: Arc::new(input(seed, rank, part, dtype, counts[rank])), counts }
        })
        .collect();
    let scatter: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| {
            let counts = matrix[0][..size].to_vec();
            ScatterPart { input: input(seed, rank, part, case.reducible(dtype), counts.iter().sum()), counts }
        })
        .collect();
    let reduce: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| input(seed, rank, part, case.reducible(dtype), matrix[0][..size].iter().sum()))
        .collect();
    let spread: Vec<_> =
        case.dtypes().map(|(part, dtype, matrix)| input(seed, rank, part, dtype, matrix[0][0])).collect();
    let exchange: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| {
            let send_counts = matrix[rank][..size].to_vec();
            ExchangePart {
                input: input(seed, rank, part, dtype, send_counts.iter().sum()),
                send_counts,
                recv_counts: (0..size).map(|from| matrix[from][rank]).collect(),
            }
        })
        .collect();

    let gathered = group.all_gather(gather, Heap::shared());
    let scattered = group.reduce_scatter(scatter, case.op, Heap::shared());
    let barrier = group.barrier();
    let all_reduced = group.all_reduce(reduce, case.op);
    let broadcast = group.broadcast(spread, root);
    let exchanged = group.all_to_all(exchange, Heap::shared());

    let everybody = |part: usize, dtype: DType, len: &dyn Fn(usize) -> usize| -> Vec<Buffer> {
        (0..size).map(|rank| input(seed, rank, part, dtype, len(rank))).collect()
    };
    let expected: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| concat(dtype, &everybody(part, dtype, &|rank| matrix[0][rank])))
        .collect();
    assert_same(&gathered.wait().unwrap(), &expected, "all_gather");

    let sums: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| {
            let total = matrix[0][..size].iter().sum();
            reduced(&everybody(part, case.reducible(dtype), &|_| total), case.op)
        })
        .collect();
    let own: Vec<_> =
        case.dtypes().map(|(part, _, matrix)| slice(&sums[part], start(&matrix[0], rank), matrix[0][rank])).collect();
    assert_same(&scattered.wait().unwrap(), &own, "reduce_scatter");
    assert!(barrier.wait().unwrap().is_empty());
    assert_same(&all_reduced.wait().unwrap(), &sums, "all_reduce");

    let expected: Vec<_> =
        case.dtypes().map(|(part, dtype, matrix)| input(seed, root, part, dtype, matrix[0][0])).collect();
    assert_same(&broadcast.wait().unwrap(), &expected, "broadcast");

    let expected: Vec<_> = case
        .dtypes()
        .map(|(part, dtype, matrix)| {
            let received: Vec<_> = (0..size)
                .map(|from| {
                    let sent = input(seed, from, part, dtype, matrix[from][..size].iter().sum());
                    slice(&sent, start(&matrix[from], rank), matrix[from][rank])
                })
                .collect();
            concat(dtype, &received)
        })
        .collect();
    assert_same(&exchanged.wait().unwrap(), &expected, "all_to_all");
}

/// A fixed list of cases: even, uneven, empty, many parts.
pub(crate) fn cases() -> Vec<Case> {
    let matrix = |f: fn(usize, usize) -> usize| -> Vec<Vec<usize>> {
        (0..4).map(|from| (0..4).map(|to| f(from, to)).collect()).collect()
    };
    let mut cases = Vec::new();
    for (seed, op) in
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product].into_iter().enumerate()
    {
        cases.push(Case { seed: seed as u64, op, root: seed, parts: Vec::new() });
        cases.push(Case { seed: seed as u64, op, root: seed, parts: vec![(DType::F32, matrix(|_, _| 0))] });
        cases.push(Case {
            seed: seed as u64,
            op,
            root: seed,
            parts: DType::ALL.into_iter().map(|dtype| (dtype, matrix(|from, to| from * 13 + to * 700))).collect(),
        });
        cases.push(Case {
            seed: seed as u64,
            op,
            root: seed,
            parts: vec![
                (DType::BF16, matrix(|_, to| if to == 1 { 40_000 } else { 0 })),
                (DType::F32, matrix(|_, _| 9_999)),
            ],
        });
    }
    cases
}
