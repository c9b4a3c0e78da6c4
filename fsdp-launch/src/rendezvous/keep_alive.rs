//! Signs of life between agents.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::RendezvousSpec;

/// How agents notice that one is gone without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeepAlive {
    /// The time between signs of life.
    pub(crate) interval: Duration,
    /// How many may be missed.
    pub(crate) attempts: u32,
}

impl fmt::Display for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.interval.as_secs_f64();
        write!(f, "keep_alive_interval={seconds},keep_alive_max_attempt={}", self.attempts)
    }
}

impl KeepAlive {
    /// What `spec` asks for, within reason: neither a flood of messages, nor more time than a clock can count.
    pub(crate) fn of(spec: &RendezvousSpec) -> Self {
        let interval = spec.keep_alive_interval.clamp(Duration::from_millis(10), Duration::from_secs(86400));
        KeepAlive { interval, attempts: spec.keep_alive_attempts }
    }

    /// The longest silence.
    pub(crate) fn limit(self) -> Duration {
        self.interval.saturating_mul(self.attempts)
    }
}
