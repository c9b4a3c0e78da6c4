//! What can go wrong between ranks.

use crate::{device_id::DeviceId, host_names::HostNames};

/// The errors of this crate. Each names the rank or the thing at fault and the way out.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh that can't be.
    #[error("{0}")]
    Mesh(String),
    /// A shard layout that can't be.
    #[error("{0}")]
    Layout(String),
    /// The rank environment is incomplete or contradicts itself.
    #[error("{0}")]
    Env(String),
    /// The ranks could not meet.
    #[error("rank {rank}: {message}")]
    Rendezvous {
        /// The rank that reports it.
        rank: usize,
        /// What happened and the way out.
        message: String,
    },
    /// Ranks issued different collectives where they should have issued the same.
    #[error(
        "rank {rank}: collective {sequence} of group \"{group}\" differs between ranks: {details}. Every rank of a \
         group \
         must issue the same collectives in the same order{advice}"
    )]
    Mismatch {
        /// The rank that reports it.
        rank: usize,
        /// The group's name.
        group: Box<str>,
        /// The position in the group's order of collectives.
        sequence: u64,
        /// What each side issued, and what differs.
        details: String,
        /// The way out where what the collectives are about has one, as further sentences.
        advice: String,
    },
    /// Some ranks did not arrive in time.
    #[error(
        "rank {rank}: {what} in group \"{group}\" timed out after {seconds:.1} s: waited for {}. See what they do \
         instead, or raise FSDP_TIMEOUT_S",
        hosts.ranks(missing)
    )]
    Timeout {
        /// The rank that reports it.
        rank: usize,
        /// The group's name.
        group: Box<str>,
        /// The collective with its sequence number.
        what: String,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
        /// The hosts of the group's ranks.
        hosts: HostNames,
        /// How long it waited, in seconds.
        seconds: f64,
    },
    /// A peer is gone.
    #[error(
        "rank {rank}: {what} in group \"{group}\" failed: {} {how}. The output of rank {peer} says more",
        hosts.rank(*peer)
    )]
    PeerLost {
        /// The rank that reports it.
        rank: usize,
        /// The group's name.
        group: Box<str>,
        /// The collective with its sequence number.
        what: String,
        /// The rank that is gone.
        peer: usize,
        /// The hosts of the group's ranks.
        hosts: HostNames,
        /// What became of it ("died", "left the group", or the error that it met).
        how: String,
    },
    /// A store did not do what it was asked, or not in time.
    #[error("{what} of {holder} failed after {seconds:.1} s: {cause}")]
    Store {
        /// What was asked, with the rank that asked and the key.
        what: String,
        /// Who holds the store.
        holder: String,
        /// How long it waited, in seconds.
        seconds: f64,
        /// Why not, and the way out.
        cause: String,
    },
    /// A collective was called with arguments that can't be.
    #[error("rank {rank}: {message}")]
    Argument {
        /// The rank that reports it.
        rank: usize,
        /// What is wrong and what was expected.
        message: String,
    },
    /// There is no memory for something.
    #[error(
        "no memory for {what}: {:.1} GiB ({bytes} bytes) were wanted. Make it smaller, spread it over more ranks, or \
         raise the limit of the process (ulimit -v)",
        *bytes as f64 / (1u64 << 30) as f64
    )]
    Memory {
        /// What it was for.
        what: String,
        /// How much was wanted, in bytes; it may be more than memory can ever hold.
        bytes: u128,
    },
    /// A device, or the library that drives it, refused something.
    #[error("{device}: {what}: {cause}")]
    Device {
        /// The device.
        device: DeviceId,
        /// What was tried.
        what: String,
        /// What the device or its driver said.
        cause: String,
    },
    /// Something has happened that can't happen: a fault of this library or of a backend.
    #[error(
        "rank {rank}: {what}. This is a fault of the library and not of its use: please report this message, with what \
         all ranks printed and the program"
    )]
    Internal {
        /// The rank that reports it.
        rank: usize,
        /// What happened, and what was expected.
        what: String,
    },
    /// The operating system refused something.
    #[error("rank {rank}: {what}: {source}")]
    Os {
        /// The rank that reports it.
        rank: usize,
        /// What was tried.
        what: String,
        /// The operating system's answer.
        source: std::sync::Arc<std::io::Error>,
    },
}

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
