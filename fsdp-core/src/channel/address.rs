//! Addresses of a host name: to listen on, and to connect to.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    time::Duration,
};

use rustix::net::sockopt::set_socket_linger;

/// Returns whether `host` is an address of this host.
pub fn is_local(host: &str) -> bool {
    // Only an address of this host can be bound.
    let is_local = |ip: &IpAddr| UdpSocket::bind((*ip, 0)).is_ok();
    host == "localhost" || addresses(host).iter().any(is_local)
}

/// Returns whether only this host can reach `host`.
pub fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Listens on `port` of the addresses of `host`. If none is an address of this host, or only a loopback address
/// although `host` is not `localhost`, it listens on all addresses: some hosts map their own name to the loopback.
///
/// # Errors
/// The system's, such as a port in use.
pub fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    if host == "localhost" {
        return TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    }
    let usable = |ip: &IpAddr| is_loopback(host) || !ip.is_loopback();
    let mut last = None;
    for ip in addresses(host).into_iter().filter(usable) {
        match TcpListener::bind((ip, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => last = Some(error),
            bound => return bound,
        }
    }
    if is_loopback(host) {
        return Err(last.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()));
    }
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// Connects to `port` of the first address of `host` that accepts, with `timeout` for each address.
///
/// # Errors
/// The system's, for the last address.
pub fn connect(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            // If nothing listens on an ephemeral port, TCP can connect a socket to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                // Linger 0 frees the port at once for a later listener.
                set_socket_linger(&stream, Some(Duration::ZERO))?;
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn addresses(host: &str) -> Vec<IpAddr> {
    let addresses = (host, 0).to_socket_addrs();
    addresses.map(|all| all.map(|address| address.ip()).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_local_and_loopback_addresses() {
        for (host, here, loopback) in [
            ("localhost", true, true),
            ("127.0.0.1", true, true),
            ("127.0.1.1", true, true),
            ("192.0.2.1", false, false),
            ("no-such-host.invalid", false, false),
        ] {
            assert_eq!((is_local(host), is_loopback(host)), (here, loopback), "{host}");
            if loopback {
                assert!(bind(host, 0).unwrap().local_addr().unwrap().ip().is_loopback());
            }
        }
    }

    #[test]
    fn a_port_without_a_listener_is_refused() {
        let port = bind("localhost", 0).unwrap().local_addr().unwrap().port();
        let error = connect("127.0.0.1", port, Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
