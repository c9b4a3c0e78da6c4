//! `--rdzv-conf`: how agents meet.

use std::time::Duration;

use crate::cli::values::{MOST_SECONDS, seconds as any_seconds};

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
                let duration = any_seconds(value).ok().filter(|duration| !duration.is_zero());
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

#[cfg(test)]
mod tests {
    use super::*;

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
