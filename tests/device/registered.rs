//! Training by memory that NCCL allocates and registers.

use crate::train_run::{Counts, Engine, TrainRun};

const FLAG: &str = "--allocate-memory-from-process-group-for-comm";

/// Returns how often a rank called the functions for NCCL's memory: allocate, free, register and deregister.
fn calls(counts: &Counts) -> [u64; 4] {
    [("allocation", "ncclMemAlloc"), ("free", "ncclMemFree"), ("registration", ""), ("deregistration", "")]
        .map(|(category, part)| counts.sum(category, |name| name.starts_with(part)))
}

/// Shards are even and uneven, and without elements on the last of 3 ranks. The second run has a group of its own for
/// reductions over fewer ranks.
#[test]
fn registered_memory_changes_no_bit_and_is_freed() {
    let flags = ["--param-dtype", "bf16", FLAG];
    for (ranks, flags) in [(2, &flags[..]), (3, &flags[..]), (4, &["--replicate", "2", FLAG])] {
        let run = TrainRun { steps: 3, ..TrainRun::recorded("llama_tiny", ranks) };
        let [with, without] = [flags, &flags[..flags.len() - 1]].map(|flags| {
            let dir = tempfile::tempdir().unwrap();
            let steps = TrainRun { flags, ..run.clone() }.train(dir.path());
            (steps, Counts::of(dir.path(), ranks))
        });
        assert_eq!(with.0, without.0, "{ranks} ranks, {flags:?}");
        for (with, without) in with.1.iter().zip(&without.1) {
            let [allocated, freed, registered, deregistered] = calls(with);
            assert!(allocated > 0);
            assert_eq!([freed, registered, deregistered], [allocated; 3]);
            assert_eq!(calls(without), [0; 4]);
            // NCCL's calls are the same.
            assert_eq!(with.by_name("nccl"), without.by_name("nccl"));
        }
    }
}

#[test]
fn registered_memory_is_allocated_in_the_first_step() {
    let counts = |steps| {
        let dir = tempfile::tempdir().unwrap();
        TrainRun { steps, flags: &[FLAG], ..TrainRun::recorded("llama_tiny", 2) }.start(dir.path()).ok();
        Counts::of(dir.path(), 2)
    };
    for (short, long) in counts(1).iter().zip(&counts(4)) {
        assert_eq!(calls(short), calls(long));
    }
}

#[test]
fn registered_memory_is_refused_by_name_where_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let said = |engine, variables| {
        let run = TrainRun { steps: 1, engine, flags: &[FLAG], variables, ..TrainRun::recorded("llama_tiny", 2) };
        let run = run.start(dir.path());
        assert!(run.code != Some(0), "{}{}", run.stdout, run.stderr);
        format!("{}{}", run.stdout, run.stderr)
    };
    for (engine, variables, why) in [
        (Engine::Cpu, &[][..], "memory of the host does not allocate any"),
        (Engine::Host, &[], "its collectives copy through the host, not by NCCL"),
        (Engine::Nccl, &[("GPU_DOUBLE_NCCL", "21805")], "NCCL 2.18.5 has no registered memory: install 2.19 or newer"),
    ] {
        let text = said(engine, variables);
        let parts = [FLAG, "has no registered memory", why, "It needs a CUDA device for each rank"];
        assert!(parts.iter().all(|part| text.contains(part)), "{engine:?}: {text}");
    }
}
