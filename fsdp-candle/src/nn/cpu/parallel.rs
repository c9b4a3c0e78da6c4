//! Spreading rows over rayon's threads.
//!
//! A rank of a job on CPUs often has one thread, and handing work to rayon's own thread would only cost the caller's
//! cache: then everything runs in place.

use candle_core::utils::get_num_threads;
use rayon::prelude::*;

/// Elements below which threads cost more than they bring.
const WORTH_THREADS: usize = 1 << 15;

/// How many threads to use for work on `elements` elements.
pub(in crate::nn) fn threads(elements: usize) -> usize {
    if elements < WORTH_THREADS { 1 } else { get_num_threads() }
}

/// Rows a thread gets of `rows`, where each row stands for `cost` elements.
fn share(rows: usize, cost: usize) -> usize {
    rows.div_ceil(threads(rows.saturating_mul(cost))).max(1)
}

/// Calls `f(first_row, rows)` on stretches of whole rows of `out`, each of `width` elements, and collects what it
/// returns in order.
pub(in crate::nn) fn map_rows<R: Send>(
    out: &mut [f32],
    width: usize,
    cost: usize,
    f: impl Fn(usize, &mut [f32]) -> R + Sync,
) -> Vec<R> {
    if width == 0 || out.is_empty() {
        return Vec::new();
    }
    let share = share(out.len() / width, cost);
    if share * width >= out.len() {
        return vec![f(0, out)];
    }
    out.par_chunks_mut(share * width).enumerate().map(|(i, rows)| f(i * share, rows)).collect()
}

/// As [`map_rows`] for two outputs of the same shape.
pub(in crate::nn) fn map_rows2(a: &mut [f32], b: &mut [f32], f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync) {
    let share = share(a.len(), 1);
    if share >= a.len() {
        return f(0, a, b);
    }
    a.par_chunks_mut(share).zip(b.par_chunks_mut(share)).enumerate().for_each(|(i, (a, b))| f(i * share, a, b));
}

/// Calls `f(task, scratch)` for each task; a thread makes its scratch once and uses it for all of its tasks.
pub(in crate::nn) fn each<S: Send>(
    tasks: usize,
    cost: usize,
    scratch: impl Fn() -> S + Sync + Send,
    f: impl Fn(usize, &mut S) + Sync + Send,
) {
    if tasks < 2 || threads(tasks.saturating_mul(cost)) < 2 {
        let mut scratch = scratch();
        (0..tasks).for_each(|task| f(task, &mut scratch));
    } else {
        (0..tasks).into_par_iter().for_each_init(scratch, |scratch, task| f(task, scratch));
    }
}
