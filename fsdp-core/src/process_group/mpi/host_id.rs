//! What tells hosts apart.

use crate::hash::Hash;

/// The same on ranks that can share memory: those of one user on one kernel, with one network, because the abstract
/// names of Unix sockets belong to that. `name` stands for it where somebody knows better. 0 where nothing is known.
pub(super) fn host_id(name: Option<&str>) -> u64 {
    let found = || {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let network = std::fs::read_link("/proc/self/ns/net").ok()?;
        let user = rustix::process::geteuid().as_raw();
        Some(format!("{}\n{}\n{user}", boot.trim(), network.display()))
    };
    let Some(identity) = name.map(str::to_string).or_else(found) else { return 0 };
    let mut hash = Hash::default();
    hash.bytes(identity.as_bytes());
    hash.value().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_hosts_apart_and_a_host_is_known_without() {
        assert_eq!(host_id(Some("a")), host_id(Some("a")));
        assert!(host_id(Some("a")) != host_id(Some("b")) && host_id(Some("a")) != host_id(None));
        assert!(host_id(None) != 0 && host_id(None) == host_id(None));
    }
}
