//! What the environment says.

use std::time::Duration;

/// The double's settings. Each has a variable, in brackets.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// How many devices there are (`GPU_DOUBLE_DEVICES`, 8).
    pub(crate) devices: usize,
    /// Bytes of each (`GPU_DOUBLE_MEMORY`, 80 GiB).
    pub(crate) memory: u64,
    /// What a device's pool takes of them at once (`GPU_DOUBLE_SEGMENT`, 2 MiB).
    pub(crate) segment: u64,
    /// The schedule (`GPU_DOUBLE_SEED`, 0), as [`schedule`](crate::schedule) explains it.
    pub(crate) seed: u64,
    /// The host has waited for other processes for so long that they will not come (`GPU_DOUBLE_STALL`, 300 seconds).
    pub(crate) stall: Duration,
}

impl Settings {
    /// What is wrong with a variable is the error.
    pub(crate) fn from_env() -> Result<Self, String> {
        Ok(Self {
            devices: number("GPU_DOUBLE_DEVICES", 8)? as usize,
            memory: number("GPU_DOUBLE_MEMORY", 80 << 30)?,
            segment: number("GPU_DOUBLE_SEGMENT", 2 << 20)?.max(1),
            seed: number("GPU_DOUBLE_SEED", 0)?,
            stall: Duration::from_secs(number("GPU_DOUBLE_STALL", 300)?),
        })
    }
}

fn number(name: &str, default: u64) -> Result<u64, String> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{name} is {text:?}, and has to be a whole number")),
    }
}
