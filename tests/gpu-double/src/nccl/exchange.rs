//! The connections between ranks, and a group of calls as bytes that ranks exchange.

use std::{
    collections::HashMap,
    os::fd::AsFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use fsdp_core::{
    Buffer, Error, ExchangePart, Heap, ProcessGroup, RankEnv,
    process_group::{Options, Signature, Subject, Work, shm},
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::transfer::{Element, Kind, Seat, Transfer};
use crate::bytes;

/// Reads device memory.
fn read(at: u64, len: usize) -> Vec<u8> {
    // SAFETY: the operation's touches cover it, and it is this operation's turn.
    unsafe { bytes::read(at, len) }
}

fn write(at: u64, data: &[u8]) {
    // SAFETY: as above.
    unsafe { bytes::copy(at, data.as_ptr() as u64, data.len()) }
}

/// Returns the bytes that a call moves from one rank to another. Every rank can compute it for all ranks.
fn moved(transfer: &Transfer, to: usize, from: usize) -> usize {
    match transfer.kind {
        _ if bytes::is_skipped(transfer.bytes()) => 0,
        Kind::AllGather { .. } | Kind::AllReduce { .. } | Kind::ReduceScatter { .. } => transfer.bytes(),
        Kind::Broadcast { root, .. } if from == root => transfer.bytes(),
        Kind::Reduce { root, .. } if to == root => transfer.bytes(),
        _ => 0,
    }
}

/// Returns this rank's bytes for all ranks, concatenated, and the number of bytes for each rank.
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

/// Returns the number of bytes from each rank.
pub(crate) fn expected(transfers: &[Transfer], seat: Seat) -> Vec<usize> {
    let from = |from: usize| transfers.iter().map(|transfer| moved(transfer, seat.rank, from)).sum();
    (0..seat.ranks).map(from).collect()
}

/// Writes the results of the received bytes. `first` is the first rank of sums.
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

/// Returns the bytes of a send.
pub(crate) fn payload(transfer: &Transfer) -> Vec<u8> {
    match transfer.kind {
        Kind::Send { from, .. } => read(from, transfer.bytes()),
        _ => vec![0; transfer.bytes()],
    }
}

/// Writes the bytes of a receive.
pub(crate) fn deliver(transfer: &Transfer, payload: &[u8]) {
    if let Kind::Receive { to, .. } = transfer.kind {
        write(to, payload);
    }
}

/// The double has no timeouts; NCCL's caller has.
const FOR_EVER: Duration = Duration::from_secs(900_000_000);

/// Connects the ranks of a named world, on this thread.
pub(crate) fn meet(name: &str, Seat { rank, ranks }: Seat) -> Result<ProcessGroup, Error> {
    enter_network()?;
    let env = RankEnv {
        rank,
        world_size: ranks,
        local_rank: rank,
        local_world_size: ranks,
        run_id: name.into(),
        master_port: 1,
        ..RankEnv::single()
    };
    shm::connect(&env, Options::default().with_timeout(FOR_EVER))
}

/// Moves this thread to the network namespace that joins the devices of several hosts, if there is one. Sockets that
/// are created there remain in it.
fn enter_network() -> Result<(), Error> {
    let Some(path) = std::env::var_os("GPU_DOUBLE_NETWORK") else { return Ok(()) };
    let enter = || {
        let network = std::fs::File::open(&path)?;
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network)).map_err(std::io::Error::from)
    };
    enter().map_err(|error| Error::Env(format!("GPU_DOUBLE_NETWORK={}: {error}", path.display())))
}

/// A world that may not be connected yet.
#[derive(Clone)]
pub(crate) struct Link(Arc<Mutex<State>>);

enum State {
    Meets(mpsc::Receiver<Result<ProcessGroup, Error>>),
    Met(Result<ProcessGroup, Error>),
}

impl Link {
    /// Starts to connect, on a separate thread.
    pub(crate) fn begin(name: String, seat: Seat) -> Self {
        let (tell, told) = mpsc::channel();
        // The receiver is gone if the communicator is gone.
        std::thread::spawn(move || tell.send(meet(&name, seat)));
        Link(Arc::new(Mutex::new(State::Meets(told))))
    }

    /// Returns the world, if it is connected.
    pub(crate) fn world(&self) -> Option<Result<ProcessGroup, Error>> {
        let mut state: MutexGuard<'_, State> = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Meets(told) = &*state {
            *state = State::Met(told.try_recv().ok()?);
        }
        match &*state {
            State::Met(world) => Some(world.clone()),
            State::Meets(_) => None,
        }
    }
}

type Issue = Box<dyn FnOnce(&ProcessGroup) -> Work + Send>;

/// An exchange that waits until its world is connected.
pub(crate) struct Pending {
    link: Link,
    issue: Option<Issue>,
    work: Option<Work>,
}

impl Pending {
    pub(crate) fn new(link: &Link, issue: impl FnOnce(&ProcessGroup) -> Work + Send + 'static) -> Self {
        Pending { link: link.clone(), issue: Some(Box::new(issue)), work: None }
    }

    /// Sends bytes from all ranks to all ranks. `alike` must be equal on all ranks.
    pub(crate) fn exchange(link: &Link, alike: String, sent: (Vec<u8>, Vec<usize>), recv_counts: Vec<usize>) -> Self {
        let (input, send_counts) = sent;
        let part = ExchangePart { input: Buffer::U8(input), send_counts, recv_counts };
        Self::new(link, move |world| {
            let signature = Signature::new(&Subject::new(alike, []), []);
            world.signed(signature).all_to_all(vec![part], Heap::shared())
        })
    }

    /// Sends bytes from the first rank to the second.
    pub(crate) fn send(link: &Link, payload: Vec<u8>) -> Self {
        Self::new(link, move |world| world.broadcast(vec![Buffer::U8(payload)], 0))
    }

    pub(crate) fn barrier(link: &Link) -> Self {
        Self::new(link, ProcessGroup::barrier)
    }

    /// Starts if the world is connected, and returns whether the exchange has started.
    pub(crate) fn is_issued(&mut self) -> bool {
        if self.issue.is_some()
            && let Some(world) = self.link.world()
            && let Some(issue) = self.issue.take()
        {
            self.work = Some(world.map_or_else(|error| Work::ready(Err(error)), |world| issue(&world)));
        }
        self.issue.is_none()
    }

    /// Starts if possible, and returns the received bytes, if any.
    pub(crate) fn poll(&mut self) -> Option<Result<Vec<u8>, Error>> {
        self.is_issued();
        self.result()
    }

    /// Returns the received bytes once the exchange has ended. Must not be called again after that.
    pub(crate) fn result(&mut self) -> Option<Result<Vec<u8>, Error>> {
        if !self.work.as_mut()?.is_done() {
            return None;
        }
        let outputs = self.work.take()?.wait();
        Some(outputs.map(|outputs| match outputs.into_iter().next() {
            Some(Buffer::U8(bytes)) => bytes,
            _ => vec![],
        }))
    }
}

/// The connections of one direction between two ranks, created on first use.
#[derive(Default)]
pub(crate) struct Directions(HashMap<(usize, usize), Link>);

impl Directions {
    /// Returns the connection from one rank to another, one of which is this rank. `name` is the communicator's.
    pub(crate) fn link(&mut self, name: &str, from: usize, to: usize, own: usize) -> Link {
        let begin = || Link::begin(format!("{name} {from} {to}"), Seat { rank: usize::from(own != from), ranks: 2 });
        self.0.entry((from, to)).or_insert_with(begin).clone()
    }
}
