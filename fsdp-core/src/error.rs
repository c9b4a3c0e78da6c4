//! Errors of this crate.

use crate::{device_id::DeviceId, file_limit, host_names::HostNames};

/// The errors of this crate. Each message names the cause and how to fix it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid mesh.
    #[error("{0}")]
    Mesh(String),
    /// An invalid shard layout.
    #[error("{0}")]
    Layout(String),
    /// The rank environment is incomplete or contradictory.
    #[error("{0}")]
    Env(String),
    /// The ranks could not meet.
    #[error("rank {rank}: {message}")]
    Rendezvous {
        /// The rank that reports it.
        rank: usize,
        /// The cause, and how to fix it.
        message: String,
    },
    /// Ranks issued different collectives.
    #[error(
        "rank {rank}: collective {sequence} of group \"{group}\" differs between ranks: {details}. Every rank of a \
         group must issue the same collectives in the same order{advice}"
    )]
    Mismatch {
        /// The rank that reports it.
        rank: usize,
        /// The group's name.
        group: Box<str>,
        /// The position in the group's order of collectives.
        sequence: u64,
        /// The collectives that the ranks issued, and their differences.
        details: String,
        /// Further sentences with advice from the collectives' signatures.
        advice: String,
    },
    /// Some ranks did not take part in time.
    #[error(
        "rank {rank}: {what} in group \"{group}\" timed out after {seconds:.1} s: waited for {}. See what they \
         do, or raise FSDP_TIMEOUT_S",
        hosts.ranks(missing)
    )]
    Timeout {
        /// The rank that reports it.
        rank: usize,
        /// The group's name.
        group: Box<str>,
        /// The collective with its sequence number.
        what: String,
        /// The missing ranks.
        missing: Vec<usize>,
        /// Host names of the group's ranks.
        hosts: HostNames,
        /// Duration of the wait in seconds.
        seconds: f64,
    },
    /// A peer died, failed or left the group.
    #[error(
        "rank {rank}: {what} in group \"{group}\" failed: {} {how}. See the output of rank {peer}",
        hosts.rank(*peer)
    )]
    PeerLost {
        /// The rank that reports it.
        rank: usize,
        /// The group's name.
        group: Box<str>,
        /// The collective with its sequence number.
        what: String,
        /// The lost rank.
        peer: usize,
        /// Host names of the group's ranks.
        hosts: HostNames,
        /// How it was lost: "died", "left the group", or its error.
        how: String,
    },
    /// An operation of a store failed or timed out.
    #[error("{what} of {holder} failed after {seconds:.1} s: {cause}")]
    Store {
        /// The operation, with its rank and key.
        what: String,
        /// The holder of the store.
        holder: String,
        /// Duration of the wait in seconds.
        seconds: f64,
        /// The cause, and how to fix it.
        cause: String,
    },
    /// A collective was called with invalid arguments.
    #[error("rank {rank}: {message}")]
    Argument {
        /// The rank that reports it.
        rank: usize,
        /// The finding, and the expectation.
        message: String,
    },
    /// An allocation failed.
    #[error(
        "no memory for {what}: {:.1} GiB ({bytes} bytes) requested. Make it smaller or use more ranks. If the memory is the \
         host's, a limit of the process may be too low (ulimit -v)",
        *bytes as f64 / (1u64 << 30) as f64
    )]
    Memory {
        /// Purpose of the memory.
        what: String,
        /// Requested size in bytes, which may exceed the address space.
        bytes: u128,
    },
    /// A device or its library failed.
    #[error("{device}: {what}: {cause}")]
    Device {
        /// The device.
        device: DeviceId,
        /// The operation.
        what: String,
        /// The message of the device or its library.
        cause: String,
    },
    /// A bug of this library or of a backend.
    #[error(
        "rank {rank}: {what}. This is a bug of the library: please report it with the output of all ranks and the \
         program"
    )]
    Internal {
        /// The rank that reports it.
        rank: usize,
        /// The finding, and the expectation.
        what: String,
    },
    /// The operating system returned an error.
    #[error("rank {rank}: {what}: {source}")]
    Os {
        /// The rank that reports it.
        rank: usize,
        /// The operation.
        what: String,
        /// The operating system's error.
        source: std::sync::Arc<std::io::Error>,
    },
}

impl Error {
    /// Creates the error of a system call.
    pub(crate) fn os(rank: usize, what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        let source = file_limit::explained(source.into());
        Error::Os { rank, what: what.into(), source: std::sync::Arc::new(source) }
    }
}

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
