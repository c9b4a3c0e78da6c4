//! What is in buffers, and how it is combined: in the buffer's own dtype, one rank after the other.

use half::{bf16, f16};

/// An `ncclDataType_t` that is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    U8,
    U32,
    I64,
    F16,
    F32,
    F64,
    BF16,
}

/// An `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Op {
    pub(crate) fn of(number: u32) -> Option<Self> {
        [Op::Sum, Op::Product, Op::Max, Op::Min, Op::Average].get(number as usize).copied()
    }
}

impl Element {
    pub(crate) fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Element::U8),
            3 => Some(Element::U32),
            4 => Some(Element::I64),
            6 => Some(Element::F16),
            7 => Some(Element::F32),
            8 => Some(Element::F64),
            9 => Some(Element::BF16),
            _ => None,
        }
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::F16 | Element::BF16 => 2,
            Element::U32 | Element::F32 => 4,
            Element::I64 | Element::F64 => 8,
        }
    }

    /// All ranks' elements combined, from rank `first` on around the ring.
    pub(crate) fn combine(self, op: Op, inputs: &[&[u8]], first: usize) -> Vec<u8> {
        match self {
            Element::U8 => combine::<u8, 1>(op, inputs, first),
            Element::U32 => combine::<u32, 4>(op, inputs, first),
            Element::I64 => combine::<i64, 8>(op, inputs, first),
            Element::F16 => combine::<f16, 2>(op, inputs, first),
            Element::F32 => combine::<f32, 4>(op, inputs, first),
            Element::F64 => combine::<f64, 8>(op, inputs, first),
            Element::BF16 => combine::<bf16, 2>(op, inputs, first),
        }
    }
}

trait Number<const SIZE: usize>: Copy + PartialOrd {
    fn read(bytes: [u8; SIZE]) -> Self;
    fn write(self) -> [u8; SIZE];
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// A rank's share of an average of `ranks`, before it is added, as NCCL has it for floats.
    fn share(self, ranks: usize) -> Self;
    /// The average of a sum, as NCCL has it for integers.
    fn average(self, ranks: usize) -> Self;
}

macro_rules! number {
    ($($t:ty, $size:literal, $add:expr, $multiply:expr, $share:expr, $average:expr;)*) => {$(
        impl Number<$size> for $t {
            fn read(bytes: [u8; $size]) -> Self {
                <$t>::from_ne_bytes(bytes)
            }
            fn write(self) -> [u8; $size] {
                self.to_ne_bytes()
            }
            fn add(self, other: Self) -> Self {
                $add(self, other)
            }
            fn multiply(self, other: Self) -> Self {
                $multiply(self, other)
            }
            fn share(self, ranks: usize) -> Self {
                $share(self, ranks)
            }
            fn average(self, ranks: usize) -> Self {
                $average(self, ranks)
            }
        }
    )*};
}
number! {
    u8, 1, u8::wrapping_add, u8::wrapping_mul, |x, _| x, |x, ranks| x / ranks as u8;
    u32, 4, u32::wrapping_add, u32::wrapping_mul, |x, _| x, |x, ranks| x / ranks as u32;
    i64, 8, i64::wrapping_add, i64::wrapping_mul, |x, _| x, |x, ranks| x / ranks as i64;
    f16, 2, |a, b| a + b, |a, b| a * b, |x: f16, ranks| x * f16::from_f32(1. / ranks as f32), |x, _| x;
    bf16, 2, |a, b| a + b, |a, b| a * b, |x: bf16, ranks| x * bf16::from_f32(1. / ranks as f32), |x, _| x;
    f32, 4, |a, b| a + b, |a, b| a * b, |x, ranks| x * (1. / ranks as f32), |x, _| x;
    f64, 8, |a, b| a + b, |a, b| a * b, |x, ranks| x * (1. / ranks as f64), |x, _| x;
}

fn combine<T: Number<SIZE>, const SIZE: usize>(op: Op, inputs: &[&[u8]], first: usize) -> Vec<u8> {
    let ranks = inputs.len();
    let columns: Vec<&[[u8; SIZE]]> = inputs.iter().map(|input| input.as_chunks::<SIZE>().0).collect();
    let element = |index: usize| {
        let values = (0..ranks).map(|step| T::read(columns[(first + step) % ranks][index]));
        let all = match op {
            Op::Sum => values.reduce(T::add),
            Op::Average => values.map(|value| value.share(ranks)).reduce(T::add).map(|sum| sum.average(ranks)),
            Op::Product => values.reduce(T::multiply),
            Op::Max => values.reduce(|a, b| if a > b { a } else { b }),
            Op::Min => values.reduce(|a, b| if a < b { a } else { b }),
        };
        all.map(T::write)
    };
    let len = columns.first().map_or(0, |column| column.len());
    (0..len).filter_map(element).flatten().collect()
}
