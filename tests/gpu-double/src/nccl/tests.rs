//! Ranks as threads, each with a device of its own.

use super::*;
use crate::{machine::set_current, streams::synchronize};

const F32: u32 = 7;
const BF16: u32 = 9;
const SUM: u32 = 0;

/// A rank with a stream.
struct Rank {
    comm: u64,
    rank: usize,
    stream: *mut c_void,
}

/// Waits until a communicator has an answer, and says how often it was asked.
fn settle(comm: u64) -> (Status, usize) {
    let mut asked = 0;
    loop {
        let mut status = SUCCESS;
        // SAFETY: it is a place for a value.
        assert_eq!(unsafe { ncclCommGetAsyncError(comm, &raw mut status) }, SUCCESS);
        if status != IN_PROGRESS {
            return (status, asked);
        }
        asked += 1;
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

fn config() -> Config {
    Config { size: 48, magic: 0xcafe_beef, version: 21_800, blocking: 0 }
}

/// Runs ranks on devices.
fn ranks<T: Send>(devices: &[usize], rank: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: it is a place for a value.
    assert_eq!(unsafe { ncclGetUniqueId(&raw mut id) }, SUCCESS);
    let run = |place: usize| {
        set_current(Some(devices[place]));
        let (mut comm, config) = (0, config());
        let ranks = devices.len() as i32;
        // SAFETY: they are a place for a value, and a configuration.
        let begun = unsafe { ncclCommInitRankConfig(&raw mut comm, ranks, id, place as i32, &raw const config) };
        assert_eq!(begun, IN_PROGRESS);
        let stream = machine().create_stream(true).unwrap() as *mut c_void;
        rank(Rank { comm, rank: place, stream })
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..devices.len()).map(|place| scope.spawn(move || run(place))).collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

impl Rank {
    fn up(&self, values: &[f32]) -> u64 {
        let at = machine().allocate(size_of_val(values).max(4), Some(self.stream as usize), "cuMemAllocAsync").unwrap();
        synchronize(self.stream, "cuStreamSynchronize");
        // SAFETY: it is as much memory, and nothing is queued that uses it.
        unsafe { (at as *mut f32).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        at
    }

    fn down(&self, at: u64, len: usize) -> Vec<f32> {
        assert_eq!(settle(self.comm).0, SUCCESS);
        synchronize(self.stream, "cuStreamSynchronize");
        // SAFETY: it is as much memory, and the stream has done what was queued.
        unsafe { std::slice::from_raw_parts(at as *const f32, len) }.to_vec()
    }

    fn ready(&self) {
        assert_eq!(settle(self.comm).0, SUCCESS);
    }
}

#[test]
fn runs_all_collectives() {
    let got = ranks(&[0, 1, 2], |rank| {
        rank.ready();
        let (comm, stream, own) = (rank.comm, rank.stream, rank.rank as f32);
        let gathered = rank.up(&[0.; 6]);
        let (sums, third, spread, reduced) = (rank.up(&[own; 2]), rank.up(&[0.]), rank.up(&[own]), rank.up(&[-1.]));
        let all = rank.up(&[own, 10. + own, 20. + own]);
        let own = rank.up(&[own, own + 0.5]);
        assert_eq!(ncclGroupStart(), SUCCESS);
        ncclAllGather(own, gathered, 2, F32, comm, stream);
        ncclAllReduce(sums, sums, 2, F32, SUM, comm, stream);
        ncclReduceScatter(all, third, 1, F32, 2, comm, stream);
        ncclBroadcast(spread, spread, 1, F32, 2, comm, stream);
        ncclReduce(own, reduced, 1, F32, 4, 1, comm, stream);
        assert!(matches!(ncclGroupEnd(), SUCCESS | IN_PROGRESS));
        let down = |at, len| rank.down(at, len);
        [down(gathered, 6), down(sums, 2), down(third, 1), down(spread, 1), down(reduced, 1)].concat()
    });
    for (rank, got) in got.iter().enumerate() {
        let (third, reduced) = (10. * rank as f32 + 2., if rank == 1 { 1. } else { -1. });
        assert_eq!(got[..8], [0., 0.5, 1., 1.5, 2., 2.5, 3., 3.]);
        assert_eq!(got[8..], [third, 2., reduced], "rank {rank}");
    }
}

#[test]
fn sends_between_two_ranks_and_to_itself() {
    let got = ranks(&[0, 1, 2], |rank| {
        rank.ready();
        let (comm, stream) = (rank.comm, rank.stream);
        if rank.rank == 2 {
            return vec![];
        }
        let (peer, own) = (1 - rank.rank as i32, rank.rank as f32);
        let (first, second, to) = (rank.up(&[own]), rank.up(&[own + 10., own + 20.]), rank.up(&[0.; 4]));
        ncclGroupStart();
        ncclSend(first, 1, F32, peer, comm, stream);
        ncclSend(second, 2, F32, peer, comm, stream);
        ncclRecv(to, 1, F32, peer, comm, stream);
        ncclRecv(to + 4, 2, F32, peer, comm, stream);
        ncclSend(first, 1, F32, rank.rank as i32, comm, stream);
        ncclRecv(to + 12, 1, F32, rank.rank as i32, comm, stream);
        ncclGroupEnd();
        rank.down(to, 4)
    });
    assert_eq!(got, [vec![1., 11., 21., 0.], vec![0., 10., 20., 1.], vec![]]);
}

#[test]
fn sums_in_the_buffers_dtype() {
    let one = half::bf16::from_f32(256.).to_bits();
    let small = half::bf16::from_f32(1.).to_bits();
    let sums = ranks(&[0, 1, 2], |rank| {
        rank.ready();
        let value = if rank.rank == 0 { one } else { small };
        let at = rank.up(&[0.; 8]);
        let sum = |count: usize| {
            // SAFETY: nothing is queued that uses it.
            unsafe { (at as *mut u16).write(value) };
            ncclAllReduce(at, at, count, BF16, SUM, rank.comm, rank.stream);
            let bits = rank.down(at, 1)[0].to_bits() as u16;
            half::bf16::from_bits(bits).to_f32()
        };
        let sums: Vec<f32> = (1..=12).map(sum).collect();
        let again: Vec<f32> = (1..=12).map(sum).collect();
        assert_eq!(sums, again, "the same call adds up in the same order");
        sums
    });
    assert!(sums.iter().all(|of| *of == sums[0]), "all ranks have the same bits: {sums:?}");
    // In f32, and then rounded, it would be 258 whatever the order.
    assert!(sums[0].contains(&256.) && sums[0].contains(&258.), "{sums:?}");
}

#[test]
fn rejects_two_ranks_on_one_device() {
    for status in ranks(&[3, 3], |rank| {
        settle(rank.comm).0 == INVALID_USAGE && {
            // SAFETY: it is a text of the library's.
            let said = unsafe { CStr::from_ptr(ncclGetLastError(rank.comm)) };
            said.to_string_lossy().contains("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3")
        }
    }) {
        assert!(status);
    }
}

#[test]
fn aborted_operations_do_not_write() {
    let got = ranks(&[0, 1], |rank| {
        rank.ready();
        let (comm, stream) = (rank.comm, rank.stream);
        let at = rank.up(&[7.]);
        if rank.rank == 0 {
            ncclAllReduce(at, at, 1, F32, SUM, comm, stream);
            assert_eq!(settle(comm).0, SUCCESS);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(100));
                    assert_eq!(ncclCommAbort(comm), SUCCESS);
                });
                synchronize(stream, "cuStreamSynchronize");
            });
        }
        // SAFETY: it is a float, and the stream has ended what was queued.
        unsafe { *(at as *const f32) }
    });
    assert_eq!(got, [7., 7.]);
}

#[test]
fn rejects_invalid_calls() {
    ranks(&[0, 1], |rank| {
        let (comm, stream) = (rank.comm, rank.stream);
        let at = rank.up(&[0.; 8]);
        let is_refused = |status: Status| assert_eq!(status, INVALID_ARGUMENT);
        // Before it is ready.
        let mut fresh = 0;
        let config = config();
        // SAFETY: they are a place for a value, and a configuration.
        unsafe {
            let id = UniqueId([b'x'; 128]);
            assert_eq!(ncclCommInitRankConfig(&raw mut fresh, 2, id, 0, &raw const config), IN_PROGRESS);
            let bare = Config { magic: 0, ..config };
            is_refused(ncclCommInitRankConfig(&raw mut fresh, 2, id, 0, &raw const bare));
            is_refused(ncclCommInitRankConfig(&raw mut fresh, 2, id, 2, &raw const config));
        }
        is_refused(ncclAllReduce(at, at, 1, F32, SUM, fresh, stream));
        rank.ready();
        is_refused(ncclAllReduce(at, at, 1, F32, SUM, 0, stream));
        is_refused(ncclAllReduce(0, at, 1, F32, SUM, comm, stream));
        is_refused(ncclAllReduce(at, at, 1, 77, SUM, comm, stream));
        is_refused(ncclAllReduce(at, at, 1, F32, 5, comm, stream));
        is_refused(ncclBroadcast(at, at, 1, F32, 2, comm, stream));
        is_refused(ncclSend(at, 1, F32, -1, comm, stream));
        // Overlapping, but not in place.
        is_refused(ncclAllReduce(at, at + 4, 2, F32, SUM, comm, stream));
        is_refused(ncclAllGather(at + 4 * (1 - rank.rank as u64), at, 1, F32, comm, stream));
        // One that is refused ends its group.
        assert_eq!(ncclGroupStart(), SUCCESS);
        is_refused(ncclBroadcast(at, at, 1, F32, 9, comm, stream));
        is_refused(ncclGroupEnd());
        assert_eq!(ncclGroupEnd(), INVALID_USAGE);
        assert_eq!(ncclCommFinalize(comm), SUCCESS);
        assert_eq!(ncclCommDestroy(comm), SUCCESS);
    });
}

#[test]
fn registers_memory_of_its_own() {
    let sums = ranks(&[0, 1], |rank| {
        rank.ready();
        let (mut at, mut handle) = (0, 0);
        // SAFETY: they are places for values.
        unsafe {
            assert_eq!(ncclMemAlloc(&raw mut at, 64), SUCCESS);
            assert_eq!(ncclCommRegister(rank.comm, at, 64, &raw mut handle), SUCCESS);
        }
        // SAFETY: it is as much memory, and nothing is queued that uses it.
        unsafe { (at as *mut f32).copy_from_nonoverlapping([1., 2.].as_ptr(), 2) };
        ncclAllReduce(at, at, 2, F32, SUM, rank.comm, rank.stream);
        let sum = rank.down(at, 2);
        assert_eq!(ncclCommDeregister(rank.comm, handle), SUCCESS);
        assert_eq!(ncclCommDeregister(rank.comm, handle), INVALID_ARGUMENT);
        assert_eq!(ncclMemFree(at), SUCCESS);
        assert_eq!(ncclMemFree(0), SUCCESS);
        sum
    });
    assert_eq!(sums, [[2., 4.]; 2]);
}
