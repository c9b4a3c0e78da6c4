//! A group of calls as bytes that ranks exchange: who sends what to whom, and what comes of it.

use super::{
    element::Element,
    transfer::{Kind, Seat, Transfer},
};
use crate::bytes;

/// Bytes of device memory that is read.
fn read(at: u64, len: usize) -> Vec<u8> {
    // SAFETY: the operation's touches cover it, and it is this operation's turn.
    unsafe { bytes::read(at, len) }
}

fn write(at: u64, data: &[u8]) {
    // SAFETY: as above.
    unsafe { bytes::copy(at, data.as_ptr() as u64, data.len()) }
}

/// How many bytes a call moves from a rank to another. All ranks know it of all.
fn moved(transfer: &Transfer, to: usize, from: usize) -> usize {
    match transfer.kind {
        Kind::AllGather { .. } | Kind::AllReduce { .. } | Kind::ReduceScatter { .. } => transfer.bytes(),
        Kind::Broadcast { root, .. } if from == root => transfer.bytes(),
        Kind::Reduce { root, .. } if to == root => transfer.bytes(),
        _ => 0,
    }
}

/// What this rank sends to each rank, one behind the other, and how much it is for each.
pub(crate) fn sent(transfers: &[Transfer], seat: Seat) -> (Vec<u8>, Vec<usize>) {
    let (mut all, mut counts) = (vec![], vec![]);
    for to in 0..seat.ranks {
        let before = all.len();
        for transfer in transfers {
            let len = moved(transfer, to, seat.rank);
            let from = match transfer.kind {
                Kind::ReduceScatter { from, .. } => from + (to * len) as u64,
                Kind::AllGather { from, .. } | Kind::AllReduce { from, .. } => from,
                Kind::Broadcast { from, .. } | Kind::Reduce { from, .. } | Kind::Send { from, .. } => from,
                Kind::Receive { .. } => 0,
            };
            if len > 0 {
                all.extend(read(from, len));
            }
        }
        counts.push(all.len() - before);
    }
    (all, counts)
}

/// How much comes from each rank.
pub(crate) fn expected(transfers: &[Transfer], seat: Seat) -> Vec<usize> {
    let from = |from: usize| transfers.iter().map(|transfer| moved(transfer, seat.rank, from)).sum();
    (0..seat.ranks).map(from).collect()
}

/// Writes what comes of what came. `first` is the rank that sums begin with.
pub(crate) fn finish(transfers: &[Transfer], seat: Seat, received: &[u8], first: usize) {
    let counts = expected(transfers, seat);
    let mut rests: Vec<&[u8]> = vec![];
    let mut rest = received;
    for count in counts {
        let (of, others) = rest.split_at(count);
        rests.push(of);
        rest = others;
    }
    for (number, transfer) in transfers.iter().enumerate() {
        let inputs: Vec<&[u8]> = rests
            .iter_mut()
            .enumerate()
            .map(|(from, rest)| {
                let (input, others) = rest.split_at(moved(transfer, seat.rank, from));
                *rest = others;
                input
            })
            .collect();
        let combined = |element: Element, op, first: usize| element.combine(op, &inputs, first % seat.ranks);
        match transfer.kind {
            Kind::AllGather { to, .. } => write(to, &inputs.concat()),
            Kind::Broadcast { to, root, .. } => write(to, inputs[root]),
            Kind::AllReduce { to, op, .. } => write(to, &combined(transfer.element, op, first + number)),
            Kind::Reduce { to, op, root, .. } if root == seat.rank => {
                write(to, &combined(transfer.element, op, first + number));
            }
            Kind::ReduceScatter { to, op, .. } => {
                write(to, &combined(transfer.element, op, first + number + seat.rank));
            }
            Kind::Reduce { .. } | Kind::Send { .. } | Kind::Receive { .. } => {}
        }
    }
}

/// What a send sends.
pub(crate) fn payload(transfer: &Transfer) -> Vec<u8> {
    match transfer.kind {
        Kind::Send { from, .. } => read(from, transfer.bytes()),
        _ => vec![0; transfer.bytes()],
    }
}

/// Writes what a receive received.
pub(crate) fn deliver(transfer: &Transfer, payload: &[u8]) {
    if let Kind::Receive { to, .. } = transfer.kind {
        write(to, payload);
    }
}
