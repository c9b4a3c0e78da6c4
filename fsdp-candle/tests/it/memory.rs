//! The error of a failed allocation has the size and the purpose of the memory.

use std::process::Command;

use candle_core::{DType, Device};
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, World, fully_shard, nn};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{WIDTH, batch, built, loss_of, refused, vars};

#[test]
fn names_parameters_larger_than_memory() {
    let world = World::single().unwrap();
    let build = |shape: (usize, usize), ignored: bool| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars).ignored_params(move |_| ignored);
        fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(shape.1, shape.0, vb.pp("big")))
    };
    for ignored in [false, true] {
        for shape in [(1 << 62, 1), (1 << 62, 4), (1 << 31, 1 << 31), (usize::MAX, usize::MAX)] {
            refused(build(shape, ignored), &["parameter `big.weight`: of shape [", "larger than memory"]);
        }
        // A valid shape that needs more memory than any machine has.
        refused(
            build((1 << 45, 256), ignored),
            &[
                "parameter `big.weight`: no memory for 9007199254740992 elements of F32",
                "33554432.0 GiB (36028797018963968 bytes) requested",
            ],
        );
    }
}

#[test]
fn names_rotary_tables_larger_than_memory() {
    for (dim, positions) in [(1 << 62, 8), (64, 1 << 62), (1 << 40, 1 << 40)] {
        let error = nn::Rotary::new(1e4, dim, positions, &Device::Cpu).unwrap_err().to_string();
        let what = format!("no memory for the rotary table of {positions} positions and heads of {dim} elements: ");
        assert!(error.contains(&what), "{error}");
    }
}

/// Runs `f` with at most `more` bytes of address space beyond the current usage.
fn with_little_memory<T>(more: u64, f: impl FnOnce() -> T) -> T {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let kib: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some((kib << 10) + more), maximum: before.maximum }).unwrap();
    let outcome = f();
    setrlimit(Resource::As, before).unwrap();
    outcome
}

/// Not a test: the code of the next test's process, because the limit is process-wide.
#[test]
fn run_with_little_memory() {
    if std::env::var("FSDP_TEST_ROLE").is_err() {
        return;
    }
    let world = World::single().unwrap();
    let (vars, model) = built(&world, WIDTH);
    let x = batch(0, WIDTH);
    // The first call of each unit checks for cuts on a thread. It skips the check if it can't start the thread.
    with_little_memory(200 << 20, || loss_of(&model, &x));
    for _ in 0..2 {
        // One run without a limit, so that threads and buffers exist.
        model.backward(&loss_of(&model, &x)).unwrap();
        let loss = loss_of(&model, &x);
        let error = with_little_memory(200 << 20, || model.backward(&loss).unwrap_err().to_string());
        println!("says: {error}");
    }
    // A parameter and its moments: 256 MiB each.
    let build = || fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| vb.get(64 << 20, "big"));
    let error = with_little_memory(200 << 20, || build().err().unwrap().to_string());
    println!("says: {error}");
    let big = build().unwrap();
    let optim = || AdamW::new(big.params().to_vec(), AdamWConfig::default()).err().unwrap().to_string();
    println!("says: {}", with_little_memory(400 << 20, optim));
    // Unsharded parameters and a gradient that do not fit.
    let error = with_little_memory(200 << 20, || big.unshard().unwrap_err().to_string());
    println!("says: {error}");
    big.reset_iter_state();
}

#[test]
fn trains_after_out_of_memory_errors() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::run_with_little_memory", "--nocapture", "--test-threads=1"])
        .env("FSDP_TEST_ROLE", "little memory")
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && !stderr.contains("panicked"), "{}: {stdout}{stderr}", child.status);
    let said: Vec<&str> = stdout.lines().filter_map(|line| Some(line.split_once("says: ")?.1)).collect();
    let stack = "no memory for the stack of backward: ";
    let big = "parameter `big`: no memory for 67108864 elements of F32: 0.2 GiB (268435456 bytes) requested";
    let moments = "parameter `big`: the optimizer's state: no memory for 67108864 elements of F32";
    let gather = "no memory for 67108864 elements of F32";
    assert_eq!(said.len(), 5, "{stdout}");
    for (said, want) in said.iter().zip([stack, stack, big, moments, gather]) {
        assert!(said.contains(want), "{said}");
    }
}
