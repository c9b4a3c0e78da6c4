//! The values of options: numbers with the words that a wrong one gets.

use std::{num::NonZeroU16, time::Duration};

use crate::rank::{cores, gpus};

/// The most that may be waited for, which is for ever.
pub(crate) const MOST_SECONDS: f64 = 1e19;

pub(crate) fn process_count(text: &str) -> Result<usize, String> {
    match text {
        "cpu" => Ok(cores::count()),
        "auto" => Ok(Some(gpus::count()).filter(|&count| count > 0).unwrap_or_else(cores::count)),
        "gpu" => match gpus::count() {
            0 => Err("there is no GPU here, or CUDA_VISIBLE_DEVICES hides it; expected a number, or `cpu`".into()),
            count => Ok(count),
        },
        number => number
            .parse::<NonZeroU16>()
            .map(|count| usize::from(count.get()))
            .map_err(|_| format!("expected a number from 1 to {}, `auto`, `cpu` or `gpu`", u16::MAX)),
    }
}

pub(crate) fn restarts(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("expected a number of restarts from 0 to {}", u32::MAX))
}

pub(crate) fn port(text: &str) -> Result<NonZeroU16, String> {
    text.parse().map_err(|_| format!("expected a port from 1 to {}", u16::MAX))
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|&seconds: &f64| seconds <= MOST_SECONDS);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| format!("expected a number of seconds, 0 or more and at most {MOST_SECONDS:e}"))
}
