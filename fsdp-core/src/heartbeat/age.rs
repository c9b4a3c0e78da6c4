//! How long something has been so.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// A duration that is serialized as a number of seconds, and printed as people say it.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::heartbeat::Age;
/// assert_eq!(Age(Duration::from_millis(1260)).to_string(), "1.3 s");
/// assert_eq!(Age(Duration::from_secs(754)).to_string(), "12 min 34 s");
/// assert_eq!(Age(Duration::from_secs(93_784)).to_string(), "26 h 3 min");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Age(pub Duration);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            0..60 => write!(f, "{:.1} s", self.0.as_secs_f64()),
            seconds @ 60..3600 => write!(f, "{} min {} s", seconds / 60, seconds % 60),
            seconds => write!(f, "{} h {} min", seconds / 3600, seconds % 3600 / 60),
        }
    }
}

impl From<Age> for f64 {
    fn from(age: Age) -> f64 {
        age.0.as_secs_f64()
    }
}

impl TryFrom<f64> for Age {
    type Error = std::time::TryFromFloatSecsError;

    fn try_from(seconds: f64) -> Result<Self, Self::Error> {
        Duration::try_from_secs_f64(seconds).map(Age)
    }
}
