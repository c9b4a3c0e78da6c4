//! A launch: its parameters are copied at the call, its kernel runs when the stream comes to it.

use std::{
    ffi::c_void,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    kernels::{
        library::{Kernel, Launch},
        limits,
    },
    operation::{Operation, Progress},
    report,
    settings::Settings,
    stream,
};

/// A launch as the driver is asked for it.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

/// The work of a launch. The error says what it asks for that it may not.
///
/// # Safety
/// `parameters` leads to as many pointers as the kernel has parameters, and they to values of their types.
pub(crate) unsafe fn operation(
    kernel: &'static Kernel,
    shape: Shape,
    parameters: *mut *mut c_void,
) -> Result<Operation, String> {
    let most = kernel.most_shared.load(Ordering::Relaxed);
    if let Some(why) = limits::refusal(shape.grid, shape.block, shape.shared_bytes, most) {
        return Err(format!("a launch of kernel {} asks for {why}", kernel.name));
    }
    if parameters.is_null() && !kernel.sizes.is_empty() {
        return Err(format!("a launch of kernel {} gives none of its {} parameters", kernel.name, kernel.sizes.len()));
    }
    let copy = |(index, size): (usize, &usize)| {
        let mut bytes = vec![0; *size].into_boxed_slice();
        // SAFETY: the caller promises that a value of this size lies there.
        unsafe { (*parameters.add(index)).cast::<u8>().copy_to_nonoverlapping(bytes.as_mut_ptr(), *size) };
        bytes
    };
    let mut values: Vec<_> = kernel.sizes.iter().enumerate().map(copy).collect();
    let touches = kernel.touches(&values);
    let seed = next_seed();
    let run = move || {
        let mut arguments: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let Shape { grid, block, shared_bytes } = shape;
        let launch = Launch { grid, block, shared_bytes, seed, arguments: arguments.as_mut_ptr() };
        // SAFETY: the values have the parameters' sizes, and the stream has its turn.
        if let Err(fault) = unsafe { kernel.run(&launch) } {
            report::fault(fault);
        }
        Progress::Done
    };
    Ok(Operation { name: format!("kernel {}", kernel.name), touches, run: Box::new(run) })
}

/// Queues a launch.
///
/// # Safety
/// As for [`operation`].
pub(crate) unsafe fn launch(
    kernel: &'static Kernel,
    shape: Shape,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
) -> Result<i32, String> {
    // SAFETY: the caller promises it.
    let operation = unsafe { operation(kernel, shape, parameters) }?;
    Ok(stream::enqueue(stream, operation))
}

/// The order of this launch's blocks and threads. With the schedule 0 it is that of their numbers.
fn next_seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    match *SEED.get_or_init(|| Settings::from_env().map_or(0, |settings| settings.seed)) {
        0 => 0,
        seed => (seed << 32) + LAUNCHES.fetch_add(1, Ordering::Relaxed),
    }
}
