//! The options that tell agents how to meet.

use std::time::Duration;

/// Reads `--nnodes N|MIN:MAX`.
pub(crate) fn nnodes(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse().ok().filter(|count| (1..=MOST_NODES).contains(count));
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok((min, max)),
        _ => Err(format!("expected N or MIN:MAX with 1 <= MIN <= MAX <= {MOST_NODES}")),
    }
}

/// Writes what [`nnodes`] reads.
pub(crate) fn nnodes_text((min, max): (u32, u32)) -> String {
    if min == max { max.to_string() } else { format!("{min}:{max}") }
}

/// The most hosts of a launch: the coordinator has two threads for each.
const MOST_NODES: u32 = 4096;

/// The most that may be waited for, which is for ever.
pub(crate) const MOST_SECONDS: f64 = 1e19;

/// Reads `--node-rank N`.
pub(crate) fn node_rank(text: &str) -> Result<u32, String> {
    let rank = text.parse().ok().filter(|&rank| rank < MOST_NODES);
    rank.ok_or_else(|| format!("expected a number, 0 for the first host, and less than {MOST_NODES}"))
}

/// The keys of `--rdzv-conf` that say something to the launcher.
pub(crate) const CONF_KEYS: [&str; 6] =
    ["join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "is_host"];

/// Keys of `torchrun`'s backends that mean nothing here.
pub(crate) const TORCHRUN_CONF_KEYS: [&str; 14] = [
    "close_timeout",
    "heartbeat_timeout",
    "cas_backoff_max_seconds",
    "read_timeout",
    "store_type",
    "rank",
    "protocol",
    "cert",
    "key",
    "cacert",
    "ssl_cert",
    "ssl_cert_key",
    "ca_cert",
    "etcd_prefix",
];

/// `--rdzv-conf KEY=VALUE,...`, in `torchrun`'s names. Keys that only its backends know are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RendezvousConf {
    /// `join_timeout` or `timeout`, in seconds: how long to wait for the fewest hosts.
    pub join_timeout: Option<Duration>,
    /// `last_call_timeout`, in seconds: how long to wait for more than the fewest.
    pub last_call_timeout: Option<Duration>,
    /// `keep_alive_interval`, in seconds: the time between two signs of life.
    pub keep_alive_interval: Option<Duration>,
    /// `keep_alive_max_attempt`: how many of them may be missed until a host is gone.
    pub keep_alive_max_attempt: Option<u32>,
    /// `is_host`: this agent holds the rendezvous, or does not.
    pub is_host: Option<bool>,
    /// Keys that neither the launcher nor `torchrun` knows.
    pub unknown: Vec<String>,
}

impl std::str::FromStr for RendezvousConf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut conf = RendezvousConf::default();
        for pair in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            let wrong = || format!("expected KEY=VALUE,KEY=VALUE, but there is {pair:?}");
            let (key, value) = pair.split_once('=').ok_or_else(wrong)?;
            let (key, value) = (key.trim(), value.trim());
            if key.is_empty() || value.is_empty() {
                return Err(wrong());
            }
            let seconds = || {
                let seconds = value.parse().ok().filter(|&seconds: &f64| seconds > 0.0 && seconds <= MOST_SECONDS);
                let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                let expected =
                    || format!("expected a positive number of seconds, at most {MOST_SECONDS:e}, in {pair:?}");
                duration.map(Some).ok_or_else(expected)
            };
            match key {
                "join_timeout" | "timeout" => conf.join_timeout = seconds()?,
                "last_call_timeout" => conf.last_call_timeout = seconds()?,
                "keep_alive_interval" => conf.keep_alive_interval = seconds()?,
                "keep_alive_max_attempt" => {
                    let count = value.parse().ok().filter(|&count: &u32| count > 1);
                    conf.keep_alive_max_attempt = Some(count.ok_or_else(|| {
                        format!(
                            "expected 2 or more, at most {}, in {pair:?}: a host tells once in a keep_alive_interval \
                             that it is alive, and with less than 2 would be given up before it can",
                            u32::MAX
                        )
                    })?);
                }
                "is_host" => {
                    conf.is_host = Some(match value.to_ascii_lowercase().as_str() {
                        "1" | "true" | "t" | "yes" | "y" => true,
                        "0" | "false" | "f" | "no" | "n" => false,
                        _ => return Err(format!("expected true or false in {pair:?}")),
                    });
                }
                _ if TORCHRUN_CONF_KEYS.contains(&key) => {}
                _ => conf.unknown.push(key.to_owned()),
            }
        }
        Ok(conf)
    }
}

/// An address, a role, an id: text that a rank finds in its environment.
pub(crate) fn word(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err("expected a text without spaces and control characters, and not an empty one".into());
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_counts() {
        assert_eq!([(2, 2), (1, 4)].map(nnodes_text), ["2", "1:4"]);
        assert_eq!([nnodes("1"), nnodes("2"), nnodes("1:4")], [Ok((1, 1)), Ok((2, 2)), Ok((1, 4))]);
        for text in ["0", "2:1", "", "x", "1:", "1:1:1", "-1", "0:2", "1:99999"] {
            assert!(nnodes(text).unwrap_err().contains("MIN <= MAX"), "{text}");
        }
        assert!(
            node_rank("0").is_ok() && node_rank("7").is_ok() && node_rank("x").is_err() && node_rank("-1").is_err()
        );
    }

    #[test]
    fn the_conf_has_torchruns_names() {
        let conf: RendezvousConf =
            "timeout=900, last_call_timeout=1.5,is_host=False,read_timeout=5,keep_alive_max_attempt=4".parse().unwrap();
        assert_eq!(
            (conf.join_timeout, conf.last_call_timeout),
            (Some(Duration::from_secs(900)), Some(Duration::from_millis(1500)))
        );
        assert_eq!((conf.is_host, conf.keep_alive_max_attempt, conf.keep_alive_interval), (Some(false), Some(4), None));
        assert!(conf.unknown.is_empty());
        assert_eq!("join_timeot=3,store_type=file".parse::<RendezvousConf>().unwrap().unknown, ["join_timeot"]);
        assert_eq!("".parse(), Ok(RendezvousConf::default()));
        for text in [
            "a",
            "a=1,",
            "=1",
            "a=",
            "join_timeout=soon",
            "join_timeout=0",
            "keep_alive_max_attempt=0",
            "keep_alive_max_attempt=1",
            "is_host=maybe",
        ] {
            assert!(text.parse::<RendezvousConf>().is_err(), "{text}");
        }
    }
}
