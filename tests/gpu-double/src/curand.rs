//! cuRAND: generators whose numbers depend only on the seed. They differ from cuRAND's own numbers.
#![allow(non_snake_case, reason = "cuRAND's names")]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_ulonglong, c_void},
    sync::{Mutex, PoisonError},
};

use crate::bytes;
use crate::streams::{self, Access, Operation, Progress, Touch};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 101;
const LENGTH_NOT_MULTIPLE: c_int = 105;
const LAUNCH_FAILURE: c_int = 201;

#[derive(Clone, Copy, Default)]
struct Generator {
    seed: u64,
    /// Index of the next number in the sequence.
    next: u64,
    stream: usize,
}

#[derive(Default)]
struct Generators {
    live: BTreeMap<usize, Generator>,
    made: usize,
}

static GENERATORS: Mutex<Option<Generators>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Generators) -> T) -> T {
    f(GENERATORS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Generators::default))
}

fn of(generator: *mut c_void, f: impl FnOnce(&mut Generator)) -> c_int {
    with(|generators| generators.live.get_mut(&(generator as usize)).map(f)).map_or(NOT_INITIALIZED, |()| SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn curandCreateGenerator(generator: *mut *mut c_void, _kind: c_int) -> c_int {
    with(|generators| {
        generators.made += 1;
        let handle = 0x5200_0000 + generators.made;
        generators.live.insert(handle, Generator::default());
        // SAFETY: the caller passes a pointer to a generator.
        unsafe { *generator = handle as *mut c_void };
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn curandDestroyGenerator(generator: *mut c_void) -> c_int {
    with(|generators| generators.live.remove(&(generator as usize))).map_or(NOT_INITIALIZED, |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn curandSetPseudoRandomGeneratorSeed(generator: *mut c_void, seed: c_ulonglong) -> c_int {
    of(generator, |generator| (generator.seed, generator.next) = (seed, 0))
}

#[unsafe(no_mangle)]
extern "C" fn curandSetStream(generator: *mut c_void, stream: *mut c_void) -> c_int {
    of(generator, |generator| generator.stream = stream as usize)
}

/// Queues `number(seed, index)` for `count` indices of the sequence.
fn generate<T: 'static>(
    name: &'static str,
    generator: *mut c_void,
    out: *mut T,
    count: usize,
    number: impl Fn(u64, u64) -> T + Send + 'static,
) -> c_int {
    let mut state = Generator::default();
    let found = of(generator, |generator| {
        state = *generator;
        generator.next += count as u64;
    });
    if found != SUCCESS || count == 0 {
        return found;
    }
    let at = out as u64;
    let run = move || {
        let count = if bytes::computes() { count } else { 0 };
        for place in 0..count {
            // SAFETY: the stream has its turn, and the program allocated as many values there.
            unsafe { (at as *mut T).add(place).write(number(state.seed, state.next + place as u64)) };
        }
        Progress::Done
    };
    let touches = vec![Touch { at, access: Access::Write }];
    match streams::enqueue(state.stream as *mut c_void, Operation { name: name.into(), touches, run: Box::new(run) }) {
        0 => SUCCESS,
        _ => LAUNCH_FAILURE,
    }
}

macro_rules! generates {
    // Normal numbers come in pairs, and cuRAND refuses an odd count.
    ($name:ident, $type:ty, normal) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            generator: *mut c_void,
            out: *mut $type,
            count: usize,
            mean: $type,
            deviation: $type,
        ) -> c_int {
            if count % 2 == 1 {
                return LENGTH_NOT_MULTIPLE;
            }
            let (mean, deviation) = (f64::from(mean), f64::from(deviation));
            generate(stringify!($name), generator, out, count, move |seed, place| {
                (normal(seed, place) * deviation + mean) as $type
            })
        }
    };
    ($name:ident, $type:ty, $number:expr) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(generator: *mut c_void, out: *mut $type, count: usize) -> c_int {
            generate(stringify!($name), generator, out, count, $number)
        }
    };
}

generates!(curandGenerateUniform, f32, uniform_f32);
generates!(curandGenerateUniformDouble, f64, uniform_f64);
generates!(curandGenerateNormal, f32, normal);
generates!(curandGenerateNormalDouble, f64, normal);

/// Returns the `index`-th value of SplitMix64.
fn bits(seed: u64, index: u64) -> u64 {
    let mut value = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Returns a number from 0 (exclusive) to 1 (inclusive), as cuRAND does, with a float's 24 bits.
fn uniform_f32(seed: u64, index: u64) -> f32 {
    ((bits(seed, index) >> 40) + 1) as f32 / (1u32 << 24) as f32
}

/// [`uniform_f32`] with a double's 53 bits.
fn uniform_f64(seed: u64, index: u64) -> f64 {
    ((bits(seed, index) >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// Returns a normal number with mean 0 and standard deviation 1, by Box and Muller. Each pair of numbers shares one
/// radius and one angle.
fn normal(seed: u64, index: u64) -> f64 {
    let pair = index & !1;
    let radius = (-2.0 * uniform_f64(seed, pair).ln()).sqrt();
    let angle = std::f64::consts::TAU * uniform_f64(seed, pair + 1);
    if index == pair { radius * angle.cos() } else { radius * angle.sin() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the mean and the variance.
    fn moments(values: impl Iterator<Item = f64>) -> (f64, f64) {
        let values: Vec<f64> = values.collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        (mean, values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64)
    }

    #[test]
    fn uniform_numbers_fill_their_interval() {
        let of = |seed| (0..100_000).map(move |index| uniform_f64(seed, index));
        let (mean, variance) = moments(of(7));
        assert!((mean - 0.5).abs() < 0.005 && (variance - 1.0 / 12.0).abs() < 0.001, "{mean} {variance}");
        assert!(of(7).all(|value| value > 0.0 && value <= 1.0));
        assert!((0..100_000).all(|index| (uniform_f32(7, index) - uniform_f64(7, index) as f32).abs() < 1e-6));
        assert_ne!(of(7).take(8).collect::<Vec<_>>(), of(8).take(8).collect::<Vec<_>>());
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let of = || (0..100_000).map(|index| normal(3, index));
        let (mean, variance) = moments(of());
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        let within = of().filter(|value| value.abs() < 1.0).count();
        assert!((within as f64 / 100_000.0 - 0.6827).abs() < 0.005, "{within}");
    }
}
