//! Device memory follows the formula of docs/memory.md on every schedule.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{golden, program, run};
use serde_json::Value;

/// Returns rank 0's bytes by mode: of the model, of a unit, between steps, and the peak beyond.
fn memory(ranks: usize, seed: u64) -> Vec<[f64; 4]> {
    let mut command = Command::new(program("fsdp-launch"));
    command.arg(format!("--nproc-per-node={ranks}")).arg(program("bench"));
    command.args(["memory", "--device", "cuda", "--mode", "zero3,zero2", "--json"]);
    command.env("GPU_DOUBLE_SEED", seed.to_string()).env("FSDP_DEVICE_BACKEND", "nccl");
    let run = run(command, Duration::from_secs(120)).ok();
    let reports = run.stdout.lines().filter_map(|line| line.find('{').map(|at| &line[at..]));
    let numbers = |line: &str| {
        let report: Value = serde_json::from_str(line).unwrap();
        ["model_bytes", "unit_bytes", "resident_bytes", "transient_bytes"].map(|key| report[key].as_f64().unwrap())
    };
    reports.map(numbers).collect()
}

#[test]
fn memory_is_within_two_percent_of_the_formula() {
    for ranks in [1, 2, 4] {
        let found = memory(ranks, 0);
        assert_eq!(found.len(), 2);
        assert_eq!(memory(ranks, 7), found, "{ranks} ranks: another schedule takes other memory");
        let share = |bytes: f64| bytes / ranks as f64;
        // A unit has two matrices, of which the gradient of one is there at the worst moment, with a reduced share.
        let reduced = |unit: f64| unit / 2. + if ranks > 1 { share(unit) } else { 0. };
        // Two units' parameters and a unit's gradients in flight, or all parameters.
        let on_top: [fn(f64, f64) -> f64; 2] = [|_, unit| 3. * unit, |model, _| model];
        for ([model, unit, resident, transient], on_top) in found.into_iter().zip(on_top) {
            let formulas = [(resident, 4. * share(model)), (transient, on_top(model, unit) + reduced(unit))];
            println!("{ranks} ranks: {formulas:?}");
            for (bytes, formula) in formulas {
                assert!((bytes / formula - 1.).abs() < 0.02, "{ranks} ranks: {bytes} bytes, formula {formula}");
            }
        }
    }
}

#[test]
fn errors_for_too_little_memory_say_what_it_holds() {
    let mut command = Command::new(program("fsdp-launch"));
    command.args(["--nproc-per-node", "1"]).arg(program("bench")).args(["step", "--device", "cuda", "--steps", "1"]);
    command.arg("--model").arg(golden("llama_tiny")).args(["--seq", "64", "--batch", "128"]);
    command.env("GPU_DOUBLE_MEMORY", (12 << 20).to_string());
    let run = run(command, Duration::from_secs(120));
    assert_ne!(run.code, Some(0));
    for words in [
        "out of memory: on rank 0, CUDA device 0 has ",
        " free of 12.0 MiB: shards of parameters take 0.",
        "gathered parameters 0.",
        " (`",
        "is activations, sharded gradients, optimizer state",
        "Use a smaller batch or shorter sequences",
    ] {
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
    // In the rank's error and in the launcher's report of it.
    assert_eq!(run.stderr.matches("out of memory: on rank 0").count(), 2, "{}", run.stderr);
}
