//! One call: its buffers, and how their elements are combined, in the buffer's dtype and rank after rank.

use std::ops::Range;

use half::{bf16, f16};

use crate::{
    memory::base_of,
    status::Fault,
    streams::{Access, Touch},
};

/// The called function with its addresses. Null is no memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    AllGather { from: u64, to: u64 },
    AllReduce { from: u64, to: u64, op: Op },
    Broadcast { from: u64, to: u64, root: usize },
    Reduce { from: u64, to: u64, op: Op, root: usize },
    ReduceScatter { from: u64, to: u64, op: Op },
    Send { from: u64, peer: usize },
    Receive { to: u64, peer: usize },
}

/// A call for `count` elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transfer {
    pub(crate) kind: Kind,
    pub(crate) element: Element,
    pub(crate) count: usize,
    /// Whether its memory is registered.
    pub(crate) is_registered: bool,
}

/// An address and a number of bytes.
pub(crate) type Memory = Option<(u64, usize)>;

/// A rank of a communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Transfer {
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.element.size()
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            Kind::AllGather { .. } => "ncclAllGather",
            Kind::AllReduce { .. } => "ncclAllReduce",
            Kind::Broadcast { .. } => "ncclBroadcast",
            Kind::Reduce { .. } => "ncclReduce",
            Kind::ReduceScatter { .. } => "ncclReduceScatter",
            Kind::Send { .. } => "ncclSend",
            Kind::Receive { .. } => "ncclRecv",
        }
    }

    /// Returns the peer of a send or receive.
    pub(crate) fn peer(&self) -> Option<usize> {
        match self.kind {
            Kind::Send { peer, .. } | Kind::Receive { peer, .. } => Some(peer),
            _ => None,
        }
    }

    /// Returns the root or the peer, if any.
    pub(crate) fn named(&self) -> Option<usize> {
        match self.kind {
            Kind::Broadcast { root, .. } | Kind::Reduce { root, .. } => Some(root),
            _ => self.peer(),
        }
    }

    /// Returns a description of the call that must be equal on all ranks.
    pub(crate) fn alike(&self) -> String {
        let how = match self.kind {
            Kind::AllReduce { op, .. } | Kind::ReduceScatter { op, .. } => format!("{op:?}, "),
            Kind::Broadcast { root, .. } => format!("from rank {root}, "),
            Kind::Reduce { op, root, .. } => format!("{op:?}, to rank {root}, "),
            _ => String::new(),
        };
        format!("{}({how}{} {:?})", self.name(), self.count, self.element)
    }

    /// Returns the memory that this rank reads and writes.
    pub(crate) fn ranges(&self, Seat { rank, ranks }: Seat) -> (Memory, Memory) {
        let bytes = self.bytes();
        match self.kind {
            Kind::AllGather { from, to } => (Some((from, bytes)), Some((to, bytes * ranks))),
            Kind::AllReduce { from, to, .. } => (Some((from, bytes)), Some((to, bytes))),
            Kind::Broadcast { from, to, root } => ((rank == root).then_some((from, bytes)), Some((to, bytes))),
            Kind::Reduce { from, to, root, .. } => (Some((from, bytes)), (rank == root).then_some((to, bytes))),
            Kind::ReduceScatter { from, to, .. } => (Some((from, bytes * ranks)), Some((to, bytes))),
            Kind::Send { from, .. } => (Some((from, bytes)), None),
            Kind::Receive { to, .. } => (None, Some((to, bytes))),
        }
    }

    /// Returns the offset of the shorter buffer in the longer one for an in-place call.
    fn in_place(&self, rank: usize) -> u64 {
        match self.kind {
            Kind::AllGather { .. } | Kind::ReduceScatter { .. } => (rank * self.bytes()) as u64,
            _ => 0,
        }
    }

    /// Returns whether the buffers overlap without being in place.
    pub(crate) fn overlaps(&self, seat: Seat) -> bool {
        let (Some((from, read)), Some((to, written))) = self.ranges(seat) else { return false };
        let shift = self.in_place(seat.rank);
        let is_in_place = if read <= written { from == to + shift } else { to == from + shift };
        let range = |at: u64, len: usize| -> Range<u64> { at..at + len as u64 };
        let (a, b) = (range(from, read), range(to, written));
        !is_in_place && a.start < b.end && b.start < a.end
    }
}

/// Returns the memory that an operation of these calls uses, each allocation once.
pub(crate) fn touches(transfers: &[Transfer], seat: Seat) -> Result<Vec<Touch>, Fault> {
    let mut touches: Vec<Touch> = vec![];
    for transfer in transfers {
        let (read, written) = transfer.ranges(seat);
        let uses = [(read, Access::Read), (written, Access::Write)];
        for ((at, len), access) in uses.into_iter().filter_map(|(range, access)| Some((range?, access))) {
            let (base, room) = base_of(at).unwrap_or((at, usize::MAX));
            if (at - base) as usize + len > room {
                let name = transfer.name();
                return Err(Fault(format!(
                    "`{name}` is told of {len} bytes at {at:#x}, but the allocation there ends {} bytes behind it",
                    room as u64 - (at - base)
                )));
            }
            match touches.iter_mut().find(|touch| touch.at == base) {
                Some(touch) if access == Access::Write => touch.access = access,
                Some(_) => {}
                None => touches.push(Touch { at: base, access }),
            }
        }
    }
    Ok(touches)
}

/// A supported `ncclDataType_t`.
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

    /// Combines all ranks' elements, starting with rank `first` of the ring.
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
    /// Scales a rank's term of an average before the sum, as NCCL does for floats.
    fn share(self, ranks: usize) -> Self;
    /// Divides a sum for an average, as NCCL does for integers.
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
