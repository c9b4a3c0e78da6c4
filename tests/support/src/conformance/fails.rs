//! Failures: all ranks get the error with its cause, and the group stays failed.

use std::{sync::Arc, time::Duration};

use fsdp_core::{
    Allocator, Buffer, DType, DeviceId, Error, ExchangePart, GatherPart, Heap, ProcessGroup, Readable, ReduceOp,
    Result, ScatterPart, Work, process_group::Options,
};

use rustix::process::{Signal, getpid, kill_process};

use super::{Join, Wrong, ensure, works::options};

/// Runs each check on a group of its own, within a world that does not fail.
pub(super) fn all(join: Join<'_>) -> Result<(), Wrong> {
    let world = join(options(4096))?;
    let fresh = || world.split(0, world.rank());
    for odd in 0..world.size() {
        different(&fresh()?, odd)?;
    }
    arguments(&fresh()?)?;
    exchange(&fresh()?)?;
    for bad in [Bad::Elsewhere, Bad::Short, Bad::Refuses, Bad::Panics] {
        input(&fresh()?, bad)?;
    }
    output(&fresh()?)?;
    leaves(fresh()?)?;
    unjoined(&fresh()?)?;
    Ok(world.barrier().wait().map(drop)?)
}

fn sum(group: &ProcessGroup, len: usize) -> Work {
    group.all_reduce(vec![Buffer::zeros(DType::F32, len)], ReduceOp::Sum)
}

/// Returns the error that a collective must end with.
fn error(outcome: Result<impl Sized>, what: &str) -> Result<Error, Wrong> {
    match outcome {
        Ok(_) => Err(format!("{what} went well").into()),
        Err(error) => Ok(error),
    }
}

/// Checks that later collectives return the first error.
fn stays_failed(group: &ProcessGroup, first: &Error) -> Result<(), Wrong> {
    let later = error(group.barrier().wait(), "a barrier of a group that has failed")?;
    ensure!(later.to_string() == first.to_string(), "after {first} the group says {later}");
    Ok(())
}

/// All ranks learn what each rank issued.
fn different(group: &ProcessGroup, odd: usize) -> Result<(), Wrong> {
    group.barrier().wait()?;
    let rank = group.rank();
    // Large enough to move in several rounds.
    let work =
        if rank == odd { group.broadcast(vec![Buffer::zeros(DType::F32, 100_000)], 0) } else { sum(group, 100_000) };
    let error = error(work.wait(), "a broadcast beside a sum")?;
    let is_it = matches!(&error, Error::Mismatch { rank: by, sequence: 1, details, .. }
        if *by == rank && details.contains(&format!("rank(s) [{odd}] issued broadcast("))
            && details.contains("issued all_reduce("));
    ensure!(is_it, "ranks that issue different collectives are told: {error}");
    stays_failed(group, &error)
}

/// A bad argument fails at once, and fails all ranks after earlier collectives.
fn arguments(group: &ProcessGroup) -> Result<(), Wrong> {
    let before = sum(group, 3);
    if group.rank() == 0 {
        let input = Arc::new(Buffer::zeros(DType::F32, 3));
        let mut work = group.all_gather(vec![GatherPart { input, counts: vec![2; group.size()] }], Heap::shared());
        ensure!(work.is_done(), "a bad argument is not seen at once");
        let error = error(work.wait(), "an input of 3 elements where there should be 2")?;
        ensure!(matches!(error, Error::Argument { rank: 0, .. }), "a bad argument is: {error}");
        stays_failed(group, &error)?;
    } else {
        let error = error(group.barrier().wait(), "a barrier without rank 0")?;
        let is_it = matches!(&error, Error::PeerLost { peer: 0, how, .. } if how.contains("counts[0] is 2"));
        ensure!(is_it, "of rank 0's bad argument the others hear: {error}");
    }
    let expected = [Buffer::zeros(DType::F32, 3)];
    ensure!(before.wait()? == expected, "what was issued before a bad argument gave something else");
    Ok(())
}

/// The two ends of an exchange must agree.
fn exchange(group: &ProcessGroup) -> Result<(), Wrong> {
    let (rank, size) = (group.rank(), group.size());
    let mut recv_counts = vec![1; size];
    if rank == size - 1 {
        recv_counts[0] = 5;
    }
    let part = ExchangePart { input: Buffer::zeros(DType::F32, size), send_counts: vec![1; size], recv_counts };
    let error = error(group.all_to_all(vec![part], Heap::shared()).wait(), "an exchange of 1 and 5 elements")?;
    let is_it = error.to_string().contains(&format!("rank 0 sends rank {} another number of elements", size - 1));
    ensure!(is_it && matches!(error, Error::Mismatch { .. }), "ends of an exchange that differ are told: {error}");
    Ok(())
}

/// An input that fails.
#[derive(Clone, Copy, Debug)]
enum Bad {
    Elsewhere,
    Short,
    Refuses,
    Panics,
}

impl Readable for Bad {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn len(&self) -> usize {
        4
    }
    fn device(&self) -> DeviceId {
        if let Bad::Elsewhere = self { DeviceId::Cuda(3) } else { DeviceId::Host }
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        match self {
            Bad::Elsewhere | Bad::Refuses => Err("it is asleep".into()),
            Bad::Short => {
                f(&[0; 15]);
                Ok(())
            }
            Bad::Panics => panic!("on purpose"),
        }
    }
}

/// Failing inputs fail the group instead of hanging it.
fn input(group: &ProcessGroup, bad: Bad) -> Result<(), Wrong> {
    let good: Arc<dyn Readable> = Arc::new(Buffer::zeros(DType::F32, 4));
    let input = if group.rank() == 0 { Arc::new(bad) } else { good };
    let work = group.all_gather(vec![GatherPart { input, counts: vec![4; group.size()] }], Heap::shared());
    let error = error(work.wait(), "an all-gather of an input that misbehaves")?;
    let text = match bad {
        Bad::Elsewhere => "part 0: it is in the memory of CUDA device 3, but the group moves host memory",
        Bad::Short => "fewer bytes",
        Bad::Refuses => "it is asleep",
        Bad::Panics => "all_gather panicked: on purpose",
    };
    ensure!(error.to_string().contains(text), "an input that misbehaves ({bad:?}) is: {error}");
    stays_failed(group, &error)
}

/// An allocator whose buffers are too short.
struct Stingy;

impl Allocator for Stingy {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        Buffer::try_zeros(dtype, len.saturating_sub(1))
    }
    fn give(&self, _: Buffer) {}
}

/// A buffer of the wrong length fails all ranks.
fn output(group: &ProcessGroup) -> Result<(), Wrong> {
    let memory: Arc<dyn Allocator> = if group.rank() == 1 { Arc::new(Stingy) } else { Heap::shared() };
    let size = group.size();
    let part = ScatterPart { input: Buffer::zeros(DType::F32, 2 * size), counts: vec![2; size] };
    let error = error(group.reduce_scatter(vec![part], ReduceOp::Sum, memory).wait(), "an output that is too short")?;
    let text = error.to_string();
    let is_it = text.contains("the allocator gave a buffer of 1 F32") && text.contains("expected 2 F32");
    ensure!(is_it, "an allocator that gives too little is: {error}");
    Ok(())
}

/// A rank that leaves is named. Collectives that it issued before still run.
fn leaves(group: ProcessGroup) -> Result<(), Wrong> {
    let first = group.barrier();
    if group.rank() == 1 {
        return Ok(());
    }
    first.wait()?;
    let error = error(group.barrier().wait(), "a barrier without a rank that has left")?;
    let is_it = matches!(&error, Error::PeerLost { peer: 1, how, .. } if how == "left the group");
    ensure!(is_it, "of a rank that has left the others hear: {error}");
    Ok(())
}

/// A split that one rank does not join is a mismatch.
fn unjoined(group: &ProcessGroup) -> Result<(), Wrong> {
    let error = match group.rank() {
        0 => error(group.split(0, 0), "a split that one rank does not join")?,
        _ => error(group.barrier().wait(), "a barrier beside a split")?,
    };
    let is_it = matches!(&error, Error::Mismatch { details, .. } if details.contains("issued split()"));
    ensure!(is_it, "ranks of which one splits are told: {error}");
    Ok(())
}

/// A timeout names the missing ranks, and they learn that others timed out waiting for them.
pub(super) fn late(join: Join<'_>) -> Result<(), Wrong> {
    let group = join(Options::default().with_timeout(Duration::from_secs(1)))?;
    let others = join(options(4096))?;
    // On a busy machine, a rank may take long to come here.
    others.barrier().wait()?;
    if group.rank() % 2 == 0 {
        let error = error(sum(&group, 10).wait(), "a sum that half of the ranks do not join")?;
        let is_it = matches!(&error, Error::Timeout { missing, what, .. }
            if *missing == [1, 3] && what == "all_reduce (collective 0)");
        ensure!(is_it, "of ranks 1 and 3, which do not come, the others hear: {error}");
        stays_failed(&group, &error)?;
        return Ok(others.barrier().wait().map(drop)?);
    }
    others.barrier().wait()?;
    let error = error(sum(&group, 10).wait(), "a sum that all others have given up")?;
    let is_it =
        matches!(&error, Error::PeerLost { peer: 0 | 2, how, .. } if how.contains("timed out waiting for this rank"));
    ensure!(is_it, "a rank that comes too late hears: {error}");
    Ok(())
}

/// A rank whose process dies in a collective is named by all others.
pub(super) fn dies(join: Join<'_>) -> Result<(), Wrong> {
    let world = join(options(32 << 10))?;
    sum(&world, 1000).wait()?;
    if world.rank() == 1 {
        // Dies during this collective.
        let _large = sum(&world, 8 << 20);
        let _ = kill_process(getpid(), Signal::KILL);
    }
    let error = error(sum(&world, 8 << 20).wait(), "a sum without a rank that has died")?;
    let is_it = matches!(&error, Error::PeerLost { peer: 1, how, .. } if how == "died");
    ensure!(is_it, "of rank 1, which has died, the others hear: {error}");
    stays_failed(&world, &error)
}
