//! The costs of a step on a device, as the double counts them: waits of the host, calls of NCCL, memory.

use crate::train_run::{Counts, TrainRun};

fn counts(steps: usize) -> Vec<Counts> {
    let dir = tempfile::tempdir().unwrap();
    TrainRun { steps, ..TrainRun::recorded("llama_tiny", 2) }.start(dir.path()).ok();
    Counts::of(dir.path(), 2)
}

/// Layers upload nothing. A step's tokens and targets, of 8 KiB here, go through page-locked memory.
#[test]
fn a_step_copies_nothing_of_more_than_4_kib_from_pageable_memory() {
    let counts = |steps, batch| {
        let dir = tempfile::tempdir().unwrap();
        TrainRun { steps, batch, ..TrainRun::recorded("llama_tiny", 1) }.start(dir.path()).ok();
        Counts::of(dir.path(), 1).remove(0)
    };
    let (short, long) = (counts(2, 64), counts(4, 64));
    let more = |part: &str| {
        let of = |counts: &Counts| counts.sum("pageable copy", |name| name.ends_with(part));
        of(&long) - of(&short)
    };
    assert_eq!([more("of more than 4 KiB"), more("of at most 4 KiB")], [0, 2]);
}

/// The optimizer multiplies gradients as it reads them.
#[test]
fn clipping_launches_and_allocates_nothing() {
    let counts = |max: &str| {
        let dir = tempfile::tempdir().unwrap();
        let flags = ["--clip-grad-norm", max];
        TrainRun { steps: 2, flags: &flags, ..TrainRun::recorded("llama_tiny", 1) }.start(dir.path()).ok();
        let counts = Counts::of(dir.path(), 1).remove(0);
        ["operation", "allocation", "event", "host synchronisation"].map(|category| counts.by_name(category))
    };
    assert_eq!(counts("0.001"), counts("0"));
}

#[test]
fn a_step_waits_only_for_loss_and_norm_and_allocates_nothing() {
    let (first, short, long) = (counts(1), counts(3), counts(7));
    for ((first, short), long) in first.iter().zip(&short).zip(&long) {
        for category in ["host synchronisation", "allocation", "operation"] {
            for (name, count) in long.by_name(category) {
                let before = short.sum(category, |other| other == name);
                println!("{category}, {name}: {} a step", (count - before) as f64 / 4.);
            }
        }
        let a_step = |category: &str, part: &str| {
            let of = |counts: &Counts| counts.sum(category, |name| name.starts_with(part));
            let more = of(long) - of(short);
            assert_eq!(more % 4, 0, "{category} {part}: {more} in four steps");
            more / 4
        };
        // The table of docs/gpus.md. The host waits for the loss and for the norm.
        assert_eq!(a_step("host synchronisation", ""), 2);
        let calls = ["ncclAllGather", "ncclBroadcast", "ncclReduceScatter", "ncclReduce"];
        let exactly = |call: &str| long.sum("nccl", |name| name == call) - short.sum("nccl", |name| name == call);
        assert_eq!(calls.map(|call| exactly(call) / 4), [39, 0, 21, 0]);
        assert_eq!(a_step("nccl", ""), 60);
        assert_eq!(a_step("operation", "nccl"), 10);
        assert_eq!((a_step("event", "cuEventRecord"), a_step("event", "cuStreamWaitEvent")), (22, 20));
        assert_eq!((a_step("operation", "kernel"), a_step("operation", "cuMemset")), (185, 142));
        assert_eq!(a_step("allocation", "cuMemAllocAsync"), 310);
        // A batch needs a new page-locked buffer while the device is still to copy from the older ones.
        let pinned = |counts: &Counts| counts.sum("allocation", |name| name == "cuMemHostAlloc");
        assert!(pinned(long) <= pinned(short) + 2, "{} and {}", pinned(short), pinned(long));
        // All that the driver's pool needs it has taken from the device in the first step.
        let growths = |counts: &Counts| counts.sum("growth of the pool", |_| true);
        assert!(growths(first) > 0);
        assert_eq!((growths(short), growths(long)), (growths(first), growths(first)));
        // Loading a kernel while a collective waits for other ranks would wait with it.
        assert_eq!(long.by_name("loaded after a collective"), vec![]);
        // The first step has no pooled buffers during its forward.
        let [first, short, long] = [first, short, long].map(|counts| counts.bytes("peak_bytes"));
        assert!(first <= short && short == long, "{first}, {short} and {long} bytes");
    }
}

/// Shares that are uneven cost as many calls as even ones: 2 ranks divide most parameters, 3 ranks none of the matrices.
#[test]
fn the_number_of_nccl_calls_does_not_depend_on_the_ranks() {
    let calls = |ranks| {
        let dir = tempfile::tempdir().unwrap();
        TrainRun { steps: 1, ..TrainRun::recorded("llama_tiny", ranks) }.start(dir.path()).ok();
        Counts::of(dir.path(), ranks).iter().map(|counts| counts.by_name("nccl")).collect::<Vec<_>>()
    };
    let of_two = calls(2).remove(0);
    for ranks in [3, 4] {
        assert_eq!(calls(ranks), vec![of_two.clone(); ranks]);
    }
}
