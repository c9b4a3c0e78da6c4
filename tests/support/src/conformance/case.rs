//! All collectives on one list of parts, issued together, and the reference that one thread computes.

use std::sync::Arc;

use fsdp_core::{
    Buffer, DType, Element, ExchangePart, GatherPart, Heap, ProcessGroup, ReduceOp, ScatterPart,
    process_group::Guarantees,
};
use half::{bf16, f16};

use super::{Wrong, ensure};

/// Number of ranks that a case has counts for.
pub(super) const RANKS: usize = 4;

/// Data for every collective: for each part a dtype, and for each pair of ranks the number of elements to send.
#[derive(Clone, Debug)]
pub struct Case {
    /// The seed of the elements.
    pub seed: u64,
    /// The operation of reductions.
    pub op: ReduceOp,
    /// The rank that broadcasts, modulo the number of ranks.
    pub root: usize,
    /// Dtypes and counts.
    pub parts: Vec<(DType, Vec<Vec<usize>>)>,
}

impl Case {
    /// A fixed list with even, uneven, empty and many parts, and 20 random cases.
    pub(super) fn all() -> Vec<Case> {
        let matrix = |f: fn(usize, usize) -> usize| -> Vec<Vec<usize>> {
            (0..RANKS).map(|from| (0..RANKS).map(|to| f(from, to)).collect()).collect()
        };
        let mut cases = Vec::new();
        for (root, op) in OPS.into_iter().enumerate() {
            let case = |parts| Case { seed: root as u64, op, root, parts };
            let large = |_, to| if to == 1 { 40_000 } else { 0 };
            cases.push(case(Vec::new()));
            cases.push(case(vec![(DType::F32, matrix(|_, _| 0))]));
            let every = DType::ALL.into_iter().map(|dtype| (dtype, matrix(|from, to| from * 13 + to * 700)));
            cases.push(case(every.collect()));
            cases.push(case(vec![(DType::BF16, matrix(large)), (DType::F32, matrix(|_, _| 9_999))]));
        }
        cases.extend((0..20).map(Case::any));
        cases
    }

    fn any(seed: u64) -> Case {
        let mut drawn = seed << 32;
        let mut below = |limit: usize| {
            drawn += 1;
            (scrambled(drawn) % limit as u64) as usize
        };
        let count = |below: &mut dyn FnMut(usize) -> usize| match below(8) {
            0 | 1 => 0,
            2..5 => below(20),
            _ => below(700),
        };
        let (op, root, parts) = (OPS[below(OPS.len())], below(RANKS), below(5));
        let part = |_| {
            let dtype = DType::ALL[below(DType::ALL.len())];
            (dtype, (0..RANKS).map(|_| (0..RANKS).map(|_| count(&mut below)).collect()).collect())
        };
        Case { seed, op, root, parts: (0..parts).map(part).collect() }
    }

    fn dtypes(&self) -> impl Iterator<Item = (usize, DType, &Vec<Vec<usize>>)> {
        self.parts.iter().enumerate().map(|(part, (dtype, matrix))| (part, *dtype, matrix))
    }

    /// Floats if the operation requires them.
    fn reducible(&self, dtype: DType) -> DType {
        if self.op == ReduceOp::Avg && !dtype.is_float() { DType::F32 } else { dtype }
    }

    /// Runs every collective on the case in a group of at most four ranks, and compares the results.
    ///
    /// # Errors
    /// The first wrong result, with the expected one.
    pub fn check(&self, group: &ProcessGroup) -> Result<(), Wrong> {
        let (rank, size, seed) = (group.rank(), group.size(), self.seed);
        ensure!(size <= RANKS, "a case is for at most {RANKS} ranks, not for {size}");
        let root = self.root % size;
        // Minima and maxima are exact in any order.
        let is_rounded = !matches!(self.op, ReduceOp::Min | ReduceOp::Max);
        let allowed =
            |sums: &Buffer| if is_rounded { Allowed::of(group.guarantees(), sums.dtype()) } else { Allowed::EXACT };
        let exact = |_: &Buffer| Allowed::EXACT;
        let mine = |part, dtype, len| input(seed, rank, part, dtype, len);

        let gather = self.dtypes().map(|(part, dtype, matrix)| {
            let counts = matrix[0][..size].to_vec();
            GatherPart { input: Arc::new(mine(part, dtype, counts[rank])), counts }
        });
        let scatter = self.dtypes().map(|(part, dtype, matrix)| {
            let counts = matrix[0][..size].to_vec();
            ScatterPart { input: mine(part, self.reducible(dtype), counts.iter().sum()), counts }
        });
        let reduce = self
            .dtypes()
            .map(|(part, dtype, matrix)| mine(part, self.reducible(dtype), matrix[0][..size].iter().sum()));
        let spread = self.dtypes().map(|(part, dtype, matrix)| mine(part, dtype, matrix[0][0]));
        let exchange = self.dtypes().map(|(part, dtype, matrix)| {
            let send_counts = matrix[rank][..size].to_vec();
            ExchangePart {
                input: mine(part, dtype, send_counts.iter().sum()),
                send_counts,
                recv_counts: (0..size).map(|from| matrix[from][rank]).collect(),
            }
        });
        let gathered = group.all_gather(gather.collect(), Heap::shared());
        let scattered = group.reduce_scatter(scatter.collect(), self.op, Heap::shared());
        let barrier = group.barrier();
        let all_reduced = group.all_reduce(reduce.collect(), self.op);
        let broadcast = group.broadcast(spread.collect(), root);
        let exchanged = group.all_to_all(exchange.collect(), Heap::shared());

        let everybody = |part: usize, dtype: DType, len: &dyn Fn(usize) -> usize| -> Vec<Buffer> {
            (0..size).map(|rank| input(seed, rank, part, dtype, len(rank))).collect()
        };
        let expected: Vec<_> = self
            .dtypes()
            .map(|(part, dtype, matrix)| concat(dtype, &everybody(part, dtype, &|rank| matrix[0][rank])))
            .collect();
        same(&gathered.wait()?, &expected, "all_gather", &exact)?;

        let sum = |(part, dtype, matrix): (usize, DType, &Vec<Vec<usize>>)| {
            let (dtype, total) = (self.reducible(dtype), matrix[0][..size].iter().sum());
            reduced(dtype, &everybody(part, dtype, &|_| total), self.op)
        };
        let sums = self.dtypes().map(sum).collect::<Result<Vec<_>, Wrong>>()?;
        let own = |(part, _, matrix): (usize, DType, &Vec<Vec<usize>>)| {
            slice(&sums[part], start(&matrix[0], rank), matrix[0][rank])
        };
        same(&scattered.wait()?, &self.dtypes().map(own).collect::<Vec<_>>(), "reduce_scatter", &allowed)?;
        same(&barrier.wait()?, &[], "barrier", &exact)?;
        same(&all_reduced.wait()?, &sums, "all_reduce", &allowed)?;

        let expected: Vec<_> =
            self.dtypes().map(|(part, dtype, matrix)| input(seed, root, part, dtype, matrix[0][0])).collect();
        same(&broadcast.wait()?, &expected, "broadcast", &exact)?;

        let received = |(part, dtype, matrix): (usize, DType, &Vec<Vec<usize>>)| {
            let from = |from: usize| {
                let sent = input(seed, from, part, dtype, matrix[from][..size].iter().sum());
                slice(&sent, start(&matrix[from], rank), matrix[from][rank])
            };
            concat(dtype, &(0..size).map(from).collect::<Vec<_>>())
        };
        same(&exchanged.wait()?, &self.dtypes().map(received).collect::<Vec<_>>(), "all_to_all", &exact)
    }
}

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

fn start(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// Element `index` of part `part` of rank `rank`: one of a few hundred values, some negative, for floats some
/// fractions.
fn value(seed: u64, rank: usize, part: usize, index: usize) -> i64 {
    let x = scrambled(seed ^ (rank as u64) << 48 ^ (part as u64) << 40 ^ index as u64);
    (x % 500) as i64 - 250
}

/// A different number for each argument.
fn scrambled(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Returns the input of rank `rank` for part `part`: numbers whose sums and products are rounded, or overflow.
pub fn input(seed: u64, rank: usize, part: usize, dtype: DType, len: usize) -> Buffer {
    let values = (0..len).map(|index| value(seed, rank, part, index));
    let float = |value: i64| value as f64 / 7.0;
    match dtype {
        DType::U8 => Buffer::U8(values.map(|v| v as u8).collect()),
        DType::U32 => Buffer::U32(values.map(|v| v as u32).collect()),
        DType::I64 => Buffer::I64(values.collect()),
        DType::BF16 => Buffer::BF16(values.map(|v| bf16::from_f64(float(v))).collect()),
        DType::F16 => Buffer::F16(values.map(|v| f16::from_f64(float(v))).collect()),
        DType::F32 => Buffer::F32(values.map(|v| float(v) as f32).collect()),
        DType::F64 => Buffer::F64(values.map(float).collect()),
        other => panic!("the conformance suite has no values of {other}: add them here"),
    }
}

/// The type in which a dtype is reduced.
trait Combined: Element {
    type Acc: Copy + PartialOrd;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn mul(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn divided(acc: Self::Acc, by: usize) -> Self::Acc;
}

macro_rules! combined {
    ($($t:ty, $acc:ty, $widen:expr, $narrow:expr, $add:expr, $mul:expr;)*) => {$(
        impl Combined for $t {
            type Acc = $acc;
            fn widen(self) -> $acc {
                $widen(self)
            }
            fn narrow(acc: $acc) -> $t {
                $narrow(acc)
            }
            fn add(a: $acc, b: $acc) -> $acc {
                $add(a, b)
            }
            fn mul(a: $acc, b: $acc) -> $acc {
                $mul(a, b)
            }
            fn divided(acc: $acc, by: usize) -> $acc {
                acc / by as $acc
            }
        }
    )*};
}
combined! {
    u8, u8, |x| x, |x| x, u8::wrapping_add, u8::wrapping_mul;
    u32, u32, |x| x, |x| x, u32::wrapping_add, u32::wrapping_mul;
    i64, i64, |x| x, |x| x, i64::wrapping_add, i64::wrapping_mul;
    bf16, f32, bf16::to_f32, bf16::from_f32, |a, b| a + b, |a, b| a * b;
    f16, f32, f16::to_f32, f16::from_f32, |a, b| a + b, |a, b| a * b;
    f32, f32, |x| x, |x| x, |a, b| a + b, |a, b| a * b;
    f64, f64, |x| x, |x| x, |a, b| a + b, |a, b| a * b;
}

fn combine<T: Combined>(inputs: &[Buffer], op: ReduceOp) -> Result<Buffer, Wrong> {
    let columns: Result<Vec<Vec<T>>, Buffer> = inputs.iter().cloned().map(Buffer::into_vec).collect();
    let columns = columns.map_err(|other| format!("a {} among {}", other.dtype(), T::DTYPE))?;
    let combined = |index: usize| {
        let values = columns.iter().map(|column| column[index].widen());
        let all = match op {
            ReduceOp::Sum | ReduceOp::Avg => tree(&values.collect::<Vec<_>>(), T::add),
            ReduceOp::Product => tree(&values.collect::<Vec<_>>(), T::mul),
            ReduceOp::Min => values.reduce(|a, b| if a < b { a } else { b }),
            ReduceOp::Max => values.reduce(|a, b| if a > b { a } else { b }),
        };
        all.map(|all| T::narrow(if op == ReduceOp::Avg { T::divided(all, columns.len()) } else { all }))
    };
    let len = columns.first().map_or(0, Vec::len);
    Ok(Buffer::from((0..len).filter_map(combined).collect::<Vec<T>>()))
}

/// Reduces a power of two of the values first, as many as leave some, and then the rest with the result.
fn tree<A: Copy>(values: &[A], f: fn(A, A) -> A) -> Option<A> {
    let (before, rest) = match values {
        [] => return None,
        [value] => return Some(*value),
        _ => values.split_at(values.len().next_power_of_two() / 2),
    };
    Some(f(tree(before, f)?, tree(rest, f)?))
}

/// Returns the reduction of all ranks' inputs, in the order of [`Guarantees::fixed_order`].
fn reduced(dtype: DType, inputs: &[Buffer], op: ReduceOp) -> Result<Buffer, Wrong> {
    match dtype {
        DType::U8 => combine::<u8>(inputs, op),
        DType::U32 => combine::<u32>(inputs, op),
        DType::I64 => combine::<i64>(inputs, op),
        DType::BF16 => combine::<bf16>(inputs, op),
        DType::F16 => combine::<f16>(inputs, op),
        DType::F32 => combine::<f32>(inputs, op),
        DType::F64 => combine::<f64>(inputs, op),
        other => Err(format!("the conformance suite has no reference for {other}: add it here").into()),
    }
}

/// Concatenates buffers of one dtype.
fn concat(dtype: DType, parts: &[Buffer]) -> Buffer {
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.bytes().iter().copied()).collect();
    let mut all = Buffer::zeros(dtype, bytes.len() / dtype.size());
    all.bytes_mut().copy_from_slice(&bytes);
    all
}

/// Returns elements `start..start + len` of a buffer.
fn slice(buffer: &Buffer, start: usize, len: usize) -> Buffer {
    let mut part = Buffer::zeros(buffer.dtype(), len);
    let size = buffer.dtype().size();
    part.bytes_mut().copy_from_slice(&buffer.bytes()[start * size..(start + len) * size]);
    part
}

/// The allowed difference of floats from the reference.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    relative: f64,
    absolute: f64,
}

impl Allowed {
    /// None: equal bits. All NaN are equal, and zero differs from minus zero.
    const EXACT: Allowed = Allowed { relative: 0., absolute: 0. };

    /// For sums and products of four numbers below 40 with an unspecified order or rounding.
    fn of(guarantees: Guarantees, dtype: DType) -> Self {
        let Guarantees { fixed_order, f32_accumulation, .. } = guarantees;
        let (relative, absolute) = match dtype {
            DType::F64 if !fixed_order => (1e-12, 1e-12),
            DType::F32 if !fixed_order => (1e-5, 1e-4),
            DType::BF16 | DType::F16 if !f32_accumulation => (0.05, 1.),
            DType::BF16 | DType::F16 if !fixed_order => (0.01, 1e-4),
            _ => return Allowed::EXACT,
        };
        Allowed { relative, absolute }
    }

    fn has(self, a: f64, b: f64) -> bool {
        a == b || (a - b).abs() <= self.relative * (a.abs() + b.abs()) + self.absolute
    }
}

/// Compares outputs. `allowed` returns the tolerance of an output.
fn same(got: &[Buffer], expected: &[Buffer], what: &str, allowed: &dyn Fn(&Buffer) -> Allowed) -> Result<(), Wrong> {
    ensure!(got.len() == expected.len(), "{what}: {} outputs instead of {}", got.len(), expected.len());
    for (part, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (kind, expected_kind) = ((got.dtype(), got.len()), (expected.dtype(), expected.len()));
        ensure!(kind == expected_kind, "{what}: part {part}: {kind:?} instead of {expected_kind:?}");
        let (size, allowed) = (expected.dtype().size(), allowed(expected));
        let elements = got.bytes().chunks_exact(size).zip(expected.bytes().chunks_exact(size));
        for (at, _) in elements.enumerate().filter(|(_, (got, expected))| got != expected) {
            let (got, expected) = (number(got, at), number(expected, at));
            let is_allowed = allowed.absolute > 0. && allowed.has(got, expected);
            ensure!(is_allowed, "{what}: part {part}, element {at}: {got} instead of {expected}");
        }
    }
    Ok(())
}

fn number(buffer: &Buffer, at: usize) -> f64 {
    match buffer {
        Buffer::U8(values) => values[at].into(),
        Buffer::U32(values) => values[at].into(),
        Buffer::I64(values) => values[at] as f64,
        Buffer::BF16(values) => values[at].to_f64(),
        Buffer::F16(values) => values[at].to_f64(),
        Buffer::F32(values) => values[at].into(),
        Buffer::F64(values) => values[at],
        // Device buffers are compared as copies on the host.
        _ => f64::NAN,
    }
}
