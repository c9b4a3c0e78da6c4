//! cuRAND: generators whose numbers depend on the seed only, and not on cuRAND's own.
#![allow(non_snake_case, reason = "cuRAND's names")]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_ulonglong, c_void},
    sync::{Mutex, PoisonError},
};

mod numbers;

use crate::{
    operation::{Access, Operation, Progress, Touch},
    stream,
};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 101;
const LENGTH_NOT_MULTIPLE: c_int = 105;
const LAUNCH_FAILURE: c_int = 201;

#[derive(Clone, Copy, Default)]
struct Generator {
    seed: u64,
    /// The next number's place in the sequence.
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
        // SAFETY: the caller gives a place for a generator.
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
extern "C" fn curandSetGeneratorOffset(generator: *mut c_void, offset: c_ulonglong) -> c_int {
    of(generator, |generator| generator.next = offset)
}

#[unsafe(no_mangle)]
extern "C" fn curandSetStream(generator: *mut c_void, stream: *mut c_void) -> c_int {
    of(generator, |generator| generator.stream = stream as usize)
}

/// Queues numbers `number(seed, place)` for `count` places of the sequence.
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
        for place in 0..count {
            // SAFETY: the stream has its turn, and the program said that so many values lie there.
            unsafe { (at as *mut T).add(place).write(number(state.seed, state.next + place as u64)) };
        }
        Progress::Done
    };
    let touches = vec![Touch { at, access: Access::Write }];
    match stream::enqueue(state.stream as *mut c_void, Operation { name: name.into(), touches, run: Box::new(run) }) {
        0 => SUCCESS,
        _ => LAUNCH_FAILURE,
    }
}

macro_rules! generates {
    ($name:ident, $type:ty, $number:expr) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(generator: *mut c_void, out: *mut $type, count: usize) -> c_int {
            generate(stringify!($name), generator, out, count, $number)
        }
    };
    // Normal numbers come in pairs, and cuRAND refuses an odd count.
    ($name:ident, $type:ty, normal, $number:expr) => {
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
            let number: fn(f64) -> f64 = $number;
            generate(stringify!($name), generator, out, count, move |seed, place| {
                number(numbers::normal(seed, place) * deviation + mean) as $type
            })
        }
    };
}

generates!(curandGenerate, u32, |seed, place| (numbers::bits(seed, place) >> 32) as u32);
generates!(curandGenerateLongLong, u64, numbers::bits);
generates!(curandGenerateUniform, f32, numbers::uniform_f32);
generates!(curandGenerateUniformDouble, f64, numbers::uniform_f64);
generates!(curandGenerateNormal, f32, normal, |normal| normal);
generates!(curandGenerateNormalDouble, f64, normal, |normal| normal);
generates!(curandGenerateLogNormal, f32, normal, f64::exp);
generates!(curandGenerateLogNormalDouble, f64, normal, f64::exp);
