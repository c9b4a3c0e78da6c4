//! Operations run late, in any legal order.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use super::bench::{Bench, fault, read};
use crate::streams::{Operation, Progress};

/// A program with three streams. Without the joins it has races, which it hides from the machine.
fn program(seed: u64, joins: bool) -> [f32; 4] {
    let bench = Bench::new(seed);
    let streams = [bench.stream(), bench.stream(), bench.stream()];
    let memory = [bench.floats(streams[0]), bench.floats(streams[0]), bench.floats(streams[0])];
    let fill = |place: usize| bench.set(streams[0], "kernel fill", memory[place], place as f32 + 1.0).unwrap();
    (0..3).for_each(fill);
    for round in 0..6 {
        let (stream, last) = (streams[(round + 1) % 3], streams[round % 3]);
        let (from, to) = (memory[round % 3], memory[(round + 1) % 3]);
        if joins {
            bench.join(stream, last);
            bench.map(stream, "kernel", from, to, |x| 2.0 * x + 1.0).unwrap();
        } else {
            bench
                .hidden(stream, "kernel", Vec::new(), move || {
                    super::bench::write(to, read(from).map(|x| 2.0 * x + 1.0))
                })
                .unwrap();
        }
    }
    streams.iter().for_each(|stream| bench.synchronize(*stream));
    read(memory[0])
}

#[test]
fn only_programs_with_races_have_several_results() {
    assert!((0..50).all(|seed| program(seed, true) == [127.0; 4]));
    let wrong = (0..50).filter(|seed| program(*seed, false) != [127.0; 4]).count();
    assert!(wrong > 25, "the schedule shows a missing wait in {wrong} of 50 runs");
}

#[test]
fn one_queue_runs_all_streams_in_the_order_of_calls() {
    for seed in 0..20 {
        let bench = Bench::with_queues(seed, true);
        let (one, two) = (bench.stream(), bench.stream());
        let order = Arc::new(Mutex::new(Vec::new()));
        for (place, stream) in [one, two, two, one, two].into_iter().enumerate() {
            let order = order.clone();
            bench.hidden(stream, "kernel", Vec::new(), move || order.lock().unwrap().push(place)).unwrap();
        }
        bench.synchronize(two);
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4]);
    }
}

#[test]
fn nothing_runs_before_the_host_waits() {
    for seed in 0..5 {
        let bench = Bench::new(seed);
        let (one, two) = (bench.stream(), bench.stream());
        let count = Arc::new(AtomicU32::new(0));
        for stream in [one, two, one] {
            let count = count.clone();
            bench.hidden(stream, "kernel", Vec::new(), move || _ = count.fetch_add(1, Ordering::Relaxed)).unwrap();
        }
        assert_eq!(count.load(Ordering::Relaxed), 0);
        bench.synchronize(two);
        assert!(count.load(Ordering::Relaxed) >= 1);
        bench.0.synchronize_context("cuCtxSynchronize").unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn seed_0_runs_only_awaited_operations() {
    let bench = Bench::new(0);
    let (one, two) = (bench.stream(), bench.stream());
    let ran = Arc::new(AtomicBool::new(false));
    let told = ran.clone();
    bench.hidden(one, "kernel", Vec::new(), move || told.store(true, Ordering::Relaxed)).unwrap();
    let event = bench.record(two);
    bench.0.synchronize_event(event).unwrap();
    assert!(!ran.load(Ordering::Relaxed));
    bench.join(two, one);
    bench.synchronize(two);
    assert!(ran.load(Ordering::Relaxed));
}

#[test]
fn other_seeds_run_ahead() {
    let strays = |seed| {
        let bench = Bench::new(seed);
        let (one, two) = (bench.stream(), bench.stream());
        let ran = Arc::new(AtomicBool::new(false));
        let told = ran.clone();
        bench.hidden(one, "kernel", Vec::new(), move || told.store(true, Ordering::Relaxed)).unwrap();
        bench.hidden(two, "kernel", Vec::new(), || ()).unwrap();
        bench.synchronize(two);
        ran.load(Ordering::Relaxed)
    };
    let count = (1..=50).filter(|seed| strays(*seed)).count();
    assert!((1..50).contains(&count), "with {count} of 50 seeds");
}

#[test]
fn polling_loops_end() {
    for seed in 0..5 {
        let bench = Bench::new(seed);
        let (one, two) = (bench.stream(), bench.stream());
        (0..10).for_each(|_| bench.hidden(one, "kernel", Vec::new(), || ()).unwrap());
        bench.join(two, one);
        let event = bench.0.create_event().unwrap();
        assert!(bench.0.query_event(event).unwrap(), "nothing is recorded yet");
        bench.0.record(event, two).unwrap();
        assert!(!bench.0.query_event(event).unwrap());
        while !bench.0.query_event(event).unwrap() {}
    }
}

#[test]
fn streams_continue_while_one_waits_for_other_processes() {
    let bench = Bench::new(2);
    let (one, two) = (bench.stream(), bench.stream());
    let (come, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (comes, sees) = (come.clone(), seen.clone());
    let run = Box::new(move || if come.load(Ordering::Relaxed) { Progress::Done } else { Progress::Waits });
    bench.0.enqueue(one, Operation { name: "ncclAllGather".into(), touches: Vec::new(), run }).unwrap();
    bench.hidden(one, "kernel", Vec::new(), move || sees.store(true, Ordering::Relaxed)).unwrap();
    bench.hidden(two, "other process", Vec::new(), move || comes.store(true, Ordering::Relaxed)).unwrap();
    bench.synchronize(one);
    assert!(seen.load(Ordering::Relaxed), "it is run though nobody waits for it: another process might");
}

#[test]
fn deadlocks_name_the_streams() {
    let bench = Bench::new(0);
    let (one, two) = (bench.stream(), bench.stream());
    let run = Box::new(|| Progress::Waits);
    bench.0.enqueue(one, Operation { name: "ncclAllGather".into(), touches: Vec::new(), run }).unwrap();
    bench.join(two, one);
    let message = fault(bench.0.synchronize(two, "cuStreamSynchronize"));
    assert!(message.starts_with("deadlock: `cuStreamSynchronize` has waited 50ms"), "{message}");
    assert!(message.contains("stream 1: `ncclAllGather` waits for other processes"), "{message}");
    assert!(message.contains("stream 2: `cuStreamWaitEvent` waits for stream 1"), "{message}");
}

#[test]
fn detects_driver_calls_in_operations() {
    let bench: &'static Bench = Box::leak(Box::new(Bench::new(0)));
    let stream = bench.stream();
    let told = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tell = told.clone();
    let run = move || {
        let mut messages = tell.lock().unwrap();
        messages.push(fault(bench.0.synchronize(stream, "cuStreamSynchronize")));
        messages.push(fault(bench.hidden(stream, "kernel", Vec::new(), || ())));
    };
    bench.hidden(stream, "host function", Vec::new(), run).unwrap();
    bench.synchronize(stream);
    let messages = told.lock().unwrap();
    assert!(messages[0].starts_with("deadlock: `cuStreamSynchronize` was called from inside an operation"));
    assert!(messages[1].starts_with("`kernel` was called from inside an operation"), "{}", messages[1]);
}

#[test]
fn streams_continue_without_host_calls() {
    let bench: &'static Bench = Box::leak(Box::new(Bench::new(0)));
    std::thread::spawn(|| bench.0.run_in_background());
    let stream = bench.stream();
    let ran = Arc::new(AtomicBool::new(false));
    let (told, mut asked) = (ran.clone(), 0);
    let run = Box::new(move || {
        asked += 1;
        told.store(asked == 3, Ordering::Relaxed);
        if asked == 3 { Progress::Done } else { Progress::Waits }
    });
    bench.0.enqueue(stream, Operation { name: "ncclAllGather".into(), touches: Vec::new(), run }).unwrap();
    while !ran.load(Ordering::Relaxed) {
        std::thread::yield_now();
    }
}

#[test]
fn threads_share_streams() {
    for seed in 0..5 {
        let bench = Bench::new(seed);
        let count = AtomicU32::new(0);
        let count: &'static AtomicU32 = Box::leak(Box::new(count));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    crate::machine::set_current(Some(0));
                    let (mine, default) = (bench.stream(), 2);
                    for _ in 0..50 {
                        for stream in [mine, default] {
                            bench
                                .hidden(stream, "kernel", Vec::new(), || _ = count.fetch_add(1, Ordering::Relaxed))
                                .unwrap();
                        }
                        bench.join(default, mine);
                        bench.synchronize(default);
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 400);
    }
}

#[test]
fn rejects_invalid_handles() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let event = bench.record(stream);
    bench.0.destroy_stream(stream).unwrap();
    let invalid = Err(crate::status::Refusal::Status(crate::status::INVALID_HANDLE));
    assert_eq!(bench.set(stream, "kernel", 0, 1.0), invalid);
    assert_eq!(bench.0.destroy_stream(stream), invalid);
    assert_eq!(bench.0.synchronize(stream + 7, "cuStreamSynchronize"), invalid);
    bench.0.synchronize_event(event).unwrap();
    bench.0.destroy_event(event).unwrap();
    assert_eq!(bench.0.synchronize_event(event), invalid);
}
