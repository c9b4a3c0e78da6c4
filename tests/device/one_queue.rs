//! Devices with one queue for all streams: `CUDA_DEVICE_MAX_CONNECTIONS=1`, which programs with tensor parallelism often
//! set. Collectives of several groups then begin in the order in which they were queued. If ranks queued them in
//! different orders, they could wait for each other forever.

use crate::train_run::TrainRun;

/// Without progress for a minute, the double names what waits.
const ONE_QUEUE: [(&str, &str); 2] = [("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("GPU_DOUBLE_STALL", "60")];

#[test]
fn one_queue_trains_to_the_same_bits() {
    let both = ["--replicate", "2", "--tensor-parallel", "2"];
    let tensor = ["--tensor-parallel", "2", "--activation-checkpoint", "full"];
    for (ranks, batch, flags) in [(4, 1, &["--replicate", "2"][..]), (4, 3, &tensor), (8, 1, &both)] {
        let run = TrainRun { batch, flags, steps: 3, ..TrainRun::recorded("llama_tp_tiny", ranks) };
        let train = |run: &TrainRun<'_>| run.train(tempfile::tempdir().unwrap().path());
        assert_eq!(train(&TrainRun { variables: &ONE_QUEUE, ..run.clone() }), train(&run), "{run:?}");
    }
}

/// The groups' threads queue the collectives then, in any order.
#[test]
fn one_queue_is_refused_where_ranks_compare_collectives_of_several_groups() {
    let dir = tempfile::tempdir().unwrap();
    let variables = [&ONE_QUEUE[..], &[("FSDP_NCCL_CHECK", "always")]].concat();
    let flags = ["--tensor-parallel", "2"];
    let run = TrainRun { flags: &flags, variables: &variables, ..TrainRun::recorded("llama_tp_tiny", 4) };
    let run = run.start(dir.path());
    let text = format!("{}{}", run.stdout, run.stderr);
    assert!(run.code != Some(0) && text.contains("Unset CUDA_DEVICE_MAX_CONNECTIONS"), "{text}");
}
