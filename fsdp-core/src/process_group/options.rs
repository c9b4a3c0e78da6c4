//! What can be chosen about a process group.

use std::time::Duration;

use crate::{Error, Result};

/// Timeouts that make sense: longer than a look at a clock, and at most 30 years.
const SECONDS: std::ops::RangeInclusive<f64> = 1e-3..=1e9;

/// Choices for a process group. All ranks should make the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// How long a rank waits for its peers, when they meet and for each step of a collective. 10 minutes by default.
    pub timeout: Duration,
    /// Bytes that move at a time. A rank's shared memory is four times this. 128 KiB by default; rounded to what the
    /// ranks can share evenly.
    pub chunk_bytes: usize,
    /// Whether ranks that share a host share what comes to it from others, and add up what goes to others, where hosts
    /// are several. Results have the same bits. For reductions it takes a few MiB more. True by default; it is so where
    /// all ranks want it.
    pub hierarchy: bool,
    /// Which host this rank counts to: those with the same name share one, and have to be able to share its memory. By
    /// default found out.
    pub host: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options { timeout: Duration::from_secs(600), chunk_bytes: 128 << 10, hierarchy: true, host: None }
    }
}

impl Options {
    /// With another [`Options::timeout`].
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// With other [`Options::chunk_bytes`].
    pub fn with_chunk_bytes(mut self, chunk_bytes: usize) -> Self {
        self.chunk_bytes = chunk_bytes;
        self
    }

    /// With another [`Options::hierarchy`].
    pub fn with_hierarchy(mut self, hierarchy: bool) -> Self {
        self.hierarchy = hierarchy;
        self
    }

    /// With a name for [`Options::host`].
    pub fn with_host(mut self, name: impl Into<String>) -> Self {
        self.host = Some(name.into());
        self
    }

    /// With what the environment says: `FSDP_TIMEOUT_S`, in seconds, and `FSDP_HIERARCHY`, which is 0 or 1, read
    /// through `var`.
    ///
    /// # Errors
    /// When the timeout is set to anything but a number from 0.001 to 1000000000, or the other to anything else.
    ///
    /// ```
    /// use fsdp_core::process_group::Options;
    /// let options = Options::default().overridden_by(|name| (name == "FSDP_TIMEOUT_S").then(|| "2.5".into()))?;
    /// assert_eq!(options.timeout.as_millis(), 2500);
    /// # Ok::<(), fsdp_core::Error>(())
    /// ```
    pub fn overridden_by(mut self, var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        if let Some(text) = var("FSDP_TIMEOUT_S") {
            let seconds = text.trim().parse().ok().filter(|seconds: &f64| SECONDS.contains(seconds));
            self.timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(|| {
                let (least, most) = (SECONDS.start(), SECONDS.end());
                Error::Env(format!(
                    "FSDP_TIMEOUT_S={text:?}: a timeout is a number of seconds from {least} to {most}, such as 600. \
                     Set one, \
                     or leave the variable unset for 600"
                ))
            })?;
        }
        if let Some(text) = var("FSDP_HIERARCHY") {
            self.hierarchy = match text.trim() {
                "0" => false,
                "1" => true,
                _ => {
                    return Err(Error::Env(format!(
                        "FSDP_HIERARCHY={text:?}: set 0, so that ranks of several hosts send to each other as if each \
                         had one of its own, or leave the variable unset for 1"
                    )));
                }
            };
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_timeout_is_an_error_that_names_the_variable() {
        let of = |text: &'static str| {
            Options::default().overridden_by(|name| (name == "FSDP_TIMEOUT_S").then(|| text.to_string()))
        };
        for text in
            ["", " ", "0", "-1", "nan", "-nan", "inf", "-inf", "1e30", "1e300", "1e-30", "2e9", "ten", "600s", "1,5"]
        {
            let error = of(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("FSDP_TIMEOUT_S={text:?}: ")), "{error}");
            assert!(error.contains("a number of seconds from 0.001 to 1000000000, such as 600"), "{error}");
        }
        for (text, millis) in [("0.001", 1), (" 2.5 ", 2500), ("1e9", 1_000_000_000_000)] {
            let options = of(text).unwrap();
            assert_eq!(options.timeout.as_millis(), millis);
        }
        assert_eq!(Options::default().overridden_by(|_| None).unwrap(), Options::default());
    }

    #[test]
    fn the_hierarchy_is_on_or_off() {
        let of = |text: &'static str| {
            Options::default().overridden_by(|name| (name == "FSDP_HIERARCHY").then(|| text.to_string()))
        };
        assert!(!of("0").unwrap().hierarchy && of(" 1 ").unwrap().hierarchy && Options::default().hierarchy);
        for text in ["", "no", "2"] {
            let error = of(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("FSDP_HIERARCHY={text:?}: set 0")), "{error}");
        }
    }
}
