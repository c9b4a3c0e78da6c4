//! Which group, and who this process is in it.

use std::time::Duration;

use crate::HostNames;

/// The name of the group of all ranks.
pub(crate) const WORLD: &str = "world";

/// A group's name, and this process's place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The group's name, the same on every rank and no other group's.
    pub name: String,
    /// This process's rank in the group.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// How long a collective may wait for its peers while none of them makes progress.
    pub timeout: Duration,
    /// The hosts of the ranks, for messages.
    pub hosts: HostNames,
}

impl Membership {
    /// That of the group of all ranks.
    pub fn world(rank: usize, size: usize, timeout: Duration) -> Self {
        Membership { name: WORLD.into(), rank, size, timeout, hosts: HostNames::default() }
    }

    /// With ranks on these hosts.
    pub fn with_hosts(self, hosts: HostNames) -> Self {
        Membership { hosts, ..self }
    }

    /// Whether the group is that of all ranks.
    pub fn is_world(&self) -> bool {
        self.name == WORLD
    }
}
