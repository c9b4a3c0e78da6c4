//! What collectives should give, computed on one thread.

use half::{bf16, f16};

use super::{
    super::backend::Promises,
    verdict::{Wrong, ensure},
};
use crate::{Buffer, DType, Element, ReduceOp};

/// Element `index` of part `part` of rank `rank`: any of a few hundred values, some negative, for floats also
/// fractions.
fn value(seed: u64, rank: usize, part: usize, index: usize) -> i64 {
    let x = scrambled(seed ^ (rank as u64) << 48 ^ (part as u64) << 40 ^ index as u64);
    (x % 500) as i64 - 250
}

/// Some other number for each.
pub(super) fn scrambled(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// What rank `rank` passes as part `part`.
pub(super) fn input(seed: u64, rank: usize, part: usize, dtype: DType, len: usize) -> Buffer {
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
    }
}

/// What a dtype is combined in.
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

/// The most values from the first on that are a power of two and leave some, combined, and then with the others.
fn tree<A: Copy>(values: &[A], f: fn(A, A) -> A) -> Option<A> {
    let (before, rest) = match values {
        [] => return None,
        [value] => return Some(*value),
        _ => values.split_at(values.len().next_power_of_two() / 2),
    };
    Some(f(tree(before, f)?, tree(rest, f)?))
}

/// The reduction of all ranks' inputs, in the order that [`Promises::fixed_order`] says.
pub(super) fn reduced(dtype: DType, inputs: &[Buffer], op: ReduceOp) -> Result<Buffer, Wrong> {
    match dtype {
        DType::U8 => combine::<u8>(inputs, op),
        DType::U32 => combine::<u32>(inputs, op),
        DType::I64 => combine::<i64>(inputs, op),
        DType::BF16 => combine::<bf16>(inputs, op),
        DType::F16 => combine::<f16>(inputs, op),
        DType::F32 => combine::<f32>(inputs, op),
        DType::F64 => combine::<f64>(inputs, op),
    }
}

/// The concatenation of buffers of one dtype.
pub(super) fn concat(dtype: DType, parts: &[Buffer]) -> Buffer {
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.bytes().iter().copied()).collect();
    let mut all = Buffer::zeros(dtype, bytes.len() / dtype.size());
    all.bytes_mut().copy_from_slice(&bytes);
    all
}

/// Elements `start..start + len` of a buffer.
pub(super) fn slice(buffer: &Buffer, start: usize, len: usize) -> Buffer {
    let mut part = Buffer::zeros(buffer.dtype(), len);
    let size = buffer.dtype().size();
    part.bytes_mut().copy_from_slice(&buffer.bytes()[start * size..(start + len) * size]);
    part
}

/// By how much floats may differ from the reference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    relative: f64,
    absolute: f64,
}

impl Allowed {
    /// By nothing: equal bits, where NaN is NaN and zero is not minus zero.
    pub(super) const EXACT: Allowed = Allowed { relative: 0., absolute: 0. };

    /// For sums and products of four numbers below 40 in an order, or in roundings, that a backend does not promise.
    pub(super) fn of(promises: Promises, dtype: DType) -> Self {
        let Promises { fixed_order, f32_sums, .. } = promises;
        let (relative, absolute) = match dtype {
            DType::F64 if !fixed_order => (1e-12, 1e-12),
            DType::F32 if !fixed_order => (1e-5, 1e-4),
            DType::BF16 | DType::F16 if !f32_sums => (0.05, 1.),
            DType::BF16 | DType::F16 if !fixed_order => (0.01, 1e-4),
            _ => return Allowed::EXACT,
        };
        Allowed { relative, absolute }
    }

    fn has(self, a: f64, b: f64) -> bool {
        a == b || (a - b).abs() <= self.relative * (a.abs() + b.abs()) + self.absolute
    }
}

/// Compares outputs. `allowed` says by how much those that are like this one may differ.
pub(super) fn same(
    got: &[Buffer],
    expected: &[Buffer],
    what: &str,
    allowed: &dyn Fn(&Buffer) -> Allowed,
) -> Result<(), Wrong> {
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
        // It is compared as a copy on the host.
        #[cfg(feature = "cuda")]
        Buffer::Cuda(_) => f64::NAN,
    }
}
