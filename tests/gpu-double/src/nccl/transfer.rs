//! One call.

use std::ops::Range;

use super::element::{Element, Op};
use crate::{
    memory::base_of,
    operation::{Access, Touch},
    status::Fault,
};

/// Which function was called. Null is no memory.
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

/// A call, which is of `count` elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transfer {
    pub(crate) kind: Kind,
    pub(crate) element: Element,
    pub(crate) count: usize,
}

/// An address and bytes from there on, if it is any.
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

    /// The other rank of a call for two.
    pub(crate) fn peer(&self) -> Option<usize> {
        match self.kind {
            Kind::Send { peer, .. } | Kind::Receive { peer, .. } => Some(peer),
            _ => None,
        }
    }

    /// A rank that the call names.
    pub(crate) fn named(&self) -> Option<usize> {
        match self.kind {
            Kind::Broadcast { root, .. } | Kind::Reduce { root, .. } => Some(root),
            _ => self.peer(),
        }
    }

    /// What all ranks must call alike.
    pub(crate) fn alike(&self) -> String {
        let how = match self.kind {
            Kind::AllReduce { op, .. } | Kind::ReduceScatter { op, .. } => format!("{op:?}, "),
            Kind::Broadcast { root, .. } => format!("from rank {root}, "),
            Kind::Reduce { op, root, .. } => format!("{op:?}, to rank {root}, "),
            _ => String::new(),
        };
        format!("{}({how}{} {:?})", self.name(), self.count, self.element)
    }

    /// What it reads and what it writes, as this rank: addresses and lengths.
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

    /// Where reading and writing may be at one place: how far into the longer the shorter then begins.
    fn in_place(&self, rank: usize) -> u64 {
        match self.kind {
            Kind::AllGather { .. } | Kind::ReduceScatter { .. } => (rank * self.bytes()) as u64,
            _ => 0,
        }
    }

    /// Whether the two overlap where that is not allowed.
    pub(crate) fn overlaps(&self, seat: Seat) -> bool {
        let (Some((from, read)), Some((to, written))) = self.ranges(seat) else { return false };
        let shift = self.in_place(seat.rank);
        let is_in_place = if read <= written { from == to + shift } else { to == from + shift };
        let range = |at: u64, len: usize| -> Range<u64> { at..at + len as u64 };
        let (a, b) = (range(from, read), range(to, written));
        !is_in_place && a.start < b.end && b.start < a.end
    }
}

/// What an operation of these calls uses, each allocation once.
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
