//! The options that tell `torchrun` how hosts find each other, as far as they mean this one host.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};

use crate::{Error, Result};

const ONE_HOST: &str = "this version launches one host";

/// Checks `--nnodes N|MIN:MAX`.
pub(crate) fn nnodes(text: &str) -> std::result::Result<u32, String> {
    let number = |text: &str| text.parse().ok().filter(|&count: &u32| count > 0);
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(1), Some(1)) => Ok(1),
        (Some(min), Some(max)) if min <= max => Err(format!("{ONE_HOST}: only 1 or 1:1 can be used")),
        _ => Err(format!("expected N or MIN:MAX with 1 <= MIN <= MAX; {ONE_HOST}, so 1 or 1:1")),
    }
}

/// Checks `--node-rank N`.
pub(crate) fn node_rank(text: &str) -> std::result::Result<u32, String> {
    match text.parse::<u32>() {
        Ok(0) => Ok(0),
        _ => Err(format!("expected 0: {ONE_HOST}, whose rank is 0")),
    }
}

/// Checks `--rdzv-conf KEY=VALUE,...`: torchrun's keys tune the meeting of several hosts, so there is nothing more to do with them.
pub(crate) fn conf(text: &str) -> std::result::Result<String, String> {
    let well_formed =
        |pair: &str| pair.split_once('=').is_some_and(|(key, value)| !key.trim().is_empty() && !value.is_empty());
    match text.split(',').find(|pair| !well_formed(pair)) {
        Some(wrong) if !text.trim().is_empty() => Err(format!("expected KEY=VALUE,KEY=VALUE, but there is {wrong:?}")),
        _ => Ok(text.into()),
    }
}

/// An address, a role, an id: text that a rank finds in its environment.
pub(crate) fn word(text: &str) -> std::result::Result<String, String> {
    if text.is_empty() || text.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err("expected a text without spaces and control characters, and not an empty one".into());
    }
    Ok(text.into())
}

/// `HOST` or `HOST:PORT` of `--rdzv-endpoint`; an IPv6 address stands in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// A name or address.
    pub host: String,
    /// The port; `None` (also for 0) if any will do.
    pub port: Option<u16>,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "expected HOST or HOST:PORT with a port from 0 to 65535, [ADDRESS]:PORT for IPv6".to_owned();
        let is_ipv6 = text.parse::<std::net::Ipv6Addr>().is_ok();
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

impl Endpoint {
    /// # Errors
    /// [`Error::Usage`] unless the host is this one.
    pub(crate) fn check_is_here(&self) -> Result<()> {
        // Only this host's own addresses can be bound.
        let is_here = |ip: IpAddr| UdpSocket::bind((ip, 0)).is_ok();
        let addresses = (self.host.as_str(), 0).to_socket_addrs();
        if self.host == "localhost" || addresses.is_ok_and(|mut all| all.any(|address| is_here(address.ip()))) {
            return Ok(());
        }
        Err(Error::Usage {
            flag: "--rdzv-endpoint",
            value: self.host.clone(),
            expected: format!("{ONE_HOST}, and this is no address of it: use localhost, or leave it out"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        for (text, host, port) in [
            ("localhost:0", "localhost", None),
            ("node7:29400", "node7", Some(29400)),
            ("node7", "node7", None),
            ("[::1]:5", "::1", Some(5)),
            ("[::1]", "::1", None),
            ("::1", "::1", None),
        ] {
            assert_eq!(text.parse(), Ok(Endpoint { host: host.into(), port }), "{text}");
        }
        for text in ["", ":5", "a:", "a:65536", "a:x", "a b:1", "a:1:2", "[]:1"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_this_host_is_here() {
        for (host, here) in
            [("localhost", true), ("127.0.0.1", true), ("192.0.2.1", false), ("no-such-host.invalid", false)]
        {
            assert_eq!(Endpoint { host: host.into(), port: None }.check_is_here().is_ok(), here, "{host}");
        }
    }

    #[test]
    fn one_host() {
        assert!(["1", "1:1"].iter().all(|text| nnodes(text).is_ok()));
        assert!(["2", "1:2", "2:4"].iter().all(|text| nnodes(text).unwrap_err().contains("only 1 or 1:1")));
        assert!(
            ["0", "2:1", "", "x", "1:", "1:1:1", "-1"]
                .iter()
                .all(|text| nnodes(text).unwrap_err().contains("MIN <= MAX"))
        );
        assert!(node_rank("0").is_ok() && node_rank("1").is_err() && node_rank("x").is_err());
        assert!(["", "a=1", "a=1,b=x y"].iter().all(|text| conf(text).is_ok()));
        assert!(["a", "a=1,", "=1", "a="].iter().all(|text| conf(text).is_err()));
    }
}
