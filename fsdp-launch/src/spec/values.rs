//! Values of the options for hosts and signals: `--nnodes`, `--node-rank`, `--rdzv-endpoint`, `--signals-to-handle`.

use std::{
    fmt, fs,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

use fsdp_core::channel;
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXCPU};

/// `HOST` or `HOST:PORT` of `--rdzv-endpoint`; an IPv6 address is written in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or address.
    pub host: String,
    /// Port; `None` (also for 0) means any.
    pub port: Option<u16>,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "expected HOST or HOST:PORT with a port from 0 to 65535, [ADDRESS]:PORT for IPv6".to_owned();
        let is_ipv6 = text.parse::<Ipv6Addr>().is_ok();
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !is_ipv6 && !port.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
            _ => (text, 0),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.contains(':') && host.parse::<IpAddr>().is_err() {
            return Err(wrong());
        }
        Ok(Endpoint { host: word(host).map_err(|_| wrong())?, port: (port != 0).then_some(port) })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?
        } else {
            write!(f, "{}", self.host)?
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

impl Endpoint {
    /// Returns whether the endpoint is an address of this host.
    pub(crate) fn is_here(&self) -> bool {
        channel::is_local(&self.host)
    }

    /// Returns whether only this host can reach the endpoint.
    pub(crate) fn is_loopback(&self) -> bool {
        channel::is_loopback(&self.host)
    }
}

/// Parses `--nnodes N|MIN:MAX`.
pub(crate) fn nnodes(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse().ok().filter(|count| (1..=MOST_NODES).contains(count));
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok((min, max)),
        _ => Err(format!("expected N or MIN:MAX with 1 <= MIN <= MAX <= {MOST_NODES}")),
    }
}

/// Formats the value of `--nnodes`.
pub(crate) fn nnodes_text((min, max): (u32, u32)) -> String {
    if min == max { max.to_string() } else { format!("{min}:{max}") }
}

/// Maximum number of hosts: the coordinator has two threads for each.
const MOST_NODES: u32 = 4096;

/// Parses `--node-rank N`.
pub(crate) fn node_rank(text: &str) -> Result<u32, String> {
    let rank = text.parse().ok().filter(|&rank| rank < MOST_NODES);
    rank.ok_or_else(|| format!("expected a number, 0 for the first host, and less than {MOST_NODES}"))
}

/// Signals that `--signals-to-handle` accepts.
const KNOWN: [(&str, i32); 9] = [
    ("SIGTERM", SIGTERM),
    ("SIGINT", SIGINT),
    ("SIGHUP", SIGHUP),
    ("SIGQUIT", SIGQUIT),
    ("SIGUSR1", SIGUSR1),
    ("SIGUSR2", SIGUSR2),
    ("SIGALRM", SIGALRM),
    ("SIGTSTP", SIGTSTP),
    ("SIGXCPU", SIGXCPU),
];

/// Value of `--signals-to-handle`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalList(pub Vec<i32>);

impl FromStr for SignalList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |name: &str| {
            let known = KNOWN.iter().find(|(known, _)| *known == name || known.strip_prefix("SIG") == Some(name));
            known.map(|(_, number)| *number).ok_or_else(|| {
                let names = KNOWN.map(|(name, _)| name).join(", ");
                format!("{name:?} can't be handled; expected names with commas between them, of {names}")
            })
        };
        text.split(',').map(|name| number(name.trim())).collect::<std::result::Result<_, _>>().map(SignalList)
    }
}

/// Returns the signals that end a launch by default: the usual ones, except those that the parent process ignores.
pub(crate) fn default_signals() -> Vec<i32> {
    let ignored = ignored_signals();
    [SIGTERM, SIGINT, SIGHUP, SIGQUIT].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}

/// Returns the ignored signals, as bit n - 1 for signal n: `nohup` ignores SIGHUP; a shell ignores SIGINT for
/// background jobs.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Parses an address, a role or an id: text without white space.
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
    fn parses_endpoints() {
        for (text, host, port) in [
            ("localhost:0", "localhost", None),
            ("node7:29400", "node7", Some(29400)),
            ("node7", "node7", None),
            ("[::1]:5", "::1", Some(5)),
            ("[::1]", "::1", None),
            ("::1", "::1", None),
        ] {
            let endpoint = Endpoint { host: host.into(), port };
            assert_eq!(text.parse(), Ok(endpoint.clone()), "{text}");
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
        for text in ["", ":5", "a:", "a:65536", "a:x", "a b:1", "a:1:2", "[]:1"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn parses_node_counts() {
        assert_eq!([(2, 2), (1, 4)].map(nnodes_text), ["2", "1:4"]);
        assert_eq!([nnodes("1"), nnodes("2"), nnodes("1:4")], [Ok((1, 1)), Ok((2, 2)), Ok((1, 4))]);
        for text in ["0", "2:1", "", "x", "1:", "1:1:1", "-1", "0:2", "1:99999"] {
            assert!(nnodes(text).unwrap_err().contains("MIN <= MAX"), "{text}");
        }
        assert!(
            node_rank("0").is_ok() && node_rank("7").is_ok() && node_rank("x").is_err() && node_rank("-1").is_err()
        );
    }
}
