//! `train --trace` shows what each rank computes and communicates, and that the two overlap.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use fsdp_tests::{golden_flags, launch};
use serde_json::Value;

const STEPS: usize = 4;

struct Event {
    rank: u64,
    thread: u64,
    phase: String,
    name: String,
}

/// The names of threads (or processes) that the trace gives, by their id.
fn names(trace: &[Value], what: &str, id: &str) -> Vec<(u64, String)> {
    let named = trace.iter().filter(|event| event["name"] == what);
    named.map(|event| (event[id].as_u64().unwrap(), event["args"]["name"].as_str().unwrap().to_string())).collect()
}

/// What happened, in order of time: each thread's events come in it already.
fn events(trace: &[Value]) -> Vec<Event> {
    let mut timed: Vec<_> = trace.iter().filter(|event| event["ph"] != "M").collect();
    timed.sort_by(|a, b| a["ts"].as_f64().unwrap().total_cmp(&b["ts"].as_f64().unwrap()));
    let event = |event: &Value| Event {
        rank: event["pid"].as_u64().unwrap(),
        thread: event["tid"].as_u64().unwrap(),
        phase: event["ph"].as_str().unwrap().into(),
        name: event["name"].as_str().unwrap().into(),
    };
    timed.into_iter().map(event).collect()
}

fn traced(flags: &[&str], dir: &Path) -> Vec<Value> {
    let golden = golden_flags("llama_tiny");
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    let at = args.iter().position(|arg| *arg == "--steps").unwrap();
    let steps = STEPS.to_string();
    args[at + 1] = &steps;
    args.extend(["--batch-size", "2", "--trace", "trace.json"]);
    args.extend(flags);
    let run = launch(2, "train", &args, dir).ok();
    assert!(run.stdout.contains("trace: trace.json"), "{}", run.stdout);
    assert!(!dir.join("trace.rank0.json").exists() && !dir.join("trace.rank1.json").exists());
    serde_json::from_str(&std::fs::read_to_string(dir.join("trace.json")).unwrap()).unwrap()
}

#[test]
fn ranks_are_processes_and_threads_have_names() {
    let dir = tempfile::tempdir().unwrap();
    let trace = traced(&[], dir.path());
    assert_eq!(names(&trace, "process_name", "pid"), [(0, "rank 0".to_string()), (1, "rank 1".to_string())]);
    let threads = names(&trace, "thread_name", "tid");
    let count = |name: &str| threads.iter().filter(|(_, thread)| thread == name).count();
    assert_eq!((count("compute"), count("communication (world)"), threads.len()), (2, 2, 4));
    // No two threads share an id, and every event is of one of them.
    let mut ids: Vec<_> = threads.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    let events = events(&trace);
    assert!(events.iter().all(|event| ids.contains(&event.thread)));
    for event in &events {
        assert!(!event.name.starts_with("event "), "{} names no happening", event.name);
    }
}

#[test]
fn names_say_what_happens_to_which_unit() {
    let dir = tempfile::tempdir().unwrap();
    let trace = traced(&["--reshard-after-forward", "always"], dir.path());
    let events = events(&trace);
    for rank in 0..2 {
        let count = |phase: &str, name: &str| {
            events.iter().filter(|event| (event.rank, &*event.phase, &*event.name) == (rank, phase, name)).count()
        };
        for step in 1..=STEPS {
            assert_eq!((count("B", &format!("step {step}")), count("E", &format!("step {step}"))), (1, 1));
        }
        assert_eq!(count("B", "optimizer"), STEPS);
        for unit in ["(root)", "model.layers.0", "model.layers.1"] {
            let of_unit = |phase: &str, what: &str| count(phase, &format!("{what} {unit}"));
            // Each unit's gradients are reduced once a step; forward runs for the sample at the end as well.
            assert!(of_unit("B", "backward") >= STEPS);
            assert_eq!(of_unit("i", "reduce-scatter"), STEPS);
            assert_eq!(of_unit("B", "wait for reduce-scatter"), STEPS);
            let forwards = of_unit("B", "forward");
            assert!(forwards > STEPS);
            // Gathered for each forward and once more for each backward.
            assert_eq!(of_unit("i", "unshard"), forwards + STEPS);
            assert_eq!(of_unit("B", "wait for all-gather"), forwards + STEPS);
        }
        assert_eq!(count("B", "reduce_scatter"), 3 * STEPS);
        assert!(count("B", "all_gather") > 6 * STEPS);
        let (begun, ended) = ["B", "E"]
            .map(|phase| events.iter().filter(|event| event.rank == rank && event.phase == phase).count())
            .into();
        assert_eq!(begun, ended);
    }
}

/// Where the `nth` event of this kind is.
fn nth(events: &[&Event], phase: &str, name: &str, nth: usize) -> usize {
    let mut found = events.iter().enumerate().filter(|(_, event)| event.phase == phase && event.name == name);
    found.nth(nth).unwrap_or_else(|| panic!("{phase} {name} {nth}")).0
}

#[test]
fn the_next_unit_is_gathered_before_this_one_has_computed() {
    let dir = tempfile::tempdir().unwrap();
    let trace = traced(&["--reshard-after-forward", "always"], dir.path());
    for rank in 0..2 {
        let all = events(&trace);
        let events: Vec<&Event> = all.iter().filter(|event| event.rank == rank).collect();
        // In the first step nobody knows the order of forward yet.
        for step in 1..STEPS {
            let begun = nth(&events, "B", &format!("step {}", step + 1), 0);
            let of_step = &events[begun..nth(&events, "E", &format!("step {}", step + 1), 0)];
            let at = |phase: &str, name: &str| nth(of_step, phase, name, 0);
            // Forward: the all-gather of layer 1 is issued before layer 0 computes, and its outcome is asked for after that.
            let issued = at("i", "unshard model.layers.1");
            assert!(issued < at("E", "forward model.layers.0"), "rank {rank}, step {step}");
            assert!(at("E", "forward model.layers.0") < at("B", "wait for all-gather model.layers.1"));
            // Backward, in the other direction.
            let backward = at("B", "backward model.layers.1");
            let ahead = nth(of_step, "i", "unshard model.layers.0", 1);
            assert!(backward < ahead && ahead < at("E", "backward model.layers.1"));
            // Gradients of layer 1 are on their way while layer 0's are computed.
            assert!(at("i", "reduce-scatter model.layers.1") < at("E", "backward model.layers.0"));
            assert!(at("B", "wait for reduce-scatter model.layers.1") > at("B", "backward model.layers.0"));
        }
    }
}

#[test]
fn a_run_that_fails_leaves_the_files_of_its_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden_flags("llama_tiny");
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--trace", "trace.json", "--resume", "not there"]);
    launch(2, "train", &args, dir.path()).failed();
    assert!(!dir.path().join("trace.json").exists());
    for rank in 0..2 {
        let text = std::fs::read_to_string(dir.path().join(format!("trace.rank{rank}.json"))).unwrap();
        let trace: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(names(&trace, "process_name", "pid"), [(rank, format!("rank {rank}"))]);
    }
}

#[test]
fn a_place_where_no_trace_can_be_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden_flags("llama_tiny");
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--trace", "no/such/trace.json"]);
    let error = launch(2, "train", &args, dir.path()).failed();
    assert!(error.contains("can't write --trace no/such/trace.json"), "{error}");
}
