//! Failures with NCCL, without a comparison before each collective.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaStream, sys::CUstreamCaptureMode};
use fsdp_core::{
    Error, ProcessGroup, ReduceOp, Stream,
    process_group::{Nccl, Options, Work, ranks_sharing_devices},
};

use crate::{
    ranks::{host, nccl, own, seconds, start},
    values::{down, up},
};

fn sum(group: &ProcessGroup, compute: &Arc<CudaStream>, len: usize) -> Work {
    group.all_reduce(vec![up(compute, &vec![1.; len])], ReduceOp::Sum)
}

pub(crate) fn run(role: &str, compute: &Arc<CudaStream>) -> Option<String> {
    let timeout = |limit: f64| Options::default().with_timeout(seconds(limit));
    Some(match role {
        "shares a device" => {
            let host = host(Options::default()).unwrap();
            let shares = ranks_sharing_devices(&host, compute).unwrap();
            let engine = Nccl::new(&host, compute);
            host.barrier().wait().unwrap();
            format!("{shares:?} {}", engine.err().map_or("made".into(), |error| error.to_string()))
        }
        "misses one" => misses_one(&nccl(timeout(1.), compute).unwrap(), &host(timeout(60.)).unwrap(), compute),
        "is stuck" => {
            let other = nccl(timeout(60.), compute).unwrap();
            is_stuck(&nccl(timeout(1.), compute).unwrap(), &other, &host(timeout(60.)).unwrap(), compute)
        }
        "fails in two groups" => {
            fails_in_two_groups(&nccl(timeout(6.), compute).unwrap(), &host(timeout(60.)).unwrap(), compute)
        }
        "captures" => captures(&nccl(timeout(60.), compute).unwrap(), compute),
        "differs" => differs(&nccl(timeout(2.), compute).unwrap(), compute),
        "loses one" => loses_one(&nccl(timeout(60.), compute).unwrap(), compute),
        "is left" => is_left(nccl(timeout(60.), compute).unwrap(), compute),
        "fails one" => fails_one(&nccl(timeout(60.), compute).unwrap(), compute),
        _ => return None,
    })
}

/// Everything that comes after an error is that error.
fn stays_failed(group: &ProcessGroup, compute: &Arc<CudaStream>, first: &Error) {
    let later = sum(group, compute, 3).wait().unwrap_err().to_string();
    assert_eq!(later, first.to_string());
}

/// The last rank does not join. Ranks blocked on the device continue after the abort.
fn misses_one(group: &ProcessGroup, others: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    let before = sum(group, compute, 8).then(Stream::Host).unwrap();
    assert_eq!(down(&before[0]), vec![group.size() as f32; 8]);
    if group.rank() + 1 == group.size() {
        others.barrier().wait().unwrap();
        let error = sum(group, compute, 8).then(Stream::Host).unwrap_err();
        stays_failed(group, compute, &error);
        return error.to_string();
    }
    let lost = sum(group, compute, 8).wait().unwrap();
    // Blocks in the device.
    down(&lost[0]);
    let error = sum(group, compute, 8).then(Stream::Host).unwrap_err();
    stays_failed(group, compute, &error);
    others.barrier().wait().unwrap();
    error.to_string()
}

/// The first rank's device waits for a collective of another group, to which the second rank comes later; so it never
/// begins with this group's.
fn is_stuck(group: &ProcessGroup, other: &ProcessGroup, host: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    if group.rank() == 1 {
        host.barrier().wait().unwrap();
        sum(other, compute, 8).wait().unwrap();
        return "elsewhere".into();
    }
    sum(other, compute, 8).wait().unwrap();
    let error = sum(group, compute, 8).then(Stream::Host).unwrap_err();
    stays_failed(group, compute, &error);
    host.barrier().wait().unwrap();
    error.to_string()
}

/// The last rank does not join two groups. Work of the second, which has time left, blocks the abort of the first.
fn fails_in_two_groups(world: &ProcessGroup, others: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    let part = world.split(0, world.rank()).unwrap();
    if world.rank() + 1 == world.size() {
        others.barrier().wait().unwrap();
        return sum(&part, compute, 8).then(Stream::Host).unwrap_err().to_string();
    }
    let first = sum(world, compute, 8);
    std::thread::sleep(seconds(4.));
    let [first, second] = [first, sum(&part, compute, 8)].map(|work| work.then(Stream::Host).unwrap_err());
    assert_eq!(first.to_string(), second.to_string());
    stays_failed(world, compute, &first);
    stays_failed(&part, compute, &first);
    // Nothing runs on the device any more.
    compute.synchronize().unwrap();
    others.barrier().wait().unwrap();
    first.to_string()
}

/// A graph is captured.
fn captures(group: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    let input = up(compute, &[1.; 8]);
    compute.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    group.all_reduce(vec![input], ReduceOp::Sum).wait().unwrap_err().to_string()
}

/// The first rank issues something else.
fn differs(group: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    sum(group, compute, 8).then(Stream::Host).unwrap();
    let work = match group.rank() {
        0 => group.broadcast(vec![up(compute, &[1.; 8])], 0),
        _ => sum(group, compute, 8),
    };
    let error = work.then(Stream::Host).unwrap_err();
    stays_failed(group, compute, &error);
    error.to_string()
}

/// The second rank's process dies.
fn loses_one(group: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    sum(group, compute, 8).then(Stream::Host).unwrap();
    if group.rank() == 1 {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    let started = Instant::now();
    let error = sum(group, compute, 8).then(Stream::Host).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(30), "it took {:?}", started.elapsed());
    stays_failed(group, compute, &error);
    error.to_string()
}

/// The second rank leaves, with something on its way that all take part in.
fn is_left(group: ProcessGroup, compute: &Arc<CudaStream>) -> String {
    let first = sum(&group, compute, 1000);
    if group.rank() == 1 {
        drop(first);
        drop(group);
        return "left".into();
    }
    assert_eq!(down(&first.wait().unwrap()[0]), vec![group.size() as f32; 1000]);
    let error = sum(&group, compute, 8).then(Stream::Host).unwrap_err();
    error.to_string()
}

/// The second rank passes a bad argument. Earlier collectives succeed, and all ranks get the error.
fn fails_one(group: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    let before = sum(group, compute, 1000);
    let error = if group.rank() == 1 {
        let memory = crate::values::Pool::new(compute);
        let input = up(compute, &[1.; 5]);
        let part = fsdp_core::ScatterPart { input, counts: vec![2; group.size()] };
        group.reduce_scatter(vec![part], ReduceOp::Sum, memory).wait().unwrap_err()
    } else {
        sum(group, compute, 8).then(Stream::Host).unwrap_err()
    };
    drop(before);
    error.to_string()
}

fn said(role: &str, ranks: usize) -> Vec<String> {
    start(role, &own(ranks), &[]).outcomes()
}

#[test]
fn ranks_on_one_device_are_seen_and_refused_by_nccl() {
    let outcomes = start("shares a device", &[0, 1, 0], &[]).outcomes();
    for outcome in &outcomes {
        assert!(outcome.starts_with("[[0, 2]] CUDA device "), "{outcomes:?}");
        let parts = ["Duplicate GPU detected : rank 2 and rank 0", "Each rank needs a device of its own"];
        assert!(parts.iter().all(|part| outcome.contains(part)), "{outcomes:?}");
    }
    assert_eq!(start("shares a device", &own(2), &[]).outcomes(), ["[] made"; 2]);
}

#[test]
fn a_rank_that_is_elsewhere_is_named_and_nobody_hangs() {
    let outcomes = said("misses one", 3);
    for outcome in &outcomes[..2] {
        let parts = ["all_reduce (collective 1) in group \"world\" timed out after ", "waited for rank(s) [2]. "];
        assert!(parts.iter().all(|part| outcome.contains(part)), "{outcomes:?}");
    }
    assert!(outcomes[2].contains("timed out waiting for this rank"), "{outcomes:?}");
}

#[test]
fn work_of_another_group_does_not_block_an_abort() {
    let outcomes = said("fails in two groups", 3);
    for outcome in &outcomes[..2] {
        assert!(outcome.contains(" timed out after ") && outcome.contains("waited for rank(s) [2]. "), "{outcomes:?}");
    }
    assert!(outcomes[2].contains("timed out waiting for this rank"), "{outcomes:?}");
}

/// Only the double can make an abort hang.
#[test]
fn a_rank_that_nccl_cannot_end_leaves() {
    let outcomes = start("misses one", &own(2), &[("GPU_DOUBLE_ABORT", "hangs")]).outcomes();
    for outcome in &outcomes {
        assert!(outcome.starts_with("exit status: 134: "), "{outcomes:?}");
    }
    let parts = ["Error: ", "waited for rank(s) [1]. ", "NCCL could not end its work on the device within 6 s"];
    assert!(parts.iter().all(|part| outcomes[0].contains(part)), "{outcomes:?}");
}

#[test]
fn a_captured_collective_is_refused() {
    for outcome in said("captures", 2) {
        let parts = ["all_reduce (collective 0) of group", "captured into a CUDA graph", "end the capture before"];
        assert!(parts.iter().all(|part| outcome.contains(part)), "{outcome}");
    }
}

#[test]
fn a_device_that_does_not_come_to_a_collective_is_told_from_peers_that_do_not() {
    let outcomes = said("is stuck", 2);
    let parts =
        ["all_reduce (collective 0) in group", "it has not begun for ", "a kernel does not end, or takes longer"];
    assert!(parts.iter().all(|part| outcomes[0].contains(part)), "{outcomes:?}");
    assert_eq!(outcomes[1], "elsewhere");
}

#[test]
fn ranks_that_issue_different_collectives_are_told_what_differs() {
    let outcomes = said("differs", 3);
    for outcome in &outcomes {
        let parts =
            ["collective 1 of group \"world\" differs", "rank(s) [0] issued broadcast(", "rank(s) [1, 2] issued"];
        assert!(parts.iter().all(|part| outcome.contains(part)), "{outcomes:?}");
    }
}

#[test]
fn a_rank_that_dies_is_named() {
    for ranks in [2, 4] {
        let outcomes = said("loses one", ranks);
        for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != 1) {
            assert!(outcome.contains("rank 1 died. "), "rank {rank}: {outcomes:?}");
        }
    }
}

#[test]
fn a_rank_that_leaves_has_done_its_part() {
    for outcome in said("is left", 3) {
        assert!(outcome == "left" || outcome.contains("rank 1 left the group"), "{outcome}");
    }
}

#[test]
fn all_hear_of_a_mistake_of_one() {
    let outcomes = said("fails one", 3);
    for outcome in &outcomes {
        assert!(outcome.contains("the input has 5 elements but counts add up to 6"), "{outcomes:?}");
    }
}
