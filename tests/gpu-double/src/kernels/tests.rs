//! CUDA sources, compiled and run.

use std::ffi::c_void;

use half::{bf16, f16};

use super::{
    library::{self, Image, Kernel, Kernels, Launch},
    *,
};
use crate::{
    nvrtc::{self, Source},
    streams::Access,
};

fn compile(text: &str) -> &'static Kernels {
    let source = Source { text: text.into(), name: "test.cu".into(), ..Source::default() };
    let image = nvrtc::compile(&source).unwrap().unwrap_or_else(|log| panic!("{log}"));
    match library::open(&image).unwrap() {
        Image::Kernels(kernels) => kernels,
        Image::Missing(why) => panic!("{why}"),
    }
}

/// A parameter: its address.
fn of<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Runs a kernel with an order of blocks and threads. The error is the fault.
fn run(kernel: &Kernel, grid: u32, block: u32, shared: u32, seed: u64, args: &[*mut c_void]) -> Result<(), String> {
    assert_eq!(args.len(), kernel.sizes.len());
    let mut arguments = args.to_vec();
    let launch = Launch {
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        shared_bytes: shared,
        seed,
        arguments: arguments.as_mut_ptr(),
    };
    // SAFETY: tests give parameters of the kernel's types, and memory of their own.
    unsafe { kernel.run(&launch) }
}

const SEEDS: [u64; 5] = [0, 1, 2, 3, 4];

#[test]
fn every_thread_runs_once() {
    let kernels = compile(
        r#"extern "C" __global__ void count(unsigned* seen) {
            unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
            atomicAdd(seen + block * blockDim.x * blockDim.y * blockDim.z + thread, 1);
        }"#,
    );
    for seed in SEEDS {
        let mut seen = vec![0u32; 5 * 3 * 2 * 7 * 3 * 4];
        let at = seen.as_mut_ptr();
        let mut arguments = [of(&at)];
        let arguments = arguments.as_mut_ptr();
        let launch = Launch { grid: [5, 3, 2], block: [7, 3, 4], shared_bytes: 0, seed, arguments };
        // SAFETY: there is a count for each thread.
        unsafe { kernels["count"].run(&launch) }.unwrap();
        assert!(seen.iter().all(|count| *count == 1), "seed {seed}: {seen:?}");
    }
}

#[test]
fn shared_memory_barriers_and_shuffles_sum() {
    let kernels = compile(
        r#"
        extern "C" __global__ void by_shared(const float* from, float* to, int n) {
            extern __shared__ float sums[];
            __shared__ int last;
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            sums[threadIdx.x] = i < n ? from[i] : 0;
            if (threadIdx.x == blockDim.x - 1) last = 7;
            for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
                __syncthreads();
                if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
            }
            if (threadIdx.x == 0 && last == 7) atomicAdd(to, sums[0]);
        }
        extern "C" __global__ void by_shuffles(const float* from, float* to, int n) {
            __shared__ float warps[32];
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            float sum = i < n ? from[i] : 0;
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
            __syncthreads();
            if (threadIdx.x < 32) {
                sum = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0;
                for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffff, sum, step);
                if (threadIdx.x == 0) atomicAdd(to, sum);
            }
        }"#,
    );
    let from: Vec<f32> = (0..3000).map(|value| (value % 17) as f32).collect();
    let (at, n) = (from.as_ptr(), from.len() as i32);
    for name in ["by_shared", "by_shuffles"] {
        for (seed, block) in SEEDS.into_iter().flat_map(|seed| [(seed, 64), (seed, 1024)]) {
            let mut sum = 0f32;
            let to: *mut f32 = &mut sum;
            let blocks = from.len().div_ceil(block) as u32;
            run(kernels[name], blocks, block as u32, 4 * block as u32, seed, &[of(&at), of(&to), of(&n)]).unwrap();
            assert_eq!(sum, from.iter().sum::<f32>(), "{name}, seed {seed}, blocks of {block}");
        }
    }
}

#[test]
fn lanes_exchange_values() {
    let kernels = compile(
        r#"extern "C" __global__ void lanes(int* out) {
            int lane = threadIdx.x % 32, base = threadIdx.x - lane, all = 0xffffffff;
            int* mine = out + threadIdx.x * 8;
            mine[0] = __shfl_sync(all, lane * 10, 5);
            mine[1] = __shfl_up_sync(all, lane, 3);
            mine[2] = __shfl_down_sync(all, lane, 3, 8);
            mine[3] = __shfl_xor_sync(all, lane, 9);
            mine[4] = __ballot_sync(all, lane % 3 == 0);
            // The two halves of a warp go ways of their own.
            if (lane < 16) mine[5] = __shfl_sync(0x0000ffff, lane, 2);
            else mine[5] = __shfl_sync(0xffff0000, lane, 20);
            mine[6] = __any_sync(all, base == 32 && lane == 31) * 2 + __all_sync(all, lane < 32);
            mine[7] = __syncthreads_count(lane == 1);
        }"#,
    );
    for seed in SEEDS {
        let mut out = vec![0i32; 96 * 8];
        let at = out.as_mut_ptr();
        run(kernels["lanes"], 1, 96, 0, seed, &[of(&at)]).unwrap();
        let votes = (0..32).filter(|lane| lane % 3 == 0).fold(0u32, |votes, lane| votes | 1 << lane);
        for (thread, mine) in out.chunks(8).enumerate() {
            let lane = (thread % 32) as i32;
            let expected = [
                50,
                if lane < 3 { lane } else { lane - 3 },
                if lane % 8 + 3 >= 8 { lane } else { lane + 3 },
                lane ^ 9,
                votes as i32,
                if lane < 16 { 2 } else { 20 },
                if thread / 32 == 1 { 3 } else { 1 },
                3,
            ];
            assert_eq!(mine, expected, "thread {thread}, seed {seed}");
        }
    }
}

#[test]
fn halves_round_once_to_nearest_even() {
    let kernels = compile(
        r#"
        #include <cuda_fp16.h>
        #include <cuda_bf16.h>
        extern "C" __global__ void halves(const float* from, __half* half, __nv_bfloat16* brain) {
            half[threadIdx.x] = __float2half(from[threadIdx.x]);
            brain[threadIdx.x] = __float2bfloat16(from[threadIdx.x]);
        }
        extern "C" __global__ void doubles(const double* from, __half* half, __nv_bfloat16* brain) {
            half[threadIdx.x] = from[threadIdx.x];
            brain[threadIdx.x] = from[threadIdx.x];
        }
        extern "C" __global__ void sums(__half* half, __nv_bfloat16* brain) {
            half[threadIdx.x] = half[threadIdx.x] * half[threadIdx.x + 1] + half[threadIdx.x];
            brain[threadIdx.x] = brain[threadIdx.x] / brain[threadIdx.x + 1] - brain[threadIdx.x];
        }"#,
    );
    // Zeros, infinities, NaNs, the ends of the formats, ties of both, and floats of any kind.
    let mut from = vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(u32::MAX), f32::MAX];
    from.extend([65504.0, 65519.99, 65520.0, 5.96e-8, 2.98e-8, 2.99e-8, 1e-40]);
    from.extend([1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0]);
    from.extend((0..1000u32).map(|place| f32::from_bits(place.wrapping_mul(2_654_435_761))));
    let mut half = vec![f16::ZERO; from.len()];
    let mut brain = vec![bf16::ZERO; from.len()];
    let (at, of_half, of_brain) = (from.as_ptr(), half.as_mut_ptr(), brain.as_mut_ptr());
    run(kernels["halves"], 1, from.len() as u32, 0, 0, &[of(&at), of(&of_half), of(&of_brain)]).unwrap();
    let same = |got: f32, expected: f32| got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
    for (place, value) in from.iter().enumerate() {
        let (of_half, of_brain) = (f16::from_f32(*value), bf16::from_f32(*value));
        assert!(same(half[place].to_f32(), of_half.to_f32()), "{value:e}: {} {of_half}", half[place]);
        assert!(same(brain[place].to_f32(), of_brain.to_f32()), "{value:e}: {} {of_brain}", brain[place]);
    }
    let (old_half, old_brain) = (half.clone(), brain.clone());
    let (of_half, of_brain) = (half.as_mut_ptr(), brain.as_mut_ptr());
    // One block has at most 1024 threads; each reads its right neighbour before that one writes.
    run(kernels["sums"], 1, from.len() as u32 - 1, 0, 0, &[of(&of_half), of(&of_brain)]).unwrap();
    for place in 0..from.len() - 1 {
        let [a, b] = [place, place + 1].map(|place| old_half[place].to_f32());
        let expected = f16::from_f32(f16::from_f32(a * b).to_f32() + a);
        assert!(same(half[place].to_f32(), expected.to_f32()), "{a} {b}: {} {expected}", half[place]);
        let [a, b] = [place, place + 1].map(|place| old_brain[place].to_f32());
        let expected = bf16::from_f32(bf16::from_f32(a / b).to_f32() - a);
        assert!(same(brain[place].to_f32(), expected.to_f32()), "{a} {b}: {} {expected}", brain[place]);
    }
    // Doubles beside a tie, which a float in between would bring onto it.
    let tiny = 2f64.powi(-40);
    let half_tie = 1.0 + 2f64.powi(-11);
    let brain_tie = 1.0 + 2f64.powi(-8);
    let from = [half_tie - tiny, half_tie + tiny, brain_tie - tiny, brain_tie + tiny];
    let at = from.as_ptr();
    run(kernels["doubles"], 1, 4, 0, 0, &[of(&at), of(&of_half), of(&of_brain)]).unwrap();
    assert_eq!([half[0], half[1]], [f16::ONE, f16::from_f32(1.0 + 2f32.powi(-10))]);
    assert_eq!([brain[2], brain[3]], [bf16::ONE, bf16::from_f32(1.0 + 2f32.powi(-7))]);
}

#[test]
fn converts_to_float8() {
    let kernels = compile(
        r#"
        #include <cuda_fp8.h>
        extern "C" __global__ void there(const float* from, __nv_fp8_e4m3* four, __nv_fp8_e5m2* five) {
            four[threadIdx.x] = __nv_fp8_e4m3(from[threadIdx.x]);
            five[threadIdx.x] = __nv_fp8_e5m2(from[threadIdx.x]);
        }
        extern "C" __global__ void back(const __nv_fp8_e4m3* four, const __nv_fp8_e5m2* five, float* to) {
            to[2 * threadIdx.x] = (float)four[threadIdx.x];
            to[2 * threadIdx.x + 1] = (float)five[threadIdx.x];
        }"#,
    );
    // All values of both formats, read and written again.
    let codes: Vec<u8> = (0..=255).collect();
    let (four, five) = (codes.as_ptr(), codes.as_ptr());
    let mut values = vec![0f32; 512];
    let at = values.as_mut_ptr();
    run(kernels["back"], 1, 256, 0, 0, &[of(&four), of(&five), of(&at)]).unwrap();
    let e4m3 = |code: usize| values[2 * code];
    assert_eq!([e4m3(0), e4m3(1), e4m3(8), e4m3(0x38), e4m3(0x7e)], [0.0, 2f32.powi(-9), 2f32.powi(-6), 1.0, 448.0]);
    assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan() && e4m3(0xb8) == -1.0);
    assert_eq!([values[2 * 0x3c + 1], values[2 * 0x7b + 1], values[2 * 0x7c + 1]], [1.0, 57344.0, f32::INFINITY]);
    let to_codes = |from: &[f32]| {
        let (mut four, mut five) = (vec![0u8; from.len()], vec![0u8; from.len()]);
        let (at, to_four, to_five) = (from.as_ptr(), four.as_mut_ptr(), five.as_mut_ptr());
        run(kernels["there"], 1, from.len() as u32, 0, 0, &[of(&at), of(&to_four), of(&to_five)]).unwrap();
        (four, five)
    };
    let of_four: Vec<f32> = (0..256).map(e4m3).collect();
    let of_five: Vec<f32> = (0..256).map(|code| values[2 * code + 1]).collect();
    for (code, again) in to_codes(&of_four).0.into_iter().enumerate() {
        assert!(usize::from(again) == code || e4m3(code).is_nan() && again & 0x7f == 0x7f, "{code:#x} {again:#x}");
    }
    for (code, again) in to_codes(&of_five).1.into_iter().enumerate().filter(|(code, _)| code & 0x7f < 0x7c) {
        assert_eq!(usize::from(again), code);
    }
    // Ties go to even, what is too large to the largest.
    let between = [1.0625, 1.1875, 449.0, 1e9, f32::INFINITY, -1e9, 2f32.powi(-10), 3.0 * 2f32.powi(-10)];
    assert_eq!(to_codes(&between).0, [0x38, 0x3a, 0x7e, 0x7e, 0x7e, 0xfe, 0, 2]);
}

#[test]
fn atomics_are_exact() {
    let kernels = compile(
        r#"extern "C" __global__ void atomics(int* out, float* sum, double* most, unsigned long long* cas) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            atomicAdd(out, i); atomicSub(out + 1, 1); atomicMax(out + 2, i); atomicMin(out + 3, -i);
            atomicOr(out + 4, 1 << i % 31); atomicAnd(out + 5, ~(1 << i % 31)); atomicXor(out + 6, i);
            atomicInc((unsigned*)out + 7, 9);
            atomicAdd(sum, 0.5f);
            atomicAdd(most, 1.0);
            unsigned long long old = *cas, seen;
            do { seen = old; old = atomicCAS(cas, seen, seen + 3); } while (old != seen);
        }"#,
    );
    let (mut out, mut sum, mut most, mut cas) = ([0i32; 8], 0f32, 0f64, 0u64);
    out[5] = -1;
    let (a, b, c, d): (*mut i32, *mut f32, *mut f64, *mut u64) = (out.as_mut_ptr(), &mut sum, &mut most, &mut cas);
    run(kernels["atomics"], 4, 64, 0, 3, &[of(&a), of(&b), of(&c), of(&d)]).unwrap();
    let bits = (0..31).fold(0i32, |bits, bit| bits | 1 << bit);
    assert_eq!(out, [255 * 128, -256, 255, -255, bits, !bits, (0..256).fold(0, |a, b| a ^ b), 6]);
    assert_eq!((sum, most, cas), (128.0, 256.0, 768));
}

#[test]
fn shared_memory_starts_undefined() {
    let kernels = compile(
        r#"extern "C" __global__ void leak(float* to) {
            __shared__ float fixed[2];
            extern __shared__ float given[];
            to[4 * blockIdx.x + 2 * threadIdx.x] = fixed[threadIdx.x];
            to[4 * blockIdx.x + 2 * threadIdx.x + 1] = given[threadIdx.x];
            __syncthreads();
            fixed[threadIdx.x] = given[threadIdx.x] = 1;
        }"#,
    );
    let mut to = [0f32; 12];
    let at = to.as_mut_ptr();
    run(kernels["leak"], 3, 2, 8, 0, &[of(&at)]).unwrap();
    assert!(to.iter().all(|value| value.is_nan()), "{to:?}");
}

#[test]
fn copies_to_shared_memory_arrive_when_they_are_waited_for() {
    let kernels = compile(
        r#"
        typedef unsigned u32;
        typedef unsigned short u16;
        struct bf16 { u16 bits; };
        template <class T> struct Float;
        #include "warp_products.h"
        extern "C" __global__ void copies(const float* from, float* to, int waits, int groups) {
            __shared__ float values[2][32];
            for (int group = 0; group < groups; group++) {
                start_number(&values[group][threadIdx.x], from + 32 * group + threadIdx.x, threadIdx.x < 30);
                end_group();
            }
            if (waits) wait_for_copies<1>();
            __syncthreads();
            to[threadIdx.x] = values[0][31 - threadIdx.x];
            to[32 + threadIdx.x] = values[1][31 - threadIdx.x];
        }"#,
    );
    let from: Vec<f32> = (0..64).map(|value| value as f32).collect();
    let copied = |waits: i32, groups: i32| {
        let mut to = [0f32; 64];
        let (at, source) = (to.as_mut_ptr(), from.as_ptr());
        run(kernels["copies"], 1, 32, 0, 1, &[of(&source), of(&at), of(&waits), of(&groups)]).unwrap();
        to
    };
    let both = copied(1, 2);
    let place = |at: usize| 31 - at;
    assert!((0..32).all(|at| both[at] == if place(at) < 30 { place(at) as f32 } else { 0. }), "{both:?}");
    // The kernel has not waited for the second group.
    assert!(both[32..].iter().all(|value| value.is_nan()), "{both:?}");
    assert!(copied(0, 1)[..32].iter().all(|value| value.is_nan()));
}

#[test]
fn writes_behind_shared_memory_are_faults() {
    let kernels = compile(
        r#"extern "C" __global__ void behind(int last) {
            extern __shared__ int given[];
            given[last] = 1;
        }"#,
    );
    let run = |last: i32| run(kernels["behind"], 2, 1, 64, 0, &[of(&last)]);
    run(15).unwrap();
    assert!(run(16).unwrap_err().contains("a write behind the 64 bytes of shared memory"));
}

#[test]
fn some_seed_reveals_a_missing_barrier() {
    let kernels = compile(
        r#"extern "C" __global__ void turned(int* to) {
            __shared__ int values[64];
            values[threadIdx.x] = threadIdx.x;
            to[threadIdx.x] = values[63 - threadIdx.x];
        }"#,
    );
    let right = |seed| {
        let mut to = [0i32; 64];
        let at = to.as_mut_ptr();
        run(kernels["turned"], 1, 64, 0, seed, &[of(&at)]).unwrap();
        (0..64).all(|place| to[place as usize] == 63 - place)
    };
    assert!(SEEDS.into_iter().all(|seed| !right(seed)));
}

/// After the first barrier, warps are as far apart as the second one allows.
#[test]
fn seeds_reveal_a_missing_barrier_between_two_others() {
    let kernels = compile(
        r#"extern "C" __global__ void reused(int* to, int barrier) {
            __shared__ int values[64];
            values[threadIdx.x] = threadIdx.x;
            __syncthreads();
            to[threadIdx.x] = values[63 - threadIdx.x] + __shfl_sync(0xffffffff, 0, 0);
            if (barrier) __syncthreads();
            values[threadIdx.x] = -1;
            __syncthreads();
        }"#,
    );
    let right = |seed, barrier: i32| {
        let mut to = [0i32; 64];
        let at = to.as_mut_ptr();
        run(kernels["reused"], 1, 64, 0, seed, &[of(&at), of(&barrier)]).unwrap();
        (0..64).all(|place| to[place as usize] == 63 - place)
    };
    assert!(SEEDS.into_iter().all(|seed| right(seed, 1)));
    assert!((1..5).all(|seed| !right(seed, 0)));
}

#[test]
fn faults_name_the_kernel() {
    let kernels = compile(
        r#"
        extern "C" __global__ void divergent(int n) { if (threadIdx.x < n) __syncthreads(); }
        extern "C" __global__ void lonely(int n) { if (threadIdx.x < n) __shfl_sync(0xffffffff, n, 0); }
        extern "C" __global__ void left_out(int n) { __shfl_sync(0xfffffffe, n, 0); }
        extern "C" __global__ void asserts(int n) { assert(threadIdx.x != n); }
        extern "C" __global__ void fine(int* to) { __syncthreads(); to[threadIdx.x] = threadIdx.x; }"#,
    );
    let n = 7i32;
    let cases = [
        (
            "divergent",
            "kernel divergent, block (0, 0, 0): __syncthreads() was reached by 7 of 64 threads: 57 have ended",
        ),
        ("lonely", "kernel lonely, block (0, 0, 0): 7 of 64 threads wait in a shuffle"),
        ("left_out", "leaves it out"),
        ("asserts", "assertion `threadIdx.x != n` failed at test.cu:5"),
    ];
    for (name, expected) in cases {
        let fault = run(kernels[name], 2, 64, 0, 0, &[of(&n)]).unwrap_err();
        assert!(fault.contains(expected), "{name}: {fault}");
        // Another kernel finds no threads of the one before.
        let mut to = [0i32; 64];
        let at = to.as_mut_ptr();
        run(kernels["fine"], 1, 64, 0, 0, &[of(&at)]).unwrap();
        assert!((0..64).all(|place| to[place as usize] == place));
    }
}

#[test]
fn launches_list_the_memory_they_use() {
    let kernels = compile(
        r#"
        struct Lists { const float* from[2]; float* to; int n; };
        GPU_DOUBLE_POINTERS(Lists, {offsetof(Lists, from), 2, engine::Read}, {offsetof(Lists, to), 1, engine::Write})
        extern "C" __global__ void __launch_bounds__(64) add(const float* a, const float* const b, float* c,
                                                              Lists lists,
                                                              bool on) {
            if (on) c[0] = a[0] + b[0] + lists.from[0][0] + lists.from[1][0];
            *lists.to = lists.n;
        }"#,
    );
    #[repr(C)]
    struct Lists {
        from: [*const f32; 2],
        to: *mut f32,
        n: i32,
    }
    let (values, mut sums) = ([1f32, 2.0, 3.0, 4.0], [0f32; 2]);
    let at = |place: usize| &raw const values[place];
    let sum = sums.as_mut_ptr();
    // SAFETY: the second place of two.
    let lists = Lists { from: [at(2), at(3)], to: unsafe { sum.add(1) }, n: 9 };
    let (a, b, none, on) = (at(0), at(1), std::ptr::null::<f32>(), true);
    let shape = Shape { grid: [1; 3], block: [1; 3], shared_bytes: 0 };
    let add = |a: *const f32| {
        let mut parameters = [of(&a), of(&b), of(&sum), of(&lists), of(&on)];
        // SAFETY: the parameters are the kernel's.
        unsafe { operation(kernels["add"], shape, parameters.as_mut_ptr()) }.unwrap()
    };
    let mut whole = add(a);
    assert_eq!(whole.name, "kernel add");
    let touched: Vec<_> = whole.touches.iter().map(|touch| (touch.at as *const f32, touch.access)).collect();
    let reads = |place| (at(place), Access::Read);
    let writes = |place: usize| (&raw const sums[place], Access::Write);
    assert_eq!(touched, [reads(0), reads(1), writes(0), reads(2), reads(3), writes(1)]);
    assert_eq!((whole.run)(), Progress::Done);
    assert_eq!(sums, [10.0, 9.0]);
    assert_eq!(add(none).touches.len(), 5, "null is no memory");
    let wide = Shape { block: [1025, 1, 1], ..shape };
    // SAFETY: a launch that is refused reads no parameters.
    let refused = unsafe { operation(kernels["add"], wide, std::ptr::null_mut()) };
    assert!(refused.is_err_and(|why| why.contains("kernel add") && why.contains("1025")));
}

#[test]
fn rejects_launches_beyond_the_limits() {
    assert_eq!(refusal([1, 1, 1], [1024, 1, 1], 48 << 10, SHARED_BYTES), None);
    assert!(refusal([0, 1, 1], [32, 1, 1], 0, SHARED_BYTES).is_some());
    assert!(refusal([1, 65_536, 1], [32, 1, 1], 0, SHARED_BYTES).is_some());
    assert!(refusal([1, 1, 1], [32, 33, 1], 0, SHARED_BYTES).is_some_and(|why| why.contains("[32, 33, 1]")));
    assert!(refusal([1, 1, 1], [1, 1, 65], 0, SHARED_BYTES).is_some());
    assert!(refusal([1, 1, 1], [32, 1, 1], (48 << 10) + 1, SHARED_BYTES).is_some());
}

#[test]
fn images_load_on_the_drivers_and_devices_that_they_fit() {
    let of = |driver, capability| {
        let settings = Settings { driver, capability, ..Settings::from_env().unwrap() };
        let ptx = "gpu-double library x.so\n.version 9.0\n.target sm_90\n";
        let code = format!("{MACHINE_CODE}90\n{ptx}");
        let status =
            |image: &str| loadable(image, &settings).map(|image| assert_eq!(image, ptx)).map_err(|(status, _)| status);
        [status(ptx), status(&code)]
    };
    assert_eq!(of(TOOLKIT, 90), [Ok(()), Ok(())]);
    // A driver of an older major version, and devices of an older and a newer architecture.
    assert_eq!(of(12040, 90), [Err(UNSUPPORTED_PTX_VERSION), Err(INVALID_IMAGE)]);
    assert_eq!(of(TOOLKIT, 80), [Err(INVALID_PTX), Err(NO_BINARY_FOR_GPU)]);
    assert_eq!(of(TOOLKIT, 100), [Ok(()), Err(NO_BINARY_FOR_GPU)]);
    let settings = Settings { capability: 100, ..Settings::from_env().unwrap() };
    assert_eq!(loadable("gpu-double library x.so\n.target sm_90a\n", &settings).unwrap_err().0, INVALID_PTX);
}
