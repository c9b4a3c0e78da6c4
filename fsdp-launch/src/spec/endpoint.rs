//! Where agents meet: `--rdzv-endpoint`.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, ToSocketAddrs, UdpSocket},
};

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
        // Only this host's own addresses can be bound.
        let is_here = |ip: &IpAddr| UdpSocket::bind((*ip, 0)).is_ok();
        self.host == "localhost" || self.addresses().iter().any(is_here)
    }

    /// Other hosts have no way to it.
    pub(crate) fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    /// Listens at `port` of the address that the endpoint names. A name that leads to no address of this host, or to
    /// the loopback alone as some hosts' own name does, means all addresses.
    pub(crate) fn bind(&self, port: u16) -> io::Result<TcpListener> {
        if self.host == "localhost" {
            return TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        }
        let wanted = |ip: &IpAddr| self.is_loopback() || !ip.is_loopback();
        let mut last = None;
        for ip in self.addresses().into_iter().filter(wanted) {
            match TcpListener::bind((ip, port)) {
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => last = Some(error),
                bound => return bound,
            }
        }
        if self.is_loopback() {
            return Err(last.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()));
        }
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let addresses = (self.host.as_str(), 0).to_socket_addrs();
        addresses.map(|all| all.map(|address| address.ip()).collect()).unwrap_or_default()
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

    #[test]
    fn only_this_host_is_here_and_the_loopback_is_bound_alone() {
        for (host, here, loopback) in [
            ("localhost", true, true),
            ("127.0.0.1", true, true),
            ("127.0.1.1", true, true),
            ("192.0.2.1", false, false),
            ("no-such-host.invalid", false, false),
        ] {
            let endpoint = Endpoint { host: host.into(), port: None };
            assert_eq!((endpoint.is_here(), endpoint.is_loopback()), (here, loopback), "{host}");
            if loopback {
                assert!(endpoint.bind(0).unwrap().local_addr().unwrap().ip().is_loopback());
            }
        }
    }
}
