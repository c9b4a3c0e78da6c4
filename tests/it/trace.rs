//! `train --trace` shows the computation and communication of each rank, and their overlap.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trace::{Event, Trace};
use fsdp_test_support::{golden_flags_of, program, run, train_golden};

const STEPS: usize = 4;

fn traced(flags: &str, dir: &Path) -> Trace {
    let run = train_golden("llama_tiny", 2, &format!("--steps {STEPS} --trace trace.json {flags}"), dir).ok();
    assert!(run.stdout.contains("trace: trace.json"), "{}", run.stdout);
    assert!(!dir.join("trace.rank0.json").exists() && !dir.join("trace.rank1.json").exists());
    Trace::read(&dir.join("trace.json"))
}

#[test]
fn has_processes_for_ranks_and_named_threads() {
    let dir = tempfile::tempdir().unwrap();
    let trace = traced("", dir.path());
    let processes = trace.names("process_name", "pid");
    assert_eq!(processes.into_iter().collect::<Vec<_>>(), [(0, "rank 0".to_string()), (1, "rank 1".to_string())]);
    // Threads have distinct ids. `events` checks that each event has one of them.
    let mut threads: Vec<_> = trace.names("thread_name", "tid").into_values().collect();
    threads.sort();
    assert_eq!(threads, ["communication (world)", "communication (world)", "compute", "compute"]);
    for event in trace.events() {
        assert!(event.rank < 2 && !event.name.starts_with("event "), "{event:?}");
    }
}

#[test]
fn event_names_have_operations_and_units() {
    let dir = tempfile::tempdir().unwrap();
    let trace = traced("--reshard-after-forward always", dir.path());
    let events = trace.events();
    for rank in 0..2 {
        let count = |phase: &str, name: &str| {
            events.iter().filter(|event| (event.rank, &*event.phase, &*event.name) == (rank, phase, name)).count()
        };
        for step in 1..=STEPS {
            assert_eq!((count("B", &format!("step {step}")), count("E", &format!("step {step}"))), (1, 1));
        }
        assert_eq!(count("B", "optimizer"), STEPS);
        // Backward needs no table, and the head is not resharded after forward.
        for (unit, in_backward) in
            [("model.embed_tokens", 0), ("model.layers.0", STEPS), ("model.layers.1", STEPS), ("lm_head", 0)]
        {
            let of_unit = |phase: &str, what: &str| count(phase, &format!("{what} {unit}"));
            // Each unit's gradients are reduced once a step. Forward also runs for the sample at the end.
            assert!(of_unit("B", "backward") >= STEPS);
            assert_eq!(of_unit("i", "reduce-scatter"), STEPS);
            assert_eq!(of_unit("B", "wait for reduce-scatter"), STEPS);
            let forwards = of_unit("B", "forward");
            assert!(forwards > STEPS);
            assert_eq!(of_unit("i", "unshard"), forwards + in_backward);
            assert_eq!(of_unit("B", "wait for all-gather"), forwards + in_backward);
        }
        assert_eq!(count("B", "reduce_scatter"), 4 * STEPS);
        assert!(count("B", "all_gather") > 6 * STEPS);
        let (begun, ended) = ["B", "E"]
            .map(|phase| events.iter().filter(|event| event.rank == rank && event.phase == phase).count())
            .into();
        assert_eq!(begun, ended);
    }
}

/// Returns the position of the `nth` event of this kind.
fn nth(events: &[&Event], phase: &str, name: &str, nth: usize) -> usize {
    let mut found = events.iter().enumerate().filter(|(_, event)| event.phase == phase && event.name == name);
    found.nth(nth).unwrap_or_else(|| panic!("{phase} {name} {nth}")).0
}

#[test]
fn gathers_the_next_unit_before_this_one_has_computed() {
    let dir = tempfile::tempdir().unwrap();
    let trace = traced("--reshard-after-forward always", dir.path());
    let events = trace.events();
    // The first step records the order of forward.
    for (rank, step) in [(0, 2), (1, 2), (0, 3), (1, 3)] {
        let of_step = Trace::step(&events, rank, step);
        let at = |phase: &str, name: &str| nth(&of_step, phase, name, 0);
        // Forward: the all-gather of layer 1 is issued before layer 0 has computed, and waited for afterwards.
        let issued = at("i", "unshard model.layers.1");
        assert!(issued < at("E", "forward model.layers.0"), "rank {rank}, step {step}");
        assert!(at("E", "forward model.layers.0") < at("B", "wait for all-gather model.layers.1"));
        // Backward runs in the other direction.
        let backward = at("B", "backward model.layers.1");
        let ahead = nth(&of_step, "i", "unshard model.layers.0", 1);
        assert!(backward < ahead && ahead < at("E", "backward model.layers.1"));
        // Gradients of layer 1 are reduced while layer 0's are computed.
        assert!(at("i", "reduce-scatter model.layers.1") < at("E", "backward model.layers.0"));
        assert!(at("B", "wait for reduce-scatter model.layers.1") > at("B", "backward model.layers.0"));
    }
}

#[test]
fn a_failed_run_leaves_the_files_of_its_ranks() {
    let dir = tempfile::tempdir().unwrap();
    train_golden("llama_tiny", 2, "--trace trace.json --resume missing", dir.path()).failed();
    assert!(!dir.path().join("trace.json").exists());
    for rank in 0..2 {
        let trace = Trace::read(&dir.path().join(format!("trace.rank{rank}.json")));
        assert_eq!(
            trace.names("process_name", "pid").into_iter().collect::<Vec<_>>(),
            [(rank, format!("rank {rank}"))]
        );
    }
}

/// Files under the names of NVTX that are no libraries.
#[test]
fn nvtx_that_does_not_load_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["libnvtx3interop.so.1", "libnvToolsExt.so.1"] {
        std::fs::write(dir.path().join(name), "text").unwrap();
    }
    let mut train = Command::new(program("train"));
    train.args(golden_flags_of("llama_tiny", 1)).args(["--nvtx", "--batch-size", "4"]);
    train.env("LD_LIBRARY_PATH", dir.path()).current_dir(dir.path());
    let error = run(train, Duration::from_secs(60)).failed();
    assert!(error.contains("can't load NVTX (libnvtx3interop.so.1 or libnvToolsExt.so.1)"), "{error}");
    assert!(error.contains("too short") && error.contains("pip's nvidia-nvtx"), "{error}");
}
