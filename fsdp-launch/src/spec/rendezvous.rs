//! How this host's launcher meets those of other hosts.

use std::{path::PathBuf, time::Duration};

use crate::Endpoint;

/// How the launchers of several hosts meet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RendezvousSpec {
    /// Where; the launcher of that host holds the rendezvous. Port 29400 if there is none.
    pub endpoint: Endpoint,
    /// The fewest and the most hosts.
    pub nnodes: (u32, u32),
    /// The order of this host among them; `None` as they come.
    pub node_rank: Option<u32>,
    /// Whether this launcher is the one that holds the rendezvous; `None`: if the endpoint is an address of this host,
    /// and nobody listens there.
    pub is_host: Option<bool>,
    /// This host's address for the others; `None`: as the connection shows it.
    pub local_addr: Option<String>,
    /// The file with the secret that all launchers share, at least 16 bytes; `None`, for launchers of one user on one
    /// host, makes one.
    pub token_file: Option<PathBuf>,
    /// How long to wait for the fewest hosts.
    pub join_timeout: Duration,
    /// How long to wait for more than the fewest.
    pub last_call_timeout: Duration,
    /// The time between two signs of life of a launcher.
    pub keep_alive_interval: Duration,
    /// How many may be missed until its host is given up.
    pub keep_alive_attempts: u32,
}

impl RendezvousSpec {
    /// From `nnodes.0` to `nnodes.1` hosts that meet at `endpoint`, with `torchrun`'s times: 600 s for the fewest, 30 s
    /// for more, 3 signs of life 5 s apart.
    pub fn new(endpoint: Endpoint, nnodes: (u32, u32)) -> Self {
        RendezvousSpec {
            endpoint,
            nnodes,
            node_rank: None,
            is_host: None,
            local_addr: None,
            token_file: None,
            join_timeout: Duration::from_secs(600),
            last_call_timeout: Duration::from_secs(30),
            keep_alive_interval: Duration::from_secs(5),
            keep_alive_attempts: 3,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.endpoint.port.unwrap_or(29400)
    }

    pub(crate) fn may_hold(&self) -> bool {
        self.is_host.unwrap_or_else(|| self.endpoint.is_here())
    }
}
