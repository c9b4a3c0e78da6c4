//! The passes of a layer, timed.

use std::time::Instant;

use candle_core::{Result, Tensor};

/// Returns the least milliseconds of forward and of backward in `runs` runs.
pub(crate) fn best(runs: u32, forward: impl Fn() -> Result<Tensor>) -> Result<[f64; 2]> {
    let mut best = [f64::INFINITY; 2];
    for _ in 0..runs {
        let start = Instant::now();
        let y = forward()?;
        let seconds = start.elapsed().as_secs_f64();
        let loss = y.sum_all()?;
        let start = Instant::now();
        loss.backward()?;
        let times = [seconds, start.elapsed().as_secs_f64()];
        best = std::array::from_fn(|pass| best[pass].min(times[pass] * 1e3));
    }
    Ok(best)
}
