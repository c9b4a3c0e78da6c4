//! Missing waits are detected when the second operation is queued, on every schedule.

use super::bench::{Bench, fault};
use crate::streams::{Access, Touch};

#[test]
fn reads_after_writes_need_a_wait() {
    for seed in 0..5 {
        let bench = Bench::new(seed);
        let (compute, communication) = (bench.stream(), bench.stream());
        let (full, out) = (bench.floats(communication), bench.floats(compute));
        bench.set(communication, "ncclAllGather", full, 1.0).unwrap();
        let message = fault(bench.map(compute, "kernel uexp_f32", full, out, f32::exp));
        let memory =
            format!("race on 16 bytes of device memory at {full:#x}, allocated by `cuMemAllocAsync` on stream 2:");
        assert!(message.starts_with(&memory), "{message}");
        let rest = "`kernel uexp_f32` on stream 1 reads it, `ncclAllGather` on stream 2 wrote it before, and stream 1 \
                    does not wait for that. Missing: an event recorded on stream 2 after `ncclAllGather`, and a wait \
                    of stream 1 for the event";
        assert!(message.ends_with(rest), "{message}");
    }
}

#[test]
fn writes_after_reads_or_writes_need_a_wait() {
    for reads in [true, false] {
        let bench = Bench::new(0);
        let (one, two) = (bench.stream(), bench.stream());
        let (from, to) = (bench.floats(one), bench.floats(one));
        bench.set(one, "kernel fill", from, 1.0).unwrap();
        bench.join(two, one);
        if reads {
            bench.map(one, "kernel first", from, to, |x| x).unwrap();
        } else {
            bench.set(one, "kernel first", from, 2.0).unwrap();
        }
        let message = fault(bench.set(two, "kernel second", from, 3.0));
        let did = if reads { "read" } else { "wrote" };
        assert!(message.contains(&format!("`kernel second` on stream 2 writes it, `kernel first` on stream 1 {did}")));
    }
}

#[test]
fn events_recorded_too_early_do_not_order() {
    let bench = Bench::new(0);
    let (one, two) = (bench.stream(), bench.stream());
    let (from, to) = (bench.floats(one), bench.floats(two));
    let event = bench.record(one);
    bench.set(one, "kernel fill", from, 1.0).unwrap();
    bench.0.wait_event(two, event).unwrap();
    let message = fault(bench.map(two, "kernel use", from, to, |x| x));
    assert!(message.contains("`kernel fill` on stream 1 wrote it before"), "{message}");
}

#[test]
fn waits_are_transitive() {
    let bench = Bench::new(0);
    let (one, two, three) = (bench.stream(), bench.stream(), bench.stream());
    let (from, to) = (bench.floats(one), bench.floats(three));
    bench.set(one, "kernel fill", from, 1.0).unwrap();
    bench.join(two, one);
    bench.join(three, two);
    bench.map(three, "kernel use", from, to, |x| x).unwrap();
    bench.synchronize(three);
    bench.set(one, "kernel fill", from, 2.0).unwrap();
    bench.set(one, "kernel fill", to, 2.0).unwrap();
}

#[test]
fn allocations_are_in_stream_order() {
    let bench = Bench::new(0);
    let (one, two) = (bench.stream(), bench.stream());
    let memory = bench.floats(one);
    let message = fault(bench.set(two, "kernel fill", memory, 1.0));
    assert!(message.contains("`cuMemAllocAsync` on stream 1 wrote it before"), "{message}");
}

#[test]
fn detects_frees_during_use() {
    let bench = Bench::new(0);
    let (compute, communication) = (bench.stream(), bench.stream());
    let (shard, full) = (bench.floats(compute), bench.floats(communication));
    bench.set(compute, "kernel pack", shard, 1.0).unwrap();
    bench.join(communication, compute);
    bench.map(communication, "ncclAllGather", shard, full, |x| x).unwrap();
    let message = fault(bench.0.free(shard, Some(compute), "cuMemFreeAsync"));
    assert!(
        message.contains("`cuMemFreeAsync` on stream 1 frees it, `ncclAllGather` on stream 2 read it before"),
        "{message}"
    );
}

#[test]
fn use_after_free_names_the_free() {
    let bench = Bench::new(3);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    bench.0.free(memory, Some(stream), "cuMemFreeAsync").unwrap();
    let message = fault(bench.set(stream, "kernel fill", memory + 4, 1.0));
    assert!(message.starts_with("use after free: `kernel fill` on stream 1 writes 16 bytes of device memory"));
    assert!(message.ends_with("and freed by `cuMemFreeAsync` on stream 1"), "{message}");
    let message = fault(bench.0.free(memory, Some(stream), "cuMemFreeAsync"));
    assert!(message.starts_with("use after free: `cuMemFreeAsync` on stream 1 frees 16 bytes"), "{message}");
    let message = fault(bench.0.free(memory, None, "cuMemFree"));
    assert!(message.starts_with("use after free: `cuMemFree` frees 16 bytes"), "{message}");
}

#[test]
fn detects_unallocated_addresses() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    let far = memory + 100_000_000;
    let message = fault(bench.hidden(stream, "kernel fill", vec![Touch { at: far, access: Access::Write }], || ()));
    assert!(message.contains("where no memory is"), "{message}");
    bench.hidden(stream, "kernel", vec![Touch { at: 0, access: Access::Write }], || ()).unwrap();
}

#[test]
fn queries_count_for_their_thread_only() {
    let bench = Bench::new(0);
    let (one, two) = (bench.stream(), bench.stream());
    let (from, to) = (bench.floats(one), bench.floats(two));
    bench.set(one, "kernel fill", from, 1.0).unwrap();
    let event = bench.record(one);
    let wait = || while !bench.0.query_event(event).unwrap() {};
    std::thread::scope(|scope| scope.spawn(wait).join().unwrap());
    fault(bench.map(two, "kernel use", from, to, |x| x));
    wait();
    bench.map(two, "kernel use", from, to, |x| x).unwrap();
}

#[test]
fn blocking_streams_wait_for_the_default_stream() {
    let bench = Bench::new(1);
    let (blocking, other) = (bench.0.create_stream(false).unwrap(), bench.stream());
    let (from, to) = (bench.floats(0), bench.floats(0));
    bench.set(0, "kernel fill", from, 1.0).unwrap();
    bench.map(blocking, "kernel use", from, to, |x| x + 1.0).unwrap();
    bench.map(0, "kernel use", to, from, |x| x + 1.0).unwrap();
    fault(bench.map(other, "kernel use", to, from, |x| x));
    bench.synchronize(0);
    assert_eq!(super::bench::read(from), [3.0; 4]);
}
