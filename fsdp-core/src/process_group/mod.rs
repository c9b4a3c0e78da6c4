//! Process groups: collectives between ranks.
//!
//! A [`ProcessGroup`] checks, counts, fingerprints and queues collectives, keeps the first error, and records progress
//! for the launcher. A [`Backend`] moves the bytes. [`local`] serves threads of a process, [`shm`] processes of a host,
//! and [`mpi`] ranks of several hosts. `tcp` (a feature) carries small messages between hosts without MPI, while NCCL
//! moves tensors. A [`DeviceEngine`] beside a backend moves the memory of a device. [`init`] chooses the backend of the
//! world.
//!
//! A collective starts as an [`Op`] with a `call`, its announcement. The `queue` runs it on the backend. The backend
//! compares the announcements of all ranks before it returns outputs; `mismatch` describes differences. The conformance
//! suite of `fsdp-test-support` tests every backend.
//!
//! # Design
//!
//! - A collective owns the memory that it uses, because its caller continues meanwhile.
//! - Each group runs its collectives one after the other, in issue order. Ranks that issue the same collectives in the
//!   same order therefore cannot deadlock within a group.
//! - Over host memory, comparing ranks costs no message and no wait: an announcement travels with the first data of its
//!   collective.
//! - The bits of a sum depend on the number of ranks only, over every backend of host memory (`host::reduce`).
//! - Every wait has a deadline and watches its peers. Each rank therefore gets an error that names the missing ranks.

mod backend;
mod call;
mod collective;
#[cfg(feature = "cuda")]
mod device_memory;
mod group;
mod group_store;
mod host;
mod messages;
mod mismatch;
pub mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod on_device;
mod op;
mod options;
mod queue;
mod shared_memory;
mod signature;
mod single_rank;
#[cfg(feature = "tcp")]
pub mod tcp;
mod waiting_ranks;
mod work;

pub use backend::{Backend, CollectiveOutput, Fence, Guarantees, PeerMonitor, PeerState};
pub use collective::{Collective, Failure};
pub use group::ProcessGroup;
pub use group_store::GroupStore;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use on_device::{DeviceEngine, device_backend};
#[cfg(feature = "cuda")]
pub use on_device::{HostStaging, ranks_nccl_refuses, ranks_sharing_devices};
pub use op::{ExchangePart, GatherPart, Messages, Op, ScatterPart};
pub use options::{Membership, Options, init};
pub use shared_memory::{local, shm};
pub use signature::{Signature, Subject};
pub use work::{Completion, Work};
