//! Where agents meet: `--rdzv-endpoint`.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

use fsdp_core::channel;

use crate::spec::word::word;

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
    /// It is an address of this host.
    pub(crate) fn is_here(&self) -> bool {
        channel::is_local(&self.host)
    }

    /// Other hosts have no way to it.
    pub(crate) fn is_loopback(&self) -> bool {
        channel::is_loopback(&self.host)
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
            let endpoint = Endpoint { host: host.into(), port };
            assert_eq!(text.parse(), Ok(endpoint.clone()), "{text}");
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
        for text in ["", ":5", "a:", "a:65536", "a:x", "a b:1", "a:1:2", "[]:1"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
