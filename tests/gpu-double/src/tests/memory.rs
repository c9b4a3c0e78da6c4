//! Contents of memory, copies, and accounts.

use super::bench::{Bench, LEN, fault, read, write};
use crate::{
    memory::{Copy, Direction},
    status::{ALREADY_REGISTERED, NOT_REGISTERED, OUT_OF_MEMORY, Refusal},
};

impl Bench {
    fn to_device(&self, to: u64, from: u64, stream: usize) -> Result<(), Refusal> {
        let copy = Copy { to, from, len: LEN, direction: Direction::HostToDevice };
        // SAFETY: the tests give memory of this length.
        unsafe { self.0.copy(copy, stream, "cuMemcpyHtoDAsync") }
    }

    fn to_host(&self, to: u64, from: u64, stream: usize) -> Result<(), Refusal> {
        let copy = Copy { to, from, len: LEN, direction: Direction::DeviceToHost };
        // SAFETY: the tests give memory of this length.
        unsafe { self.0.copy(copy, stream, "cuMemcpyDtoHAsync") }
    }

    fn pinned(&self) -> u64 {
        self.0.allocate_pinned(LEN, "cuMemHostAlloc").unwrap()
    }
}

fn is_poison(values: [f32; 4]) -> bool {
    values.iter().all(|value| value.is_nan())
}

#[test]
fn new_memory_is_nan_in_every_dtype() {
    let bench = Bench::new(0);
    let memory = bench.0.allocate(LEN, None, "cuMemAlloc").unwrap();
    // SAFETY: it was just allocated.
    let bytes = unsafe { crate::bytes::read(memory, 8) };
    assert!(f64::from_ne_bytes(bytes[..8].try_into().unwrap()).is_nan());
    assert!(is_poison(read(memory)));
    let word: [u8; 2] = bytes[..2].try_into().unwrap();
    assert!(half::f16::from_ne_bytes(word).is_nan() && half::bf16::from_ne_bytes(word).is_nan());
}

#[test]
fn new_and_freed_memory_is_nan_in_stream_order() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let (memory, copy) = (bench.floats(stream), bench.floats(stream));
    bench.map(stream, "kernel", memory, copy, |x| x).unwrap();
    bench.set(stream, "kernel", memory, 5.0).unwrap();
    bench.0.free(memory, Some(stream), "cuMemFreeAsync").unwrap();
    let event = bench.record(stream);
    write(memory, [1.0; 4]);
    assert_eq!(read(memory), [1.0; 4], "nothing has run");
    bench.0.synchronize_event(event).unwrap();
    assert!(is_poison(read(copy)), "the kernel read fresh memory");
    assert!(is_poison(read(memory)), "freed memory is kept a while");
}

#[test]
fn copies_to_pinned_memory_need_a_wait() {
    for seed in 0..5 {
        let bench = Bench::new(seed);
        let stream = bench.stream();
        let (memory, host) = (bench.floats(stream), bench.pinned());
        write(host, [7.0; 4]);
        bench.set(stream, "kernel", memory, 5.0).unwrap();
        bench.to_host(host, memory, stream).unwrap();
        assert!(is_poison(read(host)));
        bench.synchronize(stream);
        assert_eq!(read(host), [5.0; 4]);
    }
}

#[test]
fn copies_read_pageable_memory_before_they_return() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    let mut pageable = Box::new([1.0_f32; 4]);
    bench.to_device(memory, &raw const *pageable as u64, stream).unwrap();
    *pageable = [2.0; 4];
    bench.synchronize(stream);
    assert_eq!(read(memory), [1.0; 4]);
}

#[test]
fn detects_writes_to_pinned_memory_that_a_copy_reads_later() {
    for (before, after) in [([1.0; 4], [1.0; 4]), ([1.0; 4], [2.0; 4])] {
        let bench = Bench::new(0);
        let stream = bench.stream();
        let (memory, host) = (bench.floats(stream), bench.pinned());
        write(host, before);
        bench.to_device(memory, host, stream).unwrap();
        write(host, after);
        let outcome = bench.0.synchronize(stream, "cuStreamSynchronize");
        assert_eq!(outcome.is_ok(), before == after, "{outcome:?}");
    }
}

#[test]
fn copies_to_pageable_memory_wait() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    let mut pageable = Box::new([1.0_f32; 4]);
    bench.set(stream, "kernel", memory, 5.0).unwrap();
    bench.to_host(&raw mut *pageable as u64, memory, stream).unwrap();
    assert_eq!(*pageable, [5.0; 4]);
}

#[test]
fn pinned_memory_in_use_is_not_overwritten_with_nan() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let (one, two, host) = (bench.floats(stream), bench.floats(stream), bench.pinned());
    write(host, [3.0; 4]);
    bench.set(stream, "kernel", two, 5.0).unwrap();
    bench.to_device(one, host, stream).unwrap();
    bench.to_host(host, two, stream).unwrap();
    bench.synchronize(stream);
    assert_eq!((read(one), read(host)), ([3.0; 4], [5.0; 4]));
}

#[test]
fn detects_races_on_pinned_memory() {
    let bench = Bench::new(0);
    let (one, two) = (bench.stream(), bench.stream());
    let (memory, other, host) = (bench.floats(one), bench.floats(two), bench.pinned());
    bench.set(one, "kernel", memory, 5.0).unwrap();
    bench.to_host(host, memory, one).unwrap();
    let message = fault(bench.to_device(other, host, two));
    assert!(message.contains("pinned host memory") && message.contains("on stream 2 reads it"), "{message}");
}

#[test]
fn detects_early_frees_of_pinned_memory() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let (memory, host) = (bench.floats(stream), bench.pinned());
    bench.set(stream, "kernel", memory, 5.0).unwrap();
    bench.to_host(host, memory, stream).unwrap();
    let message = fault(bench.0.free_unused(host, "cuMemFreeHost"));
    assert!(message.starts_with("freed too early: `cuMemFreeHost` frees 16 bytes of pinned host memory"), "{message}");
    assert!(
        message.ends_with("the host has not waited for `cuMemcpyDtoHAsync` on stream 1, which uses it"),
        "{message}"
    );
    bench.synchronize(stream);
    bench.0.free_unused(host, "cuMemFreeHost").unwrap();
}

type Call<'a> = &'a dyn Fn(&Bench, usize);

/// With some schedules, the stream ends before the call returns. The host still has to wait.
#[test]
fn calls_that_may_wait_for_the_device_sometimes_do() {
    let pageable = vec![0u8; 65 << 10];
    let mut waits = [0; 3];
    for seed in 0..32 {
        let calls: [Call<'_>; 3] = [
            &|bench, _| {
                bench.pinned();
            },
            &|bench, _| {
                bench.0.allocate(LEN, None, "cuMemAlloc").unwrap();
            },
            &|bench, stream| {
                let to = bench.0.allocate(pageable.len(), Some(stream), "cuMemAllocAsync").unwrap();
                let copy = Copy {
                    to,
                    from: pageable.as_ptr() as u64,
                    len: pageable.len(),
                    direction: Direction::HostToDevice,
                };
                // SAFETY: both have this length.
                unsafe { bench.0.copy(copy, stream, "cuMemcpyHtoDAsync") }.unwrap();
            },
        ];
        for (call, waits) in calls.into_iter().zip(&mut waits) {
            let bench = Bench::new(seed);
            let stream = bench.stream();
            let (memory, host) = (bench.floats(stream), bench.pinned());
            bench.set(stream, "kernel", memory, 5.0).unwrap();
            bench.to_host(host, memory, stream).unwrap();
            call(&bench, stream);
            *waits += usize::from(read(host) == [5.0; 4]);
            fault(bench.0.free_unused(host, "cuMemFreeHost"));
            assert!(seed > 0 || is_poison(read(host)), "the first schedule never waits");
        }
    }
    assert!(waits.iter().all(|waits| (4..32).contains(waits)), "{waits:?}");
}

#[test]
fn registered_memory_is_pinned() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    let mut host = Box::new([1.0_f32; 4]);
    let at = &raw mut *host as u64;
    bench.0.register(at, LEN, "cuMemHostRegister").unwrap();
    assert_eq!(bench.0.register(at, LEN, "cuMemHostRegister"), Err(Refusal::Status(ALREADY_REGISTERED)));
    bench.set(stream, "kernel", memory, 5.0).unwrap();
    bench.to_host(at, memory, stream).unwrap();
    assert!(is_poison(*host));
    fault(bench.0.unregister(at, "cuMemHostUnregister"));
    bench.synchronize(stream);
    assert_eq!(*host, [5.0; 4]);
    bench.0.unregister(at, "cuMemHostUnregister").unwrap();
    assert_eq!(bench.0.unregister(at, "cuMemHostUnregister"), Err(Refusal::Status(NOT_REGISTERED)));
}

#[test]
fn detects_copies_and_fills_beyond_an_allocation() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    let host = [0.0_f32; 4];
    let message = fault(bench.to_device(memory + 4, &raw const host as u64, stream));
    assert!(message.contains("`cuMemcpyHtoDAsync` of 16 bytes") && message.contains("beyond the end of"), "{message}");
    fault(bench.0.fill(memory, 0, LEN + 4, stream, "cuMemsetD8Async"));
    bench.0.fill(memory, 0, LEN, stream, "cuMemsetD8Async").unwrap();
    bench.synchronize(stream);
    assert_eq!(read(memory), [0.; 4]);
}

#[test]
fn detects_writes_beyond_an_allocation_at_the_free() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let memory = bench.floats(stream);
    bench.hidden(stream, "kernel", Vec::new(), move || write(memory + 4, [0.0; 4])).unwrap();
    bench.0.free(memory, Some(stream), "cuMemFreeAsync").unwrap();
    let message = fault(bench.0.synchronize(stream, "cuStreamSynchronize"));
    assert!(message.starts_with("something wrote beyond the end of 16 bytes"), "{message}");
}

#[test]
fn accounts_for_memory() {
    let bench = Bench::new(0);
    let stream = bench.stream();
    let take = |len| bench.0.allocate(len, Some(stream), "cuMemAllocAsync");
    let large = take(1 << 20).unwrap();
    assert_eq!(take(1), Err(Refusal::Status(OUT_OF_MEMORY)));
    assert_eq!(bench.0.allocate(1, None, "cuMemAlloc"), Err(Refusal::Status(OUT_OF_MEMORY)));
    let empty = take(0).unwrap();
    bench.0.free(empty, Some(stream), "cuMemFreeAsync").unwrap();
    bench.0.free(large, Some(stream), "cuMemFreeAsync").unwrap();
    assert_eq!(bench.0.lock().accounts[0].free(), 0, "the pool holds it");
    bench.synchronize(stream);
    assert_eq!(bench.0.lock().accounts[0].free(), 1 << 20, "and gives it back at a synchronisation");
    assert_eq!(bench.0.lock().accounts[0].used.high, 1 << 20);
}

#[test]
fn releases_freed_memory() {
    let bench = Bench::new(4);
    let stream = bench.stream();
    for _ in 0..200 {
        let memory = bench.0.allocate(1 << 20, Some(stream), "cuMemAllocAsync").unwrap();
        bench.0.free(memory, Some(stream), "cuMemFreeAsync").unwrap();
        bench.synchronize(stream);
    }
    assert!(bench.0.lock().allocations.kept() <= 64 << 20);
}
