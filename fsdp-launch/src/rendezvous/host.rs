//! What an agent tells of its host.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, TcpListener},
};

/// Text that is equal for agents between whose ranks shared memory can be handed over: of one boot of one kernel, in
/// one network namespace.
pub(crate) fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> io::Result<u16> {
    TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0))?.local_addr().map(|address| address.port())
}
