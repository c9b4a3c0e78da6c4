//! The costs of a step on a device, as the double counts them: waits of the host, calls of NCCL, memory.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::program;

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

/// A mixture of eight experts, with two for each token, in every layer.
const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 512, "max_position_embeddings": 512}"#;

/// Returns rank 0's counts of a run of `bench step`.
fn counts_of_experts(ranks: usize, layers: usize, steps: usize) -> Counts {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), EXPERTS.replace("LAYERS", &layers.to_string())).unwrap();
    let mut command = Command::new(program("fsdp-launch"));
    let ranks_of_experts = ranks.to_string();
    command.args(["--nproc-per-node", &ranks_of_experts]).arg(program("bench"));
    command.args(["step", "--device", "cuda", "--model", ".", "--expert-parallel", &ranks_of_experts]);
    command.args(["--batch", "1", "--seq", "128", "--param-dtype", "bf16", "--steps", &steps.to_string()]);
    command.env("GPU_DOUBLE_REPORT", dir.path()).current_dir(dir.path());
    fsdp_test_support::run(command, Duration::from_secs(120)).ok();
    Counts::of(dir.path(), ranks).remove(0)
}

/// The host reads the choice of the router, and no other value.
#[test]
fn a_layer_of_experts_on_several_ranks_waits_once() {
    let [few, many] = [1, 2].map(|layers| [1, 3].map(|steps| counts_of_experts(2, layers, steps)));
    let waits = |counts: &[Counts; 2]| {
        let of = |counts: &Counts| counts.sum("host synchronisation", |_| true);
        of(&counts[1]) - of(&counts[0])
    };
    assert_eq!((waits(&many) - waits(&few)) / 2, 1);
}

/// The kernels and products of a mixture are the same for any number of experts, but for the weights' gradients.
#[test]
fn a_layer_of_experts_waits_once() {
    let [few, many] = [1, 2].map(|layers| [1, 3].map(|steps| counts_of_experts(1, layers, steps)));
    // Returns the counts that one more layer adds to a step.
    let a_layer = |category: &str, is_it: &dyn Fn(&str) -> bool| {
        let of = |counts: &[Counts; 2]| counts[1].sum(category, is_it) - counts[0].sum(category, is_it);
        (of(&many) - of(&few)) / 2
    };
    for category in ["host synchronisation", "allocation", "operation", "pageable copy"] {
        println!("{category}: {} a layer", a_layer(category, &|_| true));
    }
    assert_eq!(a_layer("host synchronisation", &|_| true), 1);
    let launches =
        |part: &str| a_layer("operation", &|name| name.strip_prefix("kernel ").unwrap_or(name).starts_with(part));
    let routing = ["largest_of_rows", "sort_routes", "gather_rows", "combine_rows"];
    assert_eq!(routing.map(launches), [1, 1, 3, 2]);
    let within = ["swiglu", "weighted_swiglu_back", "cublasGemmGroupedBatchedEx"];
    assert_eq!(within.map(launches), [1, 1, 5]);
    // Three gradients of weights for each expert, and the products of attention and of the router.
    assert_eq!(launches("cublasGemmStridedBatchedEx"), 24 + 29);
    assert_eq!((a_layer("allocation", &|_| true), launches("")), (410, 602));
}
